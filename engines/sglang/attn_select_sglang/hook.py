"""The hook around SGLang's default attention backend: attn-select is asked, and an explicit choice is left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_platform

from attn_select import __version__, select_model
from attn_select.decide.lines import plain
from attn_select.decide.selection import Selection
from attn_select.decide.selector import environment_for
from attn_select.decide.text import layer_lines, warning_lines
from attn_select.engines.adapter import Adapter
from attn_select.engines.observed import workload_in_an_engine
from attn_select.errors import ConfigError, ModelError
from attn_select.layer.models import LayerKind
from attn_select.machine.detection import detect_device
from attn_select_sglang.choice import Choice, choose
from attn_select_sglang.layers import layer_kinds
from attn_select_sglang.names import OWN_KERNELS

logger = logging.getLogger("sglang.attn_select")
_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


OWN_DEFAULT = "WhisperForConditionalGeneration"
"""The architecture whose backend SGLang's default fixes (``arg_groups/model_override_base.py``)."""


def around(adapter: Adapter) -> Callable[[Callable[[Any], dict[str, str]], Any], dict[str, str]]:
    """Return the hook: called with SGLang's own function and its arguments as far as they are resolved."""

    def attention_backend_default(original: Callable[[Any], dict[str, str]], view: Any) -> dict[str, str]:
        return adapter.unless_it_fails(lambda: _chosen(view, adapter)) or original(view)

    return attention_backend_default


def _leave(what: str, why: str) -> dict[str, str]:
    """Say why SGLang is to choose."""
    logger.info("attn-select %s leaves %s to SGLang: %s", __version__, what, why)
    return {}


def _chosen(view: Any, adapter: Adapter) -> dict[str, str]:
    """Return the fields of ``ServerArgs`` that attn-select chooses; nothing where SGLang is to choose."""
    given = {name: value for name in _FIELDS if (value := getattr(view, name)) is not None}
    if given:
        named = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        return _leave("attention", f"{named} is given, or chosen by the model")
    model_config = model_config_of(view)
    architecture = (model_config.hf_config.architectures or ("",))[0]
    if current_platform.is_out_of_tree() or architecture == OWN_DEFAULT:
        return {}
    found = detect_device()
    device = found.device
    # SGLang names no compute capability: its platform says whether it is CUDA.
    capability = device.compute_capability if get_platform().is_cuda else None
    if not adapter.sees(found, capability, "a GPU of CUDA" if get_platform().is_cuda else "another device than CUDA's"):
        return {}
    try:
        read = layer_kinds(view, model_config, device)
    except (ConfigError, ModelError) as error:
        return _leave("attention", error.message)
    # SGLang brings kernels of its own: what is installed beside it does not count.
    environment = replace(environment_for(device), assume_installed=True)
    # SGLang has one choice of kernels for attention, and others for layers that keep a state.
    kinds = [kind for kind in read.kinds if kind.config.sort != "state"]
    configs = read.attention_configs
    if not configs:
        return _leave("the model", "none of its layers has attention that attn-select has a kernel for")
    workload = workload_in_an_engine(configs[0])
    selections = select_model(configs, device, adapter.rules(), environment=environment, workload=workload)
    choice = choose(selections, bool(get_platform().has_flashinfer), architecture)
    logger.info("%s", log_block(choice, kinds, selections))
    return choice.declared()


def log_block(choice: Choice, kinds: Sequence[LayerKind], selections: Sequence[Selection]) -> str:
    """Return the lines to log at the start: for each kind of layers the winner, the backends passed over, and why."""
    fields = choice.declared()
    named = ", ".join(f"{name} {value}" for name, value in fields.items()) or "nothing that SGLang has"
    lines = [f"attn-select {__version__} chose for SGLang: {named}"]
    if choice.passed_over:
        lines.append(f"  SGLang does not have for all layers: {', '.join(choice.passed_over)}")
    if choice.not_ours:
        names = ", ".join(choice.not_ours)
        lines.append(f"  comes first by times of attn-select's kernel, and SGLang runs one of its own: {names}")
        flags = [f"--attention-backend {name}" for name, backend in OWN_KERNELS.items() if backend in choice.not_ours]
        lines += [f"  attn-select's own kernel runs with {flag}" for flag in flags]
    for kind, selection in zip(kinds, selections, strict=True):
        shown = layer_lines(selection, kind.kind, kind.count, runs=False, remedies=False)
        lines.append(plain([*shown, *warning_lines(selection.warnings)]))
    return "\n".join(lines)

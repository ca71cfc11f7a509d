"""The wrapped methods of vLLM's platform: attn-select is asked first, and an explicit choice is left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attn_select import select
from attn_select.backends.registry import load_plugins
from attn_select.decide.selection import Selection
from attn_select.engines.adapter import Adapter
from attn_select.engines.observed import workload_in_an_engine
from attn_select.engines.wrap import wrap
from attn_select.errors import ConfigError, ModelError
from attn_select.machine.detection import detect_device
from attn_select_vllm import log_block
from attn_select_vllm.choice import Choice, Refusals, choose, own_choice, refusals_of
from attn_select_vllm.kernels.limits import limits, speculation_limits
from attn_select_vllm.layers import kind_of, layer_config, wanted_graphs
from attn_select_vllm.mla_prefill import choose_prefill
from attn_select_vllm.names import OWN_KERNELS, OWN_PREFIX, EngineBackend, kernels_of
from attn_select_vllm.registration import member

logger = init_logger("vllm.attn_select")


def install(adapter: Adapter) -> None:
    """Wrap the platform's choice and register attn-select's backends; nothing happens the second time."""
    # Raises AttributeError, TypeError or ImportError where vLLM has no such interface any more.
    for name, path in OWN_KERNELS.items():
        member(OWN_PREFIX + name, path)
    # vLLM's cache of choices knows nothing of speculation, on which attn-select's choice depends.
    cached = selector._cached_get_attn_backend
    selector._cached_get_attn_backend = getattr(cached, "__wrapped__", cached)
    wrap(type(current_platform), "get_attn_backend_cls", partial(_get_attn_backend_cls, adapter))


def _get_attn_backend_cls(
    adapter: Adapter,
    original: Callable[..., str],
    platform: Any,
    selected_backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
) -> str:
    if selected_backend is not None:
        path = _explicit(selected_backend, attn_selector_config)
    else:
        default = partial(original, platform, None, attn_selector_config, num_heads)
        path = adapter.unless_it_fails(lambda: _chosen(platform, attn_selector_config, num_heads, adapter, default))
    return path or original(platform, selected_backend, attn_selector_config, num_heads)


def _explicit(selected: Any, attn_config: Any) -> str | None:
    """Return the backend that was named, if it is ours; ConfigError where it does not serve such layers."""
    # Platforms that have one backend alone would not look at ours.
    name, kind = selected.name, kind_of(attn_config)
    _say(log_block.explicit_text(name, kind))
    if not name.startswith(OWN_PREFIX):
        return None
    config, backend = get_current_vllm_config(), name.removeprefix(OWN_PREFIX)
    mla = bool(selected.get_class().is_mla())
    refused = [*limits(attn_config, config), *speculation_limits(config, backend)]
    if mla != attn_config.use_mla or attn_config.use_sparse:
        refused = [f"it serves {'dense MLA' if mla else 'layers with keys and values per head'} alone"]
    if refused:
        raise ConfigError(
            f"--attention-backend {name}: attn-select's kernels do not run these {kind} layers in vLLM: "
            f"{'; '.join(refused)}",
            fields=["attention_backend"],
            hint="leave --attention-backend out, and attn-select chooses among vLLM's own backends",
        )
    return str(selected.get_path())


def _chosen(
    platform: Any, attn_config: Any, num_heads: int | None, adapter: Adapter, default: Callable[[], str]
) -> str | None:
    """Return the class path of the backend that attn-select chooses; None where vLLM is to choose."""
    # default: returns the class path of vLLM's own choice.
    kind = kind_of(attn_config)
    vllm_config = get_current_vllm_config()
    if not current_platform.is_cpu():
        capability = platform.get_device_capability() if current_platform.is_cuda() else None
        name = str(current_platform.device_name)
        if not adapter.sees(detect_device(), None if capability is None else tuple(capability), name):
            return None
    try:
        config = layer_config(attn_config, vllm_config, num_heads)
    except (ConfigError, ModelError) as error:
        _say(log_block.abstained_text(error.message, kind))
        return None
    device = "cpu" if current_platform.is_cpu() else None
    eager = wanted_graphs(vllm_config) == "NEVER"
    selection = select(config, device, adapter.rules(), workload=workload_in_an_engine(config), host_time=eager)
    choice = judge(selection, platform, attn_config, vllm_config, own_choice(AttentionBackendEnum, default))
    _say(log_block.choice_text(choice, kind))
    if kind == "mla" and not current_platform.is_cpu() and vllm_config.attention_config.mla_prefill_backend is None:
        _say(log_block.prefill_text(choose_prefill(selection, platform, vllm_config)))
    return None if choice.engine is None else str(AttentionBackendEnum[choice.engine.name].get_path())


def judge(selection: Selection, platform: Any, attn_config: Any, vllm_config: Any, own: EngineBackend | None) -> Choice:
    """Return the first backend of a selection's order that vLLM accepts on this platform; ``own`` as in ``choose``."""
    capability = platform.get_device_capability()

    def refusals(backend: str, engine: EngineBackend) -> Refusals:
        if engine.own and (found := limits(attn_config, vllm_config)):
            return found

        def ask(made: Any) -> Refusals:
            if not engine.own:
                return list(made.validate_configuration(device_capability=capability, **attn_config._asdict()))
            for name in kernels_of(backend):
                load_plugins().specs[name].get_class()
            return speculation_limits(vllm_config, backend)

        return refusals_of(engine.name, AttentionBackendEnum, ask)

    return choose(selection, refusals, own)


def _say(text: str) -> None:
    """Log what vLLM asks for several times once, and on one rank."""
    logger.info_once("%s", text, scope="global")

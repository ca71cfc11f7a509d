"""What the gate answers for a fixed list of layers on a GPU of each generation: a file that a plugin's tests keep.

    @pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
    def test_verdicts(spec):
        check_verdicts(spec, Path(__file__).parent / "golden")

A change of a fact shows in the difference of ``golden/BACKEND.txt``, which ``WRITE_VERDICTS=1 pytest -k verdicts``
writes anew. A line holds a layer, by what it asks beside the usual, and what is said of it: the codes of the reasons
with their remedies, or the plan. Plans are named by their kernel and a digest, and stand at the end without their
words.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attn_select.backends.spec import BackendPlan, BackendSpec, Reason
from attn_select.errors import ConfigError
from attn_select.layer.config import ATTENTION_TYPES, CUDA_GRAPH_LEVELS, PHASES, AttentionConfig
from attn_select.layer.dtypes import DTYPES, KV_CACHE_DTYPES
from attn_select.layer.features import FEATURES
from attn_select.layer.state import RECURRENCES, StateConfig
from attn_select.machine.device import CPU, Device, lookup
from attn_select.testing.conformance_facts import COMPANIONS
from attn_select.testing.toolkit import GQA_FIELDS, MLA_FIELDS, ask, device_of

Situation = Mapping[str, Any]
"""``layers``: what each asks beside the usual; the rest as ``ask`` has it: ``options``, ``installed``, ``pins``, …"""

DEVICES: tuple[Device, ...] = (
    CPU,
    *map(device_of, ((3, 7), (5, 0), (6, 1))),
    *map(lookup, ("v100", "t4", "a100", "a10", "jetson-agx-orin", "l4", "h100")),
    *map(lookup, ("b200", "b300", "jetson-agx-thor", "rtx5090", "gb10")),
)
USUAL: Mapping[str, Mapping[str, Any]] = {
    "attention": GQA_FIELDS,
    "mla": MLA_FIELDS,
    "sparse_mla": {**MLA_FIELDS, "sparse_top_k": 2048},
    "state": {"recurrence": "gated_delta_net", "num_heads": 16, "head_size": 128},
}
"""The usual layer of each sort: Llama 3's, DeepSeek V3's, DeepSeek V3.2's, Qwen3-Next's."""
_ANY: Mapping[str, Sequence[Any]] = {"dtype": DTYPES[1:], "cuda_graph": CUDA_GRAPH_LEVELS[1:]}
_CACHED: Mapping[str, Sequence[Any]] = {
    **_ANY,
    "kv_cache_dtype": KV_CACHE_DTYPES[1:],
    "block_size": (1, 8, 15, 16, 24, 32, 48, 64, 96, 128, 192, 256, 544),
    **{feature.field: feature.examples for feature in FEATURES},
    "num_speculative_tokens": (1, 3, 7, 8, 127),
    "decode_context_parallel_size": (2, 8),
}
_HEAD_SIZES = """8 15 16 20 24 32 40 48 64 72 80 96 100 104 112 120 136 160 176 192 224 248 256 257 264 320 512 513 520
    576 1024 1025 2048 2049"""
_MLA: Mapping[str, Sequence[Any]] = {
    **_CACHED,
    "num_heads": (1, 5, 8, 16, 20, 32, 64, 65, 96, 127, 129, 160, 192, 256),
    "kv_lora_rank": (128, 248, 256, 264, 448, 500, 520, 528, 576),
    "qk_nope_head_dim": (64, 192, 256, 448, 464),
    "qk_rope_head_dim": (0, 32, 72, 128, 144),
    "v_head_dim": (64, 192, 256, 512, 520),
}
ASKED: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "attention": {
        **_CACHED,
        "head_size": tuple(map(int, _HEAD_SIZES.split())),
        "v_head_size": (8, 64, 256, 512, 520),
        "num_heads": (8, 40, 64, 256, 264, 272, 384),
        "attn_type": ATTENTION_TYPES[1:],
    },
    "mla": _MLA,
    "sparse_mla": {**_MLA, "sparse_top_k": (7, 64, 100, 128, 192, 512, 1000, 1024, 4096)},
    "state": {
        **_ANY,
        "recurrence": RECURRENCES[1:],
        "head_size": (16, 24, 32, 48, 64, 96, 100, 192, 256, 264, 512),
        "v_head_size": (16, 32, 64, 96, 256, 264, 512),
        "state_dtype": ("bfloat16", "float16"),
        "num_speculative_tokens": (1, 3, 7, 8),
        "num_v_heads": (32,),
        "conv_kernel_size": (4,),
    },
}
"""What is asked beside the usual, on both sides of the limits that kernels have."""
TOGETHER = 60
"""Layers that ask for two to four of these at once."""


def check_verdicts(
    spec: BackendSpec,
    folder: Path,
    situations: Iterable[Situation] = (),
    *,
    usual: Mapping[str, Any] | None = None,
    left_out: Iterable[str] = (),
) -> None:
    """Compare what the gate answers with the file ``folder/BACKEND.txt``, or write it where ``WRITE_VERDICTS`` is set.

    Args:
        situations: what is asked beside the list: further layers, with options, libraries or variables.
        usual: fields in which the usual layer is not that of ``USUAL``.
        left_out: fields of plans that differ on almost every device or layer.

    Raises:
        AssertionError: shows the lines that differ.
    """
    file = folder / f"{spec.name}.txt"
    lines = [*verdicts(spec, situations, usual or {}, left_out)]
    if os.environ.get("WRITE_VERDICTS"):
        folder.mkdir(exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    kept = file.read_text("utf-8").splitlines() if file.exists() else []
    assert lines == kept, f"run again with WRITE_VERDICTS=1, and read the difference of {file}"


def verdicts(
    spec: BackendSpec, situations: Iterable[Situation], usual: Mapping[str, Any], left_out: Iterable[str]
) -> Iterator[str]:
    """Yield the lines of a backend's file; arguments as in ``check_verdicts``."""
    (sort,) = {capabilities.sort for capabilities in spec.capabilities.values()}
    served = [capabilities.compute_capabilities.value for capabilities in spec.capabilities.values()]
    devices = [device for device in DEVICES if any(each.accepts(device.compute_capability) for each in served)]
    answers, base = _Answers(spec, devices, left_out), {**USUAL[sort], **usual}
    yield f"{spec.name}: serves {' and '.join(spec.capabilities)} on {_span(devices, DEVICES)}"
    for other, fields in USUAL.items():
        if other != sort:
            yield f"{other}{answers.about(fields)}"
    rows: dict[tuple[str, str], list[str]] = {}
    for title, value, fields in _layers(sort):
        with suppress(ConfigError):  # two fields contradict each other
            rows.setdefault((title, answers.about({**base, **fields})), []).append(value)
    for (title, answer), values in rows.items():
        yield f"{' '.join([title, *values]).rstrip()}{answer}"
    for situation in situations:
        given = {name: value for name, value in situation.items() if name != "layers"}
        yield ", ".join(f"{name}: {_text(value) or 'none'}" for name, value in given.items()) or "further layers"
        for fields in situation.get("layers", ({},)):
            yield f"    {_text(fields) or 'the usual'}{answers.about({**base, **fields}, **given)}"
    for code, supported in sorted(answers.supported.items()):
        yield f"{code}: supported {'; '.join(supported)}"
    for name, text in sorted(answers.plans.items()):
        yield f"{name} = {text}"


class _Answers:
    """The gate's answers about one backend as text, with the plans and the supported values that they speak of."""

    def __init__(self, spec: BackendSpec, devices: Sequence[Device], left_out: Iterable[str]) -> None:
        self._spec, self._devices, self._left_out = spec, devices, {"path", "because", *left_out}
        self.plans: dict[str, str] = {}
        self.supported: dict[str, dict[str, None]] = {}

    def about(self, fields: Mapping[str, Any], **given: Any) -> str:
        """Return what is said of a layer by phase and device; phases of which the same is said stand together."""
        config: Any = (StateConfig if "recurrence" in fields else AttentionConfig)(**fields)
        phases: dict[tuple[str, ...], list[str]] = {}
        for phase in PHASES:
            if phase in self._spec.capabilities and phase in config.phases:
                found = [ask(self._spec, config, device, phase, **given) for device in self._devices]
                phases.setdefault(tuple(map(self._verdict, found)), []).append(phase)
        parts = [""]
        for texts, names in phases.items():
            where: dict[str, list[Device]] = {}
            for device, text in zip(self._devices, texts, strict=True):
                where.setdefault(text, []).append(device)
            start = "" if len(phases) == 1 else f"{names[0]} "
            parts += [f"{start}{_span(each, self._devices)}: {text}" for text, each in where.items()]
        return " | ".join(parts)

    def _verdict(self, outcome: BackendPlan | list[Reason]) -> str:
        if isinstance(outcome, BackendPlan):
            text = self._plan_text(outcome)
            name = f"{outcome.kernel_name}.{hashlib.sha256(text.encode()).hexdigest()[:4]}"
            self.plans[name] = text
            return name
        for reason in outcome:
            self.supported.setdefault(reason.code, {})[_text(reason.supported)] = None
        return " + ".join(f"{each.code} ({each.remedy})" if each.remedy else each.code for each in outcome)

    def _plan_text(self, plan: BackendPlan) -> str:
        """Return the fields of a plan that have not their default, of clauses their number."""
        parts = []
        for field in dataclasses.fields(plan):
            value = getattr(plan, field.name)
            if field.name in ("notes", "unverified"):
                value = len(value)
            if field.name not in self._left_out and value != field.default and (value or field.default is True):
                parts.append(f"{field.name}={_text(value)}")
        return ", ".join(parts)


def _layers(sort: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield layers: a title, a value that stands with others of the title, and what is asked beside the usual."""
    yield "the usual", "", {}
    asked, draw = ASKED[sort], random.Random(sort)
    for field, values in asked.items():
        yield from ((field, str(value), {**COMPANIONS.get(field, {}), field: value}) for value in values)
    for _ in range(TOGETHER):
        fields = {field: draw.choice(asked[field]) for field in draw.sample([*asked], draw.randint(2, 4))}
        yield _text(fields), "", fields


def _span(some: Sequence[Device], devices: Sequence[Device]) -> str:
    """Return the compute capabilities of some devices, of those that follow each other the first and the last."""
    if len(some) == len(devices) and devices is not DEVICES:
        return "all"
    runs: list[list[Device]] = []
    for device in some:
        if runs and devices.index(device) == devices.index(runs[-1][-1]) + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return " ".join("-".join(dict.fromkeys((run[0].capability_text, run[-1].capability_text))) for run in runs)


def _text(value: Any) -> str:
    """Return a value as short text; of fields those that are True by their name alone."""
    if isinstance(value, Mapping):
        return ", ".join(name if each is True else f"{name}={_text(each)}" for name, each in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)

"""What a backend declares, against what its plans accept: a value that every plan refuses is declared for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from attn_select.backends.spec import BackendSpec, Capabilities
from attn_select.decide import gate
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import is_quantized
from attn_select.layer.features import FEATURES
from attn_select.machine.device import CPU, Device, known_gpus
from attn_select.testing.conformance_configs import Fields, Heads, inside_config, made_config, own_fields, sizes_of
from attn_select.testing.toolkit import codes

_TRIES = 100
"""Configurations to draw for a value before it counts as refused. Most values are accepted in the first."""
COMPANIONS: dict[str, Fields] = {
    "draft_tree": {"num_speculative_tokens": 3},
    "per_head_quant_scales": {"kv_cache_dtype": "fp8_e4m3"},
}
"""Features that mean nothing without another field."""
Ask = Callable[[AttentionConfig, Device], str]
"""Returns why no plan accepts a configuration on a device; empty where one does."""


def undeclared(spec: BackendSpec, phase: Phase, config: AttentionConfig) -> set[str]:
    """Return the codes of the reasons that the declared capabilities give against a configuration, on any device."""
    reasons = gate.capability_reasons(spec.of_attention(phase), config, Device("any", (0, 0)), ())
    return codes(reasons) - {"compute-capability"}


def refused_values(spec: BackendSpec, phase: Phase, seed: int, heads: Heads, ask: Ask) -> dict[str, str]:
    """Return the declared values, and devices, with which all drawn configurations are refused, and why the last is."""
    # What no valid configuration has together with other declared values is left out.
    capabilities, rng = spec.of_attention(phase), random.Random(f"{spec.name} {seed} {phase} facts")
    known = {gpu.compute_capability: gpu for gpu in (*known_gpus().values(), CPU)}
    devices = [
        device
        for device in known.values()
        if capabilities.compute_capabilities.value.accepts(device.compute_capability)
    ]
    missing, refused = dict(_declared(capabilities)), {f"device {device.name}": "" for device in devices}
    for _ in range(_TRIES):
        if not missing and not refused:
            break
        drawn = own_fields(inside_config(rng, capabilities, heads, phase))
        plain: list[Fields] = [{}]
        for text, choices in [*missing.items(), ("", plain)]:
            config = made_config({**drawn, **rng.choice(choices)})
            if config is None or phase not in config.phases or undeclared(spec, phase, config):
                continue
            answers = {f"device {device.name}": ask(config, device) for device in devices}
            for device in answers.keys() & refused.keys():
                refused[device] = answers[device]
            accepted = [device for device, why in answers.items() if not why]
            for device in accepted:
                refused.pop(device, None)
            if accepted:
                refused.pop(text, None)
                missing.pop(text, None)
            elif text:
                refused[text] = next(iter(answers.values()), "no device is declared")
    return refused


def _declared(capabilities: Capabilities) -> Iterator[tuple[str, list[Fields]]]:
    """Yield each declared value as text, and fields of a configuration that have it, one of which is to be accepted."""
    if not capabilities.mla:
        yield from ((f"head_size = {size}", [{"head_size": size}]) for size in sizes_of(capabilities))
        yield from ((f"attn_type = {name!r}", [{"attn_type": name}]) for name in capabilities.attn_types.value)
    yield from ((f"dtype = {dtype!r}", [{"dtype": dtype}]) for dtype in capabilities.dtypes.value)
    if capabilities.reads_cache:
        yield from ((f"block_size = {size}", [{"block_size": size}]) for size in capabilities.block_sizes.value)
        for stored in capabilities.kv_cache_dtypes.value:
            plain = not is_quantized(stored) and stored in capabilities.dtypes.value
            fields = {"dtype": stored, "kv_cache_dtype": stored} if plain else {"kv_cache_dtype": stored}
            yield f"kv_cache_dtype = {stored!r}", [fields]
    for feature in FEATURES:
        declared = getattr(capabilities, feature.fact).value
        values = [value for value in feature.examples if value != feature.off and feature.accepts(declared, value)]
        made = [{feature.field: value, **COMPANIONS.get(feature.field, {})} for value in values]
        if declared is True:  # of any value, so some may be refused
            yield feature.field, made
        else:
            yield from ((f"{feature.field} = {value!r}", [fields]) for value, fields in zip(values, made, strict=True))

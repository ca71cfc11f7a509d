"""Made-up backends and rules, so that decisions are tested apart from the real facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import timed_kernels
from decider import Decider

from attn_select.backends.registry import Plugin, Registry
from attn_select.backends.spec import (
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
)
from attn_select.layer.config import PHASES, AttentionConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet
from attn_select.rules.rule import parse_rule

HOPPER = Device("h100", (9, 0), full_name="NVIDIA H100", sm_count=132, memory_gib=80, bandwidth_gbps=3350)

PACKAGED = {"name": "packaged-order", "layer": 0, "priority": ["A", "B", "C"]}

MakeSpec = Callable[..., BackendSpec]
MakeDecider = Callable[..., Decider]


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str


@pytest.fixture
def make_spec() -> MakeSpec:
    """Return a factory: ``make_spec("A", phases=…, layouts=…, blocks=…, path=…, reasons=…, **capabilities)``."""

    def make(
        name: str,
        phases: Sequence[str] = PHASES,
        layouts: Sequence[str] = ("FLASH_ATTN_NHD",),
        blocks: Sequence[int] = (16,),
        reasons: Callable[[AttentionConfig], list[Reason]] = lambda config: [],
        level: str = "ALWAYS",
        options: Any = None,
        plan: Any = None,
        libraries: Any = (),
        **capabilities: Any,
    ) -> BackendSpec:
        facts: dict[str, Any] = {
            "compute_capabilities": ComputeCapabilities((((8, 0), (9, 9)),)),
            "dtypes": ("bfloat16", "float16"),
            "kv_cache_dtypes": ("bfloat16", "float16"),
            "head_sizes": HeadSizes(),
            "block_sizes": tuple(blocks),
        }
        plain = {key: capabilities.pop(key) for key in ("mla", "sparse", "reads_cache") if key in capabilities}
        facts |= capabilities
        served = Capabilities(**{key: Fact(value, "test") for key, value in facts.items()}, **plain)

        def default_plan(config: AttentionConfig, *_: Any) -> Any:
            found = reasons(config)
            return found or BackendPlan(
                path="path",
                because="only one",
                query_dtype=config.dtype,
                returns_lse=True,
                kv_layouts=tuple(layouts),
                kernel_block_sizes=tuple(blocks),
                cuda_graph=level,
            )  # type: ignore[arg-type]

        extra = {} if options is None else {"options": options}
        return BackendSpec(
            name=name,
            summary=name.lower(),
            capabilities={phase: served for phase in phases},  # type: ignore[misc]
            plan=plan or default_plan,
            load=f"nowhere:{name}",
            libraries=libraries,
            **extra,
        )

    return make


@pytest.fixture
def make_decider() -> MakeDecider:
    """Return a factory: ``make_decider(specs, rules, device=…, environment=…)``.

    Rules are tables of layer 1, a user's, unless they have a key ``layer`` (0: packaged).
    """

    def make(
        specs: Sequence[BackendSpec],
        rules: Sequence[dict[str, Any]] = (),
        device: Device = HOPPER,
        environment: Environment | None = None,
        conflicts: dict[str, tuple[str, ...]] | None = None,
        failed: Sequence[Plugin] = (),
    ) -> Decider:
        registry = Registry(
            specs={spec.name: spec for spec in specs},
            owners={spec.name: "test" for spec in specs},
            conflicts=conflicts or {},
            plugins=[Plugin("test", "test", "1", tuple(spec.name for spec in specs)), *failed],
        )
        parsed = [
            parse_rule({k: v for k, v in t.items() if k != "layer"}, file="rules.toml", line=n, layer=t.get("layer", 1))
            for n, t in enumerate(rules, 1)
        ]
        rule_set = RuleSet(rules=parsed)
        return Decider(registry, rule_set, device, environment or Environment(assume_installed=True))

    return make


@pytest.fixture
def gqa() -> AttentionConfig:
    """A plain GQA decoder layer."""
    return AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)


@pytest.fixture
def mla() -> AttentionConfig:
    """DeepSeek-V3's MLA layer."""
    return AttentionConfig(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.fixture
def spec(make_spec: Any) -> Callable[..., BackendSpec]:
    """Return a factory of backends whose kernel is called as the backend, in small letters."""

    def make(
        name: str, layouts: Sequence[str] = ("FLASH_ATTN_NHD",), kernel: str | None = None, **more: Any
    ) -> BackendSpec:
        def plan(config: AttentionConfig, *_: Any) -> BackendPlan:
            return BackendPlan(
                kernel=Kernel(kernel or name.lower()),
                path="path",
                because="only one",
                query_dtype=config.dtype,
                returns_lse=True,
                kv_layouts=tuple(layouts),
                kernel_block_sizes=(16,),
                cuda_graph="ALWAYS",
                unverified=more.get("unverified", ()),
            )

        return make_spec(name, plan=plan, **{key: value for key, value in more.items() if key != "unverified"})

    return make


@pytest.fixture
def decider(spec: Any, make_decider: Any) -> Callable[..., Decider]:
    """Return a factory: backends A, B and C that can do the same, and rules behind the packaged order."""

    def make(*rules: Mapping[str, Any], specs: Sequence[BackendSpec] | None = None) -> Decider:
        made: Decider = make_decider(
            specs or [spec("A"), spec("B"), spec("C")], [PACKAGED, *rules], timed_kernels.HOPPER
        )
        return made

    return make

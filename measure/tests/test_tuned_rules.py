"""Rules out of times: what the tables say and match, how they are read back, and what contradicts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attn_select.decide.contradicted import contradicted
from attn_select.layer.config import AttentionConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.device import lookup
from attn_select.machine.environment import Environment
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import Rule, parse_rule
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.timed_layer import timed_layer
from attn_select.times.workload import parse_workload
from attn_select_measure.regions import Region
from attn_select_measure.tuned_rules import regions_of, rule_prefix, rule_tables, tuned_before

H100 = lookup("h100")
CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
MLA = AttentionConfig(
    num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_cache_dtype="fp8"
)
LIBRARIES = {"FLASHINFER": {"flashinfer-python": "0.6.14"}, "FLASH_ATTN": {"vllm": "0.33.0+cu130"}}
WHEN = "2026-11-20T10:00:00+00:00"
REGIONS = [
    Region(["FLASH_ATTN", "FLASHINFER"]),
    Region(
        ["FLASHINFER", "FLASH_ATTN"],
        {"batch": (32, None), "seq_len": (None, 2048), "kv_tokens": (4096, 65536), "effective_batch": (12.5, None)},
        parse_batch_shape("48q1s1k"),
        {"FLASHINFER": 113.4, "FLASH_ATTN": 125.3},
        "FLASH_ATTN",
        decided=9,
        right=7,
    ),
]


def tables(config: AttentionConfig = CONFIG) -> list[dict[str, Any]]:
    return rule_tables(config, H100, "decode", REGIONS, LIBRARIES, WHEN)


def rules(config: AttentionConfig = CONFIG) -> list[Rule]:
    return [parse_rule(table, file="tuned.toml", line=n, layer=1) for n, table in enumerate(tables(config), 1)]


def first_of(
    config: AttentionConfig, workload: str | None, gpu: str = "h100", versions: dict[str, str] | None = None
) -> str | None:
    pins = {"flashinfer-python": "0.6.14", "vllm": "0.33.0"} if versions is None else versions
    ranker = Ranker(rules(), lookup(gpu), Environment(assume_installed=True, pins=pins), [])
    if workload is None:
        found = ranker.rank(config, ["decode"])
    else:
        shapes = parse_workload(workload).of_phase("decode", config)
        found = ranker.rank(config, ["decode"], batches={"decode": [shape.batch for shape in shapes]})
    return next(iter(found["decode"].order), None)


def test_what_the_rules_say() -> None:
    first, second = tables()
    assert first["name"] == "tuned-h100-32x8x128-decode"
    assert second["name"] == "tuned-h100-32x8x128-decode-2"
    assert first["because"] == "measured 2026-11-20"
    figures = "FLASHINFER 113 us against FLASH_ATTN's 125 us at 48q1s1k"
    assert second["because"] == f"measured 2026-11-20: {figures}; the fastest or within 2% of it in 7 of 9 batches"
    assert second["when"]["batch"] == ">=32"
    assert second["when"]["kv_tokens"] == ">=4096,<=65536"
    assert second["when"]["library"] == {"flashinfer-python": "0.6.14", "vllm": "0.33.0"}
    assert second["measured"] == WHEN


@pytest.mark.parametrize(
    ("workload", "first"),
    [
        (None, "FLASH_ATTN"),
        ("48q1s1k", "FLASHINFER"),
        ("8q1s1k", "FLASH_ATTN"),
        ("48q1s4k", "FLASH_ATTN"),
        ("64q1s2k", "FLASH_ATTN"),
        ("48q1s1k,8q1s1k", "FLASH_ATTN"),
        ("2q1s2k_46q1s128", "FLASH_ATTN"),
    ],
)
def test_the_rules_decide(workload: str | None, first: str) -> None:
    assert first_of(CONFIG, workload) == first


def test_the_rules_lapse_with_gpu_and_versions_and_spare_other_layers() -> None:
    assert first_of(CONFIG, "48q1s1k", gpu="h200") is None
    assert first_of(CONFIG, "48q1s1k", versions={"flashinfer-python": "0.6.15", "vllm": "0.33.0"}) is None
    assert first_of(CONFIG, "48q1s1k", versions={}) is None
    assert first_of(CONFIG.model_copy(update={"cuda_graph": "UNIFORM_BATCH"}), None) == "FLASH_ATTN"
    for other in ({"sliding_window": 128}, {"sinks": True}, {"logits_soft_cap": 50.0}, {"num_heads": 64}):
        assert first_of(AttentionConfig(**{**timed_layer(CONFIG).to_dict(), **other}), None) is None
    assert first_of(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8"), None) is None


@pytest.mark.parametrize("config", [CONFIG, MLA, CONFIG.model_copy(update={"sliding_window": 128, "sinks": True})])
def test_rules_are_read_back(config: AttentionConfig) -> None:
    written = tables(config)
    found = regions_of(written, config, H100, LIBRARIES)
    assert [(region.order, region.bounds) for region in found] == [(each.order, each.bounds) for each in REGIONS]
    mine = [{"name": "mine"}, {"name": f"{rule_prefix(config, H100)}-decode"}]
    assert tuned_before([*mine, *written], config, H100, "decode") == written
    assert tuned_before(written, config, H100, "prefill") == []


@pytest.mark.parametrize(
    "change",
    [
        {"when": {"batch": ">32"}},
        {"when": {"num_heads": 16}},
        {"when": {"library": {"vllm": "0.33.0"}}},
        {"prefer": []},
    ],
)
def test_rules_that_were_edited_are_not_taken_for_regions(change: dict[str, Any]) -> None:
    first, second = tables()
    when = {**second["when"], **change.get("when", {})}
    assert regions_of([first, {**second, **change, "when": when}], CONFIG, H100, LIBRARIES) == []


def test_rules_without_one_for_any_batch_are_regions_too() -> None:
    """Any other batch keeps the order of other rules then."""
    kept = rule_tables(CONFIG, H100, "decode", REGIONS, LIBRARIES, WHEN, any_batch=False)
    assert kept == tables()[1:]
    assert [region.order for region in regions_of(kept, CONFIG, H100, LIBRARIES)] == [REGIONS[1].order]


def test_names_tell_layers_apart() -> None:
    many = [CONFIG, MLA, *(CONFIG.model_copy(update={name: value}) for name, value in CHANGES)]
    names = [rule_prefix(config, H100) for config in many]
    assert len(set(names)) == len(many)
    assert all(len(name) <= 80 for name in names)


CHANGES = [
    ("num_heads", 64),
    ("sliding_window", 128),
    ("sinks", True),
    ("dtype", "float16"),
    ("kv_cache_dtype", "fp8_e4m3"),
    ("num_speculative_tokens", 3),
]


def measured(time_us: dict[str, float], **changes: Any) -> Iterator[Measurement]:
    for backend, time in time_us.items():
        data = {
            "gpu": H100.full_name,
            "compute_capability": "9.0",
            "libraries": LIBRARIES[backend],
            "backend": backend,
            "kernel": {"decode": "any"},
            "config": timed_layer(CONFIG).to_dict(),
            "batch": "48q1s1k",
            "time_us": time,
            "spread_us": (time * 0.99, time * 1.01),
            "method": "graph",
            "date": "2026-11-21T10:00:00+00:00",
        }
        yield Measurement(**{**data, **changes})


AGAINST = {"FLASHINFER": 130.0, "FLASH_ATTN": 110.0}


def test_newer_measurements_contradict() -> None:
    ((file, line, text),) = contradicted(rules(), measured(AGAINST))
    assert (file, line) == ("tuned.toml", 2)
    assert "FLASH_ATTN 110 us against 130 us at 48q1s1k" in text
    assert "tuned-h100-32x8x128-decode-2" in text


@pytest.mark.parametrize(
    ("times", "changes"),
    [
        ({"FLASHINFER": 112.0, "FLASH_ATTN": 125.0}, {}),
        ({"FLASHINFER": 111.0, "FLASH_ATTN": 110.0}, {}),
        (AGAINST, {"date": "2026-11-19T10:00:00+00:00"}),
        (AGAINST, {"date": ""}),
        (AGAINST, {"spread_us": (90.0, 150.0)}),
        (AGAINST, {"gpu": "NVIDIA H20"}),
        (AGAINST, {"libraries": {"flashinfer-python": "0.7.0", "vllm": "0.33.0"}}),
        (AGAINST, {"config": timed_layer(MLA).to_dict()}),
        ({"FLASH_ATTN": 110.0}, {}),
    ],
)
def test_what_does_not_contradict(times: dict[str, float], changes: dict[str, Any]) -> None:
    assert list(contradicted(rules()[1:], measured(times, **changes))) == []


STATES = StateConfig(recurrence="gated_delta_net", num_heads=16, num_v_heads=32, head_size=128, conv_kernel_size=4)


def test_rules_of_layers_that_keep_a_state() -> None:
    regions = [Region(["TRITON_STATE", "FLA"]), Region(["FLA", "TRITON_STATE"], {"batch": (64, None)})]
    made = rule_tables(STATES, H100, "decode", regions, {}, WHEN)
    assert [table["name"] for table in made] == [
        "tuned-h100-gated-delta-net-16x32x128x128-conv-kernel-size-4-decode",
        "tuned-h100-gated-delta-net-16x32x128x128-conv-kernel-size-4-decode-2",
    ]
    assert regions_of(made, STATES, H100, {}) == regions
    ranker = Ranker(
        [parse_rule(table, file="tuned.toml", line=n, layer=1) for n, table in enumerate(made, 1)],
        H100,
        Environment(assume_installed=True),
        [],
    )

    def first(config: StateConfig, workload: str) -> str | None:
        shapes = parse_workload(workload).of_phase("decode", config)
        found = ranker.rank(config, ["decode"], batches={"decode": [shape.batch for shape in shapes]})
        return next(iter(found["decode"].order), None)

    assert first(STATES, "8q1s1k") == "TRITON_STATE"
    assert first(STATES, "64q1s1k") == "FLA"
    for change in ({"state_dtype": "bfloat16"}, {"conv_kernel_size": 0}, {"num_v_heads": 16}, {"recurrence": "mamba2"}):
        assert first(STATES.model_copy(update=change), "8q1s1k") is None

"""``when``: every field with values that match, values that do not, and values that are refused."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device, lookup
from attn_select.machine.environment import Environment
from attn_select.rules.conditions import compile_when
from attn_select.rules.predicates import ConditionError
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import parse_rule

H100 = Device("h100", (9, 0), sm_count=132, memory_gib=80.0, bandwidth_gbps=3350.0)
PLAIN = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
MLA = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def matches(
    when: dict[str, Any],
    config: AttentionConfig = PLAIN,
    device: Device = H100,
    environment: Environment | None = None,
) -> bool:
    """Whether a rule with this ``when`` applies."""
    rule = parse_rule({"name": "r", "prefer": ["CHOSEN"], "when": when}, file="f", line=1, layer=0)
    ranker = Ranker([rule], device, environment or Environment(assume_installed=True))
    return ranker.rank(config, ["decode"], ["OTHER"])["decode"].order[0] == "CHOSEN"


def config(**changes: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, **changes})


@pytest.mark.parametrize(
    ("when", "yes", "no"),
    [
        ({}, [PLAIN, MLA], []),
        ({"mla": True}, [MLA], [PLAIN]),
        ({"mla": True, "num_heads": 32}, [], [MLA, PLAIN]),
        ({"sparse": False}, [MLA, PLAIN], []),
        ({"sinks": True}, [config(sinks=True)], [PLAIN]),
        ({"num_heads": 32}, [PLAIN], [MLA]),
        ({"num_heads": "<=16"}, [MLA], [PLAIN]),
        ({"num_heads": " > 16 , < 32 "}, [], [PLAIN, MLA]),
        ({"num_heads": ["<8", ">=32"]}, [PLAIN], [MLA]),
        ({"head_size": "==128"}, [PLAIN], [MLA]),
        ({"logits_soft_cap": ">=30"}, [config(logits_soft_cap=30)], [PLAIN, config(logits_soft_cap=29.9)]),
        ({"sliding_window": ">0"}, [config(sliding_window=1)], [PLAIN]),
        ({"sliding_window": "!=7"}, [config(sliding_window=8)], [PLAIN, config(sliding_window=7)]),
        ({"sliding_window": "none"}, [PLAIN, MLA], [config(sliding_window=1)]),
        ({"sliding_window": ["none", "<=7"]}, [PLAIN, config(sliding_window=7)], [config(sliding_window=8)]),
        ({"logits_soft_cap": "none", "v_head_size": "none"}, [PLAIN], [config(logits_soft_cap=30)]),
        ({"block_size": 16}, [config(block_size=16)], [PLAIN, config(block_size=32)]),
        ({"v_head_size": "<128"}, [config(v_head_size=64)], [PLAIN]),
        ({"dtype": "half"}, [config(dtype="float16")], [PLAIN]),
        ({"dtype": "*float16"}, [PLAIN, config(dtype="float16")], [config(dtype="float32")]),
        ({"attn_type": "encoder*"}, [config(attn_type="encoder_decoder")], [PLAIN]),
        ({"output_quantization": ["fp8", "fp4"]}, [config(output_quantization="fp4")], [PLAIN]),
        ({"cuda_graph": "UNIFORM_*"}, [config(cuda_graph="UNIFORM_BATCH")], [PLAIN, config(cuda_graph="ALWAYS")]),
    ],
)
def test_fields_of_the_config(when: dict[str, Any], yes: list[AttentionConfig], no: list[AttentionConfig]) -> None:
    assert [matches(when, each) for each in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    ("written", "kv_cache_dtype", "expected"),
    [
        ("fp8", "fp8_e4m3", True),
        ("FP8*", "fp8_e5m2", True),
        ("fp8*", "fp8_ds_mla", True),
        ("auto", "auto", True),
        ("bf16", "auto", True),  # auto stands for the layer's dtype
        ("auto", "bfloat16", True),
        ("float16", "auto", False),
        (["float16", "fp8"], "float16", True),
    ],
)
def test_kv_cache_dtype_is_normalised(written: Any, kv_cache_dtype: str, expected: bool) -> None:
    sparse = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if kv_cache_dtype == "fp8_ds_mla":
        layer = AttentionConfig(num_heads=16, sparse_top_k=2048, kv_cache_dtype=kv_cache_dtype, **sparse)
    else:
        layer = config(kv_cache_dtype=kv_cache_dtype)
    assert matches({"kv_cache_dtype": written}, layer) is expected


@pytest.mark.parametrize(
    ("written", "yes", "no"),
    [
        ("9.x", [(9, 0), (9, 5)], [(8, 9), (10, 0)]),
        (">=8.9", [(8, 9), (9, 0), (10, 0), (12, 1)], [(8, 0), (7, 5)]),
        ("<10.0", [(9, 0), (7, 5)], [(10, 0), (12, 0)]),
        (">=8.0,<10.0", [(8, 0), (9, 0)], [(7, 5), (10, 0)]),
        ("!=9.x", [(8, 9), (10, 0)], [(9, 0)]),
        (["8.0", "12.x"], [(8, 0), (12, 1)], [(8, 6), (9, 0)]),
    ],
)
def test_compute_capability_is_compared_as_numbers(
    written: Any, yes: list[tuple[int, int]], no: list[tuple[int, int]]
) -> None:
    found = [matches({"compute_capability": written}, device=Device("x", each)) for each in (*yes, *no)]
    assert found == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    ("written", "name", "expected"),
    [
        ("h100", "h100", True),
        ("H100", "h100", True),
        ("RTX 4090", "rtx4090", True),  # any spelling that the table of GPUs knows
        ("rtx*", "rtx5090", True),
        (["h20", "h100"], "h20", True),
        (["h20", "b*"], "b200", True),
        ("a1?0", "a100", True),
    ],
)
def test_gpu(written: Any, name: str, expected: bool) -> None:
    assert matches({"gpu": written}, device=lookup(name)) is expected


def test_a_gpu_that_nobody_knows_is_a_warning() -> None:
    (condition,), (warning,) = compile_when({"gpu": "h1000"})
    assert "'h1000' is not a GPU" in warning
    assert "h100" in warning
    assert condition.matches("h1000")
    assert compile_when({"gpu": "h100"})[1] == []
    assert "matches no GPU" in compile_when({"gpu": "zz*"})[1][0]
    assert compile_when({"gpu": "h*"})[1] == []


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("sm_count", ">=132", True),
        ("sm_count", 78, False),
        ("memory_gib", ">79.5", True),
        ("bandwidth_gbps", "<3350", False),
    ],
)
def test_numbers_of_the_device(field: str, value: Any, expected: bool) -> None:
    assert matches({field: value}) is expected
    assert not matches({field: value}, device=Device("sm90", (9, 0)))  # unknown there


@pytest.mark.parametrize(
    ("written", "version", "expected"),
    [
        ("<0.6.3", "0.6.2", True),
        ("<0.6.3", "0.6.10", False),
        (">=0.6,<0.7", "0.6.14", True),
        ("0.6.*", "0.6.14", True),
        (["<0.5", ">=0.7"], "0.7.1", True),
        (">=0.6", "0.7rc1", True),
        ("==0.6.3", "0.6.3+cu130", True),
        ("!=0.6.3", None, False),
        (">=0", "built by hand", False),
        (" >= 0.6 , != 0.6.3 ", "0.6.4", True),
        ("~=0.6.1", "0.6.9", True),
        ("~=0.6.1", "0.7.0", False),
    ],
)
def test_library_and_cuda_versions(written: Any, version: str | None, expected: bool) -> None:
    pins = {} if version is None else {"flashinfer-python": version}
    environment = Environment(assume_installed=True, pins=pins, cuda=version)
    for name in ("flashinfer-python", "FlashInfer_Python"):
        assert matches({"library": {name: written}}, environment=environment) is expected
    assert matches({"cuda": written}, environment=environment) is expected


@pytest.mark.parametrize(
    "when",
    [
        "mla",
        [{"mla": True}],
        {"num_head": 3},
        {"mla": 1},
        {"mla": []},
        {"num_heads": True},
        {"num_heads": "many"},
        {"num_heads": float("nan")},
        {"num_heads": -4},
        {"num_heads": 10**400},
        {"num_heads": " " * 199 + "16"},
        {"mla": 1, "num_head": 3, "library": {"a": 1, "b c": "1"}},
        {"compute_capability": 9.0},
        {"compute_capability": ">=9.x"},
        {"compute_capability": "\u0669.\u0660"},
        {"gpu": 100},
        {"dtype": "int8"},
        {"kv_cache_dtype": "fp88"},
        {"kv_cache_dtype": "int*"},
        {"cuda": 13.0},
        {"library": "flashinfer"},
        {"library": {"a": {"b": "1"}}},
        {"library": {"a": "~0.6"}},
        {"library": {"a": ">=0.6 <1"}},
        {"library": {"a": ">=0.6.*"}},
        {"gpu": datetime.date(2026, 1, 1)},
    ],
)
def test_what_is_refused_says_what_was_seen_and_what_is_accepted(
    when: Any,
) -> None:
    with pytest.raises(ConditionError) as caught:
        compile_when(when)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def test_a_value_may_have_200_characters() -> None:
    assert matches({"num_heads": " " * 198 + "32"})


@pytest.mark.parametrize("name", ["flashinfer", "FlashInfer", "flashinfer-python", "flashinfer_python"])
@pytest.mark.parametrize(("version", "expected"), [("0.6.14", True), ("0.7.0", False), (None, False)])
def test_an_import_name_stands_for_its_distribution(name: str, version: str | None, expected: bool) -> None:
    rule = parse_rule({"name": "r", "deny": ["A"], "when": {"library": {name: "<0.6.99"}}}, file="f", line=1, layer=0)
    environment = Environment(assume_installed=True, pins={} if version is None else {"flashinfer-python": version})
    ranker = Ranker([rule], H100, environment, {"flashinfer": ("other-build", "flashinfer-python")})
    assert bool(ranker.rank(PLAIN, ["decode"], ["A"])["decode"].denied) is expected

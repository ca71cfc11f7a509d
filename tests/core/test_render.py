"""Texts of quantities, layers and selections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from decider import Decider

from attn_select import select
from attn_select.backends import distributions
from attn_select.backends.registry import Registry
from attn_select.backends.spec import BackendSpec, Capabilities, HeadSizes, Library
from attn_select.decide.explicit import Choice
from attn_select.decide.lines import plain
from attn_select.decide.selection import Selection
from attn_select.decide.text import (
    brief_lines,
    layer_lines,
    plan_lines,
    selection_text,
)
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet
from attn_select.rules.rule import parse_rule

MakeSpec = Callable[..., BackendSpec]
MakeCapabilities = Callable[..., Capabilities]
GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
H100 = Device("h100", (9, 0))


def decide(
    specs: Sequence[BackendSpec],
    order: Sequence[str],
    config: AttentionConfig = GQA,
    device: Device = H100,
    pins: dict[str, str] | None = None,
) -> Selection:
    """Decide among these backends, ranked in this order."""
    registry = Registry({spec.name: spec for spec in specs}, {spec.name: "test" for spec in specs})
    rule = parse_rule({"name": "order", "priority": list(order)}, file="rules.toml", line=1, layer=1)
    environment = Environment(assume_installed=not device.local, pins=pins or {})
    return Decider(registry, RuleSet(rules=[rule]), device, environment).decide(config, Choice())


def test_candidates_are_listed_once_where_both_phases_say_the_same(
    spec: MakeSpec, capabilities: MakeCapabilities
) -> None:
    assert selection_text(decide([spec("A")], ["A"])).count("Candidates for") == 1
    decode = spec("B", capabilities={"decode": capabilities()})
    shown = selection_text(decide([spec("A"), decode], ["A", "B"]))
    assert [line for line in shown.splitlines() if "Candidates" in line] == [
        "  Candidates for prefill",
        "  Candidates for decode",
    ]


def test_of_kernels_that_an_engine_runs_itself_no_facts_are_shown() -> None:
    """Buffers, graphs and caches are those of attn-select's kernels, and so is what ranks cost."""
    chosen = select(GQA.model_copy(update={"decode_context_parallel_size": 2}), "h100")
    ours, engines = (plain(plan_lines(chosen, runs=runs)) for runs in (True, False))
    for fact in ("CUDA graphs ", "KV cache  ", "Ranks  "):
        assert (fact in ours, fact in engines) == (True, False)


def test_nearest_misses_are_the_backends_above_the_chosen_one_that_one_remedy_admits(
    spec: MakeSpec, capabilities: MakeCapabilities
) -> None:
    rejecting = {
        "TWICE": capabilities(block_sizes=(32,), dtypes=("float16",)),
        "NEVER": capabilities(head_sizes=HeadSizes((64,))),
        "ABOVE": capabilities(block_sizes=(32,)),
        "BELOW": capabilities(block_sizes=(32,)),
    }
    backends = [spec("CHOSEN")]
    backends += [spec(name, capabilities={"prefill": facts, "decode": facts}) for name, facts in rejecting.items()]
    order = ["TRITON_ATTN", "TWICE", "NEVER", "ABOVE", "CHOSEN", "BELOW"]  # the first is not installed
    text = plain(layer_lines(decide(backends, order)))
    *_, misses = text.partition("  Nearest misses\n")
    assert [line.split() for line in misses.splitlines()] == [
        ["--block-size", "32", "would", "admit", "ABOVE", "for", "prefill", "and", "decode"]
    ]


def test_a_kernel_library_for_another_machine_needs_a_gpu(spec: MakeSpec) -> None:
    library = Library("the-kernel", "the_kernel", "pip install 'the-kernel>=2'", ">=2")
    backends, order = [spec("A", libraries=((library,),))], ["TRITON_ATTN", "A"]
    elsewhere = plain(layer_lines(decide(backends, order, pins={"the-kernel": "1"})))
    assert f"; try pip install --upgrade 'the-kernel>=2' ({distributions.NEEDS_GPU})\n" in elsewhere
    assert f"{distributions.install_command('attn-select-triton')}\n" in elsewhere
    here = plain(layer_lines(decide(backends, order, device=replace(H100, local=True), pins={"the-kernel": "1"})))
    assert "; try pip install --upgrade 'the-kernel>=2'\n" in here
    assert distributions.NEEDS_GPU not in here
    smaller = plain(layer_lines(decide([spec("A")], order, GQA.model_copy(update={"block_size": 24}))))
    assert "; try --block-size 32\n" in smaller


@pytest.mark.parametrize(
    ("dtypes", "block_sizes", "says"),
    [
        (("bfloat16",), (32,), "PLAIN: block size 16 (supported: multiples of 32); try --block-size 32"),
        (("float16",), (16,), "PLAIN: dtype bfloat16 (supported: float16); try --dtype float16"),
        (("float16",), (32,), "PLAIN: dtype bfloat16 (supported: float16) (and 1 more reason)"),
    ],
)
def test_brief_counts_the_reasons_that_it_leaves_out(
    spec: MakeSpec, capabilities: MakeCapabilities, dtypes: tuple[str], block_sizes: tuple[int], says: str
) -> None:
    served = capabilities(dtypes=dtypes, kv_cache_dtypes=("bfloat16",), block_sizes=block_sizes)
    rejected = decide([spec(capabilities=dict.fromkeys(("prefill", "decode"), served))], ["PLAIN"])
    (line,) = [line for line in plain(brief_lines(rejected)).splitlines() if "PLAIN: " in line]
    assert line.removeprefix("  rejected").strip() == says

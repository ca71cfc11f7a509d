"""Steps and calls of layers that keep a state: what is refused leaves everything as it was, checked mode sees contents,
and no graph is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("attn_select_torch")

from attn_select import AttentionConfig, ConfigError, select  # noqa: E402
from attn_select.layer.state import StateConfig  # noqa: E402
from attn_select.reference.state_serving import StateServing, state_bound  # noqa: E402
from attn_select.runtime import BatchError, Capacity, attention_group, prepare_batch  # noqa: E402
from attn_select.runtime.block_pool import PoolError  # noqa: E402
from attn_select.runtime.cuda_graph import StaticBatch, load_step  # noqa: E402
from attn_select.runtime.states import (  # noqa: E402
    Gates,
    LinearAttention,
    RawGates,
    StateCache,
    StateGroup,
    StateMetadata,
    StatePool,
    StaticStates,
)
from attn_select.testing.toolkit import selection_of  # noqa: E402
from attn_select_torch.facts.torch_state import TORCH_STATE  # noqa: E402

CONFIG = StateConfig(recurrence="gated_delta_net", num_heads=2, head_size=8, dtype="float32")
"""Both layouts of its states have one shape."""


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for checked mode."""
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")


class Served:
    """One layer, its cache of 6 slots and its pool; the lengths of its requests are kept here."""

    def __init__(self, **changes: Any) -> None:
        self.config = CONFIG.model_copy(update=changes)
        self.group = StateGroup(select(self.config, "cpu"))
        self.layer = LinearAttention(self.group, self.weight())
        self.cache = self.group.allocate(6)
        self.pool = StatePool(6, self.config.num_speculative_tokens)
        self.seen: dict[str, int] = {}

    def weight(self) -> Any:
        return torch.randn(self.config.conv_dim, width) if (width := self.config.conv_kernel_size) else None

    def add(self, *names: str) -> None:
        for name in names:
            self.pool.add(name)
            self.seen[name] = 0

    def batch(self, **num_tokens: int) -> Any:
        for name, tokens in num_tokens.items():
            self.seen[name] += tokens
        return prepare_batch(list(num_tokens.values()), [self.seen[name] for name in num_tokens])

    def build(self, **num_tokens: int) -> StateMetadata:
        return self.group.build(self.batch(**num_tokens), self.pool.step(num_tokens))

    def inputs(self, tokens: int) -> tuple[Any, Gates]:
        decay, strength = -torch.rand(tokens, self.config.num_v_heads), torch.rand(tokens, self.config.num_v_heads)
        return torch.randn(tokens, self.config.width), Gates(decay, strength)

    def run(self, **num_tokens: int) -> Any:
        metadata = self.build(**num_tokens)
        return self.layer(*self.inputs(metadata.num_actual_tokens), self.cache, metadata)


def test_no_graph_is_kept() -> None:
    served = Served(conv_kernel_size=4)
    served.add("a")
    project = torch.nn.Linear(8, served.config.width)
    made = LinearAttention(served.group, torch.nn.Parameter(served.weight()), skip=torch.nn.Parameter(torch.ones(2)))
    for tokens in (4, 1, 1):
        decay = (-torch.rand(tokens, 2)).requires_grad_()
        gates = Gates(decay, torch.rand(tokens, 2).requires_grad_())
        output = made(project(torch.randn(tokens, 8)), gates, served.cache, served.build(a=tokens))
        raw = RawGates(
            A_log=torch.nn.Parameter(torch.randn(2)),
            a=torch.randn(tokens, 2).requires_grad_(),
            dt_bias=torch.nn.Parameter(torch.randn(2)),
            b=torch.randn(tokens, 2),
        )
        activated = Gates(raw=raw)
        made(project(torch.randn(tokens, 8)), activated, served.cache, served.build(a=tokens))
        kept = (output, served.cache.state, served.cache.conv, activated.log_decay, activated.write_strength)
        assert [tensor.requires_grad for tensor in kept if tensor is not None] == [False] * 5


def test_groups_of_one_pool_build_a_step_together() -> None:
    served, other = Served(), StateGroup(select(CONFIG, "cpu"))
    other.allocate(6)
    served.add("a")
    slots, common = served.pool.step({"a": 3}), prepare_batch([3], [3])
    for group in (served.group, other):
        assert group.build(common, slots).group is group
    slots = served.pool.step({"a": 1})
    served.group.build(prepare_batch([1], [4]), slots)
    with pytest.raises(BatchError, match="request 0 has 2 tokens in the batch, and 1 by the pool's step"):
        other.build(prepare_batch([2], [5]), slots)
    with pytest.raises(PoolError, match="a group refused its last step, which another group built"):
        served.pool.step({"a": 1})
    other.build(prepare_batch([1], [4]), slots)
    assert served.pool.step({"a": 1}).read == slots.write[0]


def test_what_attention_refuses_is_not_committed() -> None:
    states = StateGroup(selection_of(TORCH_STATE, CONFIG, "cpu"), cuda_graphs=True)
    states.allocate(6)
    config = AttentionConfig(num_heads=2, head_size=32, dtype="float32")
    attention = attention_group(select(config, "cpu"), "cpu", Capacity(4, 16, 64))
    batches = {states: StaticStates(states, 1, 4), attention: StaticBatch(attention, 1)}
    pool, common = StatePool(6), prepare_batch([1], [1])
    pool.add("a")
    slots = pool.step({"a": 1})
    with pytest.raises(BatchError, match="block_table_tensor is None: layers with a KV cache need it"):
        load_step(batches, {states: common, attention: common}, {states: slots}, 2)
    pool.take_back(slots)  # it is not committed
    with pytest.raises(BatchError, match="slots are missing of a group of layers that keep a state"):
        load_step(batches, {states: common, attention: common}, {}, 2)
    assert pool.step({"a": 1}).read == [-1]


@pytest.mark.parametrize("name", ["conv_weight", "conv_bias", "skip"])
def test_weights_are_checked_when_a_layer_is_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    served = Served(conv_kernel_size=4)
    right = {"conv_weight": served.weight(), "conv_bias": torch.zeros(served.config.conv_dim), "skip": torch.zeros(2)}

    def made(group: StateGroup, wrong: Any) -> LinearAttention:
        return LinearAttention(group, **{**right, name: wrong})

    for wrong, text in (
        ([[1.0]], f"{name} is a list"),
        (right[name].double(), f"{name} is torch.float64 on cpu: accepted are"),
        (right[name].int(), f"{name} is torch.int32 on cpu: accepted are"),
        (right[name][:1], f"{name} has shape"),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            made(served.group, wrong)
        assert caught.value.fields == (name,) or list(caught.value.fields) == [name]
    holes = torch.full_like(right[name], torch.nan)
    made(served.group, holes)
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    watching = Served(conv_kernel_size=4)
    with pytest.raises(ConfigError, match=f"{name} holds NaN or infinity: accepted are finite numbers"):
        made(watching.group, holes)
    layer = made(watching.group, right[name])
    watching.add("a")
    right[name].fill_(torch.inf)  # as a loader writes later
    with pytest.raises(BatchError, match=f"{name} holds NaN or infinity"):
        layer(*watching.inputs(1), watching.cache, watching.build(a=1))


def other_group(served: Served, given: dict[str, Any]) -> None:
    other = Served()
    other.add("a")
    given["metadata"] = other.build(a=4)


def of_common(served: Served, given: dict[str, Any]) -> None:
    given["metadata"] = prepare_batch([4], [4])


def with_state(change: Callable[[Any], Any]) -> Callable[[Served, dict[str, Any]], None]:
    def put(served: Served, given: dict[str, Any]) -> None:
        given["cache"] = replace(served.cache, state=change(served.cache.state))

    return put


def with_conv(change: Callable[[Any], Any]) -> Callable[[Served, dict[str, Any]], None]:
    def put(served: Served, given: dict[str, Any]) -> None:
        given["cache"] = replace(served.cache, conv=change(served.cache.conv))

    return put


def with_argument(name: str, value: Any) -> Callable[[Served, dict[str, Any]], None]:
    def put(served: Served, given: dict[str, Any]) -> None:
        given[name] = value

    return put


ALWAYS: dict[str, tuple[Callable[[Served, dict[str, Any]], None], str]] = {
    "metadata of another group": (other_group, "metadata was built by another group than the layer's"),
    "the batch for the metadata": (of_common, "metadata is the step's CommonAttentionMetadata"),
    "another dtype": (
        with_state(torch.Tensor.half),
        r"cache.state is torch.float16 \(6, 2, 8, 8\) on cpu: accepted is",
    ),
    "too few slots": (with_state(lambda state: state[:0]), r"cache.state is torch.float32 \(0, 2, 8, 8\)"),
    "a transposed view": (with_state(lambda state: state.mT), "cache.state has strides"),
    "elsewhere": (with_state(lambda state: state.to("meta")), r"cache.state is torch.float32 \(6, 2, 8, 8\) on meta"),
    "no window": (with_conv(lambda conv: None), r"cache.conv is None: accepted is torch.float32 \(6, 3, 48\) on cpu"),
    "no cache": (with_argument("cache", torch.zeros(6, 2, 8, 8)), "cache is a Tensor: accepted is a StateCache"),
    "no gates": (with_argument("gates", torch.zeros(4, 2)), "gates is a Tensor: accepted is Gates"),
    "an output elsewhere": (with_argument("output", torch.zeros(4, 2, 8, device="meta")), "output is torch.float32"),
}
"""What each mode refuses, and how it is named."""


def numbers(name: str, value: float, token: int = 2) -> Callable[[Served, dict[str, Any]], None]:
    def put(served: Served, given: dict[str, Any]) -> None:
        gates = given["gates"]
        tensor = given["channels"] if name == "channels" else getattr(gates, name)
        tensor[token, 1] = value

    return put


def raw_number(name: str) -> Callable[[Served, dict[str, Any]], None]:
    def put(served: Served, given: dict[str, Any]) -> None:
        tensors = {"A_log": torch.zeros(2), "a": torch.zeros(4, 2), "dt_bias": torch.zeros(2), "b": torch.zeros(4, 2)}
        tensors[name].view(-1)[-1] = torch.inf
        given["gates"] = Gates(raw=RawGates(**tensors))

    return put


def inside(served: Served, given: dict[str, Any]) -> None:
    given["output"] = given["channels"][:, :16].view(4, 2, 8)


def in_the_states(served: Served, given: dict[str, Any]) -> None:
    given["output"] = served.cache.state[4:].flatten()[:64].view(4, 2, 8)


CONTENTS: dict[str, tuple[Callable[[Served, dict[str, Any]], None], str]] = {
    "NaN channels": (numbers("channels", torch.nan), r"channels\[2\] holds NaN or infinity \(token 2 of request 0\)"),
    "NaN decay": (
        numbers("log_decay", torch.nan),
        r"log_decay\[2\] = nan \(of request 0\): accepted are numbers up to",
    ),
    "positive decay": (numbers("log_decay", 0.5, 0), r"log_decay\[0\] = 0.5 \(of request 0\)"),
    "raw a": (raw_number("a"), r"a\[3\] holds NaN or infinity"),
    "raw A_log": (raw_number("A_log"), "A_log holds NaN or infinity"),
    "an output inside the channels": (inside, "output and channels overlap"),
    "an output inside the states": (in_the_states, "output and cache.state overlap"),
}
"""What checked mode refuses beside it."""


@pytest.mark.parametrize("case", [*ALWAYS, *CONTENTS])
def test_wrong_calls_write_nothing(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1" if case in CONTENTS else "0")
    change, text = {**ALWAYS, **CONTENTS}[case]
    served = Served(conv_kernel_size=4)
    served.add("a")
    served.cache.state.fill_(7.0)
    channels, gates = served.inputs(4)
    given = {"channels": channels, "gates": gates, "cache": served.cache, "metadata": served.build(a=4), "output": None}
    change(served, given)
    before = served.cache.state.clone()
    with pytest.raises(BatchError, match=text):
        served.layer(*given.values())
    assert torch.equal(served.cache.state, before)


@pytest.mark.usefixtures("checked")
def test_what_is_right_passes() -> None:
    served = Served(conv_kernel_size=4)
    served.add("a")
    channels, gates = served.inputs(6)
    channels[4:] = torch.nan  # padding
    gates.log_decay[1] = -torch.inf
    wide = torch.zeros(6, 2, 32)
    output = served.layer(channels, gates, served.cache, served.build(a=4), wide[..., 8:16])  # beside its neighbours
    assert output[:4].isfinite().all()
    assert not wide[..., :8].any()
    assert not wide[..., 16:].any()
    served.run(a=1)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("graphs", [False, True])
def test_serving_passes(seed: int, graphs: bool) -> None:
    """Chunks, decodes, drafts, forks, slots that are reused, steps in place, replays in between: nothing is refused."""
    config = CONFIG.model_copy(update={"conv_kernel_size": 4, "num_speculative_tokens": 2})

    def capturable(*given: Any) -> Any:
        return replace(TORCH_STATE.plan(*given), cuda_graph="UNIFORM_BATCH")

    spec = replace(TORCH_STATE, plan=capturable) if graphs else TORCH_STATE
    rng, bound = random.Random(seed), state_bound(config)
    serving = StateServing(selection_of(spec, config, "cpu"), 13, seed, cuda_graphs=graphs)
    assert serving.group.checked
    live = list(range(3))
    for name in live:
        serving.add(name)
    for number in range(12):
        if number == 5:
            serving.fork(live[0], "fork")
            live.append("fork")  # type: ignore[arg-type]
        if number == 9:
            serving.free(live.pop(1))
        chosen = rng.sample(live, rng.randint(1, len(live)))
        short = number % 2 == 1
        lens = dict.fromkeys(chosen, rng.choice((1, 3))) if short else {name: rng.choice((1, 3, 9)) for name in chosen}
        assert serving.step(lens).norm <= bound.norm
        for name in chosen:
            if (kept := serving.drafts_of(name)) > 1:
                serving.accept(name, rng.randint(1, kept))
    assert bool(serving.replays) is graphs


@pytest.mark.usefixtures("checked")
def test_lengths_are_what_the_states_have_seen() -> None:
    served = Served(num_speculative_tokens=2)
    served.add("a")
    with pytest.raises(BatchError, match="had 99 tokens before this step by seq_lens, and its state has seen 0"):
        served.group.build(prepare_batch([1], [100]), served.pool.step({"a": 1}))
    served.run(a=4)
    with pytest.raises(BatchError, match="had 0 tokens before this step by seq_lens, and its state has seen 4"):
        served.group.build(prepare_batch([3], [3]), served.pool.step({"a": 3}))
    served.run(a=3)
    served.pool.accept("a", 1)
    with pytest.raises(BatchError, match="had 7 tokens before this step by seq_lens, and its state has seen 5"):
        served.group.build(prepare_batch([1], [8]), served.pool.step({"a": 1}))
    served.pool.free("a")
    served.add("b")
    common = prepare_batch([2], [2])
    common.seq_lens = common.seq_lens + 1
    with pytest.raises(BatchError, match=r"seq_lens\[0\] is 3 on the device and 2 in seq_lens_cpu"):
        served.group.build(common, served.pool.step({"b": 2}))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("conv", [0, 4])
def test_a_cache_holds_what_its_requests_read(conv: int) -> None:
    served = Served(conv_kernel_size=conv)
    served.add("a", "b")
    served.run(a=4)
    turned = replace(served.cache, state=served.cache.state.mT.contiguous())
    given, metadata = served.inputs(1), served.build(a=1)
    with pytest.raises(BatchError, match="reads slot 0, whose state in this cache is none that a layer wrote"):
        served.layer(*given, turned, metadata)
    if conv:
        with pytest.raises(BatchError, match="none that a layer wrote"):
            served.layer(*given, replace(served.cache, conv=torch.zeros_like(served.cache.conv)), metadata)
    served.layer(*given, served.cache, metadata)
    served.build(a=1)  # a step that no layer runs
    skipped = served.build(a=1)
    with pytest.raises(BatchError, match="request 0 reads slot"):
        served.layer(*given, served.cache, skipped)
    pool = StatePool(6)  # of another cache
    pool.add("a")
    served.group.build(prepare_batch([4], [4]), pool.step({"a": 4}))
    foreign = served.group.build(prepare_batch([1], [5]), pool.step({"a": 1}))
    with pytest.raises(BatchError, match="whose state in this cache is another step's"):
        served.layer(*given, served.cache, foreign)


@pytest.mark.usefixtures("checked")
def test_a_step_in_place_runs_once() -> None:
    served = Served()
    names = ("a", "b", "c", "d", "e", "f")  # as many as slots
    served.add(*names)
    served.run(**dict.fromkeys(names, 3))
    metadata, given = served.build(**dict.fromkeys(names, 1)), served.inputs(6)
    served.layer(*given, served.cache, metadata)
    with pytest.raises(BatchError, match="request 0 reads slot 0, whose state in this cache is another step's"):
        served.layer(*given, served.cache, metadata)


@pytest.mark.usefixtures("checked")
def test_states_from_elsewhere_are_committed_by_hand() -> None:
    sender, receiver = Served(conv_kernel_size=4), Served(conv_kernel_size=4)
    receiver.layer = LinearAttention(receiver.group, sender.layer.conv_weight)
    sender.add("a")
    receiver.add("a")
    sender.run(a=9)
    slot, slots = sender.pool.slots_of("a")[0], receiver.pool.step({"a": 9})
    for there, here in ((sender.cache.state, receiver.cache.state), (sender.cache.conv, receiver.cache.conv)):
        here[slots.write[0][0]] = there[slot]  # type: ignore[index]
    receiver.pool.commit(slots)
    receiver.seen["a"] = 9
    given = sender.inputs(1)
    found = [side.layer(*given, side.cache, side.build(a=1)) for side in (sender, receiver)]
    assert torch.equal(*found)


def test_memory_of_ones_own_becomes_a_layers_states() -> None:
    served = Served()
    pages = torch.randn(6, 200)  # a state and something else in each page
    adopted = served.group.adopt(StateCache(pages[:, :128].view(6, 2, 8, 8), None))
    served.add("a", "b")
    metadata, given = served.build(a=4), served.inputs(4)
    expected = served.layer(*given, served.cache, metadata)
    beside = pages[:, 128:].clone()
    assert torch.equal(served.layer(*given, adopted, metadata), expected)
    assert torch.equal(pages[:, 128:], beside)
    with pytest.raises(ConfigError, match="num_slots = 5: the group's other layers have 6"):
        served.group.adopt(StateCache(torch.zeros(5, 2, 8, 8), None))
    empty = StateGroup(select(CONFIG, "cpu"))
    with pytest.raises(BatchError, match=r"cache.state is torch.float16"):
        empty.adopt(StateCache(torch.zeros(5, 2, 8, 8).half(), None))
    assert empty.num_slots is None

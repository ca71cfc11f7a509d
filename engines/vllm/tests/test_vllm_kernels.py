"""attn-select's kernels under vLLM's protocol, without vLLM: prefills and decodes equal attention in float64.

Triton's kernels run in its interpreter, as planned for a GPU that is not here.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_emulated
from interpreted import selected_for
from vllm_emulated import LLAMA, CommonAttentionMetadata, engine_config

torch = pytest.importorskip("torch")

from attn_select.runtime import loaded_backend  # noqa: E402
from attn_select.testing.ranks import ThreadCollectives, run_ranks  # noqa: E402

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
STEPS = ((5, 40, 1), (1, 1, 1), (1, 3, 20), (1, 20, 1))
"""Query lengths of three requests in four steps: prefills, decodes, and decodes before chunks.

vLLM puts new prompts last, however short, so a query of one token may stand behind a longer one.
"""
needs_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
PAIR = "TORCH_SDPA_TRITON_ATTN"
"""A pair for this test: prefills run as they would on a GPU, where those of ``names.PAIRS`` need one."""
KERNELS = ["TORCH_SDPA", *(pytest.param(name, marks=needs_interpreter) for name in ("TRITON_ATTN", PAIR))]


def layer_of(impl: Any) -> Any:
    """A layer of vLLM's: scales of 1."""
    one = torch.tensor(1.0)
    scales = {f"_{n}_scale": one for n in "qkv"} | {f"_{n}_scale_float": 1.0 for n in "qkv"}
    return SimpleNamespace(impl=impl, **scales)


def cache_of(backend: Any, protocol: str, num_blocks: int) -> Any:
    """A layer's cache, full of NaN: until 0.26 of the shape that vLLM asks for, later a view by an engine's layout."""
    if protocol == "0.26":
        return torch.full(backend.get_kv_cache_shape(num_blocks, BLOCK, KV_HEADS, SIZE), torch.nan)
    logical = {"L": 2, "B": num_blocks, "H": KV_HEADS, "N": BLOCK, "C": 2 * SIZE}
    memory = torch.full([logical[axis] for axis in protocol], torch.nan)
    layer = memory.select(protocol.index("L"), 1)
    axes = [axis for axis in protocol if axis != "L"]
    return layer.permute([axes.index(axis) for axis in "BHNC"])


def step_of(query_lens: Sequence[int], seq_lens: Sequence[int], table: Any) -> Any:
    """A step's batch, as vLLM describes it."""
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    slots = [
        int(table[r, p // BLOCK]) * BLOCK + p % BLOCK
        for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(s - q, s)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(lens),
        num_actual_tokens=len(slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        seq_lens_cpu_upper_bound=lens,
    )


def attention(
    query: Any, keys: Any, values: Any, window: int | None, scale: float, images: Sequence[tuple[int, int]] = ()
) -> Any:
    """Causal attention of a request's last tokens in float64, ``(T, heads, size)``; images see all of themselves."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("thd,shd->hts", query.double(), keys) * scale
    row, key = torch.arange(len(keys) - len(query), len(keys))[:, None], torch.arange(len(keys))
    hidden = (row < key) | (row - key >= (window or len(keys)))
    for first, last in images:
        hidden &= ~((first <= row) & (row <= last) & (first <= key) & (key <= last))
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def use(vllm: Any, gpu: str | None, monkeypatch: pytest.MonkeyPatch, text: dict[str, Any]) -> Any:
    """The emulated engine on a CPU or on a GPU that is not here."""
    config = engine_config(text)
    engine = vllm(config)
    if gpu is not None:
        from attn_select_vllm.kernels import binding

        engine.platform.device_name = "cuda"
        monkeypatch.setattr(binding, "select", functools.partial(selected_for, gpu, binding.select))
        monkeypatch.setattr(loaded_backend, "device_of", lambda selection, device: device)
    return config


def backend_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of vLLM that runs these kernels."""
    from attn_select_vllm import names
    from attn_select_vllm.kernels import attention as kernels

    monkeypatch.setitem(names.PAIRS, PAIR, ("TORCH_SDPA", "TRITON_ATTN"))
    made: dict[str, Any] = {"TORCH_SDPA": kernels.TorchSdpaBackend, "TRITON_ATTN": kernels.TritonAttnBackend}
    made[PAIR] = type("PairBackend", (kernels.TritonAttnBackend,), {"backend": PAIR})
    return made[name]


@needs_interpreter
@pytest.mark.parametrize("longest", [33, 90])
def test_steps_of_drafts_at_once(vllm: Any, monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """vLLM lengthens the requests of a verified batch by a slot per draft, but not the bounds of their lengths."""
    drafts = 2
    config = use(vllm, "a100", monkeypatch, LLAMA)
    from attn_select_vllm.kernels.batch import of_drafts

    config.use_v2_model_runner = False
    speculation = {"num_speculative_tokens": drafts, "max_num_new_slots_for_drafting": drafts}
    config.speculative_config = SimpleNamespace(parallel_drafting=True, draft_model_config=None, **speculation)
    backend = backend_of("TRITON_ATTN", monkeypatch)
    layer = layer_of(backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto"))
    config.compilation_config.static_forward_context = {"layers.0": layer}
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=BLOCK), ["layers.0"], config, torch.device("cpu"))

    torch.manual_seed(0)
    lens, each = [longest, longest - 1, 17], 1 + 2 * drafts
    step = step_of([each] * 3, lens, torch.randperm(18, dtype=torch.int32).view(3, 6))
    assert step.seq_lens_cpu_upper_bound is not None
    stale = replace(step, seq_lens_cpu_upper_bound=step.seq_lens_cpu_upper_bound - drafts)
    assert of_drafts(stale, config).seq_lens_cpu_upper_bound.tolist() == lens
    cache = cache_of(backend, "LBHNC", 18)
    rows = [torch.randn(count, 2 * KV_HEADS, SIZE) for count in lens]
    before = step_of([count - each for count in lens], [count - each for count in lens], step.block_table_tensor)
    layer.impl.do_kv_cache_update(layer, *_key_value(rows, slice(None, -each)), cache, before.slot_mapping)
    key, value = _key_value(rows, slice(-each, None))
    layer.impl.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
    query = torch.randn(len(key), HEADS, SIZE)
    output = torch.full_like(query, torch.nan)
    layer.impl.forward(layer, query, key, value, cache, builder.build_for_drafting(stale, 0), output)
    for asked, given, row in zip(query.split(each), output.split(each), rows, strict=True):
        wanted = attention(asked, *row.split(KV_HEADS, dim=1), None, SIZE**-0.5).float()
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


def _key_value(rows: list[Any], part: slice) -> tuple[Any, Any]:
    return torch.cat([row[part] for row in rows]).split(KV_HEADS, dim=1)


@pytest.mark.parametrize("protocol", ["0.26", "LBHNC"])
def test_blocks_of_any_size_are_read_whole(vllm: Any, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM lays the cache out in them, whatever smaller blocks a plan prefers."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCK", 48)
    config = use(vllm, None, monkeypatch, LLAMA)
    backend = backend_of("TORCH_SDPA", monkeypatch)
    layer = layer_of(backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS))
    config.compilation_config.static_forward_context = {"layers.0": layer}
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=48), ["layers.0"], config, torch.device("cpu"))
    torch.manual_seed(0)
    table, cache = torch.randperm(8, dtype=torch.int32).view(2, 4), cache_of(backend, protocol, 8)
    query, rows = torch.randn(130, HEADS, SIZE), [torch.randn(count, 2 * KV_HEADS, SIZE) for count in (100, 30)]
    key, value = torch.cat(rows).split(KV_HEADS, dim=1)
    step, output = step_of((100, 30), (100, 30), table), torch.full_like(query, torch.nan)
    layer.impl.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
    layer.impl.forward(layer, query, key, value, cache, builder.build(0, step), output)
    for asked, given, row in zip(query.split((100, 30)), output.split((100, 30)), rows, strict=True):
        wanted = attention(asked, *row.split(KV_HEADS, dim=1), None, SIZE**-0.5).float()
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("protocol", ["0.26", "LBHNC"])
def test_a_layer_has_one_view_of_its_cache(vllm: Any, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend keeps what it made of a cache as long as it is given the same tensor."""
    use(vllm, None, monkeypatch, LLAMA)
    backend, seen = backend_of("TORCH_SDPA", monkeypatch), []
    impl = backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
    impl.attn_select.impls["decode"] = SimpleNamespace(do_kv_cache_update=lambda *given: seen.append(given[2]))
    for blocks in (8, 9):
        cache = cache_of(backend, protocol, blocks)
        for _ in range(2):
            impl.do_kv_cache_update(None, None, None, cache, None)
        assert seen[-1] is seen[-2]
        assert (seen[-1].data_ptr(), seen[-1].numel()) == (cache.data_ptr(), cache.numel())


@pytest.mark.parametrize("name", KERNELS)
def test_scales_per_head(vllm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = use(vllm, None if name == "TORCH_SDPA" else "h100", monkeypatch, LLAMA)
    config.quant_config = SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})
    backend = backend_of(name, monkeypatch)
    layer = layer_of(backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "fp8"))
    k_scale, v_scale = torch.tensor([0.02, 0.005]), torch.tensor([0.004, 0.03])
    layer._k_scale, layer._k_scale_float = k_scale, float(k_scale.max())
    layer._v_scale, layer._v_scale_float = v_scale, float(v_scale.max())
    layer._q_scale = torch.ones(KV_HEADS)
    config.compilation_config.static_forward_context = {"layers.0": layer}
    spec = SimpleNamespace(block_size=BLOCK)
    builder = backend.get_builder_cls()(spec, ["layers.0"], config, torch.device("cpu"))
    torch.manual_seed(0)
    table = torch.randperm(18, dtype=torch.int32).view(3, 6)
    cache = torch.full(backend.get_kv_cache_shape(18, BLOCK, KV_HEADS, SIZE), 127, dtype=torch.uint8)  # NaN in e4m3
    seen: list[Any] = [torch.empty(0, 2, KV_HEADS, SIZE)] * 3
    for query_lens in STEPS:
        tokens = sum(query_lens)
        rows = torch.randn(tokens, 2, KV_HEADS, SIZE)
        scales = torch.stack([k_scale, v_scale])[:, :, None]
        stored = (rows / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
        seen = [torch.cat(each) for each in zip(seen, stored.split(query_lens), strict=True)]
        step = step_of(query_lens, [len(own) for own in seen], table)
        key, value = rows.unbind(1)
        query, output = torch.randn(tokens, HEADS, SIZE), torch.full((tokens, HEADS, SIZE), torch.nan)
        layer.impl.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
        layer.impl.forward(layer, query, key, value, cache, builder.build(0, step), output)
        for asked, given, own in zip(query.split(query_lens), output.split(query_lens), seen, strict=True):
            wanted = attention(asked, *own.unbind(1), None, SIZE**-0.5).float()
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


@needs_interpreter
def test_a_pair_splits_a_step_and_captures_decodes(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decodes' plan says what can be captured: no captured step has prefills, which this pair cannot capture."""
    config = use(vllm, "a100", monkeypatch, LLAMA)
    backend = backend_of(PAIR, monkeypatch)
    layer = layer_of(backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS))
    config.compilation_config.static_forward_context = {"layers.0": layer}
    builder_cls, spec = backend.get_builder_cls(), SimpleNamespace(block_size=BLOCK)
    builder = builder_cls(spec, ["layers.0"], config, torch.device("cpu"))
    assert builder.reorder_batch_threshold == 1
    assert builder_cls.get_cudagraph_support(config, spec).name == "UNIFORM_BATCH"
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)

    def parts(metadata: Any) -> list[tuple[str, slice]]:
        (built,) = metadata.built
        return [(part.phase, part.rows) for part in built.parts]

    mixed = builder.build(0, step_of((1, 3, 20), (9, 50, 20), table))
    assert parts(mixed) == [("decode", slice(0, 1)), ("prefill", slice(1, 24))]
    assert parts(builder.build(0, step_of((5, 3, 20), (9, 50, 20), table))) == [("prefill", slice(0, 28))]
    decodes = step_of((1, 1, 1), (9, 50, 20), table)
    assert (
        parts(builder.build(0, decodes))
        == parts(builder.build_for_cudagraph_capture(decodes))
        == [("decode", slice(0, 3))]
    )
    short_behind = builder.build(0, step_of((1, 5, 1), (9, 50, 1), table))
    assert parts(short_behind) == [("decode", slice(0, 1)), ("prefill", slice(1, 7))]


@needs_interpreter
def test_a_step_in_parts_is_not_cut_more_than_it_must(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every view costs a layer a microsecond: kernels take the whole tensors where their rows come first."""
    config = use(vllm, "a100", monkeypatch, LLAMA)
    backend, seen = backend_of(PAIR, monkeypatch), []
    layer = layer_of(backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS))
    config.compilation_config.static_forward_context = {"layers.0": layer}
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=BLOCK), ["layers.0"], config, torch.device("cpu"))
    step = step_of((1, 3, 20), (9, 50, 20), torch.randperm(12, dtype=torch.int32).view(3, 4))
    query, key = torch.randn(24, HEADS, SIZE), torch.randn(24, KV_HEADS, SIZE)
    output = torch.empty_like(query)
    noting = SimpleNamespace(forward=lambda q, k, v, cache, metadata, outputs: seen.append((q, k, outputs.output)))
    layer.impl.attn_select.impls = {"decode": noting, "prefill": noting}
    layer.impl.forward(layer, query, key, key, cache_of(backend, "LBHNC", 12), builder.build(0, step), output)
    (decode, *written), (prefill, *read) = seen
    assert decode is query
    assert written[0] is read[0] is key
    assert written[1] is output
    assert torch.equal(prefill, query[1:])
    assert read[1].data_ptr() == output[1:].data_ptr()


def test_pairs_read_one_cache_on_the_gpus_that_they_are_for(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of ``PAIRS`` can be planned for an H200, in the layout that the adapter gives them."""
    use(vllm, "h200", monkeypatch, LLAMA)
    from attn_select_vllm.kernels.attention import FlashAttnTritonAttnBackend, FlashInferTritonAttnBackend
    from attn_select_vllm.kernels.binding import selected
    from attn_select_vllm.kernels.cache_views import LAYOUT

    with torch_default(torch.bfloat16):
        for backend, dtype in ((FlashAttnTritonAttnBackend, "auto"), (FlashInferTritonAttnBackend, "fp8")):
            impl = backend.get_impl_cls()(HEADS, 128, 128**-0.5, KV_HEADS, None, None, dtype)
            assert backend.get_name() == "ATTN_SELECT_" + "_".join(impl.attn_select.backends.values())
            assert selected(impl.attn_select.backends, impl.attn_select.config, LAYOUT).kv_layout == LAYOUT


@needs_interpreter
def test_captured_decodes_of_cross_attention_read_the_encoders_lengths(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured runs again with what it was captured with, as a graph does: the addresses bring new lengths."""
    config = use(vllm, "a100", monkeypatch, LLAMA)
    config.compilation_config.cudagraph_mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    backend = backend_of("TRITON_ATTN", monkeypatch)

    class CrossAttentionBuilder(backend.get_builder_cls()):  # type: ignore[misc]
        """As vLLM wraps a backend's builder (model_executor/layers/attention/cross_attention.py)."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            host = encoder_lens.clone()
            crossed = replace(common_attn_metadata, causal=False, seq_lens=encoder_lens, seq_lens_cpu_upper_bound=host)
            crossed.max_seq_len = int(host.max())
            return super().build(common_prefix_len, crossed, fast_build)

    impl = backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_type="encoder_decoder")
    layer = layer_of(impl)
    config.compilation_config.static_forward_context = {"layers.0": layer}
    assert CrossAttentionBuilder.get_cudagraph_support(config, None).name == "UNIFORM_BATCH"
    builder = CrossAttentionBuilder(SimpleNamespace(block_size=BLOCK), ["layers.0"], config, torch.device("cpu"))

    torch.manual_seed(0)
    table = torch.randperm(18, dtype=torch.int32).view(3, 6)
    cache = torch.randn(backend.get_kv_cache_shape(18, BLOCK, KV_HEADS, SIZE))
    encoder_lens = torch.tensor([96, 96, 96], dtype=torch.int32)
    captured = builder.build_for_cudagraph_capture(step_of((1, 1, 1), (1, 1, 1), table))
    for lens in ([70, 3, 96], [16, 17, 40]):
        encoder_lens.copy_(torch.tensor(lens))
        table.copy_(torch.randperm(18, dtype=torch.int32).view(3, 6))
        builder.build(0, step_of((1, 1, 1), (9, 4, 2), table))
        query, output = torch.randn(3, HEADS, SIZE), torch.full((3, HEADS, SIZE), torch.nan)
        impl.forward(layer, query, None, None, cache, captured, output)
        for row, (asked, given) in enumerate(zip(query, output, strict=True)):
            keys, values = cache[table[row].long()].transpose(0, 1).flatten(1, 2)[:, : lens[row]]
            wanted = attention(asked[None], keys, values, None, SIZE**-0.5)
            torch.testing.assert_close(given[None], wanted.float(), rtol=1e-4, atol=1e-5)


def test_cross_attention_has_one_backend(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(vllm, "a100", monkeypatch, LLAMA)
    impl = backend_of(PAIR, monkeypatch).get_impl_cls()(HEADS, SIZE, 1.0, KV_HEADS, attn_type="encoder_decoder")
    assert impl.attn_select.backends == {"prefill": "TRITON_ATTN", "decode": "TRITON_ATTN"}


@contextmanager
def torch_default(dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_padding_of_a_graph_is_requests_without_keys(vllm: Any) -> None:
    """So that builders find the size that was captured; vLLM pads with requests of no tokens."""
    use(vllm, None, pytest.MonkeyPatch(), LLAMA)
    from attn_select_vllm.kernels.batch import common_of

    table = torch.zeros(4, 4, dtype=torch.int32)
    step = step_of((1, 1, 0, 0), (17, 50, 0, 0), table)
    step.num_actual_tokens = 4
    common = common_of(step, BLOCK)
    assert common.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 4]
    assert common.query_start_loc is step.query_start_loc
    assert common.seq_lens_cpu.tolist() == [17, 50, 0, 0]
    whole = step_of((1, 1, 1, 1), (17, 50, 3, 4), table)
    assert common_of(whole, BLOCK).query_start_loc_cpu is whole.query_start_loc_cpu
    mixed = step_of((1, 5), (17, 50), table[:2])
    assert common_of(mixed, BLOCK).query_start_loc_cpu is mixed.query_start_loc_cpu


def test_decodes_end_at_the_first_longer_query(vllm: Any) -> None:
    """vLLM may say a bound above the longest query; without a longer one, query lengths say what decodes are."""
    use(vllm, None, pytest.MonkeyPatch(), LLAMA)
    from attn_select_vllm.kernels.batch import common_of

    table = torch.zeros(3, 4, dtype=torch.int32)
    step = step_of((1, 5, 1), (17, 50, 1), table)
    assert [common_of(step, BLOCK, longest).num_decodes for longest in (None, 1, 4, 5)] == [None, 1, 1, None]
    step.max_query_len = 9
    assert common_of(step, BLOCK, 5).num_decodes is None


@pytest.mark.parametrize(
    ("levels", "support"),
    [
        (["ALWAYS"], "UNIFORM_BATCH"),
        (["ALWAYS", "UNIFORM_SINGLE_TOKEN_DECODE"], "UNIFORM_SINGLE_TOKEN_DECODE"),
        (["NEVER", "ALWAYS"], "NEVER"),
        ([], "NEVER"),
    ],
)
def test_mixed_batches_are_not_captured(vllm: Any, levels: list[str], support: str) -> None:
    config = use(vllm, None, pytest.MonkeyPatch(), LLAMA)
    from attn_select_vllm.kernels.attention import TorchSdpaBackend

    impls = [SimpleNamespace(attn_select=SimpleNamespace(level=level)) for level in levels]
    layers = {f"layers.{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    config.compilation_config.static_forward_context = layers | {"moe": SimpleNamespace()}
    found = TorchSdpaBackend.get_builder_cls().get_cudagraph_support(config, None)
    assert found.name == support


def test_a_run_that_measures_memory_writes_zeros(vllm: Any) -> None:
    use(vllm, None, pytest.MonkeyPatch(), LLAMA)
    from attn_select_vllm.kernels.attention import TorchSdpaBackend

    impl = TorchSdpaBackend.get_impl_cls()(HEADS, SIZE, 1.0, KV_HEADS)
    layer, query = layer_of(impl), torch.ones(2, HEADS, SIZE)
    impl.do_kv_cache_update(layer, query, query, torch.empty(0), torch.zeros(2, dtype=torch.int64))
    assert not impl.forward(layer, query, query, query, torch.empty(0), None, torch.ones(2, HEADS, SIZE)).any()


def test_layers_that_the_kernels_cannot_run_are_refused(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(vllm, "h100", monkeypatch, LLAMA)
    from attn_select import NoBackendError
    from attn_select_vllm.kernels.attention import FlashInferBackend

    with pytest.raises(NoBackendError, match="no backend for prefill and decode"):
        FlashInferBackend.get_impl_cls()(HEADS, 80, 1.0, KV_HEADS)


MLA: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@needs_interpreter
@pytest.mark.parametrize("lens", [(1, 1), (3, 1)], ids=["one token each", "drafts"])
def test_mla_decodes(vllm: Any, lens: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that verify drafts are decodes, whose lengths differ where a request has fewer."""
    config = use(vllm, "a100", monkeypatch, MLA)
    config.model_config.dtype = torch.float32
    if lens != (1, 1):
        config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=2)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float16)
    from attn_select_vllm.kernels.mla import TritonMlaBackend

    backend = TritonMlaBackend
    scale, dims = 192**-0.5, (None, 512, 128, 64, 192, 128)
    impl = backend.get_impl_cls()(4, 576, scale, 1, None, None, "auto", None, "decoder", None, *dims, None)
    layer = layer_of(impl)
    config.compilation_config.static_forward_context = {"layers.0": layer}
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=BLOCK), ["layers.0"], config, torch.device("cpu"))
    torch.manual_seed(0)
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    cache = torch.randn(12, BLOCK, 576).half()
    metadata = builder.build(0, step_of((*lens, 9), (17, 50, 9), table))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    query = torch.randn(sum(lens), 4, 576).half()
    output, lse = impl.forward_mqa((query[..., :512], query[..., 512:]), cache, metadata, layer)
    assert lse is None
    outputs = zip(query.split(lens), output.split(lens), strict=True)
    for row, length, (asked, found) in zip(table, (17, 50), outputs, strict=False):
        keys = cache[row.long()].view(-1, 1, 576)[:length]
        wanted = attention(asked, keys, keys[..., :512], None, scale)
        torch.testing.assert_close(found.double(), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("ranks", "drafts"), [(1, False), (1, True), (2, False), (2, True)])
def test_steps_that_verify_drafts_are_captured_but_across_ranks(
    vllm: Any, ranks: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There vLLM reads drafts of MLA as prefills, and would end in an assertion while it captures them."""
    config = use(vllm, "a100", monkeypatch, MLA)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float16)
    if drafts:
        config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=2)
    from attn_select_vllm.kernels.mla import TritonMlaBackend

    dims = (None, 512, 128, 64, 192, 128)
    impl = TritonMlaBackend.get_impl_cls()(4, 576, 1.0, 1, None, None, "auto", None, "decoder", None, *dims, None)
    config.compilation_config.static_forward_context = {"layers.0": layer_of(impl)}
    config.parallel_config.decode_context_parallel_size = ranks
    found = TritonMlaBackend.get_builder_cls().get_cudagraph_support(config, None).name
    assert found == ("UNIFORM_SINGLE_TOKEN_DECODE" if drafts and ranks == 2 else "UNIFORM_BATCH")


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("name", KERNELS[:2])
def test_ranks_share_contexts(vllm: Any, monkeypatch: pytest.MonkeyPatch, name: str, interleave: int) -> None:
    """Both have the keys of every new token, keep some of them, and their own heads' queries."""
    config = use(vllm, None if name == "TORCH_SDPA" else "a100", monkeypatch, LLAMA)
    config.parallel_config.decode_context_parallel_size = 2
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    backend = backend_of(name, monkeypatch)
    torch.manual_seed(0)
    table = torch.randperm(18, dtype=torch.int32).view(3, 6)
    steps = [
        (lens, torch.randn(sum(lens), 2, HEADS, SIZE), torch.randn(sum(lens), 2 * KV_HEADS, SIZE)) for lens in STEPS
    ]
    context: dict[str, Any] = {}
    config.compilation_config.static_forward_context = context

    def slot_of(rank: int, request: int, position: int) -> int:
        turn, within = divmod(position % (2 * BLOCK), 2 * interleave)
        own = within // interleave == rank
        block = int(table[request, position // (2 * BLOCK)])
        return block * BLOCK + turn * interleave + within % interleave if own else -1

    def run(collectives: ThreadCollectives) -> list[Any]:
        vllm_emulated.COLLECTIVES.group, rank = collectives, collectives.rank
        impl = backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
        layer = context[f"rank {rank}"] = layer_of(impl)
        spec, cache = SimpleNamespace(block_size=BLOCK), cache_of(backend, "BLHNC", 18)
        builder = backend.get_builder_cls()(spec, [f"rank {rank}"], config, torch.device("cpu"))
        outputs, seen = [], [0, 0, 0]
        for lens, query, key_value in steps:
            seen = [before + new for before, new in zip(seen, lens, strict=True)]
            step = step_of(lens, seen, table.repeat_interleave(2, dim=1))
            tokens = [(r, p) for r, (q, s) in enumerate(zip(lens, seen, strict=True)) for p in range(s - q, s)]
            step.block_table_tensor = table
            step.slot_mapping = torch.tensor([slot_of(rank, *token) for token in tokens])
            metadata, output = builder.build(0, step), torch.full((sum(lens) + 2, HEADS, SIZE), 7.0)
            padded = [torch.cat((rows, torch.full_like(rows[:2], torch.nan))) for rows in (query[:, rank], key_value)]
            key, value = padded[1].split(KV_HEADS, dim=1)
            impl.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
            impl.forward(layer, padded[0], key, value, cache, metadata, output)
            assert bool((output[-2:] == 7).all())
            outputs.append(output[:-2])
        return outputs

    for rank, outputs in enumerate(run_ranks(2, run)):
        seen = [torch.empty(0, 2 * KV_HEADS, SIZE)] * 3
        for (lens, query, key_value), output in zip(steps, outputs, strict=True):
            seen = [torch.cat(each) for each in zip(seen, key_value.split(list(lens)), strict=True)]
            for asked, given, kept in zip(query[:, rank].split(lens), output.split(lens), seen, strict=True):
                wanted = attention(asked, *kept.split(KV_HEADS, dim=1), None, SIZE**-0.5)
                torch.testing.assert_close(given, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleave", [1, 16])
def test_ranks_share_the_contexts_of_mla(vllm: Any, interleave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes the queries of both on the keys that it keeps: of a short request one keeps none."""
    config = use(vllm, "a100", monkeypatch, MLA)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float16)
    from attn_select_vllm.kernels.mla import TritonMlaBackend

    torch.manual_seed(0)
    lens, scale, dims = (9, 50, 33), 192**-0.5, (None, 512, 128, 64, 192, 128)
    keys = [torch.randn(length, 576).half() for length in lens]
    query = torch.randn(3, 8, 576).half()
    shares = []
    for rank in range(2):
        monkeypatch.setattr(vllm_emulated, "RANKS", SimpleNamespace(size=2, rank=rank, interleave=interleave))
        impl = TritonMlaBackend.get_impl_cls()(4, 576, scale, 1, None, None, "auto", None, "decoder", None, *dims, None)
        assert impl.attn_select.config.num_heads == 8  # kernels are planned for the queries of both
        layer = layer_of(impl)
        config.compilation_config.static_forward_context = {"layers.0": layer}
        spec = SimpleNamespace(block_size=BLOCK)
        builder = TritonMlaBackend.get_builder_cls()(spec, ["layers.0"], config, torch.device("cpu"))
        cache, table = torch.full((12, BLOCK, 576), torch.nan).half(), torch.randperm(12, dtype=torch.int32).view(3, 4)
        own = [each[torch.arange(len(each)) // interleave % 2 == rank] for each in keys]
        for row, kept in zip(table, own, strict=True):
            for position, latent in enumerate(kept):
                cache[row[position // BLOCK], position % BLOCK] = latent
        step = step_of((1, 1, 1), lens, table)
        step.dcp_local_seq_lens = torch.tensor([len(each) for each in own], dtype=torch.int32)
        shares.append(impl.forward_mqa(query, cache, builder.build(0, step), layer))
    lse = torch.stack([each for _, each in shares])
    parts = torch.stack([output.double().nan_to_num() for output, _ in shares])  # vLLM drops what has no weight
    found = (lse.softmax(0)[..., None] * parts).sum(0)
    for request, each in enumerate(keys):
        wanted = attention(query[request : request + 1], each[:, None], each[:, None, :512], None, scale)
        torch.testing.assert_close(found[request : request + 1], wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("sizes", "dtype", "fused"),
    [((512, 64), "bfloat16", True), ((512, 64), "float32", False), ((256, 64), "bfloat16", False)],
)
def test_the_parts_of_an_mla_query_are_joined(
    vllm: Any, sizes: tuple[int, int], dtype: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's kernel on GPUs, in the sizes and dtypes that it takes; the latent comes head by head."""
    use(vllm, "h100", monkeypatch, MLA)
    from attn_select_vllm.kernels import mla

    called = []
    plain = mla.ops.concat_mla_q
    monkeypatch.setattr(mla.ops, "concat_mla_q", lambda *parts: called.append(plain(*parts)))

    class OnGpu(torch.Tensor):
        is_cuda = True

    latent = torch.randn(4, 3, sizes[0], dtype=getattr(torch, dtype)).transpose(0, 1)
    rope = torch.randn(3, 4, sizes[1], dtype=latent.dtype)
    joined = mla.joined(latent.as_subclass(OnGpu), rope)
    assert joined.equal(torch.cat((latent, rope), dim=-1))
    assert len(called) == fused
    assert mla.joined(latent, rope).equal(joined)
    assert len(called) == fused, "not on CPUs"

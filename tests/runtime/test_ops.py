"""The shared operations against the oracle, bit for bit where they are exact, and who is asked for them."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import Scales, ops, torch_ops
from attn_select.runtime.kv_cache import allocate_kv_cache
from attn_select.testing import gather_reference, merge_reference, pack_fp8_ds_mla, same_bits, write_reference

FLASH, NHD, HND, MLA, DS, CLASSIC = layouts.LAYOUTS
STORED = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 6
SLOTS = {
    "all": [13, 0, 2, 7, 23],
    "first": [-1, 0, 2, 7, 23],
    "last": [13, 0, 2, 7, -1],
    "two in a row": [13, -1, -1, 7, 23],
    "only one": [-1, -1, 5, -1, -1],
    "only slot 0": [-1, 0, -1, -1, -1],
    "none": [-1, -1, -1, -1, -1],
    "no tokens": [],
}


@pytest.fixture(params=["chosen by mask", "without synchronisation"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the scatter of a CPU, and on the CPU with that of a GPU."""
    if request.param == "without synchronisation":
        monkeypatch.setattr(torch_ops, "_kept", torch_ops._repeated)


def headed(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, **fields})


def latent(**fields: Any) -> AttentionConfig:
    dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8}
    return AttentionConfig(**{"num_heads": 4, **dims, **fields})


def poisoned(layout: str, config: AttentionConfig) -> Tensor:
    cache = allocate_kv_cache(layout, config, BLOCKS, BLOCK, CPU)
    cache.view(torch.uint8).fill_(0xFF)
    return cache


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Normal numbers with the extremes among them: what saturates, what rounds to nothing, both zeros."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for shape in shapes:
        numbers = torch.randn(shape, generator=generator)
        flat = numbers.view(-1)
        for place, extreme in enumerate((1e6, -1e6, 460.0, -70000.0, 1e-9, -1e-9, -0.0, 0.0)):
            flat[place * 5 : place * 5 + 1] = extreme
        made.append(numbers.to(dtype))
    return made


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("kv_cache_dtype", STORED)
@pytest.mark.parametrize("layout", [FLASH, NHD, HND, CLASSIC])
def test_reshape_and_cache(layout: str, kv_cache_dtype: str, slots: list[int]) -> None:
    config = headed(kv_cache_dtype=kv_cache_dtype, dtype="float16" if kv_cache_dtype == "float16" else "bfloat16")
    key, value = drawn((len(slots), 2, 32), (len(slots), 2, 32))
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    given = {"k_scale": 0.37, "v_scale": 1.9} if kv_cache_dtype.startswith("fp8") else {}
    expected, found = poisoned(layout, config), poisoned(layout, config)
    write_reference(
        expected, key, value, slot_mapping, layout, config, **{n: torch.tensor(s) for n, s in given.items()}
    )
    scales = Scales.make(CPU, k=given.get("k_scale", 1.0), v=given.get("v_scale", 1.0))
    ops.reshape_and_cache(key, value, found, slot_mapping, layout, config, scales)
    assert same_bits(found, expected)
    assert same_bits(found, poisoned(layout, config)) == all(slot < 0 for slot in slots)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", [FLASH, NHD, HND, CLASSIC])
def test_reshape_and_cache_with_a_narrower_value_and_scales_per_head(layout: str, dtype: str) -> None:
    config = headed(v_head_size=16, kv_cache_dtype="fp8_e4m3", per_head_quant_scales=True, dtype=dtype)
    key, value = drawn((3, 2, 32), (3, 2, 16), dtype=getattr(torch, dtype))
    slot_mapping = torch.tensor([9, -1, 4])
    scales = Scales.make(CPU, k=torch.tensor([0.5, 3.0]), v=torch.tensor([0.02, 0.7]), num_kv_heads=2)
    expected, found = poisoned(layout, config), poisoned(layout, config)
    write_reference(expected, key, value, slot_mapping, layout, config, k_scale=scales.k, v_scale=scales.v)
    ops.reshape_and_cache(key, value, found, slot_mapping, layout, config, scales)
    assert same_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantize_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    numbers = torch.tensor([1e9, -1e9, most * 2, torch.nan, torch.inf, 1.0])
    made = ops.quantize_fp8(numbers, torch.tensor(2.0), dtype)
    assert made.dtype == dtype
    assert made.float()[[0, 1, 2, 4, 5]].tolist() == [most, -most, most, most, 0.5]
    assert made.float()[3].isnan()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("kv_cache_dtype", STORED)
def test_concat_and_cache_mla(kv_cache_dtype: str, slots: list[int]) -> None:
    config = latent(kv_cache_dtype=kv_cache_dtype, dtype="float32" if kv_cache_dtype == "float32" else "bfloat16")
    kv_c, k_pe = drawn((len(slots), 512), (len(slots), 64))
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    fp8 = kv_cache_dtype.startswith("fp8")
    expected, found = poisoned(MLA, config), poisoned(MLA, config)
    scale = {"k_scale": torch.tensor(0.37)} if fp8 else {}
    write_reference(expected, kv_c, k_pe, slot_mapping, MLA, config, **scale)
    ops.concat_and_cache_mla(kv_c, k_pe, found, slot_mapping, MLA, config, Scales.make(CPU, k=0.37, v=5.0))
    assert same_bits(found, expected)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "fp8_e4m3"])
def test_concat_and_cache_packs_sparse_tokens(kv_cache_dtype: str, slots: list[int]) -> None:
    config = latent(kv_cache_dtype=kv_cache_dtype, sparse_top_k=4)
    kv_c, k_pe = drawn((len(slots), 512), (len(slots), 64))
    kv_c = kv_c.clamp(-1e4, 1e4)
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    found = poisoned(DS, config)
    ops.concat_and_cache_mla(kv_c, k_pe, found, slot_mapping, DS, config, Scales.make(CPU, k=0.37))
    expected = poisoned(DS, config).view(-1, 656)
    packed = pack_fp8_ds_mla(kv_c, k_pe)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = packed[token]
    assert same_bits(found.view(-1, 656), expected)


@pytest.mark.parametrize("kv_cache_dtype", STORED)
def test_gather_cache_mla(kv_cache_dtype: str) -> None:
    """Ranges that begin inside blocks, one of them empty, from a cache whose other tokens are poison."""
    config = latent(kv_cache_dtype=kv_cache_dtype, dtype="float32")
    cache = poisoned(MLA, config)
    table = torch.tensor([[4, 1, 99], [2, 99, 99], [0, 5, 3]], dtype=torch.int32)
    ranges = [(3, 8), (2, 2), (1, 12)]
    scales = Scales.make(CPU, k=0.37)
    scale = {"k_scale": scales.k} if kv_cache_dtype.startswith("fp8") else {}
    slots = [
        int(row[at // BLOCK]) * BLOCK + at % BLOCK for row, r in zip(table, ranges, strict=True) for at in range(*r)
    ]
    kv_c, k_pe = drawn((len(slots), 512), (len(slots), 64))
    write_reference(cache, kv_c, k_pe, torch.tensor(slots), MLA, config, **scale)
    starts = torch.tensor([first for first, _ in ranges], dtype=torch.int32)
    start_loc = torch.tensor([0, 5, 5, 16], dtype=torch.int32)
    output = torch.full((20, 576), 7.0)
    ops.gather_cache_mla(cache, output, table, starts, start_loc, 16, BLOCK, config, scales)
    keys, _ = gather_reference(cache, MLA, torch.tensor(slots), config, **scale)
    assert torch.equal(output[:16], keys[:, 0].float())
    assert (output[16:] == 7).all()


def partials(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Two partial results: ordinary rows, dead ones on either side that hold NaN, both dead, and far apart."""
    generator = torch.Generator().manual_seed(3)
    outputs = [part.to(dtype) for part in torch.randn(2, 6, 3, 8, generator=generator)]
    lses = list(torch.randn(2, 6, 3, generator=generator) * 5)
    for part, row in ((0, 1), (1, 2), (0, 3), (1, 3)):
        lses[part][row] = -torch.inf
        outputs[part][row] = torch.nan
    lses[0][4], lses[1][4] = 300.0, -300.0
    lses[0][5], lses[1][5] = 700.0, 700.5
    return outputs, lses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge(dtype: torch.dtype) -> None:
    (a, b), (lse_a, lse_b) = partials(dtype)
    expected, expected_lse = merge_reference([a, b], [lse_a, lse_b])
    output, lse = torch.full_like(a, torch.nan), torch.full_like(lse_a, torch.nan)
    ops.merge_attn_states(output, a, lse_a, b, lse_b, lse)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.float(), expected.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert not output[3].any()
    assert lse[3].isneginf().all()
    # A part of which nothing is left leaves the other as it is.
    assert torch.equal(output[1], b[1])
    assert torch.equal(output[2], a[2])
    assert torch.equal(output[4], a[4])


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """The GPU, on which waiting for a result is an error."""
    yield torch.device("cuda")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("kv_cache_dtype", STORED)
@pytest.mark.parametrize("layout", [FLASH, NHD, HND, CLASSIC, MLA])
def test_a_gpu_writes_the_same_without_waiting(
    cuda: torch.device, layout: str, kv_cache_dtype: str, slots: list[int]
) -> None:
    config = latent(kv_cache_dtype=kv_cache_dtype) if layout == MLA else headed(kv_cache_dtype=kv_cache_dtype)
    shapes = ((512,), (64,)) if layout == MLA else ((2, 32), (2, 32))
    operation = torch_ops.concat_and_cache_mla if layout == MLA else torch_ops.reshape_and_cache
    key, value = drawn(*((len(slots), *shape) for shape in shapes))
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    expected = poisoned(layout, config)
    operation(key, value, expected, slot_mapping, layout, config, Scales.make(CPU, k=0.37, v=1.9))
    found, scales = poisoned(layout, config).to(cuda), Scales.make(cuda, k=0.37, v=1.9)
    arguments = (key.to(cuda), value.to(cuda), found, slot_mapping.to(cuda), layout, config, scales)
    torch.cuda.set_sync_debug_mode("error")
    operation(*arguments)
    torch.cuda.set_sync_debug_mode("default")
    assert same_bits(found.cpu(), expected)


@pytest.mark.gpu
def test_a_gpu_merges_and_gathers_without_waiting(cuda: torch.device) -> None:
    (a, b), (lse_a, lse_b) = partials()
    config = latent(dtype="float32")
    cache = torch.randn(BLOCKS, BLOCK, 576)
    table = torch.tensor([[4, 1, 99], [0, 5, 3]], dtype=torch.int32)
    starts, start_loc = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 5, 16], dtype=torch.int32)
    results = []
    for device in (CPU, cuda):
        merging = [tensor.to(device) for tensor in (torch.empty_like(a), a, lse_a, b, lse_b, torch.empty_like(lse_a))]
        gathering = [tensor.to(device) for tensor in (cache, torch.zeros(16, 576), table, starts, start_loc)]
        scales = Scales.make(device)
        torch.cuda.set_sync_debug_mode("error")
        torch_ops.merge_attn_states(*merging)
        torch_ops.gather_cache_mla(*gathering, 16, BLOCK, config, scales)
        torch.cuda.set_sync_debug_mode("default")
        results.append((merging[0].cpu(), merging[-1].cpu(), gathering[1].cpu()))
    (output, lse, gathered), (its_output, its_lse, its_gathered) = results
    torch.testing.assert_close(its_output, output)
    torch.testing.assert_close(its_lse, lse)
    assert torch.equal(its_gathered, gathered)
    assert gathered.any()


Offer = Callable[..., None]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Return ``offer(operation, **factories)``: pretend that plugins bring these, sorted by keyword."""
    entries: list[importlib.metadata.EntryPoint] = []
    module = types.ModuleType("made_up_ops")
    monkeypatch.setitem(sys.modules, "made_up_ops", module)

    def find(*, group: str, name: str) -> list[importlib.metadata.EntryPoint]:
        return [entry for entry in entries if entry.group == group and entry.name == name]

    def make(operation: str, **factories: Callable[[torch.device], object]) -> None:
        for name, factory in factories.items():
            setattr(module, name, factory)
        named = [
            importlib.metadata.EntryPoint(operation, f"made_up_ops:{name}", "attn_select.ops") for name in factories
        ]
        entries[:] = [*named[::-1], importlib.metadata.EntryPoint("other", "nowhere:at_all", "attn_select.ops")]
        ops.clear_cache()

    monkeypatch.setattr(importlib.metadata, "entry_points", find)
    yield make
    ops.clear_cache()


def test_a_plugin_serves_its_devices(offer: Offer) -> None:
    asked: list[torch.device] = []

    def double(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return numbers * 2

    def choose(device: torch.device) -> object:
        asked.append(device)
        return double if device.type == "cpu" else None

    offer("quantize_fp8", choose=choose)
    numbers = torch.ones(2)
    for _ in range(3):
        assert ops.quantize_fp8(numbers, torch.tensor(1.0), torch.float8_e4m3fn).tolist() == [2, 2]
    assert ops.implementation("quantize_fp8", CPU) == (double, "made_up_ops:choose")
    meta = torch.device("meta")
    assert ops.implementation("quantize_fp8", meta) == (torch_ops.quantize_fp8, "torch")
    assert asked == [CPU, meta]
    assert ops.implementation("merge_attn_states", CPU) == (torch_ops.merge_attn_states, "torch")


def test_a_broken_plugin_is_named_and_left_out(offer: Offer) -> None:
    def fails(device: torch.device) -> object:
        raise OSError("no such library")

    def works(*_: Any) -> Any: ...

    offer("quantize_fp8", a_fails=fails, b_works=lambda device: works)
    with pytest.warns(
        RuntimeWarning, match=r"operation quantize_fp8: made_up_ops:a_fails failed to load \(OSError: no"
    ):
        assert ops.implementation("quantize_fp8", CPU) == (works, "made_up_ops:b_works")
    assert ops.implementation("quantize_fp8", CPU)[0] is works  # and does not warn again

    offer("quantize_fp8", a_fails=fails)
    with pytest.warns(RuntimeWarning, match="another implementation serves it"):
        assert ops.implementation("quantize_fp8", CPU) == (torch_ops.quantize_fp8, "torch")


def test_tiles_of_tiny_latents_have_the_least_scale() -> None:
    """FlashMLA's floor of 1e-4, rounded up to a power of two; an all-zero tile would divide by zero without it."""
    config = latent(kv_cache_dtype="fp8_ds_mla", sparse_top_k=64)
    kv_c = torch.tensor([0.0, 1e-8, 1e-3, 0.02]).repeat_interleave(128).view(1, 512)
    cache = poisoned(DS, config)
    ops.concat_and_cache_mla(kv_c, torch.zeros(1, 64), cache, torch.tensor([3]), DS, config, Scales.make(CPU))
    assert cache[0, 3, 512:528].view(torch.float32).tolist() == [2.0**-13] * 4
    codes = cache[0, 3, :512].view(torch.float8_e4m3fn).float().view(4, 128)[:, 0]
    assert codes.tolist() == [0.0, 0.0, 8.0, 160.0]  # 1e-3 and 0.02 times 2**13 are 8.192 and 163.84

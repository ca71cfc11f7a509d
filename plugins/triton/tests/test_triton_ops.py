"""The shared operations in Triton against torch's, and who is asked for them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD, MLA, PAGED_ATTENTION
from attn_select.runtime import Scales, torch_ops
from attn_select.runtime import ops as shared
from attn_select.runtime.kv_cache import allocate_kv_cache
from attn_select.runtime.states.state_batch import conv_rows
from attn_select.testing import same_bits
from attn_select_triton import ops
from attn_select_triton.runtime import op_kernels

OPERATIONS = [name for name, value in vars(shared).items() if isinstance(value, shared.SharedOperation)]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, exact: bool = False) -> Tensor:
    """Return random numbers; exact: those that FP8 holds, since the interpreter's cast loses the carry of rounding."""
    draw = torch.Generator().manual_seed(sum(shape))
    drawn = torch.randn(shape, generator=draw)
    if exact and device.type == "cpu":
        held = torch.tensor([-3.0, -1.75, -1.0, -0.5, 0.0, 0.25, 0.75, 1.5, 2.5])
        drawn = held[(drawn.abs() * 1000).int() % len(held)]
    return drawn.to(device, dtype)


def test_every_shared_operation_is_an_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["project"]["entry-points"]["attn_select.ops"]
    assert declared == {name: f"attn_select_triton.ops:{name}" for name in sorted(OPERATIONS)}
    assert sorted(op_kernels.__all__) == sorted(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_cuda_is_served(name: str) -> None:
    serve = getattr(ops, name)
    assert serve(torch.device("cpu")) is None
    assert serve(torch.device("meta")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_gpu_is_served(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cuda", torch.cuda.current_device())
    assert callable(getattr(ops, name)(here))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert getattr(ops, name)(here) is None


@pytest.mark.parametrize(("capability", "served"), [((9, 0), True), ((7, 0), False)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_compiler_is_the_one_that_triton_would_call(
    name: str, capability: tuple[int, int], served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CC`` names it, as Triton reads it; where that is unset gcc or clang must be on PATH."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    here, compiler = torch.device("cuda", 0), tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert getattr(ops, name)(here) is None
    monkeypatch.setenv("CC", str(compiler))
    assert callable(getattr(ops, name)(here)) is served
    monkeypatch.setenv("CC", "no-such-compiler")
    assert getattr(ops, name)(here) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", FP8)
def test_quantize_fp8(fp8: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    scale = torch.tensor(0.5, device=device)
    flat = numbers(device, 3, 5, 48, dtype=dtype, exact=True)
    flat[0, 0, :2] = torch.tensor([6e4, -6e4])
    if device.type == "cuda":  # the interpreter knows no NaN in e4m3
        flat[0, 0, 2] = torch.nan
    wide = numbers(device, 7, 1100, dtype=dtype, exact=True)
    turned = wide.t()
    for given in (flat, wide[:, :1024].unflatten(1, (8, 128)), turned, flat[:0]):
        found = op_kernels.quantize_fp8(given, scale, fp8)
        wanted = torch_ops.quantize_fp8(given, scale, fp8)
        assert found.dtype == fp8
        assert found.shape == given.shape
        assert found.is_contiguous()
        both_nan = found.float().isnan() & wanted.float().isnan()
        assert bool(((found.float() == wanted.float()) | both_nan).all())


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [24, 1100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_causal_conv(dtype: torch.dtype, channels: int, width: int, device: torch.device) -> None:
    """A prompt in two pieces, a new one, decodes with drafts that write over the slot that they read, and padding."""
    lens, read, write = [5, 3, 1, 2], [2, -1, 7, 4], [[3], [0], [7], [4, 5]]
    taps, rows = conv_rows(width, np.cumsum([0, *lens]), [len(each) for each in write])
    weight, bias = numbers(device, channels, width, dtype=dtype), numbers(device, channels)
    wide = numbers(device, sum(lens), channels + 8, dtype=dtype)
    windows = numbers(device, 9, width - 1, channels, dtype=dtype)
    windows[[0, 3, 5, 8]] = torch.nan
    given = [torch.tensor(each, device=device) for each in (read, [slot for own in write for slot in own])]
    for number, own_bias in ((0, bias), (1, None)):
        mine, theirs = windows.clone(), windows.clone()
        slots = [given[0], taps.to(device), given[1] - 9 * number, rows.to(device)]  # counted from the end, too
        found = op_kernels.causal_conv(wide[:, :channels], weight, own_bias, mine, *slots)
        wanted = torch_ops.causal_conv(wide[:, :channels], weight, own_bias, theirs, *slots)
        assert found.dtype is dtype
        assert bool(found.isfinite().all())
        torch.testing.assert_close(found, wanted)
        assert same_bits(mine, theirs)


@pytest.mark.parametrize("width", [1, 40, 128, 2048])
def test_slots_in_front(width: int, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(width)
    drawn = torch.randint(-50, 100, (9, 2 * width), generator=draw, dtype=torch.int32).to(device)
    drawn[3], drawn[4] = -1, 7
    for given in (drawn[:, :width], drawn[:, width:], drawn[:0], drawn[4:]):
        for found, wanted in zip(op_kernels.slots_in_front(given), torch_ops.slots_in_front(given), strict=True):
            assert same_bits(found, wanted)
            assert found.is_contiguous()


@pytest.mark.parametrize("sizes", [(512, 64), (256, 64), (48, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", FP8)
def test_concat_and_quantize_mla_q(
    fp8: torch.dtype, dtype: torch.dtype, sizes: tuple[int, int], device: torch.device
) -> None:
    """The parts lie as engines have them: in one tensor, behind what is absorbed, or with the heads in front."""
    (rank, rope), scale = sizes, torch.tensor(0.5, device=device)
    whole = numbers(device, 5, 3, rank + rope, dtype=dtype, exact=True)
    whole[0, 0, 0], whole[0, 0, -1] = 6e4, -6e4
    absorbed = numbers(device, 3, 5, rank, dtype=dtype, exact=True).transpose(0, 1)
    for latent, behind in (
        whole.split((rank, rope), dim=-1),
        (absorbed, whole[..., 7 : 7 + rope]),
        (absorbed[:0],) * 2,
    ):
        found = op_kernels.concat_and_quantize_mla_q(latent, behind, scale, fp8)
        wanted = torch_ops.concat_and_quantize_mla_q(latent, behind, scale, fp8)
        assert (found.dtype, found.shape, found.is_contiguous()) == (fp8, wanted.shape, True)
        assert torch.equal(found.float(), wanted.float())


def test_division_by_the_scale_is_exact(device: torch.device) -> None:
    """One unit in the last place off, and a number on the border of two FP8 numbers falls to the other side."""
    scale = torch.tensor(0.0123, device=device)
    borders = torch.arange(8, 16, device=device).repeat(64) + 0.5
    given = (borders.view(64, 8).cumsum(0) * scale).float()
    if device.type == "cpu":  # the interpreter truncates: keep to what needs no rounding
        given = torch.tensor([8.0, 9.0, -10.0, 448.0, 1e9], device=device) * scale
    found = op_kernels.quantize_fp8(given, scale, torch.float8_e4m3fn)
    wanted = torch_ops.quantize_fp8(given, scale, torch.float8_e4m3fn)
    assert same_bits(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND, PAGED_ATTENTION])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"v_head_size": 32},
        {"kv_cache_dtype": "float32"},
    ],
    ids=str,
)
def test_reshape_and_cache(layout: str, fields: dict[str, Any], device: torch.device) -> None:
    config = AttentionConfig(num_heads=6, num_kv_heads=3, head_size=48, dtype="float16", **fields)
    scales = Scales.make(device, k=0.5, v=2.0)
    slots = torch.tensor([17, -1, 0, 47, 31, 16, 3], device=device)
    wide = numbers(device, 7, 3, 2 * 48, dtype=torch.float16, exact=True)
    key, value = wide[..., :48], numbers(device, 7, 3, config.value_head_size, dtype=torch.float16, exact=True)
    caches = [allocate_kv_cache(layout, config, 3, 16, device) for _ in range(2)]
    for write, kv_cache in zip((op_kernels.reshape_and_cache, torch_ops.reshape_and_cache), caches, strict=True):
        write(key, value, kv_cache, slots, layout, config, scales)
        write(key[:0], value[:0], kv_cache, slots[:0], layout, config, scales)
    assert same_bits(caches[0], caches[1])
    assert caches[0].float().any()


def test_reshape_and_cache_of_transposed_keys(device: torch.device) -> None:
    config = AttentionConfig(num_heads=2, head_size=32, dtype="float16")
    key = numbers(device, 4, 32, 2, dtype=torch.float16).transpose(1, 2)
    caches = [allocate_kv_cache(FLASHINFER_NHD, config, 2, 16, device) for _ in range(2)]
    slots, scales = torch.tensor([5, 6, 7, 30], device=device), Scales.make(device)
    for write, kv_cache in zip((op_kernels.reshape_and_cache, torch_ops.reshape_and_cache), caches, strict=True):
        write(key, key, kv_cache, slots, FLASHINFER_NHD, config, scales)
    assert same_bits(caches[0], caches[1])


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_mla_cache_written_and_gathered(dtype: str, device: torch.device) -> None:
    dims = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config = AttentionConfig(num_heads=2, dtype="float16", kv_cache_dtype=dtype, **dims)
    scales = Scales.make(device, k=0.25)
    latents, ropes = (numbers(device, 40, size, dtype=torch.float16, exact=True) for size in (64, 16))
    slots = torch.arange(40, device=device).flip(0)
    slots[3] = -1
    table = torch.tensor([[2, 1], [0, 1], [1, 0]], dtype=torch.int32, device=device)
    starts = torch.tensor([5, 0, 7], dtype=torch.int32, device=device)
    start_loc = torch.tensor([0, 11, 11, 30], dtype=torch.int32, device=device)
    results = []
    for module in (op_kernels, torch_ops):
        kv_cache = allocate_kv_cache(MLA, config, 3, 16, device)
        module.concat_and_cache_mla(latents, ropes, kv_cache, slots, MLA, config, scales)
        output = torch.full((32, 80), 7.0, dtype=torch.float16, device=device)
        module.gather_cache_mla(kv_cache, output, table, starts, start_loc, 30, 16, config, scales)
        results.append((kv_cache, output))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])
    assert bool((results[0][1][30:] == 7).all())


@pytest.mark.parametrize("lengths", [[3], [0, 5, 1], [2, 0, 0, 7, 0], [0, 0]])
def test_flatten_block_table(lengths: list[int], device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(1, 10**6, (len(lengths), 9), generator=draw, dtype=torch.int32).to(device)[:, :8]
    indptr = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    wanted = torch.full((sum(lengths) + 3,), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        wanted[int(indptr[row]) : int(indptr[row + 1])] = table[row, :length].cpu()
    for flatten in (op_kernels.flatten_block_table, torch_ops.flatten_block_table):
        out = torch.full_like(wanted, -1, device=device)
        flatten(table, indptr, out)
        assert out.tolist() == wanted.tolist()


def test_flatten_long_rows(device: torch.device) -> None:
    table = torch.arange(2 * 2500, dtype=torch.int32, device=device).view(2, 2500)
    indptr = torch.tensor([0, 2100, 2103], dtype=torch.int32, device=device)
    out = torch.zeros(2103, dtype=torch.int32, device=device)
    op_kernels.flatten_block_table(table, indptr, out)
    assert out.tolist() == [*range(2100), 2500, 2501, 2502]


def test_merge_attn_states(device: torch.device) -> None:
    parts = [numbers(device, 5, 3, 40 + i, dtype=torch.float16)[..., :40] for i in range(2)]
    lses = [numbers(device, 3, 5 + i)[:, :5].T for i in range(2)]
    lses[0][0, 0] = lses[1][1, 1] = -torch.inf
    lses[0][2, 2] = lses[1][2, 2] = -torch.inf
    parts[0][0, 0] = torch.nan
    results = []
    for merge in (op_kernels.merge_attn_states, torch_ops.merge_attn_states):
        output, lse = torch.empty(5, 3, 40, dtype=torch.float16, device=device), torch.empty(5, 3, device=device)
        merge(output, parts[0], lses[0], parts[1], lses[1], lse)
        results.append((output, lse))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [-1, 1])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_merge_rank_states(own: int, with_sinks: bool, grouped: bool, device: torch.device) -> None:
    size, tokens, heads, width = 3, 5, 4, 40
    parts = numbers(device, size, tokens, heads, width + 4, dtype=torch.float16)[..., :width]
    lses = numbers(device, size, heads, tokens + 2)[..., :tokens].transpose(1, 2)
    lses[0, 0], parts[0, 0] = -torch.inf, torch.nan
    lses[:, 2, 2] = -torch.inf
    sinks = numbers(device, heads) if with_sinks else None
    if own >= 0:
        parts = parts[own : own + 1]
    results = []
    for merge in (op_kernels.merge_rank_states, torch_ops.merge_rank_states):
        output = torch.full((heads, tokens, width), torch.nan, dtype=torch.float16, device=device).transpose(0, 1)
        lse = torch.full((tokens, heads), torch.nan, device=device)
        given = [parts, lses, sinks, output, lse]
        if grouped:  # two KV heads, of two ranks one head each
            given = [
                parts.unflatten(2, (2, 2, 1)),
                lses.unflatten(2, (2, 2, 1)),
                None if sinks is None else sinks.view(2, 2, 1),
                output.unflatten(1, (2, 2, 1)),
                lse.unflatten(1, (2, 2, 1)),
            ]
        merge(given[0], given[1], own, *given[2:])
        results.append((output, lse))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_pack_attn_states(device: torch.device) -> None:
    ranks, tokens, kv_heads, group, width = 2, 3, 2, 2, 40
    output = numbers(device, tokens, kv_heads, ranks, group, width, dtype=torch.float16).permute(2, 0, 1, 3, 4)
    lse = numbers(device, tokens, kv_heads, ranks, group).permute(2, 0, 1, 3)
    rows, message = tokens * kv_heads * group, 2000
    sent = torch.zeros(ranks, message, dtype=torch.uint8, device=device)
    packed = sent[:, : rows * width * 2].view(torch.float16).view(ranks, tokens, kv_heads, group, width)
    at = rows * width * 2 + 4
    packed_lse = sent[:, at : at + 4 * rows].view(torch.float32).view(ranks, tokens, kv_heads, group)
    op_kernels.pack_attn_states(output, lse, packed, packed_lse)
    assert torch.equal(packed, output)
    assert torch.equal(packed_lse, lse)
    assert not sent[:, at + 4 * rows :].any()


@pytest.mark.gpu
def test_no_operation_waits(device: torch.device) -> None:
    table = torch.arange(16, dtype=torch.int32, device=device).view(2, 8)
    indptr = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    scale, given, out = torch.ones((), device=device), torch.randn(4, 64, device=device), torch.zeros(8).int().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for module in (op_kernels, torch_ops):
            module.flatten_block_table(table, indptr, out)
            module.quantize_fp8(given, scale, torch.float8_e4m3fn)
            parts = given.view(2, 2, 64).split((48, 16), dim=-1)
            module.concat_and_quantize_mla_q(*parts, scale, torch.float8_e4m3fn)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.tolist() == [0, 1, 2, 8, 9, 10, 11, 0]

"""The launches and splits that are chosen for GPUs: those that stood before they came from one table, and a model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.machine.device import known_gpus
from attn_select_triton import tuning
from attn_select_triton.kernels import launch, mla_decode, paged_attention
from attn_select_triton.runtime import schedule
from attn_select_triton.tuning import Gpu, Tile, Way, way_cost

CHOICES = Path(__file__).with_name("choices.json")
"""What was chosen on 22 November 2026, as measured on H100 and H200. Renew it with ``python test_triton_tuning.py``
where another choice was measured to be better."""
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}
BOTH = ("bfloat16", "float32")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/.:;<>=?!"
H100, H200 = Gpu((9, 0), 132, 3350), Gpu((9, 0), 132, 4800)


def tiles(capability: tuple[int, int]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the launches over a grid of shape classes, by kernel."""
    boxes = (False, True) if capability >= (9, 0) else (False,)
    yield (
        "prefill",
        [
            launch.prefill_launch(capability, width, DTYPES[dtype], described, paged, keys)
            for width, dtype, described, paged, keys in product(
                (64, 96, 128, 192, 256, 512, 1024), BOTH, boxes, (False, True), (1024, 1025)
            )
        ],
    )
    yield (
        "decode",
        [
            launch.decode_launch(capability, rows, width, DTYPES[dtype], DTYPES[cache], programs)
            for rows, width, dtype, cache, programs in product(
                (1, 17, 33, 128), (64, 128, 256, 512), BOTH, DTYPES, (2.0, 2.01)
            )
        ],
    )
    yield (
        "mla",
        [
            mla_decode.mla_launch(capability, rows, *sizes, block_size, DTYPES[dtype], DTYPES[cache], gluon)
            for rows, sizes, block_size, dtype, cache, gluon in product(
                (16, 17, 33), ((512, 64), (512, 128), (48, 48)), (16, 64), BOTH, ("bfloat16", "fp8"), (True, False)
            )
        ],
    )
    yield (
        "paged",
        [
            paged_attention.paged_launch(capability, rows, width, DTYPES[dtype], DTYPES[dtype])
            for rows, width, dtype in product((16, 17), (128, 256), BOTH)
        ],
    )
    yield (
        "classic",
        [
            paged_attention.classic_prefill_launch(capability, width, DTYPES[dtype], DTYPES[cache])
            for width, dtype, cache in product((128, 256), BOTH, ("bfloat16", "fp8"))
        ],
    )


def batches() -> Iterator[tuple[list[int], list[int], int, int]]:
    """Yield batches of all kinds: query and key lengths, programs of a request, and room for splits."""
    rng = random.Random(7)
    for _ in range(150):
        top = rng.choice([100, 1000, 8000, 64000])
        lens = [rng.randint(1, top) for _ in range(rng.choice([1, 2, 5, 8, 16, 33, 64, 256]))]
        if rng.random() < 0.3:
            lens[0] = rng.randint(top, 4 * top)
        queries = [min(keys, rng.choice([1, 16, 64, 200, 512, 2000])) for keys in lens]
        yield queries, lens, rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 2, 8, 32, 200])


WAYS: tuple[dict[Way, str], ...] = (
    {"pages": "pages", "gathered": "gathered", "split": "split"},
    {"pages": "pages", "gathered": "gathered", "split": "split", "warps": "warps"},
    {"pages": "tma_pages", "split": "split", "warps": "warps"},
    {"pages": "pages", "gathered": "gathered", "split": "split_fp8"},
)


def decode_tile(gpu: Gpu, programs: int, cache: torch.dtype) -> Tile:
    return launch.decode_launch(gpu.capability, 4, 128, torch.bfloat16, cache, programs / gpu.sms)


def schedules(gpu: Gpu) -> Iterator[tuple[str, list[Any]]]:
    """Yield how batches are split and run on a GPU."""
    programs, keys = (1, 3, 8, 20, 64, 100, 131, 132, 200, 264, 512), (1, 100, 1000, 4096, 16384, 131072)
    yield (
        "splits",
        [
            launch.num_splits_for(*each, gpu, decode_tile(gpu, each[0], cache), 256 * cache.itemsize, 4)
            for cache, each in product((torch.bfloat16, torch.float8_e4m3fn), product(programs, keys))
        ],
    )
    yield "latent splits", [mla_decode.mla_num_splits(*each, gpu.sms) for each in product(programs, keys)]
    yield (
        "batches",
        [
            schedule.split_keys(
                np.array(lens),
                units=units,
                room=most * len(lens),
                gpu=gpu,
                launch=decode_tile(gpu, len(lens) * units, torch.float8_e4m3fn if units == 2 else torch.bfloat16),
                key_bytes=256 if units == 2 else 512,
                rows=4,
            )
            for _, lens, units, most in batches()
        ],
    )
    yield (
        "latents",
        [schedule.latent_keys(np.array(lens), units, most * len(lens), gpu.sms) for _, lens, units, most in batches()],
    )
    yield "ways", [
        prefill_way(ways, queries, lens, gpu, heads=heads, window=window)
        for (queries, lens, _, _), ways, heads, window in zip(
            batches(), WAYS * 50, [(32, 8), (16, 16), (64, 4)] * 60, [0, 0, 1024] * 60, strict=False
        )
    ]  # fmt: skip


def prefill_way(ways: Any, queries: Any, lens: Any, gpu: Gpu, *, heads: tuple[int, int], window: int = 0) -> str:
    costs = {way: way_cost(name) for way, name in ways.items()}
    work = schedule.prefill_work(queries, lens, heads=heads, causal=True, window=window)
    shares = schedule.prefill_shares(way_cost("warps"), work, gpu, 1 << 20)
    return schedule.prefill_way(costs, work, shares, gpu)


def said(chosen: Any) -> str:
    """Return a choice in words; of a launch what the tables say of it."""
    if not hasattr(chosen, "block_m"):
        return str(chosen)
    flags = [name for name in ("described", "hopper") if getattr(chosen, name, False)]
    numbers = f"{chosen.block_m} x {chosen.block_n}, {chosen.num_warps} warps, {chosen.num_stages} stages"
    return ", ".join([numbers, *flags])


def written(groups: Iterator[tuple[str, list[Any]]]) -> dict[str, Any]:
    """Return groups of choices with a letter for each different one."""
    found = {}
    for name, chosen in groups:
        texts = [said(each) for each in chosen]
        kinds = sorted(set(texts))
        if len(kinds) > len(LETTERS):
            found[name] = " ".join(texts)
        else:
            grid = "".join(LETTERS[kinds.index(text)] for text in texts)
            found[name] = {"kinds": kinds, "grid": grid}
    return found


def all_choices() -> dict[str, Any]:
    found = {"{}.{}".format(*capability): written(tiles(capability)) for capability in CAPABILITIES}
    return {**found, "H100": written(schedules(H100)), "H200": written(schedules(H200))}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tiles_are_those_that_were_measured_or_compiled(capability: tuple[int, int]) -> None:
    before = json.loads(CHOICES.read_text(encoding="utf-8"))["{}.{}".format(*capability)]
    assert written(tiles(capability)) == before


@pytest.mark.parametrize(("name", "gpu"), [("H100", H100), ("H200", H200), ("H100", Gpu((9, 0), 132))], ids=str)
def test_schedules_are_those_that_were_measured(name: str, gpu: Gpu) -> None:
    assert written(schedules(gpu)) == json.loads(CHOICES.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize(
    ("kv_heads", "mib", "section"), [(8, 1, 8), (8, 5, 4), (8, 12, 2), (8, 100, 1), (6, 5, 3), (7, 5, 1), (8, 0, 8)]
)
def test_a_section_has_the_heads_whose_keys_fit(kv_heads: int, mib: int, section: int) -> None:
    assert tuning.section_of(kv_heads, mib << 20) == section


def test_lengths_of_one_class_have_the_same_tile() -> None:
    lengths = range(1, 4097, 64)
    for described, paged, width in product((False, True), (False, True), (64, 128, 256)):
        chosen = {
            keys: launch.prefill_launch((9, 0), width, torch.bfloat16, described, paged, keys) for keys in lengths
        }
        classes = {keys: tuning.keys_class("prefill", keys) for keys in lengths}
        assert len({(classes[keys], chosen[keys]) for keys in lengths}) == len(set(classes.values()))
    assert len(set(classes.values())) == 2


def test_less_bandwidth_for_an_sm_needs_fewer_programs() -> None:
    l40s = known_gpus()["l40s"]
    assert l40s.sm_count is not None
    gpu = Gpu((8, 9), l40s.sm_count, l40s.bandwidth_gbps)
    assert 0.2 < gpu.bandwidth_share < 0.3


def test_a_decode_fills_whole_waves_of_programs() -> None:
    """What was fastest on an H200, of 1 to 19 splits."""
    for requests, keys, wanted in (
        (1, 1024, 16),
        (5, 5000, 6),
        (8, 16384, 4),
        (20, 3000, 3),
        (32, 16384, 1),
        (50, 2048, 1),
    ):
        tile = decode_tile(H200, 8 * requests, torch.bfloat16)
        assert launch.num_splits_for(8 * requests, keys, H200, tile, 512, 4) == wanted
        waves = 8 * requests * wanted / (H200.sms * 8 // tile.num_warps)
        assert waves <= 1
    tile = decode_tile(H200, 8, torch.bfloat16)
    assert launch.num_splits_for(8, 100, H200, tile, 512, 4) == 1  # a merge takes longer than a second tile


@pytest.mark.parametrize(
    ("mib", "tokens"),
    [(32, []), (128, [512, 1024]), (256, [64, 512, 1024]), (400, [64, 512, 1024, 2048])],
)
def test_prompts_run_beside_decodes_where_both_gain(mib: int, tokens: list[int]) -> None:
    """The swept batches that were faster on two streams, host time allowing."""
    swept = (16, 64, 512, 1024, 2048, 4096)
    assert [many for many in swept if schedule.worth_two_streams(many, mib << 20)] == tokens


def test_less_bandwidth_makes_copies_dearer() -> None:
    """A gather copies all keys once more; reading the pages costs the tensor cores' time."""
    ways = {way: name for way, name in WAYS[0].items() if way != "split"}
    chosen = [
        prefill_way(ways, [512], [16896], Gpu((8, 9), 132, bandwidth), heads=(32, 8)) for bandwidth in (3350, 500)
    ]
    assert chosen == ["gathered", "pages"]


@pytest.mark.parametrize("device", known_gpus().values(), ids=lambda device: device.name)
def test_every_gpu_has_its_shared_memory(device: Any) -> None:
    """Tiles of 4 KiB a key and stage at the most: what a chip has not is not asked for."""
    if device.arch or device.compute_capability < (7, 5):
        pytest.skip("Triton's tiles for it are those of another GPU, or it does not run there")
    gpu = Gpu(device.compute_capability, device.sm_count or 1, device.bandwidth_gbps)
    tile = launch.prefill_launch(gpu.capability, 128, torch.bfloat16, False, True, 4096)
    assert (tile.block_m + tile.num_stages * 2 * tile.block_n) * 256 <= gpu.shared_kib << 10
    assert tuning.measured(gpu.capability) == (gpu.capability == (9, 0))


if __name__ == "__main__":
    CHOICES.write_text(json.dumps(all_choices(), indent=1) + "\n", encoding="utf-8")

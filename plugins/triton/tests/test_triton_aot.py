"""Every kernel that the gates accept compiles without a GPU into the chip it is for; lengths are not compiled in.

The compiler works in processes of its own, since here Triton's interpreter may be on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

triton = pytest.importorskip("triton", reason="needs triton")
pytest.importorskip("torch", reason="needs torch")

pytestmark = pytest.mark.long
GUARD = "test_a_usual_layer_compiles; the same kernels in the interpreter"
slow = pytest.mark.slow(guard=GUARD)

SHARED_MEMORY = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may have (CUDA C++ Programming Guide, technical specifications per compute
capability)."""
PARTS = {75: 0, 80: 0, 86: 1, 89: 2, 120: 3}
"""Chips for which every kernel is compiled, but only a quarter of the layers, and which quarter. They share most tiles
of ``tuning.toml`` and the kind of products, so together they have every layer."""
IN_CI = {80: "0/4", 90: "0/2", 100: "1/2"}
"""Chips that CI compiles for: every kernel, and of the layers this part. A launch takes 3 to 4 s of a core. `make
test-all` compiles for all chips, and every layer for 9.0 and 10.0."""
TENSOR_MEMORY = 512
"""Columns of tensor memory of a multiprocessor of compute capability 10 (PTX ISA, tcgen05)."""
SPILLED = 1024
"""Bytes of spill instructions in a kernel's code that are taken as harmless. The kernels' tiles fill the registers, and
the fastest that were measured, those of the Hopper MLA decode, have 852."""
SPILLED_MORE = {
    # Products on FMA units, of operands held in float32.
    ("mla_decode_kernel", 75): 8192,
    ("paged_attention_v1_kernel", 75): 3072,
    # 64 rows over an FP8 cache, which goes through registers to 16 bits.
    ("mla_decode_kernel", 90): 2560,
    # 64 rows over an FP8 cache, by Triton 3.7: 1,288.
    ("mla_decode_kernel", 100): 1536,
    # The classic layout, by Triton 3.7: 1,076.
    ("prefill_kernel", 90): 1280,
}
if Version(triton.__version__) >= Version("3.9"):
    # Heads of 256 with a soft cap: 1,320; 120 by 3.7.
    SPILLED_MORE["prefill_hopper_kernel", 90] = 1536
ATTENTION = (
    "decode_kernel", "prefill_kernel", "mla_decode_kernel", "paged_attention_v1_kernel", "paged_attention_v2_kernel",
)  # fmt: skip
OTHERS = (
    "reshape_and_cache_kernel", "gather_pages_kernel", "merge_pieces_kernel", "merge_attn_states_kernel",
    "concat_and_cache_mla_kernel", "gather_cache_mla_kernel", "paged_attention_v2_reduce_kernel",
    "gather_classic_kernel", "quantize_fp8_kernel", "flatten_block_table_kernel",
    "concat_and_quantize_mla_q_kernel",
    "pack_attn_states_kernel", "merge_rank_states_kernel", "slots_in_front_kernel", "list_pieces_kernel",
)  # fmt: skip
INDEXER = (
    "index_logits_kernel", "index_topk_kernel", "index_digit_kernel", "index_kept_kernel", "index_write_kernel",
)  # fmt: skip
"""Launched from 8.0 on, and from 8.9 on over FP8 caches, whose keys and queries are quantised."""
HOPPER = (
    "mla_decode_hopper_kernel", "mla_decode_hopper_fp8_kernel", "mla_decode_gathered_kernel", "prefill_hopper_kernel",
    "merge_shares_kernel",
)  # fmt: skip
"""Written for compute capability 9.0, launched there only."""
Report = list[dict[str, Any]]


def launched_on(target: int) -> set[str]:
    """Return the kernels that the shape classes launch on a chip."""
    wanted = {*ATTENTION, *OTHERS, *(HOPPER if target == 90 else []), *(INDEXER if target >= 80 else [])}
    return wanted | ({"quantize_rows_kernel"} if target >= 89 else set())


on_every_chip = pytest.mark.parametrize(
    "target",
    [pytest.param(each, marks=pytest.mark.slow(guard=GUARD, ci=each in IN_CI)) for each in SHARED_MEMORY],
)


def run(script: str, target: int | str, cache: Path, *options: str) -> str:
    """Return what a script of ``aot`` prints, run with a Triton cache of its own and without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = Path(__file__).parent / "aot" / f"{script}.py"
    done = subprocess.run(
        [sys.executable, str(path), str(target), *options], capture_output=True, text=True, check=False,
        env=environment | {"TRITON_CACHE_DIR": str(cache / f"{script} {target}")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Report]]:
    """A function from a target to its kernels. The targets of this run are compiled two at a time from the start."""
    cache = tmp_path_factory.mktemp("triton")
    mine = [item for item in request.session.items if item.path == request.path]
    targets = dict.fromkeys(item.callspec.params["target"] for item in mine if "report" in item.fixturenames)
    with ThreadPoolExecutor(2) as pool:
        lines: dict[int, Future[str]] = {}
        for target in targets:
            part = ["--part", f"{PARTS[target]}/4"] if target in PARTS else []
            if {*targets} == {*IN_CI}:
                part = ["--part", IN_CI[target]]
            lines[target] = pool.submit(run, "compile_kernels", target, cache, *part)
        yield lambda target: [json.loads(line) for line in lines[target].result().splitlines()]
        pool.shutdown(cancel_futures=True)


def test_a_usual_layer_compiles(tmp_path: Path) -> None:
    """Llama-3-8B's layer in bfloat16, for Hopper: its cache, decode, prefill and merges."""
    lines = [json.loads(line) for line in run("compile_kernels", 90, tmp_path, "--first", "1").splitlines()]
    assert {line["kernel"] for line in lines} >= {"reshape_and_cache_kernel", "decode_kernel", "prefill_kernel"}
    for line in lines:
        assert line["shared"] <= SHARED_MEMORY[90] << 10, line
        assert line["spilled"] <= SPILLED, line


@slow
@pytest.mark.parametrize("target", [80, 90])
def test_every_launch_compiles(target: int, tmp_path: Path) -> None:
    """Each kernel of each launcher for one layer: what shows that a release of Triton has all that they are made of."""
    lines = [json.loads(line) for line in run("compile_kernels", target, tmp_path, "--once").splitlines()]
    kernels = [line for line in lines if "refused" not in line]
    assert {line["kernel"] for line in kernels} == launched_on(target)
    assert len(kernels) > 35
    for line in kernels:
        assert line["shared"] <= SHARED_MEMORY[target] << 10, line


@slow
@pytest.mark.parametrize(("arch", "lds"), [("gfx942", 64), ("gfx950", 160)])
def test_what_the_gate_accepts_on_amd_compiles_into_the_lds(arch: str, lds: int, tmp_path: Path) -> None:
    """KiB of a workgroup's LDS: AMD's CDNA 3 and CDNA 4 instruction set guides. No kernel ever ran there."""
    lines = [json.loads(line) for line in run("compile_for_amd", arch, tmp_path).splitlines()]
    assert {*ATTENTION} <= {line["kernel"] for line in lines}
    for line in lines:
        assert line["shared"] <= lds << 10, line


@pytest.mark.parametrize("target", [pytest.param(each, marks=[] if each == 90 else [slow]) for each in SHARED_MEMORY])
def test_the_kernels_of_states_compile(target: int, tmp_path: Path) -> None:
    """A state's tile and what is computed from it stay in registers."""
    lines = [json.loads(line) for line in run("compile_states", target, tmp_path).splitlines()]
    found = Counter(line["kernel"] for line in lines)
    assert found == {"state_decode_kernel": 5, "causal_conv_kernel": 1, "write_windows_kernel": 1}
    for line in lines:
        assert line["spilled"] == 0, line
        assert line["shared"] <= 4096, line


@on_every_chip
def test_compiles_into_the_chips_memory(target: int, report: Callable[[int], Report]) -> None:
    kernels = [line for line in report(target) if "refused" not in line]
    assert {line["kernel"] for line in kernels} == launched_on(target)
    for line in kernels:
        assert line["shared"] <= SHARED_MEMORY[target] << 10, line
        assert line["tensor_memory"] <= (TENSOR_MEMORY if target == 100 else 0), line


@on_every_chip
def test_the_gate_refuses_what_does_not_compile(target: int, report: Callable[[int], Report]) -> None:
    """e4m3 below compute capability 8.9, of a cache and of an output, and nothing else of what is asked."""
    refused = [line["refused"] for line in report(target) if "refused" in line]
    assert all("fp8_e4m3" in layer or "output_quantization=fp8" in layer for layer in refused)
    assert bool(refused) == (target < 89)


@on_every_chip
def test_products_run_on_tensor_cores(target: int, report: Callable[[int], Report]) -> None:
    """From 8.0 on, but for float32, which is exact, on FMA units. Wide tiles have the chip's own instruction."""
    multiplying = [line for line in report(target) if line.get("products")]
    assert {line["kernel"] for line in multiplying} >= set(ATTENTION)
    for line in multiplying:
        assert bool(line["instructions"]) == (target >= 80), line
    newest = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(target)
    for line in multiplying:
        if newest and line["kernel"] == "prefill_kernel":
            assert newest in line["instructions"], line


@on_every_chip
def test_registers_suffice(target: int, report: Callable[[int], Report]) -> None:
    for line in report(target):
        if "refused" not in line:
            assert line["spilled"] <= SPILLED_MORE.get((line["kernel"], target), SPILLED), line


@slow
@pytest.mark.parametrize("target", [75, 90])
def test_batches_of_all_sizes_share_their_kernels(target: int, tmp_path: Path) -> None:
    """New lengths, batch sizes, table widths and slices compile nothing anew, but where the launch table says so.

    And a kernel that is launched again without being looked up is the one that would have been found.
    """
    lines = run("count_compilations", target, tmp_path).splitlines()
    assert sum("relaunch" not in line for line in lines) > 30
    assert sum("relaunch" in line for line in lines) > 10
    for line in lines:
        count, kernel = line.split(" ", 1)
        assert count == "1", kernel


def test_the_first_steps_of_a_layer_compile_few_kinds_of_a_kernel(tmp_path: Path) -> None:
    """Each takes seconds, and the first call waits for it: a further one wants a reason."""
    counts: dict[str, dict[str, int]] = {}
    for line in run("count_of_steps", 90, tmp_path).splitlines():
        layer, kernel, kinds = line.split()
        counts.setdefault(layer, {})[kernel] = int(kinds)
    # Of the decode's, tiles of 16, 32 and 64 rows, split and whole: small steps with prefills launch it too.
    assert counts == {
        "llama-3-8b": {
            "decode_kernel": 11, "gather_pages_kernel": 1, "list_pieces_kernel": 1, "merge_pieces_kernel": 1,
            "merge_shares_kernel": 1, "prefill_hopper_kernel": 2, "prefill_kernel": 2, "reshape_and_cache_kernel": 1,
        },
        "deepseek-v3": {
            "concat_and_cache_mla_kernel": 1, "gather_cache_mla_kernel": 1, "list_pieces_kernel": 1,
            "merge_attn_states_kernel": 1, "merge_pieces_kernel": 1, "merge_shares_kernel": 1,
            "mla_decode_hopper_kernel": 2, "prefill_hopper_kernel": 3,
        },
    }  # fmt: skip


@slow
def test_kernels_compile_side_by_side(tmp_path: Path) -> None:
    *lines, again = run("compile_side_by_side", 90, tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, len(lines) + 1)]
    assert {line.split()[1] for line in lines} == {str(len(lines))}
    assert {line.split()[2] for line in lines} == {
        "reshape_and_cache_kernel", "decode_kernel", "list_pieces_kernel", "prefill_kernel"
    }  # fmt: skip
    assert again == "again 0"

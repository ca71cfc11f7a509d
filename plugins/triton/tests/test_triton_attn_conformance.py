"""TRITON_ATTN runs what its spec promises: in the interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton")


from attn_select.backends.spec import Fact
from attn_select.testing import BackendConformance
from attn_select_triton.facts.triton_attn import CAPABILITIES, TRITON_ATTN
from attn_select_triton.runtime import schedule
from attn_select_triton.tuning import Gpu

_CAPABILITIES = replace(CAPABILITIES, dtypes=Fact(("float16", "float32"), "what the interpreter multiplies right"))


class TestInterpreted(BackendConformance):
    """Few configurations, since the interpreter takes a second for each; bfloat16 it multiplies as integers."""

    spec = replace(TRITON_ATTN, capabilities={"prefill": _CAPABILITIES, "decode": _CAPABILITIES})
    device = "cpu"
    gate_device = "h100"
    num_configs = 40
    heads = ((1, 1), (4, 2), (7, 1))


class OnGPU(BackendConformance):
    """Seeds are classes of their own, so that processes can share them out: every shape class is compiled first."""

    spec = TRITON_ATTN
    num_configs = 130
    max_compile_keys = 12
    device = "cuda"


@pytest.mark.gpu
@pytest.mark.usefixtures("apart")
class TestSeed0(OnGPU):
    seed = 0


@pytest.mark.gpu
@pytest.mark.usefixtures("apart")
class TestSeed1(OnGPU):
    seed = 1


@pytest.mark.gpu
@pytest.mark.usefixtures("apart")
class TestSeed2(OnGPU):
    seed = 2


@pytest.mark.gpu
class TestSeed3(OnGPU):
    """Most steps so small are one launch."""

    seed = 3


@pytest.mark.gpu
@pytest.mark.usefixtures("apart")
class TestGathering(OnGPU):
    """As the others, but steps so small gather their pages, split keys and run by the Gluon kernel, whole and split."""

    seed = 4
    num_configs = 80

    @pytest.fixture(autouse=True)
    def _always(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def way(ways: Sequence[str], work: schedule.PrefillWork, *_: object) -> str:
            names = ["gathered", "split", *(way for way in ("warps", "gathered_warps") if way in ways)]
            return names[int(work.keys) % len(names)]

        def shares(_: object, work: schedule.PrefillWork, __: object, room: int) -> schedule.Shares:
            every = 1 + np.arange(len(work.query_lens)) % 3
            if int((every * work.query_lens).sum()) * work.heads[0] > room:
                every[:] = 1
            return schedule.Shares(every, 0.0, 0.0, 0.0, 0)

        def pieces(lens: schedule.Lens, *, units: int, room: int, gpu: Gpu, **_: object) -> tuple[int, int]:
            total = int(lens.sum())
            tokens = max(16, -(-2 * total // room), -(-total // schedule.most_pieces(units, gpu)))
            return -(-int(lens.max()) // tokens), tokens

        monkeypatch.setattr(schedule, "prefill_way", way)
        monkeypatch.setattr(schedule, "prefill_shares", shares)
        monkeypatch.setattr(schedule, "split_keys", pieces)

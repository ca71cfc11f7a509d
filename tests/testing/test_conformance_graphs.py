"""The conformance suite compares replays of CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conformance_variants import Variant
from torch import Tensor

from attn_select.backends.spec import BackendPlan
from attn_select.decide.gate import check
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import CPU
from attn_select.machine.environment import Environment
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch
from attn_select.testing import conformance_run as run
from attn_select.testing.toolkit import selection_for


@dataclass
class Replay:
    """A captured step."""

    function: Any
    views: Mapping[str, Tensor]
    metadata: Any
    output: Tensor

    def replay(self) -> None:
        self.output.copy_(self.function(self.views, self.metadata))


class EagerRunner(CudaGraphRunner[Any]):
    """Replays on a CPU: what was captured runs again on the memory that batches, inputs and builders keep."""

    def __init__(
        self,
        function: Any,
        groups: Sequence[Any],
        inputs: Mapping[str, Tensor],
        sizes: Sequence[int],
        *,
        query_len: int = 1,
        mixed: bool = False,
    ) -> None:
        self.function, self.groups, self.sizes = function, tuple(groups), sorted(sizes)
        self.query_len = None if mixed else query_len
        self.batches = {group: StaticBatch(group, self.query_len) for group in groups}
        most = next(iter(self.batches.values())).padded_tokens(self.sizes[-1])
        self.inputs = {name: tensor.new_zeros(most, *tensor.shape[1:]) for name, tensor in inputs.items()}
        self._graphs = {}

    def capture(self) -> None:
        for size in reversed(self.sizes):
            views, metadata = self._views(size), self._capture_metadata(size)
            output = self.function(views, metadata)
            self._graphs[size] = Replay(self.function, views, metadata, output), output  # type: ignore[assignment]


@pytest.mark.parametrize("level", ["UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"])
def test_graph_replays_are_compared(right: Variant, monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
    monkeypatch.setattr(run, "CudaGraphRunner", EagerRunner)
    runtime = right.runtime

    class OnDevice(runtime.AcmeMetadataBuilder):  # type: ignore[name-defined, misc]
        def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
            return runtime.AcmeMetadata(common.query_start_loc, common.seq_lens, common.block_table_tensor)

    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, sinks=True, num_speculative_tokens=2)

    def replays(variant: Variant) -> int:
        spec, options = variant.spec, variant.spec.options()
        judged = {phase: check(spec, config, CPU, Environment(), options, phase) for phase in config.phases}
        plans = {phase: plan for phase, plan in judged.items() if isinstance(plan, BackendPlan)}
        selection = selection_for(spec, plans, config, CPU, Environment(), options)
        assert selection is not None
        return run.Rig(selection, torch.device("cpu"), 0, cuda_graphs=True).check_graphs()

    variant = right.planning(cuda_graph=level)
    assert replays(variant.running(builder=OnDevice)) == (7 if level == "ALWAYS" else 4)
    with pytest.raises(AssertionError, match=r"is off by|holds NaN|LSE of request"):
        replays(variant)  # keeps the lengths that it was captured with, on the host

"""What tests of TRITON_ATTN's runtime share: groups of its layers, and steps that are compared with the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_select.layer.config import AttentionConfig
from attn_select.machine.detection import detect_device
from attn_select.reference.running import common_of, layer_of
from attn_select.runtime import AttentionGroup, Capacity, attention_group
from attn_select.testing import Problem, lse_error, random_problem, relative_error, selection_of
from attn_select_triton.facts.triton_attn import TRITON_ATTN

BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
MIXED = ((1, 40), (1, 1), (0, 9), (1, 0), (30, 70), (17, 17), (2, 50))
UNEVEN = ((1, 700), (1, 20), (1, 1), (1, 33))


def slow(fields: dict[str, Any], *more: Any) -> Any:
    return pytest.param(
        fields, *more, marks=pytest.mark.slow(guard="the test's other cases; the kernels' tests of all terms")
    )


def layer_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float16", **fields})


def made(
    device: torch.device,
    config: AttentionConfig,
    layout: str | None = None,
    *,
    capacity: Capacity | None = None,
    cuda_graphs: bool = False,
) -> AttentionGroup:
    """Return a group on ``device``; planned for an H100 where that is the CPU."""
    where = detect_device().device if device.type == "cuda" else "h100"
    selection = selection_of(TRITON_ATTN, config, where, layout=layout)
    return attention_group(selection, device, capacity or Capacity(16, 1024, 2048), cuda_graphs=cuda_graphs)


def problem_of(group: AttentionGroup, requests: Any, seed: int = 1, **options: Any) -> Problem:
    """Return a step of the group's layers; padding of tables and slots holds NaN."""
    block_size = group.block_size or 16
    return random_problem(
        seed, group.config, group.kv_layout, requests=requests, device=group.device, block_size=block_size, **options
    )


def run(
    group: AttentionGroup,
    problem: Problem,
    metadata: Any = None,
    padding: int = 2,
    output_scale: torch.Tensor | None = None,
    **build: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step on poisoned outputs with padding behind them, and return output and LSE without it.

    With ``output_scale`` the output is in e4m3. The LSE is handed over transposed, as FlashAttention has it: no kernel
    may take it for contiguous.
    """
    tokens, config = len(problem.query), group.config

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((padding, *tensor.shape[1:]), torch.nan)])

    shape, dtype = (tokens + padding, config.num_heads, config.value_head_size), problem.query.dtype
    output = torch.full(shape, torch.nan, device=group.device).to(
        dtype if output_scale is None else torch.float8_e4m3fn
    )
    lse = torch.full((config.num_heads, tokens + padding), torch.nan, device=group.device).T
    if metadata is None:
        metadata = group.build(common_of(problem), **build)
    new = (None, None) if config.attn_type == "encoder_decoder" else (padded(problem.key), padded(problem.value))
    kv_cache = None if problem.kv_cache is None else problem.kv_cache.clone()
    layer_of(group, problem).forward(padded(problem.query), *new, kv_cache, metadata, output, lse, output_scale)
    assert output[tokens:].float().isnan().all()
    assert lse[tokens:].isnan().all()
    return output[:tokens], lse[:tokens].contiguous()


def check(group: AttentionGroup, problem: Problem, **build: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step and compare it with the oracle."""
    output, lse = run(group, problem, **build)
    compare(group, problem, output, lse)
    return output, lse


def compare(group: AttentionGroup, problem: Problem, output: torch.Tensor, lse: torch.Tensor) -> None:
    wanted, wanted_lse = problem.reference()
    bound = BOUNDS[group.config.dtype]
    assert relative_error(output, wanted).row < bound
    assert lse_error(lse, wanted_lse) < bound


def builder_of(group: Any) -> Any:
    return group.distinct[0].builder


def many_sms(group: Any, count: int = 100) -> Any:
    """Make the builder schedule for a GPU that is hard to fill."""
    builder = builder_of(group)
    builder._gpu = dataclasses.replace(builder._gpu, sms=count)
    if builder._pieces is not None:
        builder._reserve_pieces()
    return group


def pieces_of(part: Any) -> list[int]:
    """Return of each request in how many pieces its keys are, of a step whose pieces were checked to be in order."""
    pieces = part.decode.pieces
    if pieces is None:
        return [1] * len(part.decode.seq_lens)
    there = pieces[pieces[:, 0] >= 0].tolist()
    assert [piece[0] >= 0 for piece in pieces.tolist()] == [True] * len(there) + [False] * (len(pieces) - len(there))
    sizes = [-(-seq_len // splits) for _, _, splits, _, _, _, seq_len, _ in there]
    assert sizes == sorted(sizes, reverse=True)
    found = [0] * len(part.decode.seq_lens)
    for request, _, splits, *_ in there:
        found[request] = splits
    assert len(there) == sum(found)
    return found

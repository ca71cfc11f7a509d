"""Attention of ``generate()`` and of a plain forward pass: dense tensors in, our kernels on pages.

transformers keeps keys and values as ``(B, heads, tokens, size)``, of any cache class. ``TORCH_SDPA`` takes them and
the mask. For every other backend the keys of a call are copied into pages that all layers of a kind share, and the
kernel reads the pages.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_select.errors import AttnSelectError
from attn_select.runtime import AttentionMetadata, BlockTable, key_value_views, prepare_batch
from attn_select_transformers.kinds import Kernels, Kind, choices_of, kind_of
from attn_select_transformers.runs import Runs, holders, read_mask, without_mask

logger = logging.getLogger("attn_select_transformers")
_READ = "_attn_select_runs"
TAKES_DENSE = frozenset({"TORCH_SDPA"})
"""Backends that attend to dense keys and values with a mask: copies into pages would only cost time."""


class MaskError(AttnSelectError, ValueError):
    """A call that no kernel can serve and that may not go to torch's masked attention: says why and what to do."""

    code = "mask-not-supported"


@dataclass(slots=True)
class Step:
    """What all layers of a kind need for one call."""

    runs: Runs
    metadata: AttentionMetadata
    # ``(T,)`` rows of the flattened ``(B * rows)`` queries in the batch's order, and ``(S,)`` of the flattened ``(B *
    # keys)`` keys that the batch has; None: all, in order.
    queries: Tensor | None
    keys: Tensor | None
    # ``(S,)`` where each of these keys goes; None where the kernel reads no pages.
    slots: Tensor | None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers' attention functions do; return the output, and None for the weights."""
    # The query is ``(B, num_heads, T, head_size)``, keys and values ``(B, num_kv_heads, S, size)``, all of them; the
    # output ``(B, T, num_heads, value_head_size)``, where a query that sees no key (padding) has 0. The mask is as
    # ``runs.read_mask`` takes it, or None (``runs.without_mask``). Of the options ``sliding_window``, ``softcap``,
    # ``s_aux`` and ``position_bias`` count. Raises MaskError where no kernel can serve the call, and torch's masked
    # attention cannot or may not; NoBackendError where no backend serves such layers here.
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if options.pop("output_attentions", False):
        _warn_once("no weights are returned for output_attentions=True: load the model with eager attention for them")
    if attention_mask is not None and attention_mask.shape[-1] > key.shape[2]:  # a static cache's, of all its slots
        attention_mask = attention_mask[..., : key.shape[2]]
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
    if (reason := _needs_torch(query, key, value, dropout, options)) is not None:
        return _masked_by_torch(reason, module, query, key, value, attention_mask, arguments)
    if (dense := _dense_kind(module, query, key, value, causal, options)) is not None:
        choices_of(module).kinds[dense] = None
        return _by_sdpa(module, query, key, value, attention_mask, arguments), None
    if attention_mask is None:
        runs = without_mask(query.shape[0], query.shape[2], key.shape[2], causal)
    else:
        read = _read(attention_mask, query.shape[0], module)
        if read is None or not read.runs:
            shape = tuple(attention_mask.shape)
            reason = f"the attention mask of shape {shape} is not made of causal, windowed or whole runs of keys"
            return _masked_by_torch(reason, module, query, key, value, attention_mask, arguments)
        runs = read
    kind = kind_of(query, key, value, _attn_type(runs, causal), _window(runs, options), options)
    choices_of(module).kinds[kind] = None
    return attend_runs(kind, runs, module, query, key, value, scaling, options.get("s_aux")), None


def attend_runs(
    kind: Kind,
    runs: Runs,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend as ``runs`` say, on the kind's kernels; arguments and result as of ``attend``."""
    kernels = kind.kernels()
    step = _step(kernels, runs)
    layer = kernels.layer(module, scaling, sinks)  # after the step, which may replace the group
    queries = query.transpose(1, 2).flatten(0, 1)
    if step.queries is not None:
        queries = queries[step.queries]
    output = query.new_empty(queries.shape[0], query.shape[1], value.shape[3])
    if step.slots is None:
        keys, values = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (key, value))
        if step.keys is not None:
            keys, values = keys[step.keys], values[step.keys]
        layer(queries.contiguous(), keys, values, None, step.metadata, output)
    else:
        cache = _written(kernels, step, key, value)
        layer(queries.contiguous(), None, None, cache, step.metadata, output)
    if step.queries is not None:
        whole = output.new_zeros(query.shape[0] * query.shape[2], *output.shape[1:])
        whole[step.queries] = output
        output = whole
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])


def _needs_torch(query: Tensor, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any]) -> str | None:
    """Return why a call cannot go to a kernel whatever its mask, or None."""
    if options.get("position_bias") is not None:
        return "a position bias is added to the scores, which no kernel here does"
    if dropout:
        return f"dropout = {dropout}: the kernels are for inference"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        return "gradients are asked for (no torch.no_grad()): the kernels are for inference"
    return None


def _dense_kind(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, causal: bool, options: dict[str, Any]
) -> Kind | None:
    """Return the kind of a call whose backend takes dense tensors; None where it does not."""
    # A soft cap and sinks are not part of what torch's function computes: such calls go to pages.
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        return None
    attn_type = "decoder" if causal else "encoder_only" if query.shape[2] == key.shape[2] else "encoder_decoder"
    window = options.get("sliding_window") if causal else None
    kind = kind_of(query, key, value, attn_type, window, options)
    choices_of(module).considered[kind] = None
    return kind if set(kind.selection.selected.values()) <= TAKES_DENSE else None


def _read(mask: Tensor, sequences: int, module: nn.Module) -> Runs | None:
    """Return ``read_mask``, read once for all layers that get the same tensor."""
    # An inference tensor counts no changes. It is read again when the layer that read it gets it again: in the next
    # forward pass.
    version = None if mask.is_inference() else mask._version
    known = getattr(mask, _READ, None)
    if known is None or known[:2] != (version, sequences) or (version is None and known[2] is module):
        known = (version, sequences, module, read_mask(mask, sequences))
        setattr(mask, _READ, known)
    runs: Runs | None = known[3]
    return runs


def _attn_type(runs: Runs, causal: bool) -> str:
    if not runs.bidirectional and (causal or any(run.rows > 1 for run in runs.runs)):
        return "decoder"
    # "whole": each run's rows stand where its keys stand; "every": no row of a sequence is left out.
    whole = all(run.first_row == run.first_key and run.last_row == run.last_key for run in runs.runs)
    every = len(runs.runs) * runs.rows == sum(run.rows for run in runs.runs) and runs.rows == runs.keys
    return "encoder_only" if whole and every and runs.runs[0].rows == runs.rows else "encoder_decoder"


def _window(runs: Runs, options: dict[str, Any]) -> int | None:
    """Return the window of the layer: its own where the mask agrees with it, else what the mask shows."""
    if runs.bidirectional:
        return None
    own = options.get("sliding_window")
    agrees = own and (runs.window == own or (runs.window is None and runs.widest <= own))
    return int(own) if own and agrees else runs.window


def _step(kernels: Kernels, runs: Runs) -> Step:
    """Return what the kind's layers need for these runs, made once for all of them."""
    step: Step | None = kernels.state.get("step")
    if step is None or step.runs is not runs:
        requests, tokens = len(runs.runs), sum(run.rows for run in runs.runs)
        kernels.reserve(requests, tokens, max(run.last_key - run.first_key for run in runs.runs))
        step = kernels.state["step"] = _made(kernels, runs)
    return step


def _made(kernels: Kernels, runs: Runs) -> Step:
    size, device = kernels.group.block_size, kernels.device
    query_lens = [run.rows for run in runs.runs]
    seq_lens = [run.last_key - run.first_key for run in runs.runs]
    slots = table = None
    if size is None:
        keys = _rows_or_all(
            [(r.sequence, r.first_key, r.last_key) for r in runs.runs], runs.sequences, runs.keys, device
        )
    else:
        first_blocks: dict[tuple[int, int], int] = {}
        key_rows, key_slots, used = [], [], 0
        for (sequence, first), positions in holders(runs).items():
            first_blocks[sequence, first] = used
            key_rows.append(torch.arange(positions) + (sequence * runs.keys + first))
            key_slots.append(torch.arange(positions) + used * size)
            used += -(-positions // size)
        keys, slots = torch.cat(key_rows).to(device), torch.cat(key_slots).to(device)
        table = BlockTable(len(seq_lens), -(-max(seq_lens) // size), size, device)
        for row, (run, length) in enumerate(zip(runs.runs, seq_lens, strict=True)):
            begin = first_blocks[run.sequence, run.first_key]
            table.set_row(row, [*range(begin, begin - (-length // size))])
        kernels.state["blocks"] = max(used, kernels.state.get("blocks", 0))
    common = prepare_batch(query_lens, seq_lens, table, new_lens=[0] * len(seq_lens), device=device)
    if table is not None:  # the layer writes nothing: the keys of all runs are copied into the pages before
        nowhere = torch.full((common.num_actual_tokens,), -1, dtype=torch.int64, device=device)
        common = replace(common, slot_mapping=nowhere)
    queries = _rows_or_all(
        [(r.sequence, r.first_row, r.last_row) for r in runs.runs], runs.sequences, runs.rows, device
    )
    return Step(runs, kernels.group.build(common), queries, keys, slots)


def _rows_or_all(parts: list[tuple[int, int, int]], sequences: int, length: int, device: torch.device) -> Tensor | None:
    """Return the rows ``first .. last - 1`` of each part's sequence in the flattened batch; None where they are all."""
    rows = torch.cat([torch.arange(first, last) + sequence * length for sequence, first, last in parts])
    return None if torch.equal(rows, torch.arange(sequences * length)) else rows.to(device)


def _written(kernels: Kernels, step: Step, key: Tensor, value: Tensor) -> Tensor:
    """Copy the call's keys and values into the kind's pages and return these."""
    state = kernels.state
    blocks: int = state["blocks"]
    cache: Tensor | None = state.get("cache")
    if cache is None or state["cache_blocks"] < blocks:
        state["cache_blocks"] = 1 << (blocks - 1).bit_length()
        with torch.inference_mode(False):  # the pages outlive this pass: others write them outside of inference mode
            cache = state["cache"] = kernels.group.allocate_kv_cache(state["cache_blocks"])
    assert kernels.group.kv_layout is not None
    pages = key_value_views(cache, kernels.group.kv_layout, kernels.config)
    size = pages[0].shape[1]
    assert step.slots is not None
    at = step.slots // size, step.slots % size
    for page, dense in zip(pages, (key, value), strict=True):
        rows = dense.transpose(1, 2).flatten(0, 1)
        page[at] = rows[step.keys]
    return cache


def _masked_by_torch(
    reason: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attend through torch's masked attention, and say so once per reason; MaskError where that is not allowed."""
    # A rule may deny TORCH_SDPA, and it has no soft cap and no sinks.
    kind = kind_of(query, key, value, "decoder", None, arguments)
    has = (("soft cap", kind.config.logits_soft_cap), ("sinks", kind.config.sinks))
    lacks = [name for name, here in has if here]
    name = type(module).__name__
    if lacks:
        raise MaskError(
            f"{name}: {reason}, and torch's masked attention has no {' and no '.join(lacks)}",
            hint='load the model with attn_implementation="eager"',
        )
    if (denied := _denied(kind)) is not None:
        raise MaskError(
            f"{name}: {reason}, and TORCH_SDPA is not allowed: {denied}",
            hint='allow TORCH_SDPA in the rules, or load the model with attn_implementation="sdpa" or "eager"',
        )
    seen = choices_of(module).without_kernel
    if reason not in seen:
        seen[reason] = None
        _warn_once(f"{name}: {reason}; TORCH_SDPA attends with the mask")
    return _by_sdpa(module, query, key, value, mask, arguments), None


def _by_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]
) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **arguments)[0]
    return output


def _denied(kind: Kind) -> str | None:
    """Return how a rule denies TORCH_SDPA, or None where none does."""
    for candidate in kind.selection.candidates:
        for verdict in candidate.phases.values() if candidate.backend == "TORCH_SDPA" else ():
            for reason in verdict.reasons:
                if reason.code == "denied-by-rule":
                    return reason.message
    return None


_WARNED: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        logger.warning("attn-select: %s", text)

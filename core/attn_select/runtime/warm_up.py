"""``LayerGroup.warm_up``: steps that run before serving, so that no kernel is compiled in the middle of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.runtime.backend import Progress
from attn_select.runtime.batch import prepare_batch
from attn_select.runtime.custom_op import layer_of
from attn_select.runtime.metadata import CommonAttentionMetadata, causal_trees

SHORT, USUAL, LONG = 64, 2048, 32768
"""Tokens of the requests of the steps, as far as the capacity allows."""
FEW, MANY = (1, 8, 20), 64
"""Requests of small steps, whose keys are split in several ways, and of a large one, as far as the capacity allows."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did: ``kernels`` compiled before a step ran, ``steps`` that ran, and the ``seconds`` of all."""

    kernels: int
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the query tokens and the keys of each request, decodes first; ``tree``: they are trees of drafts."""

    requests: tuple[tuple[int, int], ...]
    captured: bool = False
    tree: bool = False

    def __str__(self) -> str:
        kinds = dict.fromkeys(self.requests)
        each = [f"{self.requests.count(kind)} x {kind[0]} tokens over {kind[1]} keys" for kind in kinds]
        return " and ".join(each) + (", trees" if self.tree else "") + (", captured" if self.captured else "")


def steps_of(
    config: AttentionConfig, most: tuple[int, int, int], phases: set[Phase], *, mixed: bool, captured: bool
) -> list[Step]:
    """Return steps that together need the kernels of a serving engine: few and many requests, short and long ones."""
    # ``most`` are the requests and tokens of a step, and the tokens of a request. ``mixed``: one backend computes
    # decodes and prefills of a step together. ``captured``: decodes, where the group serves them, are captured, too.
    many, tokens, length = min(MANY, most[0]), most[1], most[2]
    own_keys = not config.has_cache or config.attn_type == "encoder_decoder"
    found: list[Step] = []

    def add(requests: int, query: int, keys: int, captured: bool = False, tree: bool = False) -> None:
        keys = min(keys, length)
        query = min(query, keys)
        requests = min(requests, most[0], max(1, tokens // query))
        if query <= tokens:
            found.append(Step(((query, query if own_keys else keys),) * requests, captured, tree))

    if "decode" in phases:
        longest = config.max_decode_query_len
        for query in _halves(longest, 1):  # a request may have fewer drafts than an engine makes at most
            for requests, keys in ((1, SHORT), *((some, LONG) for some in FEW), (many, USUAL), (most[0], USUAL)):
                add(requests, query, keys)
                if config.draft_tree and query == longest > 1:
                    add(requests, query, keys, tree=True)
                if captured and query in (1, longest):
                    add(requests, query, keys, True, config.draft_tree)  # chains too read a mask
    if "prefill" in phases:
        for requests, query in ((1, SHORT), (4, USUAL // 4), (1, USUAL), (4, USUAL)):
            add(requests, query, query)
        if config.attn_type == "decoder":
            add(1, USUAL // 4, LONG)
            few = config.max_decode_query_len + 1
            add(2, USUAL, 4 * USUAL)
            for query in _halves(64, few):  # the rest of a prompt whose beginning is cached
                add(1, query, USUAL)
                add(1, query, query)
                add(FEW[1], query, LONG)
            add(1, USUAL // 6, USUAL // 6)  # a prompt too long for one launch with decodes, and short for its own
            rest, whole = min(4 * USUAL, length), min(USUAL // 4, length)
            # Uneven steps: of few programs, so that keys are split, and of many.
            short = min(SHORT, whole)
            for uneven in (
                ((few, rest),) * 4 + ((whole, whole),),
                ((few, few), (whole, whole)) * 2,
                ((few, rest), (short, short)) * 3,
                ((few, rest), (short, rest), (short, short), (short, short)) * 2,
            ):
                if len(uneven) <= most[0] and sum(query for query, _ in uneven) <= tokens and few <= rest:
                    found.append(Step(uneven))
    if mixed and phases == {"decode", "prefill"} and tokens >= SHORT + many and length >= SHORT:
        found.append(Step((*((1, min(USUAL, length)),) * (many - 1), (SHORT, SHORT))))
        # Small steps, whose decodes and prefills may be one launch, with keys that are split and whole.
        for query in _halves(SHORT, config.max_decode_query_len + 1):
            for requests, keys in ((1, SHORT), *((some, USUAL // 2) for some in FEW), (many - 1, SHORT)):
                decodes = ((1, min(keys, length)),) * min(requests, most[0] - 1)
                found.append(Step((*decodes, (query, min(max(keys, query), length)))))
    return list(dict.fromkeys(found))


def _halves(most: int, least: int) -> list[int]:
    """Return ``most`` and its halves down to ``least``: kernels' tiles of rows double, so that these need them all."""
    found = [most]
    while found[-1] > least:
        found.append(max(least, -(-found[-1] // 2)))
    return found


def batch_of(
    step: Step, config: AttentionConfig, block_size: int | None, device: torch.device
) -> CommonAttentionMetadata:
    """Return a step's batch: every request's blocks are block 0, and nothing is written."""
    queries, keys = zip(*step.requests, strict=True)
    common = prepare_batch(queries, keys, device=device)
    if block_size is not None and config.has_cache:
        columns = -(-common.max_seq_len // block_size)
        table = torch.zeros(common.num_reqs, columns, dtype=torch.int32, device=device)
        written = 0 if config.attn_type == "encoder_decoder" else common.num_actual_tokens
        slots = torch.full((written,), -1, dtype=torch.int64, device=device)
        common = replace(common, block_table_tensor=table, slot_mapping=slots, block_size=block_size)
    return replace(common, tree_mask=causal_trees(common, config.max_decode_query_len)) if step.tree else common


class GroupSteps:
    """The steps of a group, and what they run through: a layer, and a cache of one block that they do not write."""

    def __init__(self, group: Any) -> None:
        layer = layer_of(group)
        if layer is None:
            raise ConfigError("warm_up runs a layer of the group, and there is none: make the layers before")
        config, capacity = group.config, group.capacity
        self.group, self._layer = group, layer
        self._cache = group.allocate_kv_cache(1) if config.has_cache else None
        self.steps = steps_of(
            config,
            (capacity.max_num_seqs, capacity.max_num_batched_tokens, capacity.max_model_len),
            set(group.backends),
            mixed=group.unified or config.mla,
            captured=group.cuda_graphs and group.cudagraph_support != "NEVER",
        )

    def run(self, step: Step) -> None:
        """Run one step."""
        group = self.group
        common = batch_of(step, group.config, group.block_size, group.device)
        metadata = (group.build_for_cudagraph_capture if step.captured else group.build)(common)
        inputs = self._layer.dummy_inputs(common.num_actual_tokens)
        self._layer(**inputs, kv_cache=self._cache, attn_metadata=metadata)


def compile_kernels(every: Sequence[GroupSteps], tell: Progress) -> int:
    """Compile the kernels of these steps side by side, where a group's one backend can; run none. Return how many."""
    compiled = 0

    def count(name: str, done: int, known: int) -> None:
        nonlocal compiled
        compiled += 1
        tell(name, done, known)

    able: dict[Any, list[GroupSteps]] = {}
    for one in every:
        # Of several backends one could read indices that a kernel of another one, which did not run, was to write.
        kinds = {own.backend.compiling for own in one.group.distinct}
        if len(kinds) == 1 and (compiling := kinds.pop()) is not None:
            able.setdefault(compiling, []).append(one)
    for compiling, together in able.items():
        with compiling(count):
            for one in together:
                for step in one.steps:
                    one.run(step)
    return compiled


def warm_up(group: Any, progress: Progress | None) -> WarmUp:
    """Run steps through a layer of a group, whose ``warm_up`` says more; ConfigError where it has no layer yet."""
    began = time.perf_counter()
    tell = progress or (lambda name, done, known: None)
    made = GroupSteps(group)
    kernels = compile_kernels([made], tell)
    for done, step in enumerate(made.steps, 1):
        made.run(step)
        tell(str(step), done, len(made.steps))
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return WarmUp(kernels, len(made.steps), time.perf_counter() - began)

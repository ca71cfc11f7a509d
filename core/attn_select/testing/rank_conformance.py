"""A suite's configurations on the ranks of a process group: real collectives, and CUDA graphs with them inside."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from typing import Any

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, RuntimeMissingError
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import ContextParallel
from attn_select.testing.conformance import BackendConformance, rank_options
from attn_select.testing.conformance_configs import config_text, draw_case
from attn_select.testing.conformance_run import Rig
from attn_select.testing.toolkit import plans_of, selection_for

ALONE = {
    "sliding_window": None, "attention_chunk_size": None, "alibi": False, "cuda_graph": "NEVER", "draft_tree": False,
}  # fmt: skip
"""What no backend runs over several ranks, off; the level of CUDA graphs is the plan's."""


def layers_of(suite: BackendConformance, size: int) -> Iterator[tuple[int, Selection]]:
    """Yield numbers and selections of layers over ``size`` ranks that a suite's backend runs on this machine."""
    _, device, environment = suite.place()
    for index in range(suite.num_configs):
        case = draw_case(suite.spec, suite.seed, index, suite.heads)
        if case.changed is not None or not case.config.has_cache or case.config.output_quantization == "fp4":
            continue
        try:
            config = case.config.model_copy(update={**ALONE, "decode_context_parallel_size": size})
        except ConfigError:
            continue
        plans = plans_of(suite.answers_here(config))
        given = (suite.spec, plans, config, device, environment, suite.made_options())
        if plans and (selection := selection_for(*given, layout_choice=index)) is not None:
            yield index, selection


def check_on_group(
    suite: BackendConformance,
    group: Any,
    num_layers: int,
    *,
    cuda_graphs: bool = False,
    merge: str | None = None,
) -> list[str]:
    """Run a suite's first layers over the ranks of a process group; every rank calls it. Return what went wrong."""
    # That is the same on all ranks: per failure the layer as an expression, the options, and the error. ``merge`` is
    # how results are merged, as ``ContextParallel`` has it; None: drawn for each layer.
    here = suite.place()[0]
    size, wrong, ran = ContextParallel(group).size, [], 0
    for index, selection in layers_of(suite, size):
        if ran == num_layers:
            break
        options = rank_options(random.Random(f"ranks {index}"), selection)
        if merge is not None:
            options["merge"] = merge
        ranks = ContextParallel(group, **options)
        config: AttentionConfig = selection.config
        try:
            rig = Rig(selection, here, index, bound=suite.error_bound, ranks=ranks)
            rig.check_batches()
            if cuda_graphs and rig.can_capture:
                Rig(selection, here, index, bound=suite.error_bound, cuda_graphs=True, ranks=ranks).check_graphs()
            ran += 1
        except RuntimeMissingError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename}:{where.lineno}"
            wrong.append(f"{config_text(config)}, {options}: {type(error).__name__}: {error} ({place})")
            ran += 1
    return wrong if ran else [f"{suite.spec.name}: no layer could be run"]

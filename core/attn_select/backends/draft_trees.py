"""Trees of drafts on kernels that take no mask: what their plans say (``attn_select.runtime.tree_group`` runs them)."""

from __future__ import annotations

from dataclasses import replace

from attn_select.backends.spec import BackendPlan, Reason
from attn_select.layer.config import AttentionConfig

IN_TWO_PARTS = "trees of drafts in two parts: the context by the kernel, the step's own tokens in torch, merged by LSE"


def reasons_against_two_parts(config: AttentionConfig) -> list[Reason]:
    """Return what a layer asks for that trees in two parts lack; nothing where it asks for no tree."""
    if not config.draft_tree:
        return []
    accepted = {"sliding_window": None, "alibi": False, "batch_invariant": False, "decode_context_parallel_size": 1}
    seen = {name: value for name, off in accepted.items() if (value := getattr(config, name)) != off}
    if not seen:
        return []
    wanted, supported = (", ".join(f"{name} {each}" for name, each in some.items()) for some in (seen, accepted))
    text = f"trees of drafts in two parts with {wanted} (supported: {supported})"
    return [Reason("draft-tree-in-two-parts", text, seen, accepted)]


def in_two_parts(plan: BackendPlan, config: AttentionConfig) -> BackendPlan:
    """Return the plan of a kernel that takes no mask, as it is where the layer asks for no tree."""
    if not config.draft_tree:
        return plan
    # A captured mixed step would be one batch of the kernel; in two parts its decodes are another.
    level = "UNIFORM_BATCH" if plan.cuda_graph == "ALWAYS" else plan.cuda_graph
    return replace(plan, trees_in_two_parts=True, cuda_graph=level, notes=(*plan.notes, IN_TWO_PARTS))

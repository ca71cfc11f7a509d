"""What ``select`` returns: the decision for one attention layer, which can be explained, written as data and loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from attn_select.backends.spec import BackendPlan
from attn_select.decide.outcome import Candidate, Outcome
from attn_select.errors import AttnSelectError
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import ConfigT

_OF_RULES = ("name", "effect", "phase", "file", "line", "because")
_OF_PLANS = (
    *("path", "because", "provider", "query_dtype", "rounds_to", "returns_lse", "kv_layouts", "kernel_block_sizes"),
    *("block_table_width_multiple", "cuda_graph", "workspace_bytes", "notes", "nan_tail_safe", "unverified"),
)
"""What JSON says of rules and of plans, in order."""


class NoBackendError(AttnSelectError):
    """No backend can run the layer, or the one that was asked for cannot.

    Attributes:
        selection: the whole decision, with every candidate's reasons.
    """

    code = "no-valid-backend"

    def __init__(self, message: str, selection: Selection[Any], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.selection = selection


class Selection(Outcome[ConfigT]):
    """The decision for one attention layer: what runs, how, and why nothing else does.

    ``attn_select.decide.outcome.Outcome`` documents the attributes.

    Attributes:
        runs_anywhere: its kernels are emulated, so that layers may run on another device than ``device``.
    """

    __slots__ = ()
    runs_anywhere: ClassVar[bool] = False

    def __repr__(self) -> str:
        chosen = ", ".join(f"{phase}={name}" for phase, name in self.selected.items())
        cache = "" if self.kv_layout is None else f", {self.kv_layout} in blocks of {self.block_size}"
        return f"Selection({self.device.name}: {chosen}{cache})"

    def load(self) -> dict[Phase, Any]:
        """Import the chosen kernels and return the runtime backend per phase.

        Raises:
            NoBackendError: a phase has no backend; names every candidate with its reasons.
            RuntimeMissingError: the backend's plugin brings facts but no runtime.
        """
        self.require()
        return {phase: spec.get_class() for phase, spec in self.backends.items() if spec is not None}

    def require(self) -> None:
        """Make sure that every phase has a backend.

        Raises:
            NoBackendError: a phase has none; names every candidate with its reasons.
        """
        missing = [phase for phase, spec in self.backends.items() if spec is None]
        if missing:
            raise NoBackendError(
                f"no backend for {' and '.join(missing)}\n{self.explain()}",
                self,
                hint="see the reasons and remedies above",
            )

    def explain(self) -> str:
        """Return the decision as text: the plan, every candidate with its reasons, the rules, the nearest remedies."""
        from attn_select.decide.text import selection_text

        return selection_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain data; ``docs/json.md`` documents the fields."""
        return {
            "config": self.config.model_dump(),
            "selected": self.selected,
            "explicit": dict(self.explicit),
            "workload": self.workload.to_dict() if self.workload is not None else None,
            "evidence": self.evidence.to_dict() if self.evidence is not None else None,
            "plan": self._plan_dict(),
            "candidates": [_candidate_dict(candidate) for candidate in self.candidates],
            "runners_up": {phase: found.to_dict() for phase, found in self.runners_up.items()},
            "rules": [{name: getattr(rule, name) for name in _OF_RULES} for rule in self.rules],
        }

    def _plan_dict(self) -> dict[str, Any]:
        selected, plans = self.selected, self.plans
        return {
            "phases": {phase: {"backend": selected[phase], **_backend_plan_dict(plans[phase])} for phase in plans},
            "block_size": self.block_size,
            "kv_layout": self.kv_layout,
            "cache_shape": self.cache_shape,
            "cache_dtype": self.stored_dtype,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_request": self.bytes_per_request,
            "indexer_bytes_per_token": self.indexer_bytes_per_token,
            "ranks": self._rank_dict(),
        }

    def _rank_dict(self) -> dict[str, Any] | None:
        """Return what context parallelism costs and saves; None for layers of one rank."""
        costs = self.rank_costs
        if costs is None:
            return None
        steps = [{**asdict(step), "batch": str(step.batch)} for step in costs.steps]
        return {"size": costs.ranks, "bytes_per_token": costs.bytes_per_token, "steps": steps}


def _backend_plan_dict(plan: BackendPlan) -> dict[str, Any]:
    values = {name: getattr(plan, name) for name in _OF_PLANS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _candidate_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "phases": {
            phase: {
                "rank": verdict.rank,
                "verdict": verdict.verdict,
                "reasons": [asdict(reason) for reason in verdict.reasons],
                "path": verdict.plan.path if verdict.plan is not None else None,
                "because": verdict.plan.because if verdict.plan is not None else None,
                "unverified": list(verdict.plan.unverified) if verdict.plan is not None else [],
                "timing": verdict.timing.to_dict() if verdict.timing is not None else None,
                "behind": verdict.relative_time,
            }
            for phase, verdict in candidate.phases.items()
        },
    }

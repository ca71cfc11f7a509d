"""Which candidates of a selection take turns in one group, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selection import Selection
from attn_select.decide.shared_cache import PlansByBackend
from attn_select.errors import ConfigError, show
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.times.choice import Rival
from attn_select.times.model import LEAST_POINTS, TimeModel
from attn_select.times.step_choice import StepChoice

MEASURED = "measured"
"""The value of ``dispatch`` with which the backend that is predicted to be fastest runs each step."""


@dataclass(slots=True)
class Dispatch:
    """The backends that take turns.

    Attributes:
        plans: of all backends, the chosen ones first.
        specs: by name.
        choice: which runs a step.
        candidates: per phase the backends that take turns, the chosen one first; fewer than two: it runs all of them.
        left_out: per phase why others do not take part, a clause each.
    """

    plans: dict[str, dict[Phase, BackendPlan]]
    specs: dict[str, BackendSpec]
    choice: StepChoice
    candidates: dict[Phase, list[str]] = field(default_factory=dict)
    left_out: dict[Phase, list[str]] = field(default_factory=dict)


def check_dispatch(dispatch: str | None, config: AttentionConfig) -> None:
    """Make sure that steps of these layers may be given to different backends.

    Raises:
        ConfigError: ``dispatch`` is neither None nor ``measured``, or the layers do not allow it.
    """
    if dispatch is None:
        return
    if dispatch != MEASURED:
        text = f"dispatch = {show(dispatch)}: accepted are {MEASURED!r} and None"
        raise ConfigError(text, fields=["dispatch"])
    for name, given, why in (
        ("batch_invariant", config.batch_invariant, "a request's result must not depend on the rest of its batch"),
        ("sparse_top_k", config.sparse, "times of sparse MLA are not measured"),
        ("output_quantization", config.output_quantization == "fp4", "block scales cannot be split between backends"),
    ):
        if given:
            text = f"dispatch = {MEASURED!r} with {name} = {show(getattr(config, name))}: {why}"
            raise ConfigError(text, fields=["dispatch", name])


def make_dispatch(selection: Selection, chosen: PlansByBackend, fits: Callable[[PlansByBackend], bool]) -> Dispatch:
    """Return the backends that take turns with a selection's backends, and the choice between them.

    Args:
        selection: made with a workload.
        chosen: the plans of the selection's backends for the phases that the group serves.
        fits: whether the kernels of some plans share a block size in the selection's layout.

    Raises:
        ConfigError: the selection knows no times, or in no phase two candidates can take turns; says why.
    """
    if selection.evidence is None:
        text = f"dispatch = {MEASURED!r}: the selection was made without a workload, so it knows no times"
        raise ConfigError(text, fields=["dispatch"], hint="select(config, workload='chat')")
    plans = {name: dict(own) for name, own in chosen.items()}
    specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
    names = {phase: name for name, own in chosen.items() for phase in own}
    models: dict[Phase, dict[str, TimeModel]] = {}
    left_out: dict[Phase, list[str]] = {}
    for phase, name in names.items():
        rivals = {rival.spec.name: rival for rival in selection.evidence.rivals.get(phase, ())}
        why = left_out[phase] = [] if rivals else [selection.evidence.phases[phase].why]
        found: dict[str, TimeModel] = {}
        for other in sorted(rivals, key=lambda each: each != name):  # the chosen one first
            model = rivals[other].model
            more = {**plans, other: {**plans.get(other, {}), phase: rivals[other].plan}}
            if model is None:
                why.append(f"{other} has no model of its times (`attn-select measurements fit` fits them)")
            elif against := next(_against(selection, rivals[other], rivals[name], phase, model), ""):
                why.append(f"{other} {against}")
            elif not fits(more):
                why.append(f"{other} shares no block size with {' and '.join(plans)} in {selection.kv_layout}")
            else:
                found[other] = model
                plans, specs[other] = more, rivals[other].spec
            if other == name and name not in found:
                break  # nothing compares with what is not known
        if len(found) > 1:
            models[phase] = found
    if not models:
        told = "; ".join(f"{phase}: {', '.join(why) or 'no other candidate'}" for phase, why in left_out.items())
        raise ConfigError(
            f"dispatch = {MEASURED!r}: times of fewer than two backends that could take turns are known ({told})",
            fields=["dispatch"],
            hint="measure more batches with attn-select bench, or leave dispatch out",
        )
    choice = StepChoice(selection.config, names, models, apart=selection.config.mla)
    candidates = {phase: [*models.get(phase, (name,))] for phase, name in names.items()}
    kept = {name for each in candidates.values() for name in each}
    return Dispatch({name: plans[name] for name in plans if name in kept}, specs, choice, candidates, left_out)


def _against(selection: Selection, rival: Rival, chosen: Rival, phase: Phase, model: TimeModel) -> Iterator[str]:
    """Yield why a candidate cannot take turns with the chosen one."""
    if (model.decode if phase == "decode" else model.prefill) is None:
        yield f"was measured for fewer than {LEAST_POINTS} batches of {phase}"
    if rival.plan.kv_layouts and selection.kv_layout not in rival.plan.kv_layouts:
        yield f"does not read {selection.kv_layout}"
    merged = selection.config.mla and phase == "prefill"  # chunks of cached context are merged by their LSE
    if merged and chosen.plan.returns_lse and not rival.plan.returns_lse:
        yield f"returns no LSE, as {chosen.spec.name} does"

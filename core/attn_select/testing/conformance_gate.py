"""What the gate says to a configuration, held against what is declared; and a selection of one backend from it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attn_select import gate
from attn_select.config import AttentionConfig, Phase
from attn_select.decide import shared_cache
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.layouts import MLA
from attn_select.selection import Candidate, Selection, Verdict
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec, Reason
from attn_select.testing.conformance_configs import Case

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them
Outcome = BackendPlan | list[Reason]
Outcomes = dict[Phase, Outcome]
"""Per phase that the layer has and the backend serves."""
ASSUMED = Environment(assume_installed=True)
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_WORDS = {True: "accepts", False: "refuses"}


def outcomes(
    spec: BackendSpec, config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions
) -> Outcomes:
    """Ask the gate about every phase."""
    served = [phase for phase in config.phases if phase in spec.capabilities]
    return {phase: gate.check(spec, config, device, environment, options, phase) for phase in served}


def plans_of(found: Outcomes) -> dict[Phase, BackendPlan]:
    """Return the plans of the phases that are accepted."""
    return {phase: outcome for phase, outcome in found.items() if isinstance(outcome, BackendPlan)}


def codes(outcome: Outcome) -> set[str]:
    """Return the codes of the reasons, none of a plan."""
    return {reason.code for reason in outcome} if isinstance(outcome, list) else set()


def undeclared(spec: BackendSpec, phase: Phase, config: AttentionConfig) -> set[str]:
    """Return the codes of what a plain comparison has against a configuration, on whatever device."""
    compared = gate.CapabilityGate(spec.capabilities[phase], Device("any", (0, 0)), ())
    return codes(compared.reasons(config, gate.Demands(config))) - {"compute-capability"}


def check_outcomes(spec: BackendSpec, case: Case, found: Outcomes) -> None:
    """Hold the gate to its word: what is not declared is refused for that, what is declared only by the plan.

    Raises:
        AssertionError: it is not so, or a reason says nothing.
    """
    for phase, outcome in found.items():
        for reason in outcome if isinstance(outcome, list) else ():
            stated = _CODE.fullmatch(reason.code) and reason.message and reason.code != "plugin-error"
            assert stated, f"{phase} is refused for no stated reason: {reason}"
    outcome, name = found[case.phase], f"{case.phase}: {case.changed or 'all of it'}"
    if case.changed is not None:
        assert case.code in codes(outcome), f"{name} is not declared, so {case.code!r} is due; the gate said {outcome}"
        return
    wrong = undeclared(spec, case.phase, case.config)
    assert not wrong, f"{name} is declared, but the comparison refuses it: {wrong}"


def check_kernel(phase: Phase, outcome: Outcome, answer: bool | None) -> None:
    """Compare the gate with what the kernel itself says.

    Raises:
        AssertionError: they differ.
    """
    said = isinstance(outcome, BackendPlan)
    text = f"{phase}: the gate {_WORDS[said]} what the kernel {_WORDS[not said]}: {outcome}"
    assert answer is None or answer == said, text


def selection_for(
    spec: BackendSpec,
    plans: Mapping[Phase, BackendPlan],
    config: AttentionConfig,
    device: Device,
    environment: Environment,
    options: BackendOptions,
    layout_choice: int = 0,
) -> Selection | None:
    """Return what ``select`` would return if ``spec`` were the only backend; None: the phases share no cache.

    Args:
        plans: what ``gate.check`` returned for the phases to select for.
        layout_choice: which of the KV layouts that all plans read, modulo their number; 0 is the preferred one.
    """
    readers = [plan.kv_layouts for plan in plans.values() if plan.kv_layouts]
    shared = [name for name in readers[0] if all(name in layouts for layouts in readers)] if readers else []
    layout = shared[layout_choice % len(shared)] if shared else None
    cache = shared_cache([*plans.values()], config.block_size, layout)
    if cache is None:
        return None
    if config.has_cache and not readers:  # MLA prefill leaves the cache to whoever serves decode
        cache = MLA, config.block_size or 16
    verdicts: dict[Phase, Verdict] = {phase: Verdict(1, "selected", [], plan) for phase, plan in plans.items()}
    return Selection(
        config=config,
        device=device,
        environment=environment,
        backends=dict.fromkeys(plans, spec),
        block_size=cache[1] if config.has_cache else None,
        kv_layout=cache[0] if config.has_cache else None,
        candidates=(Candidate(spec.name, verdicts),),
        rules=(),
        explicit={},
        warnings=(),
        options={spec.name: options},
    )

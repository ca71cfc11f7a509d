"""Text for people: a selection, or a whole report of layer kinds, as lines (``attn_select.decide.lines``).

JSON comes from the same objects (``Selection.to_dict``), so both always agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_select.backends import distributions
from attn_select.backends.spec import BackendPlan, Reason
from attn_select.decide.amd import NVIDIA
from attn_select.decide.cache_text import cache_lines
from attn_select.decide.config_text import config_text
from attn_select.decide.lines import HANG, Line, byte_text, plain, row
from attn_select.decide.outcome import Candidate, Outcome, Verdict
from attn_select.decide.runner_up_text import runner_up_lines
from attn_select.decide.time_text import chosen_time_lines, time_lines
from attn_select.layer.config import Phase
from attn_select.machine.device import Device
from attn_select.rules.layers import FILE_NAME
from attn_select.rules.rule import PACKAGED, Rule

if TYPE_CHECKING:
    from attn_select.layer.models.kv_sharing import CacheOwners
    from attn_select.machine.environment import Environment
    from attn_select.times.workload import Workload

_WRONG_KIND = ("mla-only", "mla-unsupported", "sparse-only", "sparse-unsupported", "phase-not-served")
"""Codes of reasons that hold for every layer of this kind, whatever else it asks for."""
_OTHER_KIND = _WRONG_KIND[:-1]
"""Those of them that hold in every phase."""
_NEED_GPU = "need a GPU"
_NEED_NVIDIA = "need a GPU of NVIDIA's"
_NOT_JUDGED = ("plugin-not-installed", "duplicate-backend", "denied-by-rule")

NAN_TAIL_WARNING = "a NaN in the unused tail of a block reaches the result; clear blocks before they are handed out"
"""Of a plan that is not ``nan_tail_safe``."""


def selection_text(selection: Outcome[Any]) -> str:
    """Return ``Selection.explain()``."""
    lines = [*device_lines(selection), [], *layer_lines(selection), *note_lines([selection])]
    return plain([*lines, *warning_lines(selection.warnings)])


def device_lines(selection: Outcome[Any]) -> list[Line]:
    """Say which device, which libraries and which workload the decision is for."""
    return situation_lines(selection.device, selection.environment, selection.workload)


def situation_lines(device: Device, environment: Environment, workload: Workload | None) -> list[Line]:
    """Say the same where there is no selection."""
    kind = "" if device.arch else "compute capability "
    facts = [] if device.is_cpu else [f"{kind}{device.capability_text}"]
    if device.sm_count:
        facts.append(f"{device.sm_count} {'CUs' if device.arch else 'SMs'}")
    if device.memory_gib:
        facts.append(f"{device.memory_gib:g} GiB")
    if device.bandwidth_gbps:
        facts.append(f"{device.bandwidth_gbps:g} GB/s")
    name = device.full_name or device.name
    details = f" ({', '.join(facts)})" if facts else ""
    pins = ", ".join(f"{library} {version}" for library, version in environment.pins.items())
    if environment.assume_installed:
        libraries = "not this machine's: every kernel library counts as installed"
        libraries += f"; given: {pins}" if pins else " (--with NAME==VERSION says which)"
    elif pins:
        libraries = f"as installed on this machine; given: {pins}"
    else:
        libraries = "as installed here (`attn-select doctor` lists)"
    lines: list[Line] = [
        [("Device     ", "dim"), HANG, (name, "title"), (details, "")],
        [("Libraries  ", "dim"), HANG, (libraries, "")],
    ]
    if workload is not None:
        shapes = str(workload)  # behind its name, where it has one of its own
        text = shapes if workload.name == shapes else f"{workload.name} ({shapes})"
        lines.append([("Workload   ", "dim"), HANG, (text, "")])
    return lines


def layer_lines(
    selection: Outcome[Any],
    kind: str | None = None,
    count: int | None = None,
    *,
    owners: CacheOwners | None = None,
    runs: bool = True,
    remedies: bool = True,
) -> list[Line]:
    """Render one layer kind: the plan, every candidate, the rules, the nearest remedies."""
    lines = plan_lines(selection, kind, count, owners=owners, runs=runs)
    lines += time_lines(selection)
    lines += _candidate_lines(selection, remedies)
    lines += _rule_lines(selection, selection.rules)
    lines += _remedy_lines(selection)
    return lines


def brief_lines(
    selection: Outcome[Any], kind: str | None = None, count: int | None = None, *, owners: CacheOwners | None = None
) -> list[Line]:
    """Render one layer kind: the plan, one line for each rejected backend with the first reason, the user's rules."""
    lines: dict[str, Line] = {}
    folded: dict[str, list[str]] = {}
    for candidate in selection.candidates:
        named = candidate.backend in selection.explicit.values()
        if _missing_plugins(candidate) and not named:
            continue
        rejected = {phase: v for phase, v in candidate.phases.items() if v.verdict == "rejected"}
        # A rejection in a phase that the backend does serve says more than that it does not serve the other.
        in_phases = {p: v for p, v in rejected.items() if [r.code for r in v.reasons] != ["phase-not-served"]}
        told = in_phases or rejected
        if not told:
            continue
        everywhere = len(rejected) == len(candidate.phases)
        standing = {_standing(verdict, selection.device) for verdict in told.values()}
        why = standing.pop() if everywhere and len(standing) == 1 and not named else None
        if why is not None:
            standing_why = why if why in (_NEED_GPU, _NEED_NVIDIA) else "serve other layers"
            folded.setdefault(standing_why, []).append(candidate.backend)
        lines[candidate.backend] = _brief_line(candidate.backend, told, everywhere, selection.device)
    several = {why: names for why, names in folded.items() if len(names) > 1}
    for names in several.values():
        lines = {backend: line for backend, line in lines.items() if backend not in names}
    if several:
        counts = ", ".join([f"{len(names)} others {why}" for why, names in several.items()])
        lines[""] = [(counts, ""), (" (--full names them)", "dim")]
    rejected_lines = [
        row("" if index else "rejected", *line, style="" if index else "rejected")
        for index, line in enumerate(lines.values())
    ]
    own = [rule for rule in selection.rules if rule.layer > PACKAGED]
    return plan_lines(selection, kind, count, owners=owners) + rejected_lines + _rule_lines(selection, own)


def _brief_line(backend: str, told: Mapping[Phase, Verdict], always: bool, device: Device) -> Line:
    reasons: list[Reason] = []
    for verdict in told.values():
        reasons += [reason for reason in verdict.reasons if reason not in reasons]
    where = "" if always else f" for {' and '.join(told)}"
    line: Line = [(backend, ""), (f"{where}: {reasons[0].message}", "")]
    if len(reasons) > 1:
        more = len(reasons) - 1
        line.append((f" (and {more} more reason{'s' if more > 1 else ''})", "dim"))
    return line + (_try(reasons[0], device) if len(reasons) == 1 else [])


def plan_lines(
    selection: Outcome[Any],
    kind: str | None = None,
    count: int | None = None,
    *,
    owners: CacheOwners | None = None,
    runs: bool = True,
) -> list[Line]:
    """Render what one layer kind asks for and the plan of each phase; ``owners`` and ``runs`` as in ``layer_lines``."""
    name = kind or getattr(selection.config, "recurrence", "Layer")
    title = name if count is None else f"{name} × {count}"
    lines: list[Line] = [[(f"{title}  ", "title"), HANG, (config_text(selection.config), "")]]
    for phase, name, plan in _merged_plans(selection):
        if name is None or plan is None:
            lines.append([(f"  {phase:<17}", ""), HANG, ("none", "rejected"), (f"  {_why_none(selection, phase)}", "")])
            continue
        explicit = any(chosen == name and p in phase for p, chosen in selection.explicit.items())
        by_name = ", asked for by name" if explicit else ""
        lines.append(
            [(f"  {phase:<17}", ""), HANG, (name, "selected"), (f"  {plan.path}: {plan.because}{by_name}", "")]
        )
        if not runs:
            continue
        facts = [f"query {plan.query_dtype}"]
        if selection.config.sort != "state":
            facts.append("returns LSE" if plan.returns_lse else "no LSE")
        facts.append(f"CUDA graphs {plan.cuda_graph}")
        if plan.workspace_bytes:
            facts.append(f"workspace {byte_text(plan.workspace_bytes)}")
        if plan.block_table_width_multiple > 1:
            facts.append(f"block table width a multiple of {plan.block_table_width_multiple}")
        if plan.provider:
            facts.append(f"kernel from {plan.provider}")
        lines.append(row("", (", ".join(facts), "dim")))
        lines += [row("", (note, "dim")) for note in plan.notes]
        if not plan.nan_tail_safe:
            lines.append(row("", ("not NaN-safe: ", "warning"), (NAN_TAIL_WARNING, "")))
        lines += [row("", ("unverified: ", "warning"), (clause, "")) for clause in plan.unverified]
    if not runs:
        return lines + chosen_time_lines(selection)
    return [
        *lines,
        *cache_lines(selection, count, owners),
        *chosen_time_lines(selection),
        *runner_up_lines(selection),
    ]


def _why_none(selection: Outcome[Any], phase: str) -> str:
    """Say why a phase has no backend; ``phase`` may be the title of both."""
    names = dict.fromkeys(name for p, name in selection.explicit.items() if p in phase)
    if names:
        return f"{' and '.join(names)}, asked for by name, cannot run this"
    if any(v.verdict == "valid" for c in selection.candidates for p, v in c.phases.items() if p in phase):
        return "no ranked backend, or no compatible pair, can run this"
    return "no backend can run this"


def _merged_plans(selection: Outcome[Any]) -> list[tuple[str, str | None, BackendPlan | None]]:
    selected, plans = selection.selected, selection.plans
    rows: list[tuple[str, str | None, BackendPlan | None]] = [(p, selected[p], plans.get(p)) for p in selected]
    if len(rows) == 2 and rows[0][1:] == rows[1][1:]:
        return [("prefill + decode", *rows[0][1:])]
    return rows


def _candidate_lines(selection: Outcome[Any], remedies: bool) -> list[Line]:
    lines: list[Line] = []
    phases = list(selection.backends)
    same = len(phases) == 2 and all(_same(c.phases["prefill"], c.phases["decode"]) for c in selection.candidates)
    other_kinds = _other_kinds(selection)
    elsewhere = {name for names in other_kinds.values() for name in names}
    for title, phase in [("prefill and decode", phases[0])] if same else [(p, p) for p in phases]:
        lines += [[], [(f"  Candidates for {title}", "title")]]
        folded = _folded(selection, phase, remedies, elsewhere)
        for candidate in sorted(selection.candidates, key=lambda c: c.phases[phase].order):
            if candidate.backend not in elsewhere and not any(candidate.backend in names for names in folded.values()):
                lines += _verdict_lines(candidate, phase, selection.device)
        lines += map(_others_line, folded.items())
    return [*lines, *map(_others_line, other_kinds.items())]


def _others_line(folded: tuple[str, list[str]]) -> Line:
    why, names = folded
    return [("     -  ", ""), HANG, (f"{len(names)} others {why}: {', '.join(names)}", "")]


def _other_kinds(selection: Outcome[Any]) -> dict[str, list[str]]:
    """Return the backends that serve other kinds of layers, by why; where two or more share it."""
    found: dict[str, list[str]] = {}
    for candidate in selection.candidates:
        for phase, verdict in candidate.phases.items():
            reason = next((reason for reason in verdict.reasons if reason.code in _OTHER_KIND), None)
            if reason is not None and selection.explicit.get(phase) != candidate.backend:
                found.setdefault(reason.message.replace("serves", "serve", 1), []).append(candidate.backend)
                break
    return {why: names for why, names in found.items() if len(names) > 1}


def _folded(selection: Outcome[Any], phase: Phase, remedies: bool, elsewhere: Collection[str]) -> dict[str, list[str]]:
    """Return the backends that can never serve this layer, by why; only where two or more share it."""
    found: dict[str, list[str]] = {}
    for candidate in sorted(selection.candidates, key=lambda c: c.phases[phase].order):
        if candidate.backend in elsewhere:
            continue
        verdict = candidate.phases[phase]
        why = _standing(verdict, selection.device)
        if not remedies and any(reason.code == "plugin-not-installed" for reason in verdict.reasons):
            why = "have no plugin installed"
        if why is not None and selection.explicit.get(phase) != candidate.backend:
            found.setdefault(why, []).append(candidate.backend)
    return {why: names for why, names in found.items() if len(names) > 1}


def _standing(verdict: Verdict, device: Device) -> str | None:
    """Return why nothing could make a backend serve this layer, to follow "3 others"; None where something could."""
    for reason in verdict.reasons:
        if reason.code in _WRONG_KIND:
            return reason.message.replace("serves", "serve", 1)
    places = [reason.supported for reason in verdict.reasons if reason.code == "compute-capability"]
    if places and device.is_cpu:
        return _NEED_GPU
    if NVIDIA in places:
        return _NEED_NVIDIA
    return None


def _same(a: Verdict, b: Verdict) -> bool:
    return a.rank == b.rank and a.verdict == b.verdict and a.reasons == b.reasons and a.plan == b.plan


def _verdict_lines(candidate: Candidate, phase: Phase, device: Device) -> list[Line]:
    verdict = candidate.phases[phase]
    rank = "-" if verdict.rank is None else str(verdict.rank)
    head: Line = [(f"  {rank:>4}  {candidate.backend:<21} ", ""), (f"{verdict.verdict:<9} ", verdict.verdict)]
    if verdict.plan is not None:
        note = "" if verdict.rank is not None else f" (no rule ranks it; --backend {candidate.backend} chooses it)"
        marks: list[Line] = [
            [(" " * 40, ""), HANG, ("unverified: ", "warning"), (clause, "")] for clause in verdict.plan.unverified
        ]
        return [[*head, HANG, (f"{verdict.plan.path}: {verdict.plan.because}{note}", "")], *marks]
    lines: list[Line] = []
    # A remedy is worth a try only where no reason is left that nothing removes.
    removable = all(reason.remedy for reason in verdict.reasons)
    for index, reason in enumerate(verdict.reasons):
        start: Line = head if index == 0 else [(" " * 40, "")]
        lines.append([*start, HANG, (reason.message, ""), *(_try(reason, device) if removable else [])])
    return lines


def _try(reason: Reason, device: Device) -> Line:
    """Render the remedy of a reason, which removes it."""
    return [("; try ", "dim"), *_remedy(reason, device)] if reason.remedy else []


def _remedy(reason: Reason, device: Device) -> Line:
    remedy = reason.remedy or ""
    elsewhere = not device.local and reason.code != "plugin-not-installed" and remedy.startswith("pip install ")
    return [(remedy, "remedy"), (f" ({distributions.NEEDS_GPU})" if elsewhere else "", "dim")]


def _rule_lines(selection: Outcome[Any], rules: Sequence[Rule]) -> list[Line]:
    rules = [rule for rule in rules if _has_effect(rule, selection)]
    if not rules:
        return []
    lines: list[Line] = [[], [("  Rules applied", "title")]]
    for rule in rules:
        effect = "evidence off" if rule.effect == "evidence" else rule.effect
        phase = f" for {rule.phase}" if rule.phase else ""
        because = f": {rule.because}" if rule.because else ""
        text = f"{rule.name} ({effect}{phase}){because}"
        lines.append([("    ", ""), HANG, (text, ""), (f"  {_origin(rule)}", "dim")])
    return lines


def _has_effect(rule: Rule, selection: Outcome[Any]) -> bool:
    """Whether a rule moved or denied a backend that could run otherwise; one that orders all of them always counts."""
    if rule.effect not in ("prefer", "avoid", "deny"):
        return True
    verdicts = [v for c in selection.candidates if c.backend in rule.backends for v in c.phases.values()]
    if rule.effect == "deny":
        return any(reason.code == "denied-by-rule" for verdict in verdicts for reason in verdict.reasons)
    return any(verdict.plan is not None for verdict in verdicts)


def _origin(rule: Rule) -> str:
    """Return ``file:line``, short for the packaged file; ``attn-select rules path`` says where that one is."""
    return f"packaged {FILE_NAME}:{rule.line}" if rule.layer == PACKAGED else rule.origin


def _remedy_lines(selection: Outcome[Any], most: int = 3) -> list[Line]:
    """Name the near misses: backends above the chosen one (or any, where none is) that a single remedy would admit."""
    admitted: dict[tuple[str, str], tuple[Reason, list[str]]] = {}
    for phase in selection.backends:
        ranked = [c for c in selection.candidates if c.phases[phase].rank is not None or not selection.backends[phase]]
        for candidate in sorted(ranked, key=lambda c: c.phases[phase].order):
            verdict = candidate.phases[phase]
            if verdict.verdict == "selected":
                break
            # A plugin that is not installed has not been asked, so nothing is known of what it would admit.
            alone = verdict.reasons[0] if len(verdict.reasons) == 1 else None
            if alone is not None and alone.remedy and alone.code not in _NOT_JUDGED:
                admitted.setdefault((alone.remedy, candidate.backend), (alone, []))[1].append(phase)
    lines: list[Line] = [
        [
            ("    ", ""),
            HANG,
            *_remedy(reason, selection.device),
            (f"  would admit {backend} for {' and '.join(phases)}", ""),
        ]
        for (_, backend), (reason, phases) in list(admitted.items())[:most]
    ]
    return [[], [("  Nearest misses", "title")], *lines] if lines else []


def _missing_plugins(candidate: Candidate) -> set[str]:
    """Return the plugin that a backend waits for, or nothing."""
    reasons = [reason for verdict in candidate.phases.values() for reason in verdict.reasons]
    return {str(reason.supported) for reason in reasons if reason.code == "plugin-not-installed"}


def plugin_lines(selections: Iterable[Outcome[Any]], installed: Sequence[str]) -> list[Line]:
    """Say in one line which backends are left out, as their plugins are not installed; ``installed`` plugins are."""
    waiting = {c.backend: plugins for s in selections for c in s.candidates if (plugins := _missing_plugins(c))}
    if not waiting:
        return []
    missing = {plugin for plugins in waiting.values() for plugin in plugins}
    text = f"{', '.join(installed) or 'none'}; {len(missing)} more would bring {len(waiting)} backends "
    return [[("Plugins    ", "dim"), HANG, (text, ""), ("(`attn-select backends` says how)", "dim")]]


def note_lines(selections: Iterable[Outcome[Any]], full: bool = True) -> list[Line]:
    """Say where plugins come from, if an install command for one is shown and no clone is at hand."""
    shown = (c for s in selections for c in s.candidates if full or c.backend in s.explicit.values())
    missing = {plugin for candidate in shown for plugin in _missing_plugins(candidate)}
    if all(distributions.folder_in_clone(distribution) for distribution in missing):
        return []
    return [[], [("note: ", "warning"), HANG, (distributions.NOT_ON_AN_INDEX, "")]]


def warning_lines(warnings: Sequence[str]) -> list[Line]:
    """Render warnings, one line each."""
    return [[], *([("warning: ", "warning"), HANG, (w, "")] for w in warnings)] if warnings else []

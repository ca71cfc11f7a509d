"""What is doubtful about rules without being an error: unknown names, rules that can never take effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from attn_select.backends import distributions
from attn_select.errors import UnknownNameError, show
from attn_select.layer.config import MLA_DIMS, PHASES
from attn_select.layer.features import FEATURES
from attn_select.machine.device import CPU, find_gpu
from attn_select.rules.conditions import (
    ONLY_OF_ATTENTION,
    ONLY_OF_STATES,
    UNSET,
    Condition,
    compile_when,
    is_number,
    limits,
)
from attn_select.rules.document import MOST_PROBLEMS, Problem, problem_text
from attn_select.rules.layers import RuleSet
from attn_select.rules.libraries import library_doubts
from attn_select.rules.rule import PACKAGED, Rule

if TYPE_CHECKING:
    from attn_select.backends.registry import Registry

(_MLA,), _ = compile_when({"mla": True})
(_NOT_MLA,), _ = compile_when({"mla": False})


def known_names(registry: Registry) -> list[str]:
    """Return every backend name that rules may use: registered (also twice), or known."""
    return list(dict.fromkeys((*registry.specs, *registry.conflicts, *distributions.known_backends())))


def unknown_names(rules: RuleSet, known: Sequence[str]) -> list[Problem]:
    """Return a problem for every backend name that is neither registered nor known (the first hundred)."""
    problems: list[Problem] = []
    valid = set(known)
    for file, line, what, name in _names(rules):
        if name not in valid and len(problems) < MOST_PROBLEMS:
            hint = UnknownNameError("backend", name, known).hint
            problems.append((file, line, f"{what} unknown backend {show(name)}; {hint}"))
    return problems


def _names(rules: RuleSet) -> Iterator[tuple[str, int | None, str, str]]:
    for rule in rules.rules:
        for name in rule.backends:
            yield rule.file, rule.line, f"rule {rule.name!r}:", name
    yield from rules.named
    for name, table in rules.options.items():
        yield *table.origin, "options for", name


def unreachable(rules: RuleSet) -> list[Problem]:
    """Return a problem for every rule without any effect.

    That is: a priority rule that earlier ones of its file always beat, a rule whose conditions nothing meets (one
    alone, or several that contradict each other), and one that disables a rule which no earlier file has.
    """
    problems = list(rules.idle)
    for _, in_layer in groupby(rules.rules, key=lambda rule: rule.layer):
        seen: list[Rule] = []
        for rule in in_layer:
            text = _unmet(rule.when)
            if text is None and rule.effect == "priority":
                if beaten_by := _beaten_by(rule, seen):
                    text = f"{' and '.join(f'{r.name!r} (line {r.line})' for r in beaten_by)} matched first"
                seen.append(rule)
            if text is not None:
                problems.append((rule.file, rule.line, f"rule {rule.name!r} is never reached: {text}"))
    return problems


def _unmet(when: Sequence[Condition]) -> str | None:
    """Return why nothing meets these conditions, None where something may."""
    for condition in when:
        if not _overlap(condition, condition):
            return f"nothing matches {condition}{_accepted(condition.field)}"
    return _contradiction(when) or _no_such_gpu(when)


def _accepted(field: str) -> str:
    """Return the values that a field of numbers can have, in words; nothing for other fields."""
    if not is_number(field):
        return ""
    least, most = limits(field)
    if 0 < least < 1:
        return " (it is greater than 0)"
    return f" (it is at least {least})" if most >= 2**31 - 1 else f" (it lies between {least} and {most})"


def _overlap(one: Condition, other: Condition) -> bool:
    """Whether a value may match both conditions, which are about the same field."""
    points = one.points | other.points
    if one.unset and other.unset:
        return True
    return not (one.points and other.points) or any(one.matches(p) and other.matches(p) for p in points)


# What a layer that matches the first conditions is known to match too (``AttentionConfig`` refuses all else).
_FOLLOWS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"sparse_top_k": ">0"}, {"sparse": True}),
    ({"kv_cache_dtype": "fp8_ds_mla"}, {"sparse": True}),
    ({"sparse": True}, {"mla": True}),
    *(({dimension: ">0"}, {"mla": True}) for dimension in MLA_DIMS),
    ({"v_head_size": ">0"}, {"mla": False}),
    ({"mla": True}, {"attn_type": "decoder", "num_kv_heads": 1}),
    ({"per_head_quant_scales": True}, {"kv_cache_dtype": ["fp8*", "nvfp4"]}),
    (
        {"attn_type": ["encoder", "encoder_only"]},
        {f.field: UNSET if f.off is None else f.off for f in FEATURES if f.not_in_encoders},
    ),
)


def _contradiction(when: Sequence[Condition]) -> str | None:
    """Return which two conditions no layer can meet together, None where none are known to contradict."""
    of_states = next((condition for condition in when if condition.field in ONLY_OF_STATES), None)
    of_attention = next((condition for condition in when if condition.field in ONLY_OF_ATTENTION), None)
    if of_states is not None and of_attention is not None:
        return f"a layer with {of_states} keeps a state, and the rule asks for {of_attention}, which is of attention"
    known = {condition.field: condition for condition in when}
    for needs, follows in _FOLLOWS:  # ordered so that what follows from one row is known to the rows below
        triggers, _ = compile_when(needs)
        if not implies(known.values(), triggers):
            continue
        for condition in compile_when(follows)[0]:
            written = known.get(condition.field)
            if written is not None and not _overlap(written, condition):
                cause = " and ".join(str(known[trigger.field]) for trigger in triggers)
                return f"a layer with {cause} has {condition}, and the rule asks for {written}"
            if written is None:
                known[condition.field] = condition
    return None


def _no_such_gpu(when: Sequence[Condition]) -> str | None:
    """Return that none of the GPUs that a rule names is like the rest of its conditions, None where one is."""
    by_field = {condition.field: condition for condition in when if condition.scope == "device"}
    named = by_field.pop("gpu", None)
    if named is None or not named.points or not by_field:
        return None
    for name in named.points:
        gpu = CPU if name == CPU.name else find_gpu(name)
        if gpu is None:
            return None  # a GPU that is not in the table may be anything
        values = {field: getattr(gpu, field) for field in by_field}
        if all(
            condition.matches(values[field])
            if values[field] is not None
            # A GPU has one of these, by its vendor; what else it has not is only unknown.
            else not gpu.is_cpu and field not in ("compute_capability", "arch")
            for field, condition in by_field.items()
        ):
            return None
    wanted = " and ".join(map(str, by_field.values()))
    return f"no GPU named {' or '.join(sorted(named.points))} has {wanted}"


def _beaten_by(rule: Rule, earlier: Sequence[Rule]) -> list[Rule]:
    """Return the earlier rules that together take every case of ``rule``, or nothing."""
    found: dict[str, Rule] = {}
    for phase in PHASES if rule.phase is None else (rule.phase,):
        for when in _halves(rule.when):
            for other in earlier:
                if other.phase in (None, phase) and implies(when, other.when):
                    found[other.name] = other
                    break
            else:
                return []
    return list(found.values())


def _halves(when: tuple[Condition, ...]) -> list[tuple[Condition, ...]]:
    """Split ``when`` into its MLA and its other cases: most rules files have these two halves."""
    fields = {condition.field for condition in when}
    if "mla" in fields:
        return [when]
    sparse = any(condition.field == "sparse" and not condition.matches(False) for condition in when)
    if sparse or not fields.isdisjoint((*MLA_DIMS, "sparse_top_k")):
        return [(*when, _MLA)]
    return [(*when, _MLA), (*when, _NOT_MLA)]


def implies(narrow: Iterable[Condition], wide: Iterable[Condition]) -> bool:
    """Whether everything that matches ``narrow`` surely matches ``wide`` too."""
    by_field = {condition.field: condition for condition in narrow}
    return all(_implies(by_field.get(condition.field), condition) for condition in wide)


def _implies(narrow: Condition | None, wide: Condition) -> bool:
    if narrow is None or (narrow.unset and not wide.unset):
        return False
    if narrow.points:
        return all(wide.matches(point) for point in narrow.points | wide.points if narrow.matches(point))
    return set(narrow.written) <= set(wide.written)


def rule_warnings(rules: RuleSet, known: Sequence[str]) -> list[str]:
    """Return the warnings that a selection carries, one line each."""
    return [*map(problem_text, [*rules.foreign, *unknown_names(rules, known), *rules.idle, *_of_rules(rules)])]


def _of_rules(rules: RuleSet) -> list[Problem]:
    """Return the warnings that rules came with when they were compiled."""
    return [(each.file, each.line, f"rule {each.name!r}: {text}") for each in rules.rules for text in each.warnings]


def beaten_by_denials(rules: RuleSet) -> list[Problem]:
    """Return a problem for every user's rule that names a backend which another rule denies in all its cases.

    A denial counts whatever prefers the backend, in whichever file.
    """
    problems: list[Problem] = []
    denials = [rule for rule in rules.rules if rule.effect == "deny"]
    for rule in [rule for rule in rules.rules if rule.layer > PACKAGED]:
        for name in rule.backends:
            others = denials[: denials.index(rule)] if rule.effect == "deny" else denials
            above = next((each for each in others if name in each.backends and _covers(each, rule)), None)
            if above is not None:
                text = f"rule {rule.name!r} has no effect on {name}: rule {above.name!r} ({above.origin}) denies it"
                problems.append((rule.file, rule.line, text))
    return problems


def _covers(wide: Rule, narrow: Rule) -> bool:
    """Whether a rule holds wherever another one does."""
    return wide.phase in (None, narrow.phase) and implies(narrow.when, wide.when)


def doubts(rules: RuleSet, registry: Registry) -> list[Problem]:
    """Return what ``rules check`` warns of."""
    libraries = library_doubts(rules.rules, registry.specs)
    problems = [*rules.foreign, *_of_rules(rules), *libraries, *unreachable(rules), *beaten_by_denials(rules)]
    return sorted(problems, key=lambda problem: (problem[0], problem[1] or 0))

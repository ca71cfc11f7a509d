"""``BackendConformance``: a pytest class that holds a backend to what its spec declares.

    from attn_select.testing import BackendConformance

    class TestAcme(BackendConformance):
        spec = ACME_ATTN

Each configuration is one test. The gate must refuse what is not declared, for that reason, and may refuse what is
declared only through ``plan``, with a reason. What it accepts runs on this machine and is compared with the float64
oracle. What cannot be run is judged by the gate in one test of its own, and the summary names it with its number: the
machine lacks the device or a library, or nothing can run the plan yet, which is then marked ``unverified``.

Slots behind a sequence's end in its last block hold NaN: a request must not be exposed to what another one left there.
Where a plan declares that it is not ``nan_tail_safe`` they hold large finite numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import pytest
import torch

from attn_select import detection, gate
from attn_select.config import AttentionConfig, Phase
from attn_select.device import CPU, Device, known_gpus, lookup
from attn_select.environment import Environment
from attn_select.errors import RuntimeMissingError
from attn_select.selector import environment_for
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec
from attn_select.spec_check import problems_of
from attn_select.testing import comparison
from attn_select.testing.conformance_configs import Case, Heads, config_text, draw_case, with_known_key
from attn_select.testing.conformance_run import Rig, Terms
from attn_select.testing.toolkit import (
    Outcome,
    Outcomes,
    check_stated,
    codes,
    environment_of,
    outcomes,
    plans_of,
    selection_for,
)

NEVER_RUN: Mapping[Callable[[AttentionConfig], bool], str] = {
    lambda config: config.decode_context_parallel_size > 1: "decode context parallelism needs several processes",
    lambda config: config.output_quantization == "fp4": "the oracle has no FP4 output",
}
"""What the suite can run on no machine; plans for it are marked ``unverified``."""
_WORDS = {True: "accepts", False: "refuses"}


class BackendConformance:
    """Subclass it in a test file, with a name that starts with ``Test``, and set ``spec``.

    Attributes:
        spec: the backend.
        seed: of everything drawn; a failure prints it with the configuration's number.
        num_configs: configurations to draw, two of five from outside the declared capabilities.
        max_compile_keys: distinct ``spec.compile_key`` values to run. Most configurations beyond are brought to one
            of them, the others are judged and not run.
        heads: ``(num_heads, num_kv_heads)`` to draw from.
        device: where tensors live; None: ``cuda`` if there is one, else ``cpu``.
        gate_device: what the gate judges for, a ``Device`` or its name; None: the machine's own. With a name such as
            ``h100`` and ``device = "cpu"`` an emulated kernel runs anywhere.
        environment: the libraries to judge by; None: this machine's, or all with a ``gate_device`` that is not here.
        options: the ``[backends.NAME]`` table.
        rows_without_keys: a request without keys (padding of a CUDA graph) gives output 0 and LSE -inf.
        exact_alibi_lse: with ALiBi the LSE is that of ``slope * -distance``; False: it has row constants of its own
            and is not compared.
        fp8_cache_steps: FP8 numbers that a written one may be off (1 where the scale's inverse is multiplied with).
    """

    spec: ClassVar[BackendSpec]
    seed: ClassVar[int] = 0
    num_configs: ClassVar[int] = 200
    max_compile_keys: ClassVar[int] = 12
    heads: ClassVar[Heads] = ((1, 1), (4, 4), (4, 2), (8, 1), (14, 2))
    device: ClassVar[str | None] = None
    gate_device: ClassVar[Device | str | None] = None
    environment: ClassVar[Environment | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    rows_without_keys: ClassVar[bool] = True
    exact_alibi_lse: ClassVar[bool] = True
    fp8_cache_steps: ClassVar[int] = 0

    def error_bound(self, config: AttentionConfig, plans: Mapping[Phase, BackendPlan]) -> comparison.ErrorBound:
        """Return the errors that are accepted; override it for a path that needs other bounds, and say why there."""
        return comparison.error_bound(config, plans)

    def kernel_accepts(self, config: AttentionConfig, phase: Phase) -> bool | None:
        """Return what the kernel itself says to a configuration on this machine; None: it cannot be asked."""
        return None

    def test_spec_is_sound(self) -> None:
        """The registry would take it."""
        assert problems_of(self.spec) == []

    def test_other_devices_are_refused(self) -> None:
        """On a device that is not declared every phase is refused for that."""
        for phase, capabilities in self.spec.capabilities.items():
            config = next(case.config for case in self._cases() if phase in case.config.phases)
            for device in (CPU, *known_gpus().values()):
                if not capabilities.compute_capabilities.value.accepts(device.compute_capability):
                    found = outcomes(self.spec, config, device, environment_of(), self._options())[phase]
                    assert "compute-capability" in codes(found), f"{phase} on {device.name}: {found}"

    def test_config(self, index: int) -> None:
        """The gate is right about one configuration, and what it accepts gives the oracle's results."""
        case = self._cases()[index]
        with self._named(case):
            found, _ = self._judge(case)
            plans = self._check_gate(case, found)
            for phase, outcome in found.items():
                _check_kernel(phase, outcome, self.kernel_accepts(case.config, phase))
            if plans:
                self._run(case, plans)
                self._tally["run"] += 1

    def test_configs_that_are_not_run(self) -> None:
        """The gate is right about what is not run, too, and what nothing can run is marked ``unverified``."""
        tested = set(self._to_run())
        for case in self._cases():
            if case.index in tested:
                continue
            with self._named(case):
                plans, why = self._check_gate(case, self._judge(case)[0]), self._left_out(case)
                for phase, plan in plans.items() if why in NEVER_RUN.values() else ():
                    assert plan.unverified, f"{phase} by {plan.path} is not marked unverified, but {why}"
            if why is not None:
                self._not_run[why] += 1

    # What happened so far, per subclass.
    _tally: ClassVar[Counter[str]]
    _not_run: ClassVar[Counter[str]]
    _drawn: ClassVar[list[Case]]
    _compiled: ClassVar[dict[object, AttentionConfig]]
    _threads: ClassVar[int]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make each configuration that is run here or rejected a test, and see to the summary.

        Where this machine can run none they are one skipped test.
        """
        if "index" in metafunc.fixturenames:
            metafunc.parametrize("index", self._to_run() or [self._skipped()])
            manager = metafunc.config.pluginmanager
            summary: Any = manager.get_plugin(_Summary.name)
            if summary is None:
                manager.register(summary := _Summary(), _Summary.name)
            summary.suites[type(self)] = None

    @classmethod
    def setup_class(cls) -> None:
        """Begin to count. On tensors as tiny as these more threads only wait for each other."""
        cls._tally, cls._not_run = Counter(), Counter()
        cls._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    @classmethod
    def teardown_class(cls) -> None:
        """Give the threads back."""
        torch.set_num_threads(cls._threads)

    def _options(self) -> BackendOptions:
        return self.spec.options(**self.options)

    def _place(self) -> tuple[torch.device, Device, Environment]:
        """Return where tensors live, and what the gate judges for."""
        here = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        device = self.gate_device or (CPU if here.type == "cpu" else detection.detect_device().device)
        device = lookup(device) if isinstance(device, str) else device
        return here, device, self.environment or environment_for(device)

    def _here(self, config: AttentionConfig) -> Outcomes:
        return outcomes(self.spec, config, *self._place()[1:], self._options())

    def _judge(self, case: Case) -> tuple[Outcomes, str | None]:
        """Return the gate's answers, and what this machine lacks if they are for another one."""
        found = self._here(case.config)
        here, device, _ = self._place()
        if plans_of(found):
            return found, "no CUDA device" if here.type == "cuda" and not torch.cuda.is_available() else None
        taken = self.spec.capabilities[case.phase].compute_capabilities.value
        if not taken.accepts(device.compute_capability):
            others = [gpu for gpu in known_gpus().values() if taken.accepts(gpu.compute_capability)]
            device = others[case.index % len(others)] if others else CPU
        elsewhere = outcomes(self.spec, case.config, device, environment_of(), self._options())
        missing = [found[phase] for phase in plans_of(elsewhere)]
        if not missing:
            return found, None
        reasons = [reason for outcome in missing if isinstance(outcome, list) for reason in outcome]
        return elsewhere, "; ".join(dict.fromkeys(reason.message for reason in reasons))

    def _cases(self) -> list[Case]:
        """Draw all configurations, once, and keep the number of compilations down."""
        cls = type(self)
        if "_drawn" not in cls.__dict__:
            cls._compiled = {}
            drawn = (draw_case(self.spec, self.seed, index, self.heads) for index in range(self.num_configs))
            cls._drawn = [self._with_few_keys(case) for case in drawn]
        return cls._drawn

    def _with_few_keys(self, case: Case) -> Case:
        known, key = self._compiled, self.spec.compile_key(case.config)
        if key in known or case.changed is not None or not plans_of(self._here(case.config)):
            return case
        if len(known) < self.max_compile_keys:
            known[key] = case.config
        elif case.index % 4:
            near = with_known_key(self.spec, self.seed, case, [*known.values()][case.index % len(known)])
            declared = case.phase in near.phases and not _undeclared(self.spec, case.phase, near)
            if declared and plans_of(self._here(near)):
                return replace(case, config=near)
        return case

    def _to_run(self) -> list[int]:
        """Return the numbers of the configurations that are tests of their own; none where none can be run here."""
        own = [case for case in self._cases() if self._left_out(case) is None]
        can_run = any(plans_of(self._judge(case)[0]) for case in own)
        return [case.index for case in own] if can_run else []

    def _skipped(self) -> Any:
        """Return the parameter of the one test that stands for all configurations where none can be run here."""
        why = Counter(filter(None, map(self._left_out, self._cases())))
        reason = why.most_common(1)[0][0] if why else "the gate rejects all of them"
        mark = pytest.mark.skip(reason=f"none of {self.num_configs} configurations can be run: {reason}")
        return pytest.param(-1, marks=mark, id="all")

    def _left_out(self, case: Case) -> str | None:
        """Return why an accepted configuration is not run here, or None."""
        found, lacking = self._judge(case)
        if not plans_of(found) or lacking is not None:
            return lacking
        for asks, why in NEVER_RUN.items():
            if asks(case.config):
                return why
        if self.spec.compile_key(case.config) not in self._compiled:
            return f"its compile key is beyond max_compile_keys = {self.max_compile_keys}"
        return None

    def _check_gate(self, case: Case, found: Outcomes) -> dict[Phase, BackendPlan]:
        """Hold the gate's answers to their form, count the configuration, and return the plans."""
        _check_outcomes(self.spec, case, found)
        plans = plans_of(found)
        for phase, plan in plans.items():
            hidden = self.spec.capabilities[phase].nan_tail_safe.value and not plan.nan_tail_safe
            assert not hidden, f"{phase} by {plan.path} is not nan_tail_safe, but the capabilities declare it"
        self._tally["accepted" if plans else "rejected"] += 1
        return plans

    def _run(self, case: Case, plans: Mapping[Phase, BackendPlan]) -> None:
        """Run all phases together where they share a cache, else each by itself."""
        __tracebackhide__ = True
        here, device, environment = self._place()
        selection = selection_for(
            self.spec, plans, case.config, device, environment, self._options(), layout_choice=case.index
        )
        if selection is None:
            for phase, plan in plans.items():
                self._run(case, {phase: plan})
            return
        terms = Terms(self.error_bound, self.rows_without_keys, self.exact_alibi_lse, self.fp8_cache_steps)
        seed = 1000 * self.seed + case.index
        try:
            rig = Rig(selection, here, seed, terms)
        except RuntimeMissingError as missing:
            self._skip(missing.message)
        self._tally["batches"] += rig.check_batches()
        if here.type == "cuda" and rig.can_capture:
            self._tally["replays"] += Rig(selection, here, seed, terms, cuda_graphs=True).check_graphs()

    def _skip(self, why: str) -> NoReturn:
        self._not_run[why] += 1
        pytest.skip(why)

    @contextmanager
    def _named(self, case: Case) -> Iterator[None]:
        """Add to whatever goes wrong which configuration it is, ready to be pasted."""
        try:
            yield
        except Exception as error:
            kind = f"outside in {case.changed}" if case.changed else "inside"
            where = f"{self.spec.name}, seed {self.seed}, index {case.index}, drawn for {case.phase}, {kind}"
            error.add_note(f"{where}:\n{config_text(case.config)}")
            self._tally["failed"] += 1
            raise

    @classmethod
    def summary(cls) -> list[str]:
        """Return what became of the configurations, as lines; none where no test ran."""
        tally: Counter[str] = cls.__dict__.get("_tally", Counter())
        drawn = tally["accepted"] + tally["rejected"]
        if not drawn:
            return []
        runs = f"{tally['run']} run ({tally['batches']} batches, {tally['replays']} graph replays)"
        line = (
            f"{cls.__name__} ({cls.spec.name}): {drawn} configurations of seed {cls.seed}: {tally['accepted']} accepted"
        )
        line += f", {tally['rejected']} rejected, {runs}, {tally['failed']} failed, {cls._not_run.total()} not run"
        return [line, *(f"  {count} not run: {why}" for why, count in cls._not_run.most_common())]


class _Summary:
    """Prints every suite's counts at the end of the session."""

    name = "attn-select-conformance"

    def __init__(self) -> None:
        self.suites: dict[type[BackendConformance], None] = {}

    def lines(self) -> list[str]:
        return [line for suite in self.suites for line in suite.summary()]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand a worker of pytest-xdist's counts to the process that prints."""
        output: dict[str, list[str]] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[self.name] = self.lines()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write_summary(terminalreporter, self.lines())


def write_summary(terminalreporter: pytest.TerminalReporter, lines: Sequence[str]) -> None:
    """Write the counts of all suites at the end of a session, nothing where no suite ran."""
    if lines:
        terminalreporter.section("attention backends held to their specs")
        for line in lines:
            terminalreporter.write_line(line)


def _undeclared(spec: BackendSpec, phase: Phase, config: AttentionConfig) -> set[str]:
    """Return the codes of what a plain comparison has against a configuration, on whatever device."""
    compared = gate.CapabilityGate(spec.capabilities[phase], Device("any", (0, 0)), ())
    return codes(compared.reasons(config, gate.Demands(config))) - {"compute-capability"}


def _check_outcomes(spec: BackendSpec, case: Case, found: Outcomes) -> None:
    """Hold the gate to its word: what is not declared is refused for that, what is declared only by the plan.

    Raises:
        AssertionError: it is not so, or a reason says nothing.
    """
    __tracebackhide__ = True
    for phase, outcome in found.items():
        check_stated(phase, outcome)
    outcome, name = found[case.phase], f"{case.phase}: {case.changed or 'all of it'}"
    if case.changed is not None:
        assert case.code in codes(outcome), f"{name} is not declared, so {case.code!r} is due; the gate said {outcome}"
        return
    wrong = _undeclared(spec, case.phase, case.config)
    assert not wrong, f"{name} is declared, but the comparison refuses it: {wrong}"


def _check_kernel(phase: Phase, outcome: Outcome, answer: bool | None) -> None:
    """Compare the gate with what the kernel itself says.

    Raises:
        AssertionError: they differ.
    """
    __tracebackhide__ = True
    said = isinstance(outcome, BackendPlan)
    text = f"{phase}: the gate {_WORDS[said]} what the kernel {_WORDS[not said]}: {outcome}"
    assert answer is None or answer == said, text

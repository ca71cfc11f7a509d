"""``BackendConformance``: a pytest class that holds a backend to what its spec declares.

    from attn_select.testing import BackendConformance

    class TestAcme(BackendConformance):
        spec = ACME_ATTN

Each declared value must be one that some plan accepts. Each configuration is one test. The gate must refuse a value
that is not declared, and name it as the reason. A declared value may be refused by ``plan`` alone, with a reason. What
the gate accepts runs on this machine and is compared with the float64 oracle: two layers of a group take turns, each
with caches of its own, over batches that are built in turn. Configurations that cannot run here (the machine lacks the
device or a library) or anywhere yet (the plan is then marked ``unverified``) are put before the gate in one test, and
the summary says why and how many.

Slots behind a sequence's end in its last block hold NaN: no request may depend on what another one left there. Where a
plan declares that it is not ``nan_tail_safe`` these slots hold large finite numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, NoReturn

import pytest
import torch

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec
from attn_select.backends.spec_check import problems_of
from attn_select.decide import gate
from attn_select.decide.selection import Selection
from attn_select.decide.selector import environment_for
from attn_select.errors import RuntimeMissingError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine import detection
from attn_select.machine.device import CPU, Device, known_gpus, lookup
from attn_select.machine.environment import Environment
from attn_select.reference import comparison
from attn_select.reference.running import Bound
from attn_select.runtime import ContextParallel
from attn_select.runtime.context_parallel.collectives import Collectives
from attn_select.runtime.context_parallel.context_parallel import QUERIES
from attn_select.testing.conformance_configs import Case, Heads, config_text, draw_case, large_of, with_known_key
from attn_select.testing.conformance_facts import refused_values, undeclared
from attn_select.testing.conformance_run import Rig
from attn_select.testing.conformance_summary import SuiteCounts, SummaryPlugin, summary_lines
from attn_select.testing.ranks import run_ranks
from attn_select.testing.toolkit import (
    Outcomes,
    check_outcome,
    codes,
    environment_of,
    outcomes,
    plans_of,
    selection_for,
    with_other_texts,
)

NEVER_RUN: Mapping[Callable[[AttentionConfig], bool], str] = {
    lambda config: config.output_quantization == "fp4": "the oracle has no FP4 output",
}
"""What the suite can run on no machine; plans for it are marked ``unverified``."""


class BackendConformance:
    """Subclass it in a test file, with a name that starts with ``Test``, and set ``spec``.

    Attributes:
        spec: the backend.
        seed: of everything drawn; a failure prints it with the configuration's number.
        num_configs: configurations to draw, two of five from outside the declared capabilities.
        max_compile_keys: distinct ``spec.compile_key`` values to run. Most further configurations are changed until
            they have one of these keys; the others are put before the gate and not run.
        heads: ``(num_heads, num_kv_heads)`` to draw from.
        device: where tensors live; None: ``cuda`` if there is one, else ``cpu``.
        gate_device: what the gate judges for, a ``Device`` or its name; None: the machine's own. With a name such as
            ``h100`` and ``device = "cpu"`` an emulated kernel runs anywhere.
        environment: the libraries to judge by; None: this machine's, or all with a ``gate_device`` that is not here.
        options: the ``[backends.NAME]`` table.
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

    def error_bound(self, config: AttentionConfig, plans: Mapping[Phase, BackendPlan]) -> comparison.ErrorBound:
        """Return the errors that are accepted; override it for a path that needs other bounds, and say why there."""
        return comparison.error_bound(config, plans)

    def test_spec_is_sound(self) -> None:
        """The registry accepts the spec."""
        assert problems_of(self.spec) == []

    def test_other_devices_are_refused(self) -> None:
        """On a device that is not declared every phase is refused, with the device as a reason."""
        # What runs on AMD's GPUs is no fact of a spec: they have no compute capability.
        devices = [CPU, *(gpu for gpu in known_gpus().values() if gpu.arch is None)]
        for phase, capabilities in self.spec.capabilities.items():
            config = next(case.config for case in self._cases() if phase in case.config.phases)
            for device in devices:
                if not capabilities.compute_capabilities.value.accepts(device.compute_capability):
                    found = outcomes(self.spec, config, device, environment_of(), self.made_options())[phase]
                    assert "compute-capability" in codes(found), f"{phase} on {device.name}: {found}"

    def test_what_is_declared_is_accepted(self) -> None:
        """With each declared value, and on each declared device, a plan accepts some configuration."""
        for phase in self.spec.capabilities:
            found = refused_values(self.spec, phase, self.seed, self.heads, partial(self._why_refused, phase))
            refused = "; ".join(f"{value} ({why})" for value, why in found.items())
            assert not found, f"{phase}: declared, but refused by every plan: {refused}"

    def test_config(self, index: int) -> None:
        """The gate is right about one configuration, and if it accepts it the results are the oracle's."""
        case = self._cases()[index]
        with self._named(case):
            found, _ = self._judge(case)
            plans = self._check_gate(case, found)
            if plans:
                self._run(case, plans)
                self._tally["run"] += 1

    def test_configs_that_are_not_run(self) -> None:
        """The gate is right about configurations that are not run, and marks the ones that nothing can run."""
        left_out = {case.index: self._left_out(case) for case in self._cases()}
        tested = set(self._to_run(left_out))
        for case in self._cases():
            if case.index in tested:
                continue
            with self._named(case):
                plans, why = self._check_gate(case, self._judge(case)[0]), left_out[case.index]
                for phase, plan in plans.items() if why in NEVER_RUN.values() else ():
                    assert plan.unverified, f"{phase} by {plan.path} is not marked unverified, but {why}"
            if why is not None:
                self._not_run[why] += 1

    # Counts of what happened so far, one set per subclass.
    _tally: ClassVar[Counter[str]]
    _not_run: ClassVar[Counter[str]]
    _drawn: ClassVar[list[Case]]
    _compiled: ClassVar[dict[object, AttentionConfig]]
    _threads: ClassVar[int]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each configuration that is run here or rejected, and register the summary."""
        # Where this machine can run no configuration there is one skipped test instead.
        if "index" in metafunc.fixturenames:
            left_out = {case.index: self._left_out(case) for case in self._cases()}
            manager = metafunc.config.pluginmanager
            indices = self._to_run(left_out)
            params = [self._param(index, manager.hasplugin("xdist")) for index in indices] or [self._skipped(left_out)]
            metafunc.parametrize("index", params)
            summary: Any = manager.get_plugin(SummaryPlugin.name)
            if summary is None:
                manager.register(summary := SummaryPlugin(), SummaryPlugin.name)
            summary.suites[type(self)] = None

    @classmethod
    def setup_class(cls) -> None:
        """Begin the counts, and use one thread: the tensors are too small for more."""
        # A process that pytest-xdist gives several groups of configurations comes here once for each.
        if "_tally" not in cls.__dict__:
            cls._tally, cls._not_run = Counter(), Counter()
        cls._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    @classmethod
    def teardown_class(cls) -> None:
        """Restore the number of threads."""
        torch.set_num_threads(cls._threads)

    def made_options(self) -> BackendOptions:
        return self.spec.options(**self.options)

    def place(self) -> tuple[torch.device, Device, Environment]:
        """Return where tensors live, and the device and libraries that the gate judges for."""
        here = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        device = self.gate_device or (CPU if here.type == "cpu" else detection.detect_device().device)
        device = lookup(device) if isinstance(device, str) else device
        return here, device, self.environment or environment_for(device)

    def answers_here(self, config: AttentionConfig) -> Outcomes:
        return outcomes(self.spec, config, *self.place()[1:], self.made_options())

    def _why_refused(self, phase: Phase, config: AttentionConfig, device: Device) -> str:
        """Return why a device with any library gives a configuration no plan; empty where it gives one."""
        judged_for = self.place()[1:]
        environments = [environment_of(), *(env for own, env in [judged_for] if own == device)]
        why = ""
        for environment, options in product(environments, (self.spec.options(), self.made_options())):
            outcome = gate.check(self.spec, config, device, environment, options, phase)
            if isinstance(outcome, BackendPlan):
                return ""
            why = outcome[0].message
        return why

    def _judge(self, case: Case) -> tuple[Outcomes, str | None]:
        """Return the gate's answers here; if this machine refuses, a fit machine's answers, and what this one lacks."""
        found = self.answers_here(case.config)
        here, device, _ = self.place()
        if plans_of(found):
            return found, "no CUDA device" if here.type == "cuda" and not torch.cuda.is_available() else None
        taken = self.spec.capabilities[case.phase].compute_capabilities.value
        if not taken.accepts(device.compute_capability):
            others = [gpu for gpu in known_gpus().values() if not gpu.arch and taken.accepts(gpu.compute_capability)]
            device = others[case.index % len(others)] if others else CPU
        elsewhere = outcomes(self.spec, case.config, device, environment_of(), self.made_options())
        missing = [found[phase] for phase in plans_of(elsewhere)]
        if not missing:
            return found, None
        reasons = [reason for outcome in missing if isinstance(outcome, list) for reason in outcome]
        return elsewhere, "; ".join(dict.fromkeys(reason.message for reason in reasons))

    def _cases(self) -> list[Case]:
        """Draw all configurations once, with few different compile keys."""
        cls = type(self)
        if "_drawn" not in cls.__dict__:
            cls._compiled = {}
            drawn = (draw_case(self.spec, self.seed, index, self.heads) for index in range(self.num_configs))
            cls._drawn = [self._with_few_keys(case) for case in drawn]
        return cls._drawn

    def _with_few_keys(self, case: Case) -> Case:
        known, key = self._compiled, self.spec.compile_key(case.config)
        if key in known or case.changed is not None or not plans_of(self.answers_here(case.config)):
            return case
        if len(known) < self.max_compile_keys:
            known[key] = case.config
        elif case.index % 4:
            near = with_known_key(self.spec, self.seed, case, [*known.values()][case.index % len(known)])
            declared = case.phase in near.phases and not undeclared(self.spec, case.phase, near)
            if declared and plans_of(self.answers_here(near)):
                return replace(case, config=near)
        return case

    def _to_run(self, left_out: Mapping[int, str | None]) -> list[int]:
        """Return the numbers of the configurations that are tests of their own: none if this machine can run none."""
        own = [case for case in self._cases() if left_out[case.index] is None]
        can_run = any(plans_of(self._judge(case)[0]) for case in own)
        return [case.index for case in own] if can_run else []

    def _param(self, index: int, grouped: bool) -> Any:
        """Return the parameter of one configuration. Configurations with one compile key run in one process."""
        if not grouped:
            return index
        group = (
            f"{type(self).__module__}.{type(self).__qualname__} {self.spec.compile_key(self._cases()[index].config)}"
        )
        return pytest.param(index, marks=pytest.mark.xdist_group(group))

    def _skipped(self, left_out: Mapping[int, str | None]) -> Any:
        """Return the parameter of the one test that stands for all configurations where none can be run here."""
        why = Counter(filter(None, left_out.values()))
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
        """Check the gate's answers, count the configuration, and return the plans."""
        _check_outcomes(self.spec, case, found)
        plans = plans_of(found)
        for phase, plan in plans.items():
            hidden = self.spec.of_attention(phase).nan_tail_safe.value and not plan.nan_tail_safe
            assert not hidden, f"{phase} by {plan.path} is not nan_tail_safe, but the capabilities say that it is"
        self._tally["accepted" if plans else "rejected"] += 1
        return plans

    def _run(self, case: Case, plans: Mapping[Phase, BackendPlan]) -> None:
        """Run all phases together where they share a cache, else each by itself."""
        __tracebackhide__ = True
        here, device, environment = self.place()
        nameless = {phase: with_other_texts(plan) for phase, plan in plans.items()}
        selection = selection_for(
            self.spec, nameless, case.config, device, environment, self.made_options(), layout_choice=case.index
        )
        if selection is None:
            for phase, plan in plans.items():
                if len(plans) == 1:
                    text = f"{phase} by {plan.path} reads no cache in blocks of block_size = {case.config.block_size}"
                    raise AssertionError(f"{text}: kernel_block_sizes = {plan.kernel_block_sizes}, but it is declared")
                self._run(case, {phase: plan})
            return
        seed = 1000 * self.seed + case.index
        if case.config.decode_context_parallel_size > 1:
            self._tally["batches"] += _run_on_ranks(selection, here, seed, self.error_bound)
            return
        try:
            rig = Rig(selection, here, seed, bound=self.error_bound, large=large_of(case.index))
        except RuntimeMissingError as missing:
            self._skip(missing.message)
        self._tally["batches"] += rig.check_batches()
        if here.type == "cuda" and rig.can_capture:
            graphs = Rig(selection, here, seed, bound=self.error_bound, cuda_graphs=True)
            self._tally["replays"] += graphs.check_graphs()

    def _skip(self, why: str) -> NoReturn:
        self._not_run[why] += 1
        pytest.skip(why)

    @contextmanager
    def _named(self, case: Case) -> Iterator[None]:
        """Add the configuration to every error, as an expression that can be pasted."""
        try:
            yield
        except Exception as error:
            kind = f"outside in {case.changed}" if case.changed else "inside"
            where = f"{self.spec.name}, seed {self.seed}, index {case.index}, drawn for {case.phase}, {kind}"
            error.add_note(f"{where}:\n{config_text(case.config)}")
            self._tally["failed"] += 1
            raise

    @classmethod
    def counts(cls) -> SuiteCounts:
        """Return what happened to the configurations in this process."""
        known = cls.__dict__
        name = f"{cls.__name__} ({cls.spec.name})"
        return {
            "suite": name,
            "seed": cls.seed,
            "tally": dict(known.get("_tally", {})),
            "not_run": dict(known.get("_not_run", {})),
        }

    @classmethod
    def summary(cls) -> list[str]:
        """Return the lines that count what happened to the configurations; none if no test ran."""
        return summary_lines([cls.counts()])


def rank_options(rng: random.Random, selection: Selection) -> dict[str, Any]:
    """Draw what ``ContextParallel`` is made with, beside the group."""
    block_size = selection.block_size or 1
    return {
        "interleave": rng.choice([count for count in (1, 4, block_size) if block_size % count == 0]),
        "merge": rng.choice(("auto", "a2a")),
        "queries": rng.choice(QUERIES),
    }


def _run_on_ranks(selection: Selection, device: torch.device, seed: int, bound: Bound) -> int:
    """Run drawn batches of layers whose cache lies on several ranks, in this process; return the number of runs."""
    __tracebackhide__ = True
    options = rank_options(random.Random(f"ranks {seed}"), selection)

    def run(collectives: Collectives) -> int:
        ranks = ContextParallel(collectives, **options)
        return Rig(selection, device, seed, bound=bound, ranks=ranks).check_batches()

    try:
        return run_ranks(selection.config.decode_context_parallel_size, run)[0]
    except Exception as error:
        error.add_note(f"ContextParallel: {options}")
        raise


def _check_outcomes(spec: BackendSpec, case: Case, found: Outcomes) -> None:
    """Check that a value outside the capabilities is refused with its code, and that no capability refuses others."""
    __tracebackhide__ = True
    for phase, outcome in found.items():
        check_outcome(phase, outcome, case.config)
    outcome = found[case.phase]
    if case.changed is not None:
        text = f"{case.phase}: {case.changed} has a value that is not declared, so the gate must give {case.code!r}"
        assert case.code in codes(outcome), f"{text}; it gave {outcome}"
        return
    wrong = undeclared(spec, case.phase, case.config)
    assert not wrong, f"{case.phase}: all values are declared, but the capabilities refuse {', '.join(sorted(wrong))}"

"""The conformance suite of backends for layers that keep a state::

    class TestMine(StateConformance):
        spec = MINE

It draws layers from the declared capabilities, and from just outside them. It serves requests through the layers that
the gate accepts: chunks of prompts, mixed steps, decodes, drafts of which some are rejected, forks, slots that are
reused. Decodes of one length are replays of CUDA graphs where the backend allows it. Free slots hold NaN. Every output
is compared with the float64 recurrence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, ClassVar

import pytest
import torch

from attn_select.backends.spec import BackendSpec, HeadSizes, StateCapabilities
from attn_select.backends.spec_check import problems_of
from attn_select.decide import gate
from attn_select.decide.selection import Selection
from attn_select.layer import dtypes
from attn_select.layer.config import Phase
from attn_select.layer.state import RECURRENCES, StateConfig
from attn_select.machine.detection import detect_device
from attn_select.machine.device import CPU, Device, known_gpus
from attn_select.machine.environment import Environment
from attn_select.reference.state_serving import StateServing, state_bound
from attn_select.testing.toolkit import codes, environment_of, selection_of, shared_layouts

Fields = dict[str, Any]
MANY_REQUESTS = 70


class StateConformance:
    """Subclass it in a test file, with a name that starts with ``Test``, and set ``spec``.

    Attributes:
        spec: the backend.
        seed: of everything drawn.
        num_configs: layers to draw and run.
        steps: of each layer.
        longest: tokens of the longest chunk of a prompt.
        sizes: accepted widths of heads to draw from.
        device: where tensors live.
        gate_device: what the gate judges for; None: ``device``. With another than the machine's, kernels are emulated.
        environment: the libraries to judge by; None: all.
    """

    spec: ClassVar[BackendSpec]
    seed: ClassVar[int] = 0
    num_configs: ClassVar[int] = 40
    steps: ClassVar[int] = 10
    longest: ClassVar[int] = 150
    sizes: ClassVar[tuple[int, ...]] = (8, 16, 24, 33, 64, 128)
    device: ClassVar[str] = "cpu"
    gate_device: ClassVar[Device | None] = None
    environment: ClassVar[Environment | None] = None

    def test_spec_is_sound(self) -> None:
        """The registry accepts the spec."""
        assert problems_of(self.spec) == []

    def test_other_devices_are_refused(self) -> None:
        """On a device that is not declared every phase is refused, with the device as a reason."""
        config = self._drawn(0)
        for phase, capabilities in self._capabilities().items():
            for device in (CPU, *known_gpus().values()):
                if not capabilities.compute_capabilities.value.accepts(device.compute_capability):
                    assert "compute-capability" in self._codes(config, phase, device)

    def test_what_is_not_declared_is_refused(self) -> None:
        """A value outside the capabilities is refused, and for that reason alone."""
        for phase, capabilities in self._capabilities().items():
            accepted = capabilities.compute_capabilities.value.accepts
            device = next(each for each in (CPU, *known_gpus().values()) if accepted(each.compute_capability))
            for code, fields in _outside(capabilities):
                config = _made({**self._drawn(0).model_dump(), **fields})
                assert self._codes(config, phase, device) == {code}, f"{phase}: {fields}"

    def test_results(self, state_config: int) -> None:
        """Requests that are served through a drawn layer get what the float64 recurrence gives."""
        if self.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("this machine has no CUDA device")
        config = self._drawn(state_config)
        rng = random.Random(f"{self.spec.name} {self.seed} {state_config} steps")
        selection = self._selected(config, rng)
        drafts = config.num_speculative_tokens
        graphs = any(plan.cuda_graph != "NEVER" for plan in selection.plans.values() if plan is not None)
        # A few layers get long chunks, or many requests of a few tokens each.
        longest = {5: 4 * self.longest, 8: 8}.get(state_config % 12, self.longest)
        least = MANY_REQUESTS if longest == 8 else 3
        serving = StateServing(selection, (least + 7) * (1 + drafts), state_config, self.device, cuda_graphs=graphs)
        live: list[int] = []
        names = count()
        for number in range(self.steps):
            while len(live) < least:
                live.append(next(names))
                serving.add(live[-1])
            if rng.random() < 0.2:
                serving.fork(rng.choice(live), -1 - number)
                live.append(-1 - number)
            if len(live) > 2 and rng.random() < 0.3:
                serving.free(live.pop(rng.randrange(len(live))))
            chosen = rng.sample(live, rng.randint(1, len(live)))
            # A backend of one phase gets decodes alone, new requests among them, or prefills alone.
            short = [1, 1, 1 + drafts] if "decode" in self.spec.capabilities else []
            long = [rng.randint(2 + drafts, longest)] if "prefill" in self.spec.capabilities else []
            same = rng.choice([*short, *long])
            lens = {name: same if graphs else rng.choice([*short, *long]) for name in chosen}
            error = serving.step(lens)
            where = f"configuration {state_config} of seed {self.seed}, step {number} of {lens}: {config}"
            bound = state_bound(config)
            assert error.norm <= bound.norm, f"{error} in {where}"
            assert error.row <= bound.row, f"{error} in {where}"
            for name in chosen:
                if (kept := serving.drafts_of(name)) > 1:
                    serving.accept(name, rng.randint(1, kept))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each drawn layer."""
        if "state_config" in metafunc.fixturenames:
            metafunc.parametrize("state_config", range(self.num_configs))

    def _capabilities(self) -> Mapping[Phase, StateCapabilities]:
        found = {phase: each for phase, each in self.spec.capabilities.items() if isinstance(each, StateCapabilities)}
        assert len(found) == len(self.spec.capabilities), f"{self.spec.name} is not for layers that keep a state"
        return found

    @property
    def _environment(self) -> Environment:
        return self.environment or environment_of()

    def _place(self) -> Device:
        return self.gate_device or (CPU if self.device == "cpu" else detect_device().device)

    def _codes(self, config: StateConfig, phase: Phase, device: Device) -> set[str]:
        return codes(gate.check(self.spec, config, device, self._environment, self.spec.options(), phase))

    def _selected(self, config: StateConfig, rng: random.Random) -> Selection[StateConfig]:
        plans = selection_of(self.spec, config, self._place(), environment=self._environment).plans
        layout = rng.choice(shared_layouts(plans))
        return selection_of(self.spec, config, self._place(), environment=self._environment, layout=layout)

    def takes(self, config: StateConfig) -> bool:
        """Whether the plan takes a layer that the capabilities accept; overridden where it refuses some itself."""
        return True

    def _drawn(self, index: int) -> StateConfig:
        """Draw a layer that all phases accept."""
        rng = random.Random(f"{self.spec.name} {self.seed} {index}")
        return next(config for config in iter(lambda: self._any(rng), None) if self.takes(config))

    def _any(self, rng: random.Random) -> StateConfig:
        each = list(self._capabilities().values())

        def among(values: Callable[[StateCapabilities], tuple[Any, ...]]) -> Any:
            return rng.choice([value for value in values(each[0]) if all(value in values(other) for other in each)])

        def size(facts: Callable[[StateCapabilities], HeadSizes]) -> int:
            return rng.choice([size for size in self.sizes if all(facts(one).accepts(size) for one in each)])

        recurrence = among(lambda one: one.recurrences.value)
        heads = rng.choice((1, 2, 4))
        most = min(one.speculative_tokens.value for one in each)
        return StateConfig(
            recurrence=recurrence,
            num_heads=heads,
            num_v_heads=heads * (1 if recurrence == "kda" else rng.choice((1, 2, 3))),
            head_size=size(lambda one: one.head_sizes.value),
            v_head_size=size(lambda one: one.v_head_sizes.value),
            dtype=among(lambda one: one.dtypes.value),
            state_dtype=among(lambda one: one.state_dtypes.value),
            conv_kernel_size=rng.choice((0, 2, 4)),
            chunk_size=rng.choice((16, 64)),
            num_speculative_tokens=rng.choice([drafts for drafts in (0, 0, 1, 3) if drafts <= most]),
        )


def _made(fields: Fields) -> StateConfig:
    """Return the layer, with one value head per key head where its recurrence needs that."""
    if fields["recurrence"] == "kda":
        fields = {**fields, "num_v_heads": fields["num_heads"]}
    return StateConfig(**fields)


def _outside(capabilities: StateCapabilities) -> list[tuple[str, Fields]]:
    """Return values that are not declared, each with the code of the reason against it."""
    found: list[tuple[str, Fields]] = []
    found += [("recurrence", {"recurrence": r}) for r in RECURRENCES if r not in capabilities.recurrences.value]
    found += [("dtype", {"dtype": name}) for name in dtypes.DTYPES if name not in capabilities.dtypes.value]
    found += [("state-dtype", {"state_dtype": n}) for n in dtypes.DTYPES if n not in capabilities.state_dtypes.value]
    for code, field, sizes in (
        ("head-size", "head_size", capabilities.head_sizes.value),
        ("v-head-size", "v_head_size", capabilities.v_head_sizes.value),
    ):
        found += [(code, {field: size}) for size in (7, 65, 192, 512, 1024) if not sizes.accepts(size)]
    if (most := capabilities.speculative_tokens.value) < 1024:
        found.append(("speculative-tokens", {"num_speculative_tokens": most + 1}))
    return found

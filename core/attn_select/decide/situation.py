"""``Situation``: all that a decision rests on beside the layer, gathered once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attn_select.backends import distributions
from attn_select.backends.rank import by_rank
from attn_select.backends.registry import Registry
from attn_select.backends.spec import BackendOptions, BackendSpec, Reason
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet
from attn_select.rules.libraries import import_names
from attn_select.rules.lint import known_names, rule_warnings
from attn_select.rules.options import read_options
from attn_select.rules.ranking import Ranker, unknown_versions


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """A device, its libraries, the plugins and the rules."""

    registry: Registry
    rules: RuleSet
    device: Device
    environment: Environment
    ranker: Ranker  # the rules that hold on the device
    # of every registered backend the sorts of layers that it serves in any phase (``AttentionConfig.sort``)
    sorts: Mapping[str, frozenset[str]]
    order: list[str]  # the registered backends in the order that counts where no rule says otherwise
    absent: Mapping[str, Reason]  # why each backend that is known by name and not registered cannot be judged
    names: list[str]  # every known backend: registered, doubly registered, and known but not installed
    options: Mapping[str, BackendOptions]  # the ``[backends.NAME]`` table of every registered backend
    warnings: list[str]  # what a user should know whatever the layer, one sentence each

    @property
    def specs(self) -> Mapping[str, BackendSpec]:
        """The registered backends by name."""
        return self.registry.specs

    def registered_for(self, config: LayerConfig) -> list[str]:
        """Return the registered backends for layers of this sort (attention, MLA, sparse MLA, state), in order."""
        return [name for name in self.order if config.sort in self.sorts[name]]

    def candidates(self, config: LayerConfig, named: Iterable[str] = ()) -> dict[str, BackendSpec]:
        """Return the backends that are put through the gate for a layer, and the ones that are asked for by name."""
        of_states, also = config.sort == "state", set(named)
        return {n: spec for n, spec in self.specs.items() if ("state" in self.sorts[n]) is of_states or n in also}


def situation_of(registry: Registry, rules: RuleSet, device: Device, environment: Environment) -> Situation:
    """Gather what decisions on a device rest on."""
    specs, names, modules = registry.specs, known_names(registry), import_names(registry.specs)
    unknown = unknown_versions(rules.rules, device, environment, modules)
    order = by_rank(specs, list(distributions.known_backends()))
    return Situation(
        registry=registry,
        rules=rules,
        device=device,
        environment=environment,
        ranker=Ranker(rules.rules, device, environment, modules),
        sorts={name: frozenset(each.sort for each in spec.capabilities.values()) for name, spec in specs.items()},
        order=order,
        absent=absent_backends(registry),
        names=names,
        options=read_options(rules, specs),
        warnings=[*registry.warnings, *rule_warnings(rules, names), *unknown],
    )


def absent_backends(registry: Registry) -> dict[str, Reason]:
    """Return why each backend that is known by name and cannot be judged is absent, with the remedy if there is one."""
    absent: dict[str, Reason] = {}
    for name, owners in registry.conflicts.items():
        text = f"registered by {' and by '.join(owners)}"
        absent[name] = Reason("duplicate-backend", text, list(owners), "one owner", f"pip uninstall {owners[-1]}")
    failed = {plugin.distribution: plugin for plugin in registry.failed}
    for name, distribution in distributions.known_backends().items():
        if name in registry.specs or name in absent:
            continue
        if plugin := failed.get(distribution):
            absent[name] = Reason("plugin-broken", f"{plugin} is broken: {plugin.error}", plugin.error)
        else:
            command = distributions.install_command(distribution)
            text = f"plugin {distribution} is not installed"
            absent[name] = Reason("plugin-not-installed", text, None, distribution, command)
    return absent

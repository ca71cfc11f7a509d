"""``attn-select flags``: the choice as an engine's command-line arguments and environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from attn_select.engines import ENGINES
from attn_select_cli import complete
from attn_select_cli.help import Command
from attn_select_cli.layer_options import diff_options, overrides_from

if TYPE_CHECKING:
    from attn_select.engines.names import EngineTable
    from attn_select_cli.engine_arguments import EngineArguments, Taken
    from attn_select_cli.explanation import Explanation
    from attn_select_cli.table import Block

EPILOG = """\b
Examples:
  attn-select flags --engine vllm --model llama-3-8b --gpu h100
  attn-select flags --engine vllm --model deepseek-v3 --gpu b200 --tensor-parallel 8
  attn-select flags --engine sglang --model gpt-oss-120b --gpu h100
  attn-select flags --engine trtllm --model llama-3-8b --gpu b200 --kv-cache-dtype fp8
  attn-select flags --engine transformers --model ./config.json --gpu a100 --json
  vllm serve org/name $(attn-select flags --engine vllm --model org/name --arguments)

Where an engine cannot run the first choice, the first of attn-select's order that it has is named, and those
before it are listed. The engine's release is shown; its names may differ in another.

Where the engine has nothing that serves a layer, or what it has is known to be wrong, there is no command.

Exit code: 0 the engine has a backend of the order for every layer, 1 it has none for one, 2 wrong input.
"""


@click.command("flags", cls=Command, epilog=EPILOG, short_help="The choice as an engine's command-line arguments.")
@click.option(
    "--engine",
    "-e",
    required=True,
    type=complete.choices(*ENGINES),
    metavar="NAME",
    help=f"The engine: {', '.join(ENGINES)}.",
)
@diff_options
@click.option("--arguments", "alone", is_flag=True, help="Print the arguments alone, on one line, for $(...).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (documented in docs/json.md).")
def command(engine: str, alone: bool, as_json: bool, **options: Any) -> int:
    """Show the command-line arguments and environment by which an engine takes the choice for a model on a GPU."""
    from attn_select.engines.names import engine_table
    from attn_select_cli.engine_arguments import engine_arguments
    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_json, print_lines, print_warnings

    table = engine_table(engine)
    if options["model"] is None:
        raise click.UsageError("which model? Give --model: an engine serves models", click.get_current_context())
    if alone and as_json:
        raise click.UsageError("--arguments and --json contradict each other", click.get_current_context())
    explanation = build_explanation(options, unserved_alone=True)
    _refuse_states(table, explanation)
    if options["backend"]:  # an explicit choice is taken or refused, never replaced
        for layer in explanation.layers:
            layer.selection.require()
    overrides = overrides_from(options)
    _refuse_ranks(table, options, explanation, overrides)
    result = engine_arguments(explanation, table, options["tensor_parallel"], overrides)
    _refuse_replaced(result)
    if alone:
        _print_alone(result)
    elif as_json:
        print_json(_to_dict(result, explanation))
    else:
        print_lines(_lines(result, explanation, _shown_model(options)))
    print_warnings(explanation.all_warnings)
    return 0 if result.ok else 1


def _refuse_states(table: EngineTable, explanation: Explanation) -> None:
    """Refuse batch invariance where the engine's kernels of states do not have it."""
    from attn_select.errors import ConfigError

    configs = [layer.selection.config for layer in explanation.layers]
    has_states = any(config.sort == "state" for config in configs)
    invariant = any(config.sort != "state" and config.batch_invariant for config in configs)
    if has_states and invariant and not table.states_batch_invariant:
        raise ConfigError(
            f"--batch-invariant: {table.engine} {table.release} refuses it for layers that keep a state",
            fields=["batch_invariant"],
            hint="leave it out for this model",
        )


def _refuse_ranks(
    table: EngineTable, options: Mapping[str, Any], explanation: Explanation, overrides: dict[str, Any]
) -> None:
    """Refuse ranks that the engine does not let share heads or contexts."""
    from attn_select.engines.ranks import wrong_ranks
    from attn_select.errors import ConfigError
    from attn_select.layer.config import AttentionConfig
    from attn_select.layer.models import load
    from attn_select_cli.explanation import known_layers

    tensor_parallel = options["tensor_parallel"]
    ranks = overrides.get("decode_context_parallel_size", 1) if "decode_context_parallel_size" in table.arguments else 1
    divided = tensor_parallel > 1 and table.divides_kv_heads(
        explanation.model["architecture"] if explanation.model else ""
    )
    if ranks == 1 and not divided:
        return
    whole = known_layers(load(options["model"]), {**options, "tensor_parallel": 1}, explanation.device, overrides)
    for config in (kind.config for kind in whole.kinds if isinstance(kind.config, AttentionConfig)):
        if divided and not config.mla and config.num_kv_heads % tensor_parallel:
            raise ConfigError(
                f"--tensor-parallel {tensor_parallel}: {table.engine} divides the {config.num_kv_heads} KV heads of "
                "this model among the ranks, and copies none",
                fields=["tensor_parallel_size"],
                hint=f"valid: the divisors of {config.num_kv_heads}",
            )
        why, accepted = wrong_ranks(config, tensor_parallel, ranks)
        if why:
            raise ConfigError(
                f"--dcp {ranks} with --tensor-parallel {tensor_parallel}: {table.engine} refuses it, since {why}",
                fields=["decode_context_parallel_size"],
                hint=f"valid with --tensor-parallel {tensor_parallel}: --dcp {accepted}",
            )


def _print_alone(result: EngineArguments) -> None:
    """Print the arguments on one line, and on stderr what no argument says."""
    import shlex

    from attn_select.errors import ConfigError
    from attn_select_cli.engine_arguments import FILE_NAME

    table = result.table
    if result.refused:
        click.echo(f"no arguments: {result.refused}", err=True)
        return
    if result.file:
        raise ConfigError(
            f"--arguments: {table.engine} reads the choice in a file, {FILE_NAME}, which has to be written first",
            fields=["arguments"],
            hint="without --arguments the text of the file is printed",
        )
    for name, value in result.environment.items():
        click.echo(f"set in the environment: {name}={shlex.quote(value)}", err=True)
    for taken in result.taken:
        if taken.offer is None:
            click.echo(f"{taken.layer.kind}, {', '.join(taken.served)}: {_why_none(taken, result)}", err=True)
    for layers, kernels in result.unserved:
        if not kernels:
            click.echo(f"{layers.kind}: {_none_known(table)}", err=True)
    click.echo(shlex.join(result.argument_list()))


def _refuse_replaced(result: EngineArguments) -> None:
    """Refuse an explicit choice that the engine has no backend for."""
    from attn_select.errors import ConfigError

    table = result.table
    for taken in result.taken:
        for phase in taken.phases:
            name = taken.layer.selection.explicit.get(phase)
            if name is None or (taken.offer is not None and taken.offer.backend == name):
                continue
            one = f"{table.engine} takes one backend for {' and '.join(taken.phases)}"
            why = dict(taken.passed_over()).get(name, one)
            runs = table.adapter_runs(name, taken.layer.selection.config, taken.layer.selection.device)
            adapter = f"; {_adapter_text(table, [name])}" if runs else ""
            raise ConfigError(
                f"--backend {name} for {taken.layer.kind}, {phase}: {why}",
                fields=["backend"],
                hint=f"without --backend the first of attn-select's order that {table.engine} has is named{adapter}",
            )


def _adapter_text(table: EngineTable, backends: Iterable[str]) -> str:
    return f"{table.adapter}, installed beside {table.engine}, has attn-select's {', '.join(backends)} for it"


def _shown_model(options: Mapping[str, Any]) -> str:
    """Return what stands for the model in the command: a preset has no weights, but its repository has."""
    from attn_select.layer.models.presets import find_preset

    model: str = options["model"]
    own_name = find_preset(model) is not None and "/" not in model
    return "MODEL" if own_name else model.removesuffix("/config.json")


def _none_known(table: EngineTable) -> str:
    return f"no backend of {table.engine} is known for these layers on this device"


def _named(taken: Taken) -> str:
    if taken.refused:
        return "-"
    if taken.offer is None or taken.offer.name is None:
        return f"{taken.default.name}, its default" if taken.default and taken.stands else "its default"
    return f"{taken.offer.name.name}, its default" if taken.is_default else taken.offer.name.name


def _why_none(taken: Taken, result: EngineArguments) -> str:
    engine = result.table.engine
    if result.otherwise:
        return f"{engine} runs them in another way, by its default: {result.otherwise.why}"
    if taken.stands:
        return f"{engine} chooses by itself: attn-select measured nothing on AMD's GPUs, so its order says nothing"
    has = f"{engine} has none of its backends" if taken.offers else "no backend of attn-select is valid"
    return f"{has}, and the default of {engine} runs there"


def _lines(result: EngineArguments, explanation: Explanation, model: str) -> list[Block]:
    from attn_select.decide.lines import HANG
    from attn_select_cli.engine_arguments import FILE_NAME, command_lines, file_lines
    from attn_select_cli.table import Table
    from attn_select_cli.unserved_lines import engine_names

    table = result.table
    engine = f"{table.engine} {table.release}"
    lines: list[Block] = [
        *explanation.head_lines(),
        [("Engine     ", "dim"), HANG, (engine, "title"), (": names and arguments are this release's", "")],
        [],
    ]
    if result.file:
        lines.append([(f"{FILE_NAME}:", "title")])
        lines += [[(f"  {line}", "")] for line in file_lines(result.nested_file())]
        lines.append([])
    if result.refused:
        lines += [[("No command: ", "rejected"), HANG, (result.refused, "")]]
    else:
        lines += [[(f"  {line}", "selected")] for line in command_lines(result, model)]
    rows = [
        [
            f"{taken.layer.kind} × {taken.layer.count}",
            ", ".join(taken.served),
            _named(taken),
            taken.offer.backend if taken.offer and not taken.refused else "-",
        ]
        for taken in result.taken
    ]
    rows += [
        [f"{layer.kind} × {layer.count}", state.phase, state.value or "its own, without a choice", state.backend or "-"]
        for layer, state in result.states
    ]
    rows += [
        [f"{layers.kind} × {layers.count}", "prefill, decode", engine_names(kernels) or "-", "-"]
        for layers, kernels in result.unserved
    ]
    lines += [[], Table(["layers", "phases", table.engine, "attn-select's backend"], rows)]
    for layers, kernels in result.unserved:
        takes = f"{table.engine} takes its own by itself" if kernels else _none_known(table)
        text = f"attn-select has no kernel for these layers; {takes}"
        lines.append([(f"{layers.kind}: ", "warning"), HANG, (text, "")])
    for taken in result.taken:
        if taken.offer is None and not result.refused:
            text = _why_none(taken, result)
            lines += [[(f"{taken.layer.kind}, {', '.join(taken.served)}: ", "rejected"), HANG, (text, "")]]
    passed: dict[tuple[str, str], list[str]] = {}
    for taken in result.taken:
        for pair in taken.passed_over():
            passed.setdefault(pair, []).append(f"{taken.layer.kind}, {', '.join(taken.served)}")
    for layer, state in result.states:
        why = f"{table.engine} has no such kernel for {layer.kind} in {state.phase}"
        passed |= {(backend, why): [] for backend in state.passed_over}
    if passed:
        lines += [[], [("Ranked higher", "title"), (" by attn-select, but not taken:", "")]]
        reasons = Counter(backend for backend, _ in passed)
        for (backend, why), places in passed.items():
            where = f" for {'; '.join(places)}" if reasons[backend] > 1 else ""
            lines.append([(f"  {backend}{where}: ", ""), HANG, (why, "")])
        brought = dict.fromkeys(
            backend
            for taken in result.taken
            for backend, _ in taken.passed_over()
            if table.adapter_runs(backend, taken.layer.selection.config, taken.layer.selection.device)
        )
        if brought:
            lines.append([("  ", ""), HANG, (_adapter_text(table, brought), "remedy")])
    if result.refused:
        return lines
    lines += [[], [("Not expressed", "title"), (" by arguments:", "")]]
    lines += [[("  ", ""), HANG, (text, "")] for text in result.not_expressed]
    lines += [[], [(f"Whether {table.engine} serves this model at all is not looked up.", "dim")]]
    return lines


def _to_dict(result: EngineArguments, explanation: Explanation) -> dict[str, Any]:
    from attn_select_cli.unserved_lines import engine_backends

    table = result.table
    return {
        "schema_version": 1,
        "engine": {"name": table.key, "release": table.release, "adapter": table.adapter},
        "model": explanation.model,
        "refused": {"why": result.refused, "starts": result.starts} if result.refused else None,
        "device": explanation.device.to_dict(),
        "arguments": result.argument_list(),
        "environment": result.environment,
        "file": {"argument": table.arguments["file"], "content": result.nested_file()} if result.file else None,
        "layers": [taken.to_dict() for taken in result.taken],
        "states": [
            {
                "kind": layer.kind,
                "count": layer.count,
                "phase": state.phase,
                "selected": state.selected,
                "backend": state.backend,
                "argument": state.row.argument if state.row else None,
                "value": state.value,
                "passed_over": [*state.passed_over],
                "source": state.row.source if state.row else None,
            }
            for layer, state in result.states
        ],
        "unserved": [
            {"kind": layers.kind, "count": layers.count, "engine_backends": engine_backends(kernels)}
            for layers, kernels in result.unserved
        ],
        "not_expressed": result.not_expressed,
        "warnings": explanation.all_warnings,
    }

"""The other commands: matrix, diff, backends, rules, models, gpus, doctor, help."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from attn_select import __version__
from attn_select.backends.registry import Plugin, Registry, load_plugins
from attn_select.machine.detection import Detection
from attn_select.machine.device import lookup
from attn_select.rules.layers import packaged_rules_path
from attn_select_cli import main, rules
from attn_select_cli.main import COMMANDS, OF_MEASURE, OTHERS


def test_version_and_help(run: Any) -> None:
    assert __version__ in run("--version").out
    overview = run("--help").out
    for command in COMMANDS:
        assert command in overview
        text = run(command, "--help")
        assert text.code == 0
        assert "Example" in text.out
        assert "None" not in text.out
    for command in rules.command.commands:
        assert "Example" in run("rules", command, "--help").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explian",), ("unknown command 'explian'", "did you mean explain?")),
        (("rules", "sow"), ("unknown rules command 'sow'", "did you mean show?")),
    ],
)
def test_an_unknown_command(run: Any, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    wrong = run(*words)
    assert wrong.code == 2
    assert all(part in wrong.err for part in said)


@pytest.mark.parametrize(("command", "takes_models"), [("explain", True), ("run", True), ("gpus", False)])
def test_a_model_without_its_option(run: Any, command: str, takes_models: bool) -> None:
    wrong = run(command, "llama-3-8b")
    assert (wrong.code, "a model is given by --model" in wrong.err) == (2, takes_models)


def test_matrix_shows_the_decisions_of_explain(run: Any) -> None:
    arguments = ("matrix", "--model", "llama-3-8b", "--model", "deepseek-v3", "--gpu", "h100", "--gpu", "t4")
    cells = {(c["model"], c["gpu"]): c["selected"] for c in run(*arguments, "--json").json["cells"]}
    assert len(cells) == 4
    for (model, gpu), selected in cells.items():
        assert run("explain", "--model", model, "--gpu", gpu, "--json").json["layers"][0]["selected"] == selected
    text = run(*arguments)
    assert text.code == 0
    lines = text.out.splitlines()
    column = lines[0].index("h100")
    assert all(line[column - 2 : column] == "  " for line in lines if len(line) > column)


def test_matrix_is_exit_1_where_a_cell_has_no_backend(run: Any) -> None:
    result = run("matrix", "--model", "llama-3-8b", "--gpu", "h100", "--backend", "FLASHMLA")
    assert result.code == 1
    *_, told = result.out.splitlines()
    why = "`attn-select explain --model llama-3-8b --gpu h100` with the same options says why"
    assert told == f"none: no backend is valid there: {why}"
    layer = run("matrix", "--num-heads", "8", "--head-size", "64", "--gpu", "h100", "--backend", "FLASHMLA")
    assert "`attn-select explain --gpu h100`" in layer.out
    assert "explain" not in run("matrix", "--model", "llama-3-8b", "--gpu", "h100").out


def test_diff_says_predicted_times(run: Any) -> None:
    result = run("diff", "--model", "deepseek-v3", "--gpu", "h200", "--no-times", "--to", "--gpu h100", "--json")
    assert result.json["changes"] == []  # what is given for both sides
    result = run("diff", "--model", "deepseek-v3", "--gpu", "a100", "--to", "--gpu h200", "--json")
    why = [" ".join(change["why"]) for change in result.json["changes"] if change["what"] == "backend"]
    assert any("TRITON_MLA is predicted to take " in each for each in why)


def test_diff_between_rules(run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('version = 1\n[[rules]]\nname = "x"\nprefer = ["TRITON_ATTN"]\n')
    result = run("diff", "--model", "llama-3-8b", "--gpu", "a100", "--to", "--rules mine.toml", "--json")
    assert result.code == 1
    change = result.json["changes"][0]
    assert (change["from"], change["to"]) == ("FLASH_ATTN", "TRITON_ATTN")
    assert any("rule x (mine.toml:2)" in why for why in change["why"])


def test_diff_against_a_golden_file(run: Any, tmp_path: Path) -> None:
    golden = tmp_path / "golden.json"
    golden.write_text(run("explain", "--model", "deepseek-v3", "--gpu", "h100", "--json").out)
    assert run("diff", "--model", "deepseek-v3", "--gpu", "h100", "--golden", str(golden)).out == "no change\n"
    assert run("diff", "--model", "deepseek-v3", "--gpu", "b200", "--golden", str(golden)).code == 1
    golden.write_text("[]")
    result = run("diff", "--model", "deepseek-v3", "--golden", str(golden))
    assert result.code == 2
    assert "golden.json" in result.err
    assert run("diff", "--model", "deepseek-v3").code == 2


def test_backends_lists_all_and_shows_the_source_of_every_fact(run: Any) -> None:
    listed = run("backends", "--json").json
    names = [b["name"] for b in listed["backends"]]
    assert set(names) == set(load_plugins().specs)
    overview = run("backends").out
    assert all(name in overview for name in names)
    for name in names:
        result = run("backends", name.lower().replace("_", "-"), "--json")
        assert result.code == 0
        for capabilities in result.json["backends"][0]["capabilities"].values():
            assert all(f["source"] for k, f in capabilities.items() if k not in ("mla", "sparse", "reads_cache"))
        assert "Capabilities" in run("backends", name).out
    assert run("backends", "FLASH_ATEN").code == 2


def test_rules_show_and_path(run: Any) -> None:
    shown = run("rules", "show", "--json").json
    assert [r["name"] for r in shown["rules"]] == [
        r["name"] for r in tomllib.loads(packaged_rules_path().read_text())["rules"]
    ]
    assert all(rule["line"] > 0 for rule in shown["rules"])
    assert "cpu" in run("rules", "show").out
    assert {f["kind"]: f["state"] for f in run("rules", "path", "--json").json["files"]} == {
        "packaged": "read",
        "user": "not found",
        "working directory": "not found",
    }


def test_rules_check(run: Any, tmp_path: Path) -> None:
    assert run("rules", "check").code == 0
    bad = tmp_path / "bad.toml"
    bad.write_text(
        'version = 1\n[[rules]]\nname = "a"\npriority = ["FLASH_ATEN"]\n\n'
        '[[rules]]\nname = "b"\nwhen = { mla = true }\npriority = ["TRITON_MLA"]\n\n'
        "[backends.FLASHINFER]\nuse_trtlm = true\n"
    )
    result = run("rules", "check", str(bad))
    assert result.code == 1
    assert f"{bad}:2: error: rule 'a': unknown backend 'FLASH_ATEN'; did you mean FLASH_ATTN" in result.out
    assert f"{bad}:6: warning: rule 'b' is never reached" in result.out
    bad.write_text("version = 1\n[backends.FLASHINFER]\nuse_trtlm = true\n")
    result = run("rules", "check", str(bad))
    assert result.code == 1
    assert "use_trtllm" in result.out
    bad.write_text("version = 1\n[[rules]\n")
    assert run("rules", "check", str(bad)).code == 1


def test_models_and_gpus(run: Any) -> None:
    models = run("models", "--json").json["models"]
    assert {"llama-3-8b", "deepseek-v3", "whisper-large-v3", "bert-base"} <= {m["name"] for m in models}
    assert all(m["source"] for m in models)
    assert all(set(m) == {"name", "names", "description", "source"} for m in models)
    assert "deepseek-v3.2" in run("models").out
    gpus = run("gpus", "--json").json["gpus"]
    assert {"t4", "a100", "h20", "h100", "l40s", "rtx4090", "rtx5090", "b200", "b300"} <= {g["name"] for g in gpus}
    assert "b200" in run("gpus").out


def test_doctor(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    monkeypatch.setenv("FORCE_NUM_KV_SPLITS", "2")
    result = run("doctor", "--no-import", "--json")
    found = json.loads(result.out)
    assert found["attn_select"] == __version__
    assert found["variables_without_effect"]["VLLM_ATTENTION_BACKEND"]["value"] == "FLASHINFER"
    assert found["variables"]["FORCE_NUM_KV_SPLITS"] == {"value": "2", "effect": "read by CUTLASS_MLA"}
    assert {"attn-select-fla", "attn-select-torch"} < {plugin["distribution"] for plugin in found["plugins"]}
    assert "flashinfer-python" in found["libraries"]
    text = run("doctor", "--no-import").out
    assert "VLLM_ATTENTION_BACKEND" in text
    assert "--backend NAME" in text


def test_doctor_says_where_no_backend_can_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("doctor", "--no-import", "--json").json["runnable_backends"] != []
    everything = load_plugins()
    torch_alone = [spec for spec in everything.specs.values() if everything.owners[spec.name] == "attn-select-torch"]
    kernels_alone = [spec for spec in everything.specs.values() if spec.name == "FLASHMLA"]

    def registered(specs: list[Any], *plugins: Plugin) -> None:
        owners = {s.name: everything.owners[s.name] for s in specs}
        registry = Registry({s.name: s for s in specs}, owners, plugins=[*plugins])
        monkeypatch.setattr("attn_select.backends.registry.load_plugins", cache(lambda: registry))

    monkeypatch.setattr("attn_select.machine.detection.detect_device", cache(lambda: Detection(lookup("cpu"))))
    registered(kernels_alone)
    result = run("doctor", "--no-import")
    assert result.code == 1
    assert "can run here        none" in result.out
    plugin = "attn-select-torch serves CPUs and GPUs: pip install "
    assert f"problem: no backend can run on this machine: {plugin}" in result.out
    registered(kernels_alone, Plugin("torch", "attn-select-torch", "1", error="ImportError: no libtorch.so"))
    result = run("doctor", "--no-import")
    assert "is broken: ImportError: no libtorch.so" in result.out
    assert plugin not in result.out
    registered(torch_alone)
    monkeypatch.setattr("attn_select.machine.environment.installed_version", lambda name: None)
    monkeypatch.setattr("attn_select.machine.environment.has_module", lambda name: False)
    result = run("doctor", "--no-import")
    assert result.code == 1
    assert (
        "no backend can run on this machine: TORCH_SDPA, FLEX_ATTENTION, TORCH_MLA, TORCH_MLA_SPARSE, TORCH_STATE: pip "
        "install torch" in result.out
    )


@pytest.mark.parametrize("command", ["doctor", "doctor --no-import", "backends", "explain --gpu h100", "run"])
def test_commands_import_nothing_from_the_working_directory(run: Any, tmp_path: Path, command: str) -> None:
    modules = {
        library.module for spec in load_plugins().specs.values() for group in spec.libraries for library in group
    }
    assert {"torch", "triton"} <= modules
    for name in modules | {"numpy", "json", "sitecustomize"}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    run(*command.split())
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("explain --model llama-3-8", "llama-3-8b"),
        ("explain --gpu b20", "b200"),
        ("explain --backend FLASHM", "FLASHMLA_SPARSE"),
        ("explain --kv-cache-dtype fp8_d", "fp8_ds_mla"),
        ("backends CUT", "CUTLASS_MLA"),
        ("rule", "rules"),
    ],
)
def test_shell_completion(run: Any, monkeypatch: pytest.MonkeyPatch, words: str, expected: str) -> None:
    monkeypatch.setenv("COMP_WORDS", f"attn-select {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setenv("_ATTN_SELECT_COMPLETE", "bash_complete")
    assert f"plain,{expected}\n" in run().out


def test_output_that_cannot_be_written_is_no_bug_of_ours(tmp_path: Path) -> None:
    code = "from attn_select_cli.main import main; main()"
    command = [sys.executable, "-c", code, "explain", "--model", "llama-3-8b", "--gpu", "h100", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", ["explain", "run", "flags", "matrix", "diff", "cache", "bench", "tune", "report"])
def test_help_begins_with_examples_and_has_its_options_in_groups(run: Any, command: str) -> None:
    text = run(command, "--help").out
    titles = re.findall(r"(?m)^(\S.*):$", text)
    order = ["Model, and how it is served", "Options", "Rules and times", "A layer by hand, or in place of the model's"]
    assert [title for title in titles if title in order] == [title for title in order if title in titles]
    assert titles[0] == "Model, and how it is served"
    assert titles[-1] == "Output"
    assert text.index("Examples:") < text.index(titles[0])
    parameters = main.cli.get_command(click.Context(main.cli), command).params
    for parameter in parameters:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        assert len(re.findall(rf"(?m)^  .*{flags[0]}\b(?![\w-])", text)) >= 1, flags


@pytest.mark.parametrize("name", OF_MEASURE)
def test_a_command_of_a_distribution_that_is_not_installed_says_what_to_install(
    run: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.metadata.entry_points
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda **given: [] if given["group"] == OTHERS else found(**given)
    )
    result = run(name, "--model", "llama-3-8b", "--help")
    assert result.code == 2
    assert f"attn-select {name} is a command of attn-select-measure, which is not installed" in result.err
    assert "hint: pip install " in result.err
    assert re.search(rf"{name} +Not here: attn-select-measure brings it\.", run("--help").out)


def test_other_distributions_bring_commands(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    brought = importlib.metadata.EntryPoint("mine", "attn_select_cli.gpus:command", OTHERS)

    def entry_points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [brought] if group == OTHERS and name in (None, "mine") else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert "h100" in run("mine").out
    assert re.search(r"(?m)^  mine ", run("--help").out)


def distribution(folder: Path, name: str, entry_points: str) -> None:
    """Install a distribution with nothing but its entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:command", "ModuleNotFoundError"),
        ("attn_select_cli.gpus:nothing", "AttributeError"),
        ("attn_select_cli.gpus:EPILOG", "no click.Command"),
        ("exits_at_import:command", "SystemExit"),
    ],
)
def test_a_broken_command_of_a_distribution_is_named_and_the_others_go_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    distribution(tmp_path / "site", "acme-tools", f"[{OTHERS}]\nacme = {value}\n")
    (tmp_path / "site" / "exits_at_import.py").write_text("print('noise')\nraise SystemExit(1)\n")
    listed = run("--help")
    assert listed.code == 0
    assert re.search(r"(?m)^  acme +Broken: acme-tools", listed.out)
    assert "explain" in listed.out
    assert "noise" not in listed.out
    result = run("acme", "--any", "thing")
    assert (result.code, result.out) == (2, "")
    assert "acme-tools, which brings it, cannot be used" in result.err
    assert why in result.err
    assert run("models").code == 0


def test_verbose_says_what_is_read_and_decided(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("version = 1\n")
    asked = ("explain", "--model", "llama-3-8b", "--gpu", "h200", "--rules", "mine.toml", "--json")
    quiet, told = (shell(tmp_path, *asked, *more) for more in ((), ("-v",)))
    assert quiet.stderr == ""
    assert told.stdout == quiet.stdout
    for said in (
        "rules, --rules: mine.toml: read",
        "plugin triton",
        "times: survey of NVIDIA H200",
        "model: llama-3-8b",
    ):
        assert said in told.stderr
    assert re.search(r"(?m)^decode: TRITON_ATTN by times, \d+ of \d+ backends can run it: 32 query heads", told.stderr)


def shell(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: logging is set up once per process."""
    code = "from attn_select_cli.main import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "--gpu", "h100"),
        ("explain", "--gpu", "h100", "--json"),
        ("matrix", "--gpu", "h100"),
        ("matrix", "--gpu", "h100", "--json"),
        ("diff", "--gpu", "h100", "--to", "--block-size 64"),
        ("diff", "--gpu", "h100", "--to", "--block-size 64", "--json"),
        ("cache", "--gpu", "h100"),
        ("flags", "--gpu", "h100", "--engine", "vllm"),
        ("flags", "--gpu", "h100", "--engine", "vllm", "--json"),
    ],
    ids=" ".join,
)
def test_warnings_go_to_stderr(run: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "mine"\nprefer = ["NO_SUCH"]\n')
    result = run(*command, "--model", "gemma-3-27b", "--rules", str(rules))
    assert f"warning: {rules}:2: rule 'mine': unknown backend 'NO_SUCH'" in result.err
    assert "warning: " not in result.out
    if "--json" in command:
        assert isinstance(result.json, dict)


def test_plugins_that_are_not_installed_are_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.entry_points

    def entry_points(**given: str) -> Any:
        return [each for each in found(**given) if given["group"] != "attn_select" or each.name == "torch"]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    asked = ("explain", "--model", "llama-3-8b", "--gpu", "h100")
    result = run(*asked)
    (line,) = [line for line in result.out.splitlines() if line.startswith("Plugins ")]
    assert "attn-select-torch; 6 more would bring 15 backends" in line
    assert "pip install" not in result.out
    assert "TRITON_ATTN" not in result.out
    assert len(result.out.splitlines()) < 14
    assert "plugin attn-select-triton is not installed; try pip install" in run(*asked, "--full").out
    named = run(*asked, "--backend", "TRITON_ATTN")
    assert named.code == 1
    assert "plugin attn-select-triton is not installed; try pip install" in named.out

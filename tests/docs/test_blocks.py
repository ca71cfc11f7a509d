"""Every block of code in README.md and docs/*.md is run, read by what reads such a file, or listed with the reason.

A test elsewhere holds some of them: ``CLAIMS`` names it. ``test_tutorials`` runs docs/tutorials.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from attn_select import AttentionConfig, clear_cache, select
from attn_select.backends import distributions
from attn_select.machine.device import CPU
from attn_select.machine.environment import Environment
from attn_select_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"(?ms)^ *```(\w*)[^\n]*\n(.*?)^ *```$")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
COMMANDS = {"text": "$ ", "sh": ""}
"""By language, what a line with a command begins with."""


@dataclass(frozen=True)
class Block:
    """One fence: where it begins, its language and what is in it."""

    file: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def commands(self) -> list[str]:
        """What the block would have a shell run, a line each."""
        prompt = COMMANDS[self.language]
        lines = [line for line in self.text.splitlines() if line and not line.startswith("#")]
        return [line.removeprefix(prompt) for line in lines if line.startswith(prompt)]


def blocks() -> list[Block]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        for match in FENCE.finditer(text):
            found.append(Block(path.name, text.count("\n", 0, match.start()) + 1, *match.groups()))
    return found


BLOCKS = blocks()

NOT_RUN = {
    ("runtime.md", "S = exp(g) * S"): "a formula, which the oracle and the conformance suite compute",
}
CLAIMS: dict[str, Callable[[Block], bool]] = {
    "test_documents runs its commands": lambda b: b.language == "console",
    "test_examples finds it in the program": lambda b: b.language == "python" and b.first.startswith("# examples/"),
    "test_serve compares it": lambda b: b.first == "$ python examples/serve.py",
    "test_state_layer compares it": lambda b: b.first == "$ python examples/state_layer.py",
    "test_third_party compares it": lambda b: (b.file, b.language) == ("plugins.md", "text"),
    "test_a_shown_run": lambda b: b.language == "text" and b.first.startswith("$ attn-select run"),
    "test_shown_ranks": lambda b: b.language == "text" and b.first.startswith("$ torchrun"),
    "test_rules": lambda b: b.language == "toml" and "[[rules]]" in b.text,
    "test_an_entry_point": lambda b: b.language == "toml" and b.first.startswith("[project.entry-points"),
    "test_shell": lambda b: b.language == "sh",
    "test_python": lambda b: b.language == "python" and bool(prepared(b)),
    "not run": lambda b: any(b.file == file and b.text.startswith(start) for file, start in NOT_RUN),
}


def claimed(claim: str) -> list[Any]:
    return [pytest.param(b, id=f"{b.file}:{b.line}") for b in BLOCKS if CLAIMS[claim](b)]


# What the blocks of Python find already there.


def nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {}


def a_batch(config: AttentionConfig, device: str = HERE) -> dict[str, Any]:
    """A decode behind 20 cached tokens and a prompt of 5 tokens, in a cache of 4 blocks."""
    from attn_select.runtime import BlockTable

    table = BlockTable(2, 2, 16, device)
    table.append_row(0, [1, 2])
    table.append_row(1, [3])

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(6, *shape, dtype=torch.bfloat16, device=device)

    return {
        "select": select,
        "config": config,
        "num_blocks": 4,
        "query_lens": [1, 5],
        "seq_lens": [21, 5],
        "block_table": table,
        "drawn": drawn,
        "query": drawn(4, 64),
        "key": drawn(2, 64),
        "value": drawn(2, 64),
    }


def a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return a_batch(AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64))


def a_batch_of_trees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from attn_select.runtime import prepare_batch

    known = a_batch(AttentionConfig(num_heads=4, head_size=64, num_speculative_tokens=3))
    counts = {"num_tokens": 6, "num_speculative_tokens": 3, "first": 1, "query_lens": [1, 4], "device": HERE}
    return {**known, **counts, "table": known["block_table"], "torch": torch, "prepare_batch": prepare_batch}


def an_owner_of_a_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from attn_select.runtime import Attention, attention_group, prepare_batch

    known = a_batch(AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, block_size=16))
    group = attention_group(select(known["config"]))
    cache, owner = group.allocate_kv_cache(4), Attention(group)
    metadata = group.build(prepare_batch([1, 5], [21, 5], known["block_table"]))
    owner(known["query"], known["key"], known["value"], cache, metadata)
    names = {"group": group, "owner": owner, "kv_cache_of_owner": cache, "metadata": metadata}
    return {**known, **names, "Attention": Attention}


def two_sides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Blocks of 1008 tokens as an H100 keeps them, for a B200."""
    from attn_select.runtime import convert_kv_cache

    source, target = (select(AttentionConfig(num_heads=4, head_size=64), gpu) for gpu in ("h100", "b200"))
    blocks = torch.zeros(2, 63, 16, 4, 64, dtype=torch.bfloat16)
    return {"convert_kv_cache": convert_kv_cache, "blocks": blocks, "source": source, "target": target}


def check_blocks(names: dict[str, Any]) -> None:
    assert names["blocks"].shape == (63, 2, 4, 16, 64)


def check_trees(names: dict[str, Any]) -> None:
    assert names["common"].tree_mask.sum() == 8


def a_compiled_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from attn_select.runtime import Attention, attention_group, forward_context, prepare_batch

    known = a_batch(AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, block_size=16))
    group = attention_group(select(known["config"]))
    layer, cache = Attention(group), group.allocate_kv_cache(4)
    return {
        "forward_context": forward_context,
        "group": group,
        "common": prepare_batch([1, 5], [21, 5], known["block_table"]),
        "tokens": known["query"],
        "compiled_model": lambda query: layer(query, known["key"], known["value"], cache),
    }


def an_mla_group(folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> dict[str, Any]:
    from attn_select.runtime import MLAAttention, attention_group, prepare_batch

    dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    known = a_batch(AttentionConfig(num_heads=4, block_size=16, **dims, **fields))
    group, drawn = attention_group(select(known["config"])), known["drawn"]
    return {
        **known,
        "MLAAttention": MLAAttention,
        "group": group,
        "kv_b_proj": torch.zeros(4 * 256, 512, dtype=torch.bfloat16, device=group.device),
        "query": drawn(4, 192),
        "kv_c_normed": drawn(512),
        "k_pe": drawn(64),
        "kv_cache": group.allocate_kv_cache(4),
        "metadata": group.build(prepare_batch([1, 5], [21, 5], known["block_table"])),
    }


def a_sparse_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from attn_select.runtime import SparseIndexer

    names = an_mla_group(folder, monkeypatch, sparse_top_k=8)
    names["layer"] = names["MLAAttention"](names["group"], names["kv_b_proj"])
    index = {"index_query": names["drawn"](64, 128), "index_key": names["drawn"](128)}
    return {**names, **index, "weights": names["drawn"](64).float(), "SparseIndexer": SparseIndexer}


def check_layer(names: dict[str, Any]) -> None:
    assert names["output"].isfinite().all()


def check_builds(names: dict[str, Any]) -> None:
    """The first build that serves the layer is taken; without it, the reasons say what each build accepts."""
    config, sinks = (AttentionConfig(num_heads=4, head_size=64, sinks=each) for each in (False, True))
    everything, options = Environment(assume_installed=True), names["AcmeOptions"]
    plan = names["plan"]
    assert plan(config, CPU, everything, options(), "decode").provider == "acme-red (acme_red.attention)"
    assert plan(config, CPU, everything, options(provider="acme-blue"), "decode").provider == "acme-blue (acme_blue)"
    (reason,) = plan(sinks, CPU, everything, options(provider="acme-blue"), "decode")
    assert reason.code in ("sinks", "pinned-kernel")


def facts_of_builds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The block of facts, and one of its libraries."""
    (block,) = (b for b in BLOCKS if (b.file, b.first) == ("plugins.md", "# facts: no torch"))
    names: dict[str, Any] = {}
    exec(compile(block.text, block.file, "exec", dont_inherit=True), names)
    (folder / "acme_blue.py").write_text("def attend(query, key, value, scale=1.0, out=None):\n    return query\n")
    monkeypatch.syspath_prepend(folder)
    return names


def check_adapter(names: dict[str, Any]) -> None:
    assert names["attend_of"](names["AcmeKernel"]("acme-blue"))(1, 2, 3) == 1


def check_models(names: dict[str, Any]) -> None:
    assert names["found"].configs[0].num_heads == 8
    assert names["selections"][0].backends["decode"] is not None


def check_nothing(names: dict[str, Any]) -> None:
    return None


Prelude = Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]
PYTHON: dict[tuple[str, str], tuple[Prelude, Callable[[dict[str, Any]], None]]] = {
    ("README.md", "from attn_select import AttentionConfig, select"): (nothing, check_nothing),
    ("README.md", "from attn_select import configs_from_model, select_model"): (nothing, check_models),
    ("README.md", "from attn_select.runtime import Attention, attention_group, prepare_batch"): (a_layer, check_layer),
    ("plugins.md", "# facts: no torch"): (nothing, check_builds),
    ("plugins.md", "# runtime"): (facts_of_builds, check_adapter),
    ("runtime.md", "blocks = convert_kv_cache("): (two_sides, check_blocks),
    ("runtime.md", "shared = Attention("): (an_owner_of_a_cache, check_layer),
    ("runtime.md", "layer = MLAAttention("): (an_mla_group, check_layer),
    ("runtime.md", "indexer = SparseIndexer("): (a_sparse_layer, check_layer),
    ("runtime.md", "tree_mask = torch.zeros("): (a_batch_of_trees, check_trees),
    ("runtime.md", "with forward_context("): (a_compiled_model, check_nothing),
}  # fmt: skip
"""By document and what the block begins with: what a block finds there, and what is checked behind it."""


def prepared(block: Block) -> list[tuple[Prelude, Callable[[dict[str, Any]], None]]]:
    """Return the rows of ``PYTHON`` for a block."""
    return [row for (file, start), row in PYTHON.items() if block.file == file and block.text.startswith(start)]


def test_every_block_is_held_by_one_test() -> None:
    held = {f"{b.file}:{b.line} {b.first}": [name for name, claim in CLAIMS.items() if claim(b)] for b in BLOCKS}
    assert len(held) > 40
    stray = {where: by for where, by in held.items() if len(by) != 1}
    assert stray == {}, "say in CLAIMS, PYTHON or NOT_RUN how each block is held"
    assert sum(CLAIMS["not run"](b) for b in BLOCKS) == len(NOT_RUN)
    assert sum(CLAIMS["test_python"](b) for b in BLOCKS) == len(PYTHON)


@pytest.mark.parametrize("block", claimed("test_python"))
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((prelude, check),) = prepared(block)
    names = prelude(tmp_path, monkeypatch)
    try:
        exec(compile(block.text, f"{block.file}:{block.line}", "exec", dont_inherit=True), names)
        for expression, shown in re.findall(r"(?m)^(\S[^#\n]*?)  # ([{\[].*)$", block.text):
            assert eval(expression, names) == ast.literal_eval(shown), expression
        check(names)
    finally:
        clear_cache()


@pytest.mark.parametrize("block", claimed("test_rules"))
def test_rules(block: Block, tmp_path: Path) -> None:
    """Each is a file, or a part of one, in which ``rules check`` finds nothing wrong."""
    version = "" if "version = " in block.text else "version = 1\n"
    text = block.text.replace("ACME_ATTN", "FLASH_ATTN")  # the plugin that the page writes
    (tmp_path / "rules.toml").write_text(version + text)
    check_command("attn-select rules check rules.toml", tmp_path)


@pytest.mark.parametrize("block", claimed("test_an_entry_point"))
def test_an_entry_point(block: Block) -> None:
    from attn_select.runtime import ops

    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert all(callable(getattr(ops, operation)) for operation in groups[ops.ENTRY_POINT_GROUP])


@pytest.mark.parametrize("block", claimed("test_shell"))
def test_shell(block: Block) -> None:
    """The targets, folders, extras and options that a command names are there."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8")))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    known = {*distributions.known_backends().values(), "attn-select"}
    assert block.commands
    for line in block.commands:
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if words[0] == "attn-select":
            check_options(words)
        elif words[0] == "python":  # programs have tests of their own
            assert (ROOT / words[1]).is_file(), line
        elif words[0] == "make":
            assert set(words[1:]) <= targets
        elif words[:2] == ["pip", "install"]:
            for word in words[2:]:
                name, _, rest = word.partition("[")
                if word.startswith("."):
                    assert list(ROOT.glob(f"{word.rstrip('/')}/pyproject.toml")), word
                elif not word.startswith(("-", "/")):
                    assert name in known, word
                    assert set(rest.rstrip("]").split(",")) - {""} <= extras, word
        else:
            assert words == ["export", "PIP_FIND_LINKS=/path/to/dist"], line


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *sorted((ROOT / "docs" / "tutorials").glob("*.md"))], ids=lambda p: p.name
)
def test_commands_in_sentences(path: Path) -> None:
    """A command that a sentence names is one, and has the options that it is given."""
    for text in re.findall(r"(?<!`)`attn-select ([^`]+)`", FENCE.sub("", path.read_text("utf-8"))):
        if "COMMAND" not in text and ", " not in text:
            check_options(["attn-select", *text.replace("…", "X").split()])


def check_options(words: list[str]) -> None:
    """Check that the sub-command is one and that every option is one of its own."""
    command: click.Command = cli
    context = click.Context(cli, info_name="attn-select")
    rest = words[1:]
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        assert found is not None, " ".join(words)
        command, rest = found, rest[1:]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    asked = {word.partition("=")[0] for word in rest if word.startswith("-")}
    assert asked <= known, f"{' '.join(words)}: {sorted(asked - known)}"


def check_command(line: str, folder: Path) -> str:
    """Run a line in a shell, with this tree's command, and return what it prints."""
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "attn-select"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m attn_select "$@"\n')
    script.chmod(0o755)
    variables = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "NO_COLOR": "1"}
    done = subprocess.run(["sh", "-c", line], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow(guard="test_shell")
def test_commands_in_a_shell(tmp_path: Path) -> None:
    """Those that need no GPU are run: what they print is for the reader's eyes, so it is not compared."""
    lines = [line.partition("  #")[0] for b in BLOCKS if CLAIMS["test_shell"](b) for line in b.commands]
    ours = [line for line in lines if line.startswith("attn-select")]
    minutes = ("attn-select bench", "attn-select survey")  # without a GPU
    measuring = [line for line in ours if line.startswith(minutes)]
    assert (len(ours), len(measuring)) == (9, 5)
    for line in ours:
        if line not in measuring:
            check_command(line, tmp_path)


@pytest.mark.slow(guard="test_run, which runs layers of another model")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the block shows a CPU")
@pytest.mark.parametrize("block", claimed("test_a_shown_run"))
def test_a_shown_run(block: Block, tmp_path: Path) -> None:
    """Everything but times and errors, which depend on the processor, is as it is shown."""
    (command,) = block.commands

    def plain(text: str) -> list[list[str]]:
        lines = [line for line in text.splitlines() if not line.startswith("warning: no NVIDIA driver")]
        return [re.sub(r"\d+\.\d+(e-\d+)?", "N", line).split() for line in "\n".join(lines).strip().splitlines()]

    assert plain(check_command(command, tmp_path)) == plain(block.text)[1:]


@pytest.mark.slow(guard="tests/distributed, which runs ranks without torchrun")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the block shows CPUs")
@pytest.mark.parametrize("block", claimed("test_shown_ranks"))
def test_shown_ranks(block: Block) -> None:
    (command,) = block.commands
    words = shlex.split(command.replace("torchrun", "torch.distributed.run --standalone"))
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == block.text.partition("\n")[2]

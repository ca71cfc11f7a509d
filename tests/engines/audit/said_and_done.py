"""What ``attn-select flags`` says of a drawn command, held against what an engine does with it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drawn_commands import MODELS, Drawn

from attn_select.engines.names import engine_table
from attn_select_cli.main import run

Verdict = Literal[
    "agreed",
    "both refuse",
    "starts, known wrong",
    "refused",
    "other backend",
    "it runs what we refuse",
    "could not be asked",
]
WRONG: tuple[Verdict, ...] = ("refused", "other backend", "it runs what we refuse")

# How a user asks for drafts, which `flags` leaves to them: by n-grams, which need no second model.
DRAFTS = {
    "vllm": lambda drafts: ["--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": drafts})],
    "sglang": lambda drafts: [
        "--speculative-algorithm",
        "NGRAM",
        "--speculative-num-draft-tokens",
        str(drafts + 1),
        "--speculative-ngram-max-bfs-breadth",
        "1",
    ],
}

# SGLang's arguments that name the kernels of sparse MLA.
DSA = {"--dsa-prefill-backend": "dsa prefill", "--dsa-decode-backend": "dsa decode"}


@dataclass(frozen=True)
class Said:
    """What ``flags`` says.

    Attributes:
        refused: why there is no command; empty where there is one.
        starts: whether the engine is said to start all the same, with wrong outputs.
        arguments, environment: as the engine takes them; of a refused command what was asked for.
        names: the engine's backend by its kind of layers (vLLM) or phase (SGLang); None: its default, not known.
    """

    refused: str
    starts: bool
    arguments: list[str]
    environment: dict[str, str]
    names: dict[str, list[str | None]]

    @property
    def digest(self) -> str:
        """A short name of what the engine is asked: equal ones have equal answers."""
        return hashlib.sha256(json.dumps([self.arguments, self.environment]).encode()).hexdigest()[:12]


def said(engine: str, drawn: Drawn, folder: Path) -> Said:
    """Ask ``flags`` about a drawn command; its model is written below ``folder``."""
    config = folder / drawn.model / "config.json"
    if not config.exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(MODELS[drawn.model]), "utf-8")
    words = ["flags", "--engine", engine, "--model", str(config), "--gpu", drawn.gpu, *drawn.words(), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        code = run(words)
    found = json.loads(out.getvalue())
    drafts = DRAFTS[engine](drawn.drafts) if drawn.drafts else []
    if "error" in found:
        if code not in (1, 2):
            raise RuntimeError(f"{words}: {found['error']}")
        arguments, environment = asked_for(engine, drawn)
        return Said(found["error"]["message"], False, arguments + drafts, environment, {})
    kinds = engine_table(engine).kinds
    names: dict[str, list[str | None]] = {}
    for layer in found["layers"]:
        if kinds and layer["kind"] not in kinds:
            continue  # an encoder's own layers, for which vLLM takes no argument
        for phase in layer["phases"]:
            apart = layer["kind"] == "mla" and layer["phases"] == ["prefill"]
            key = phase if not kinds else "mla_prefill" if apart else kinds[layer["kind"]]
            name = layer["engine_backend"] or layer["engine_default"]
            if name not in names.setdefault(key, []):
                names[key].append(name)
    for flag, value in itertools.pairwise(found["arguments"]):
        if flag in DSA:
            names[DSA[flag]] = [value]
    refused = found["refused"] or {"why": "", "starts": False}
    return Said(refused["why"], refused["starts"], found["arguments"] + drafts, found["environment"], names)


def asked_for(engine: str, drawn: Drawn) -> tuple[list[str], dict[str, str]]:
    """Return the engine's arguments and environment for what a drawn command asks for, without any choice."""
    table = engine_table(engine)
    values = {
        "tensor_parallel": drawn.tensor_parallel if drawn.tensor_parallel > 1 else None,
        "decode_context_parallel_size": drawn.ranks if drawn.ranks > 1 else None,
        "kv_cache_dtype": table.kv_cache_dtypes.get({"fp8": "fp8_e4m3"}.get(drawn.cache, drawn.cache or "")),
        "block_size": drawn.block_size,
    }
    known = [(table.arguments[what], str(value)) for what, value in values.items() if value and what in table.arguments]
    arguments = [word for pair in known for word in pair]
    flag = table.arguments["batch_invariant"]
    if not drawn.batch_invariant:
        return arguments, {}
    return (arguments, {flag[:-1]: "1"}) if flag.endswith("=") else ([*arguments, flag], {})


def verdict(ours: Said, answer: dict[str, Any]) -> tuple[Verdict, str]:
    """Compare what ``flags`` says with what the engine did; return the verdict, and the engine's side in words."""
    if "unasked" in answer:
        return "could not be asked", answer["unasked"]
    if "refused" in answer:
        return ("both refuse" if ours.refused else "refused"), answer["refused"]
    does = answer["names"]
    text = ", ".join(f"{key} {'/'.join(names)}" for key, names in does.items())
    if ours.starts:
        return "starts, known wrong", text
    if ours.refused:
        return "it runs what we refuse", text
    for key, names in does.items():
        named = ours.names.get(key, [None])
        if None not in named and sorted(named, key=str) != sorted(names):
            return "other backend", text
    return "agreed", text

"""Print what `attn-select flags` says for ten models, six GPUs and two engines, with the engines' lines.

    python research/flags_table.py VLLM_SITE_PACKAGES SGLANG_SITE_PACKAGES > docs/log/flags.md

The folders hold an installed engine each: a `source` of the answer ("vllm/x.py Name: why") becomes file and line.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = (
    "llama-3.1-8b",
    "llama-3.3-70b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "gemma-3-27b",
    "llama-4-scout",
    "deepseek-v3",
    "deepseek-v3.2",
    "kimi-k2",
    "glm-5",
)
GPUS = ("a100", "l40s", "h100", "h200", "b200", "rtx-pro-6000")
HEAD = """# Flags against the engines' source

`attn-select flags` for ten models on six GPUs and two engines, and where the engines' source says it: the
file, the name looked up there, and its line. Lines of vLLM are of 0.32.0 (the CPU wheel that runs here), while the
answers name 0.33.0; those of SGLang are of 0.5.23. `--dtype bfloat16`, which every answer has, is left out.
Made by `research/flags_table.py`.
"""
NAME = re.compile(r"[A-Za-z_]\w+")


def flags(engine: str, model: str, gpu: str) -> dict[str, Any]:
    command = ["attn-select", "flags", "--engine", engine, "--model", model, "--gpu", gpu, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout))


def cell(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"]["message"])
    said = " ".join([*answer["arguments"], *(f"{key}={value}" for key, value in answer["environment"].items())])
    said = " ".join(said.replace("--dtype bfloat16", "").split())
    own = sorted(
        {layer["engine_backend"] for layer in answer["layers"] if layer["engine_backend"] and layer["default"]}
    )
    if not any(layer["engine_backend"] for layer in answer["layers"]):
        return "no backend of the engine's runs it"
    text = f"`{said}`" if said else "nothing"
    return f"{text}, for its own is {', '.join(own)}" if own else text


def lines(source: str, folder: Path) -> str:
    """Return the file and lines of a source's names; "not found" where the release here lacks them."""
    file, _, words = source.partition(" ")
    file, _, line = file.partition(":")
    if line:
        return line
    path = next((at for at in (folder / file, folder / "sglang" / "srt" / file) if at.is_file()), None)
    if path is None:
        return "not in this release"
    text = path.read_text("utf-8").splitlines()
    found = {
        number
        for name in NAME.findall(words)
        for number, line in enumerate(text, 1)
        if re.match(rf"\s*(async )?(def|class) {name}\b|{name}\b.*=", line)
    }
    return ", ".join(map(str, sorted(found)[:4])) or "whole file"


def sources(answers: Iterator[dict[str, Any]]) -> list[str]:
    said = (layer[key] for answer in answers for layer in answer.get("layers", ()) for key in ("source", "default"))
    parts = {part.strip().removeprefix("python/") for text in said if text for part in text.split(";")}
    return sorted(part for part in parts if "/" in part.split()[0])


def main() -> None:
    print(HEAD)
    folders = dict(zip(("vllm", "sglang"), map(Path, sys.argv[1:]), strict=True))
    for engine, folder in folders.items():
        answers = {(m, g): flags(engine, m, g) for m, g in itertools.product(MODELS, GPUS)}
        release = next(answer["engine"]["release"] for answer in answers.values() if "engine" in answer)
        print(f"\n## {engine} {release}\n")
        for model in MODELS:
            print(f"**{model}**\n")
            cells = [(gpu, cell(answers[model, gpu])) for gpu in GPUS]
            for text, group in itertools.groupby(sorted(cells, key=lambda c: c[1]), key=lambda c: c[1]):
                print(f"- {', '.join(gpu for gpu, _ in group)}: {text}")
            print()
        print("| file | names | lines |\n| --- | --- | --- |")
        for source in sources(iter(answers.values())):
            file, _, words = source.partition(" ")
            print(f"| {file.partition(':')[0]} | {words} | {lines(source, folder)} |")


if __name__ == "__main__":
    main()

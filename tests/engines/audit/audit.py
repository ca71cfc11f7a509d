"""Hold the commands that ``attn-select flags`` prints against the engines' own code, on GPUs that are not here.

    make audit ARGS="--engine vllm --count 1000 --seed 1 --record"
    make audit ARGS="--engine vllm --count 500 --gpus amd-and-12x"

Commands are drawn by the seed, made by ``flags``, and put through the engine's own argument parser and backend
selection in an environment of its own (``tests/engines/run.py``). A table says of every command that is refused, or
answered by another backend than said, what we say and what the engine does. ``--record`` keeps the engine's answers in
``answers_ENGINE_GPUS.json``, against which ``test_recorded_answers.py`` holds later states of ``flags``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from drawn_commands import GPU_SETS, MODELS, Drawn, draw  # noqa: E402
from run import AUDITED, ROOT, made  # noqa: E402
from said_and_done import WRONG, Said, said, verdict  # noqa: E402

from attn_select.engines.names import engine_table  # noqa: E402
from attn_select.machine.device import lookup  # noqa: E402

COUNTS = {"vllm": 1000, "sglang": 300}


def question(drawn: Drawn, ours: Said, folder: Path, gpus: Sequence[str]) -> dict[str, Any]:
    """Return what an engine is asked about a command. GPUs of one compute capability or arch are asked about as one."""
    device = {lookup(gpu).capability_text: lookup(gpu) for gpu in gpus}[lookup(drawn.gpu).capability_text]
    gpu = {"capability": device.compute_capability, "name": device.full_name, "sm_count": device.sm_count}
    gpu |= {"memory_gib": device.memory_gib, "arch": device.arch}
    asked = {"gpu": gpu, "model": str(folder / drawn.model)}
    return asked | {"arguments": ours.arguments, "environment": ours.environment}


def answers(engine: str, python: Path, questions: Sequence[str]) -> list[dict[str, Any]]:
    """Return an engine's answers, from one process."""
    program = ROOT / f"engines/{engine}/tests/ask_{engine}.py"
    done = subprocess.run([python, program], input="\n".join(questions), capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if len(found) != len(questions):
        raise RuntimeError(f"{engine} ended at {questions[len(found)]}:\n{done.stderr[-3000:]}")
    return found


def main() -> int:
    """Audit one engine or all; return 1 where a command is refused or answered by another backend than said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*COUNTS], help="one of them alone")
    parser.add_argument("--count", type=int, help=f"commands drawn (default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", choices=[*GPU_SETS], default="nvidia", help="the GPUs that they are drawn for")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of the engine at a time")
    parser.add_argument("--record", action="store_true", help="keep the answers for the tests")
    options = parser.parse_args()
    engines = [options.engine] if options.engine else [*COUNTS]
    return max(audit(engine, options.count or COUNTS[engine], options.seed, options) for engine in engines)


def audit(engine: str, count: int, seed: int, options: argparse.Namespace) -> int:
    """Audit one engine and print the table; return 1 where anything is wrong."""
    python, gpus = made(AUDITED[engine]), GPU_SETS[options.gpus]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ours = {drawn: said(engine, drawn, folder) for drawn in draw(engine, count, seed, gpus)}
        asked = {drawn: json.dumps(question(drawn, say, folder, gpus)) for drawn, say in ours.items()}
        # A process for some of the models, each of which it imports once, and one architecture of AMD's; GPU by GPU.
        parts: dict[tuple[int | None, str | None], list[str]] = {}
        for line, drawn in {
            asked[drawn]: drawn for drawn in sorted(ours, key=lambda one: (one.gpu, one.model))
        }.items():
            arch = lookup(drawn.gpu).arch
            part = None if arch else [*MODELS].index(drawn.model) % options.jobs
            parts.setdefault((part, arch), []).append(line)
        print(f"{engine}: {count} commands, seed {seed}: {sum(map(len, parts.values()))} questions", flush=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            found = pool.map(
                lambda part: zip(part, answers(engine, python, part), strict=True), map(sorted, parts.values())
            )
            known = {line: answer for part in found for line, answer in part}
    judged = {drawn: verdict(say, known[asked[drawn]]) for drawn, say in ours.items()}
    counted = Counter(word for word, _ in judged.values())
    for drawn, (word, does) in sorted(judged.items(), key=lambda item: (item[1], str(item[0]))):
        if word in WRONG or word == "could not be asked":
            say = ours[drawn]
            print(f"{word}: {drawn.model} on {drawn.gpu} {' '.join(drawn.words())}")
            print(f"    we say  {say.refused.splitlines()[0] if say.refused else say.names}: {' '.join(say.arguments)}")
            print(f"    it does {does}")
    print(f"{engine}, {count} commands, seed {seed}: " + ", ".join(f"{n} {word}" for word, n in counted.most_common()))
    if options.record:
        record(engine, options.gpus, seed, {drawn: (say, known[asked[drawn]]) for drawn, say in ours.items()})
    return int(any(counted[word] for word in WRONG))


def record(engine: str, gpus: str, seed: int, known: dict[Drawn, tuple[Said, dict[str, Any]]]) -> None:
    """Write the answers, one command a line, with a digest of its arguments and the beginning of a refusal."""
    head = json.dumps({"engine": engine, "release": engine_table(engine).release, "seed": seed})
    lines = [
        json.dumps([*vars(drawn).values(), say.digest, {k: v[:80] if k == "refused" else v for k, v in answer.items()}])
        for drawn, (say, answer) in known.items()
    ]
    text = ",\n".join([head, *lines])
    (HERE / f"answers_{engine}_{gpus}.json").write_text(f"[\n{text}\n]\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())

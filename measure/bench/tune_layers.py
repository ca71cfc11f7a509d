"""Tunes the layers of ``timed_layers.py`` one after the other, as ``attn-select tune`` does, and writes their rules.

    python measure/bench/tune_layers.py --out $OUT --with vllm==0.26.0 --seconds 60     # on the GPU
    python measure/bench/held_out.py --from held_out.jsonl --rules $OUT/tuned.toml

It goes on where a run before it stopped (``OUT/tuned.jsonl``). ``--seconds`` are for all layers together.
"""

from __future__ import annotations

import argparse

from timed_layers import SLOW, add_options, environment_of, layers_of

from attn_select.rules.plugins import load_plugins
from attn_select_cli import rules_file
from attn_select_cli.output import print_lines
from attn_select_measure.benching import Bench
from attn_select_measure.tuner import Tuner, outcome_lines, outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    times, rules = arguments.out / "tuned.jsonl", arguments.out / "tuned.toml"
    bench = Bench(environment_of(arguments), rounds=arguments.rounds)
    tuner = Tuner(bench, times, [name for name in load_plugins().specs if name not in SLOW] if bench.on_gpu else ())
    for name, config in layers_of(arguments).items():
        for phase in config.phases:
            tuner.add(name, config, phase, {}, None)
    tuner.run(arguments.seconds, lambda text: print(text, flush=True))
    text = rules_file.read_text(rules)
    outcome = []
    for one in outcomes(tuner, rules_file.rules_in(text) if text else []):
        outcome.append(one)
        for table in one.tables:
            text = rules_file.with_rule(text, table)
        rules.write_text(text, encoding="utf-8")  # of each layer and phase as soon as they are made
    print_lines(outcome_lines(outcome, tuner))


if __name__ == "__main__":
    main()

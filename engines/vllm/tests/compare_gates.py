"""Count where our gate and vLLM 0.33's selector accept the same backends, by the answers that ``vllm_answers`` wrote.

    python engines/vllm/tests/compare_gates.py

It asks about every layer and GPU of ``vllm_answers_0_33_0.json`` with all libraries as the newest release looked into,
and lists each backend that one accepts and the other refuses. For MLA it is decode that is compared.
"""

from __future__ import annotations

from collections import Counter

from test_vllm_choice import CASES, GOLDEN, config_for

from attn_select import select
from attn_select.layer.config import Phase


def reasons_against(gpu: str, layer: str, phase: Phase) -> dict[str, str]:
    """Return the first reason against each backend of ours, empty where it accepts the layer."""
    candidates = select(config_for(GOLDEN["layers"][layer]), gpu).candidates
    verdicts = {one.backend: one.phases[phase] for one in candidates if phase in one.phases}
    return {name: verdict.reasons[0].message if verdict.reasons else "" for name, verdict in verdicts.items()}


def main() -> None:
    equal: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for gpu, layer in CASES:
        phase: Phase = "prefill" if GOLDEN["layers"][layer].get("attn_type") == "encoder_only" else "decode"
        ours = reasons_against(gpu, layer, phase)
        for backend, reasons in GOLDEN["answers"][gpu][layer]["refused"].items():
            if backend not in ours:
                continue
            asked[backend] += 1
            if (not reasons) == (not ours[backend]):
                equal[backend] += 1
            else:
                takes = "vLLM" if not reasons else "attn-select"
                print(f"{gpu:5} {layer:20} {backend:22} {takes} alone: {ours[backend] or '; '.join(reasons)}")
    print(f"equal: {equal.total()} of {asked.total()}")
    for backend, number in sorted(asked.items()):
        print(f"  {backend:24}{equal[backend]:3} of {number}")


if __name__ == "__main__":
    main()

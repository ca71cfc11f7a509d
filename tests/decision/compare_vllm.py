"""Count where our decisions and those of vLLM 0.33.0's selector are the same, and why the others differ.

    python tests/decision/compare_vllm.py  # the tables, with --write into docs/decisions.md
    python tests/decision/compare_vllm.py --list 'page sizes'  # the decisions of one class

vLLM's answers were written by ``ask_vllm.py``, without a network and without a GPU. Ours count every library as
installed, in the release that vLLM pins where it pins one. Only backends that both have are compared: each side's first
one, for MLA in decode, and for MLA prefill by itself. Layers that ``AttentionConfig`` calls contradictory are left out.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_questions import Question, config_of

from attn_select import ConfigError, Environment, select
from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase

ANSWERS = Path(__file__).with_name("vllm_0_33_0.json.xz")
PINS = {"vllm": "0.33.0", "flashinfer-python": "0.7.2.post1"}
"""What runs in an installation of vLLM 0.33.0."""
OURS_ALONE = ("TORCH_SDPA", "TORCH_MLA", "TORCH_MLA_SPARSE", "TRITON_MLA_SPARSE", "PAGED_ATTENTION", "CUDNN_ATTN")
SAME = {"FLASHINFER_MLA_SPARSE_SM120": "FLASHINFER_MLA_SPARSE"}
"""Our names of vLLM's backends where they differ; those that this project does not have are passed over."""
PREFILLS = {"FLASH_ATTN": "FLASH_ATTN_MLA", "FLASHINFER": "FLASHINFER_MLA", "TRTLLM_RAGGED": "FLASHINFER_MLA"}
"""vLLM's names of MLA prefill by ours."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One decision that differs.

    Attributes:
        vllm, ours: what each chose; None: nothing that both have.
        against: why we refuse vLLM's choice, as (code, message), empty where we accept it.
        refused: why vLLM refuses ours, empty where it accepts it.
        unverified: whether our plan for vLLM's choice is marked so.
    """

    kind: str
    capability: str
    question: Question
    vllm: str | None
    ours: str | None
    against: tuple[tuple[str, str], ...]
    refused: tuple[str, ...]
    unverified: bool

    def refuses(self, backend: str, code: str) -> bool:
        """Whether we refuse vLLM's choice of this name for this reason."""
        return self.vllm == backend and any(each == code for each, _ in self.against)

    def offers(self, backend: str, reason: str) -> bool:
        """Whether our choice is one of this name that vLLM refuses for this reason."""
        return self.ours == backend and any(each.startswith(reason) for each in self.refused)


@dataclass(frozen=True, slots=True)
class Class:
    """Decisions that differ for one reason.

    Attributes:
        verdict: one of ``VERDICTS``.
    """

    name: str
    verdict: str
    because: str
    holds: Callable[[Difference], bool]


VERDICTS = {
    "vLLM's cannot run": "what vLLM chooses raises later, or computes something else",
    "ours runs too": "vLLM does not offer what we choose",
    "order": "both accept both, and we rank otherwise",
    "left out": "what vLLM chooses may run; it is left out for the reason given, and another backend serves the layer",
}
CLASSES = (
    Class(
        "e4m3 cache through Triton below 8.9",
        "vLLM's cannot run",
        "Triton cannot compile e4m3 there; vLLM's selector accepts and its kernel raises later (`triton_attn.py`)",
        lambda d: (d.vllm or "").startswith("TRITON") and d.refuses(d.vllm or "", "kv-cache-dtype"),
    ),
    Class(
        "MLA prefill on 7.5",
        "vLLM's cannot run",
        "FlashAttention 2 needs 8.0; vLLM's prefill selector does not ask",
        lambda d: d.kind == "MLA, prefill" and d.refuses("FLASH_ATTN_MLA", "compute-capability"),
    ),
    Class(
        "distances with DCP",
        "vLLM's cannot run",
        "shares are interleaved, so a rank would measure a window within its own share; vLLM asserts when it makes the "
        "cache",
        lambda d: any(code == "decode-context-parallel-distance" for code, _ in d.against),
    ),
    Class(
        "head size 512 on 10.x and 11.0",
        "vLLM's cannot run",
        "neither FlashAttention 2 nor 4 has it there (TMEM); vLLM's check looks at FlashAttention 4 being there at all",
        lambda d: d.refuses("FLASH_ATTN", "head-size") and d.capability != "9.0",
    ),
    Class(
        "head size 512 on 9.0, FP8 cache",
        "left out",
        "vLLM's own copy of FlashAttention 4 loads whole pages of 64 tokens there (`fp8_kv_dequant`), so that a NaN "
        "behind a sequence's end would reach the output, where `FLASH_ATTN` promises that none does",
        lambda d: d.refuses("FLASH_ATTN", "head-size"),
    ),
    Class(
        "a window in cross-attention",
        "vLLM's cannot run",
        "FlashAttention 2 places a window by the ends of queries and keys, which have no common order there",
        lambda d: d.refuses("FLASH_ATTN", "sliding-window"),
    ),
    Class(
        "sparse MLA with a 16-bit cache",
        "vLLM's cannot run",
        "on 10.x the kernels are bfloat16 or FP8; on 12.x vLLM silently stores `fp8_ds_mla`, to be asked for here",
        lambda d: d.refuses("FLASHINFER_MLA_SPARSE", "kv-cache-dtype"),
    ),
    Class(
        "more than 128 gathered heads",
        "vLLM's cannot run",
        "with DCP a rank has the heads of all ranks, and FlashMLA's sparse kernel takes 64 or 128",
        lambda d: d.refuses("FLASHMLA_SPARSE", "num-heads"),
    ),
    Class(
        "MLA ranks other than 512 on FlashMLA",
        "vLLM's cannot run",
        "FlashMLA checks the width of the latent",
        lambda d: d.refuses("FLASHMLA", "head-size"),
    ),
    Class(
        "trtllm-gen MLA in float16",
        "vLLM's cannot run",
        "it computes and writes bfloat16; the layer stays on kernels of its dtype",
        lambda d: d.vllm == "FLASHINFER_MLA" and d.question.get("dtype") == "float16" and not d.against,
    ),
    Class(
        "batch invariance of FlashAttention 4 on 10.x",
        "order",
        "no source says it (on 9.0 it passed the suite's bitwise comparison), so it is `unverified` and comes last",
        lambda d: d.vllm in ("FLASH_ATTN", "FLASH_ATTN_MLA") and d.unverified and d.question["head_size"] != 512,
    ),
    Class(
        "batch invariance of FlashInfer's ragged prefill",
        "left out",
        "vLLM's prefill selector does not ask for it (`mla/prefill/selector.py`); FlashInfer's query tiles follow the "
        "batch (flashinfer-ai/flashinfer #2424), and no source says that TRT-LLM's compiled kernel has it",
        lambda d: d.refuses("FLASHINFER_MLA", "batch-invariant"),
    ),
    Class(
        "multimodal prefix through FlashAttention 4",
        "left out",
        "vLLM compiles a mask of its own into it, with lists of blocks that each step makes on the device "
        "(vllm-project/vllm #42175, #50294); Triton's kernel knows image ranges, and ran here",
        lambda d: d.refuses("FLASH_ATTN", "mm-prefix"),
    ),
    Class(
        "MLA prefill dims off vLLM's list",
        "ours runs too",
        "FlashAttention takes any QK up to 256 that is a multiple of 8, and V is padded; Triton serves the rest",
        lambda d: d.kind == "MLA, prefill" and d.vllm is None,
    ),
    Class(
        "page sizes",
        "ours runs too",
        "FlashAttention 3 and 4 and native FlashInfer take any page size, and a 16-bit sparse cache is read token by "
        "token",
        lambda d: d.offers(d.ours or "", "block_size"),
    ),
    Class(
        "`FLASHINFER_MLA` on 8.x, 9.x and 11.0",
        "ours runs too",
        "the native wrapper runs there (fa3 on an H100 is the fastest MLA decode measured)",
        lambda d: d.offers("FLASHINFER_MLA", "compute capability"),
    ),
    Class(
        "`FLASHINFER` on 7.5",
        "ours runs too",
        "float16 since FlashInfer 0.6.16; `unverified`, and so behind every other backend",
        lambda d: d.offers("FLASHINFER", "compute capability"),
    ),
    Class(
        "`TRITON_MLA` with e5m2",
        "ours runs too",
        "the kernel reads it",
        lambda d: d.offers("TRITON_MLA", "kv_cache_dtype"),
    ),
    Class(
        "attention sinks of `FLASHINFER`",
        "ours runs too",
        "XQA takes them on 9.x and 12.x, trtllm-gen on 10.x, where vLLM first asks a server of NVIDIA's, which it "
        "could not reach here",
        lambda d: d.offers("FLASHINFER", "attention sinks"),
    ),
    Class(
        "batch invariance vLLM does not offer",
        "ours runs too",
        "native FlashInfer decode without split KV is equal to the bit; FlashAttention 3 over gathered latents too",
        lambda d: d.offers(d.ours or "", "batch invariance"),
    ),
    Class(
        "DCP with `TRITON_ATTN` and sparse MLA on 12.x",
        "ours runs too",
        "both return the LSE that DCP merges; plans with DCP are `unverified`",
        lambda d: d.offers(d.ours or "", "DCP"),
    ),
    Class(
        "scales per head with `TRITON_ATTN`",
        "ours runs too",
        "the query is multiplied by K's scales and the output by V's; such plans are `unverified`",
        lambda d: d.offers("TRITON_ATTN", "per-head quant scales"),
    ),
    Class(
        "non-causal MLA",
        "ours runs too",
        "FlashAttention 3, FlashMLA and Triton take it",
        lambda d: d.offers(d.ours or "", "non-causal"),
    ),
    Class(
        "head size 512 on 9.0",
        "order",
        "vLLM's own copy of FlashAttention 4 takes it; this project never ran that, so it comes behind FlashInfer",
        lambda d: d.vllm == "FLASH_ATTN" and d.question["head_size"] == 512 and d.unverified,
    ),
    Class(
        "heads of 256 with an FP8 cache on 12.1",
        "order",
        "a GB10 failed there at the first request (vllm-project/vllm #50331, open, cause unknown), so `FLASHINFER` is "
        "`unverified` and comes last",
        lambda d: d.vllm == "FLASHINFER" and d.capability == "12.1" and d.question["head_size"] == 256 and d.unverified,
    ),
    Class(
        "decode on 8.9",
        "order",
        "rule `ada-decode`, by published tables",
        lambda d: d.capability == "8.9" and not d.against and not d.refused,
    ),
)
"""Asked in order; the first that holds is meant."""


def class_of(difference: Difference) -> Class | None:
    """Return the class of a difference; None: nobody has looked into it."""
    return next((each for each in CLASSES if each.holds(difference)), None)


def read() -> dict[str, Any]:
    """Return vLLM's answers."""
    return json.loads(lzma.decompress(ANSWERS.read_bytes()))


Compared = tuple[str, str | None, Difference | None]
"""The kind of a decision, what vLLM chose of what both have, and the difference if there is one."""


def decisions(answers: dict[str, Any]) -> Iterator[Compared]:
    """Yield every decision that is compared."""
    environment = Environment(assume_installed=True, pins=PINS)
    for capability, given in answers["answers"].items():
        for question, answer in zip(answers["questions"], given, strict=True):
            try:
                config = config_of(question)
            except ConfigError:
                continue
            found = select(config, capability, environment=environment)
            accepted = [SAME.get(name, name) for name in answer["accepted"]]
            refused = {SAME.get(name, name): tuple(reasons) for name, reasons in answer["refused"].items()}
            for phase in ("decode",) if config.mla else config.phases:
                kind = "sparse MLA" if config.sparse else "MLA, decode" if config.mla else f"MHA, {phase}"
                kind = kind if config.has_cache else "encoders"
                yield _compared(kind, capability, question, found, phase, accepted, refused)
            if config.mla and not config.sparse:
                prefill = PREFILLS.get(answer["prefill"] or "")
                if answer["prefill"] is None or prefill is not None:
                    yield _compared(
                        "MLA, prefill", capability, question, found, "prefill", [prefill] if prefill else [], {}
                    )


def _compared(
    kind: str,
    capability: str,
    question: Question,
    found: Selection,
    phase: Phase,
    accepted: Sequence[str],
    refused: dict[str, tuple[str, ...]],
) -> Compared:
    verdicts = {one.backend: one.phases[phase] for one in found.candidates if phase in one.phases}
    shared = [
        name for name in verdicts if name not in OURS_ALONE and (name in refused or name in accepted or not refused)
    ]
    valid = [name for name in shared if verdicts[name].verdict != "rejected"]
    ours = min(valid, key=lambda name: verdicts[name].rank or len(verdicts), default=None)
    theirs = next((name for name in accepted if name in verdicts), None)
    if ours == theirs:
        return kind, theirs, None
    judged = verdicts[theirs] if theirs else None
    different = Difference(
        kind,
        capability,
        question,
        theirs,
        ours,
        tuple((reason.code, reason.message) for reason in judged.reasons) if judged else (),
        refused.get(ours or "", ()) if ours not in accepted else (),
        bool(judged and judged.plan and judged.plan.unverified),
    )
    return kind, theirs, different


def _fails(difference: Difference) -> bool:
    found = class_of(difference)
    return found is not None and found.verdict == "vLLM's cannot run"


def tables(found: Sequence[Compared]) -> str:
    """Return what docs/decisions.md shows: the counts by kind, by verdict, and by class."""
    total, equal = Counter(kind for kind, *_ in found), Counter(kind for kind, _, each in found if each is None)
    lines = ["| kind | equal |", "| --- | --- |"]
    for kind in total:
        lines.append(f"| {kind} | {equal[kind]:,} of {total[kind]:,} ({equal[kind] / total[kind]:.1%}) |")
    lines.append(f"| all | {equal.total():,} of {total.total():,} ({equal.total() / total.total():.1%}) |")
    runs = [each for _, theirs, each in found if theirs is not None and not (each is not None and _fails(each))]
    same = runs.count(None)
    lines += [f"| all where vLLM chooses what runs | {same:,} of {len(runs):,} ({same / len(runs):.1%}) |", ""]
    classes = Counter(class_of(each) for *_, each in found if each is not None)
    verdicts: Counter[str] = Counter()
    for each, number in classes.items():
        verdicts[each.verdict if each else "not looked into"] += number
    lines += ["| difference | count | meaning |", "| --- | --- | --- |"]
    lines += [f"| {name} | {verdicts[name]:,} | {meaning} |" for name, meaning in VERDICTS.items()]
    lines += ["", "| class | difference | count | reason |", "| --- | --- | --- | --- |"]
    order = [*VERDICTS]
    for each, number in sorted(
        ((each, number) for each, number in classes.items() if each is not None),
        key=lambda pair: (order.index(pair[0].verdict), -pair[1]),
    ):
        lines.append(f"| {each.name} | {each.verdict} | {number:,} | {each.because} |")
    return "\n".join(lines)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "decisions.md"
BEGIN, END = "<!-- compare_vllm.py writes what follows -->\n", "<!-- up to here -->\n"


def with_tables(page: str, text: str) -> str:
    """Return a page with other tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="CLASS", help="print the decisions of one class, or of 'none'")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/decisions.md")
    arguments = parser.parse_args()
    found = [*decisions(read())]
    if arguments.list is None:
        print(tables(found))
        if arguments.write:
            PAGE.write_text(with_tables(PAGE.read_text("utf-8"), tables(found)), "utf-8")
        return
    names = {each.name for each in CLASSES} | {"none"}
    if arguments.list not in names:
        parser.error(f"no class {arguments.list!r}; there are {', '.join(sorted(names))}")
    for kind, _, each in found:
        named = None if each is None else class_of(each)
        if each is not None and (named.name if named else "none") == arguments.list:
            why = "; ".join([*(message for _, message in each.against), *each.refused])
            print(f"{each.capability:5}{kind:14}{each.vllm!s:24}{each.ours!s:24}{each.question}  {why}")


if __name__ == "__main__":
    main()

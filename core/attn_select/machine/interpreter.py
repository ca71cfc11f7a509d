"""Fresh interpreters that import what is installed, and nothing that lies in the working directory."""

from __future__ import annotations

import sys


def interpreter(program: str) -> list[str]:
    """Return the command that runs a program's source in an interpreter like this one.

    ``-c`` alone puts the working directory in front of everything that is installed, and a ``torch.py`` there would
    run. Folders of ``PYTHONPATH`` count, unless this interpreter ignores them too (``-I``, ``-E``, ``-s``). What
    libraries warn of is no error, whatever ``PYTHONWARNINGS`` says.
    """
    flags = ["-P", "-W", "ignore"]
    flags += ["-E"] if sys.flags.ignore_environment else []
    flags += ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *flags, "-c", program]

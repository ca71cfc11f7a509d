"""Files that are read up to a size, and written in one step."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("is not a regular file")
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"is larger than {most} bytes, the most that is read")
    return content


def replace_file(target: Path, content: bytes, check: Callable[[], None] | None = None) -> None:
    """Write a file in one step: others see the old content or the new one. Its mode stays as it was.

    What ``check`` raises, which is called just before that step, leaves the file as it is.

    What is written at first has a name that nobody knows, and no link is followed to it.
    """
    new = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(new, flags, 0o666 if mode is None else mode)
    try:
        if mode is not None:
            os.chmod(new, mode)  # the mode of a new file is what the process's umask leaves of it
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check()
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)

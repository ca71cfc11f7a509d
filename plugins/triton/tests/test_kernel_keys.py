"""Keys of kernels in Triton's cache on the disk: the same in every process, whatever it has launched before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

KEYS = """
import importlib, json, pkgutil, sys
import attn_select_triton.kernels as package
from triton.runtime.jit import JITFunction

found = {}
for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
    for name, value in vars(importlib.import_module(f"{package.__name__}.{module}")).items():
        if isinstance(value, JITFunction) and value.module.endswith(f".{module}"):
            found[module, name] = value
print(json.dumps({str(each): found[each].cache_key for each in sorted(found, reverse=sys.argv[1] == "back")}))
"""


def keys(order: str) -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", KEYS, order], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_keys_do_not_depend_on_the_order_of_first_launches() -> None:
    there, back = keys("there"), keys("back")
    assert len(there) > 50
    assert there == back

"""What every test process needs before torch and triton are imported, the order of the tests, and which are slow."""

from __future__ import annotations

import gc
import os
import shutil
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

from attn_select.machine.amx import avoid_trapping_amx

QUICK_CONFIGS = 6
"""Configurations per conformance suite that `make test` runs; the others are marked slow."""
SUMMARY = pytest.StashKey[list[Any]]()

# On tensors as small as the tests' more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

avoid_trapping_amx()  # workers of pytest-xdist inherit what it sets

# Without a GPU kernels run in Triton's interpreter, which must be on before anything imports triton.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes of pytest-xdist take several GPUs in turn: CUDA_VISIBLE_DEVICES=0,1 python3 -m pytest -m gpu -n 40
worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
if worker is not None and len(gpus) > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]

# The same examples on every machine, however slow it is. `make test` draws fewer: --hypothesis-profile=quick. A GPU
# machine may lack hypothesis; its tests of kernels need none.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "full",
        max_examples=200,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        # A test's own list would replace this one, and make it fail on a slow machine.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.register_profile("quick", settings.get_profile("full"), max_examples=50)
    settings.load_profile("full")


# Torch, transformers and the collected tests are a million objects that live until the end. The collector looks at none
# of them: it waits until they are there, and then counts them as permanent.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[Any] = Counter()
    for item in items:
        suite = getattr(item, "cls", None)
        if suite is not None and getattr(item, "originalname", "") == "test_config" and hasattr(suite, "num_configs"):
            seen[suite] += 1
            if seen[suite] > QUICK_CONFIGS:
                item.add_marker(pytest.mark.slow(guard=f"the suite's first {QUICK_CONFIGS} configurations"))
    # Processes take classes and modules in this order; the many short ones at the end fill up what is left.
    items.sort(key=lambda item: not is_long(item))


def is_long(item: pytest.Item) -> bool:
    """Whether an item's class or module takes long: where it is marked so, and every conformance suite."""
    return item.get_closest_marker("long") is not None or hasattr(getattr(item, "cls", None), "num_configs")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, with one reason for all of it; hold ``slow`` to its argument.

    A conformance suite sees to that itself: without a GPU it still judges configurations for one.
    """
    for mark in item.iter_markers("slow"):
        assert mark.kwargs.get("guard"), (
            "slow(guard=...) says what `make test` has instead: no behaviour goes unguarded"
        )
    if item.get_closest_marker("gpu") is not None and not hasattr(getattr(item, "cls", None), "num_configs"):
        torch = pytest.importorskip("torch", reason="needs torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist says of its conformance suites."""
    counts: list[Any] = getattr(node, "workeroutput", {}).get("attn-select-conformance", [])
    node.config.stash.setdefault(SUMMARY, []).extend(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SUMMARY in terminalreporter.config.stash:
        from attn_select.testing.conformance_summary import write_summary

        counts = terminalreporter.config.stash[SUMMARY]
        write_summary(terminalreporter, counts)

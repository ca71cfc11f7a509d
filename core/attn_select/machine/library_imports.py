"""Imports of kernel libraries, whose warnings are remarks on what else they could use, and no errors of ours."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def warnings_logged(name: str) -> Iterator[None]:
    """Log what warns inside, at level INFO (``attn-select -v`` shows it): under ``-W error`` it would not import.

    Filters that the library sets are kept.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        try:
            yield
        finally:
            added: list[Any] = [each for each in warnings.filters if each not in before]
            for each in caught:
                logger.info("import of %s: %s: %s", name, each.category.__name__, each.message)
    for action, message, category, module, line in reversed(added):
        patterns = [getattr(each, "pattern", each) or "" for each in (message, module)]
        warnings.filterwarnings(action, patterns[0], category, patterns[1], line)


def import_library(module: str) -> ModuleType:
    """Import a module of a kernel library; what it warns of is logged."""
    with warnings_logged(module):
        return importlib.import_module(module)

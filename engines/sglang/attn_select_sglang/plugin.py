"""The entry point of ``sglang.srt.plugins``: SGLang calls it in every process, before arguments are resolved."""

from __future__ import annotations

import logging
import multiprocessing

from attn_select.engines.adapter import Adapter
from attn_select.engines.observed import counter, observes

RELEASES = ("0.5.23",)
"""The releases of SGLang that this adapter was run with; docs/engines.md says what ran where."""
TARGET = "sglang.srt.arg_groups.overrides._attention_backend_default"
"""What fills in the attention backends that no argument names, for prefill and decode."""


def register() -> None:
    """Let attn-select choose in this process, where it takes part in this release of SGLang."""
    from sglang.version import __version__

    logger = logging.getLogger("sglang.attn_select")

    def warn(message: str) -> None:
        if multiprocessing.parent_process() is None:  # SGLang's other processes would say the same again
            logger.warning("%s", message)

    adapter = Adapter("attn-select-sglang", "SGLang", __version__, RELEASES, warn)

    def install() -> None:
        import pkgutil

        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from attn_select_sglang.hook import around
        from attn_select_sglang.registration import register_kernels

        register_kernels()
        pkgutil.resolve_name(TARGET)
        HookRegistry.register(TARGET, around(adapter), HookType.AROUND)
        if observes():
            from attn_select_sglang import observe

            count = counter(adapter, observe.lengths_of, lambda text: logger.info("attn-select: %s", text))
            HookRegistry.register(observe.TARGET, observe.before(count), HookType.BEFORE)

    adapter.joins(install)

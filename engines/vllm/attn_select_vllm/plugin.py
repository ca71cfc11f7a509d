"""The entry point of ``vllm.general_plugins``: vLLM calls it in every process, before a model is made."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

from attn_select.engines.adapter import Adapter
from attn_select.engines.observed import counter, observes
from attn_select.machine.amx import avoid_trapping_amx

RELEASES = ("0.26", "0.32", "0.33")
"""The releases of vLLM that this adapter was run with; docs/engines.md says what ran where."""


def register() -> None:
    """Let attn-select choose in this process, where it takes part in this release of vLLM. May be called again."""
    import vllm
    from vllm.logger import init_logger

    logger = init_logger("vllm.attn_select")

    def warn(message: str) -> None:
        logger.warning_once("%s", message, scope="global")

    def warn_in_the_first_process(message: str) -> None:
        if multiprocessing.parent_process() is None:  # the engine's other processes would say the same again
            warn(message)

    adapter = Adapter("attn-select-vllm", "vLLM", vllm.__version__, RELEASES, warn_in_the_first_process)
    avoid_trapping_amx(warn_in_the_first_process)  # vLLM's own CPU kernels multiply bfloat16 too
    own = replace(adapter, warn=warn)  # layers are chosen for in the engine's workers

    def install() -> None:
        from attn_select_vllm import hook

        hook.install(own)
        if observes():
            from attn_select_vllm.observe import lengths_of, watch

            watch(counter(own, lengths_of, lambda text: logger.info("attn-select: %s", text)))

    adapter.joins(install)

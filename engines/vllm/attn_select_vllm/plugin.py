"""The entry point of ``vllm.general_plugins``: vLLM calls it in every process, before a model is made."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

from attn_select.engines.adapter import MOVED, Adapter
from attn_select.engines.observed import ObservedSteps, observes
from attn_select.machine.amx import avoid_trapping_amx
from attn_select_vllm.releases import RELEASES


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
    if not adapter.takes_part():
        return
    try:
        from attn_select_vllm import hook

        hook.install(replace(adapter, warn=warn))  # layers are chosen for in the engine's workers
        if observes():
            from attn_select_vllm.observe import watch

            steps = ObservedSteps(f"vLLM {vllm.__version__}", lambda text: logger.info("attn-select: %s", text))
            watch(replace(adapter, warn=warn), steps)
    except MOVED as error:
        adapter.interface_moved(error)

"""The runtime of ``FLA``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_select.layer.layouts import STATE_VK
from attn_select.machine.library_imports import import_library
from attn_select.runtime.states import GatheredStateImpl, StateBackend, StateContext, StatePart
from attn_select_fla.facts.fla import LEAST_LOG_DECAY, FlaKernel

Operation = Callable[..., tuple[Tensor, Tensor]]


def operation(kernel: FlaKernel) -> Operation:
    """Return an operation of fla-core."""
    found: Operation = getattr(import_library(kernel.module), kernel.function)
    return found


class FlaImpl(GatheredStateImpl):
    """Runs the recurrence of one layer by fla-core. Its tensors are ``(1, T, heads, size)``, or ``(B, 1, …)``."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self._operations = {phase: operation(plan.kernel) for phase, plan in context.plans.items()}  # type: ignore[arg-type]

    def one_token(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of one token of each request, and the states behind it."""
        tokens = [None if x is None else x.unsqueeze(1) for x in (query, key, value, log_decay, strength)]
        found, new_state = self._operations["decode"](**self._arguments(*tokens), initial_state=state)
        return found.squeeze(1), new_state

    def varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        strength: Tensor | None,
        state: Tensor,
        part: StatePart,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of all tokens, and the states behind each request's last one."""
        log_decay = log_decay.clamp(min=LEAST_LOG_DECAY.value)
        tokens = [None if x is None else x.unsqueeze(0) for x in (query, key, value, log_decay, strength)]
        found, new_state = self._operations["prefill"](
            **self._arguments(*tokens), initial_state=state, cu_seqlens=part.query_start_loc.long()
        )
        return found.squeeze(0), new_state

    def _arguments(self, query: Any, key: Any, value: Any, log_decay: Any, strength: Any) -> dict[str, Any]:
        """Return the arguments that all operations take alike."""
        config, rule = self.context.config, self.context.config.rule
        v_first = self.context.state_layout == STATE_VK
        given = {"g": log_decay, "scale": config.scale, "output_final_state": True, "state_v_first": v_first}
        if rule.delta_rule:
            return {
                **given,
                "q": query.contiguous(),
                "k": key.contiguous(),
                "v": value.contiguous(),
                "beta": strength,
                "use_qk_l2norm_in_kernel": rule.normalized,
            }
        # simple_gla has one key head per value head and no write strength.
        group = config.num_v_heads // config.num_heads
        written = value if strength is None else (value * strength[..., None]).to(value.dtype)
        return {
            **given,
            "q": query.repeat_interleave(group, dim=2),
            "k": key.repeat_interleave(group, dim=2),
            "v": written.contiguous(),
        }


class FlaBackend(StateBackend):
    """Layers that keep a state by the kernels of fla-core."""

    impl_cls = FlaImpl

    @classmethod
    def prepare(cls) -> None:
        """Import the library."""
        import_library("fla.ops")

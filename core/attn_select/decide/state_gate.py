"""What the capabilities of a backend say against a layer that keeps a state."""

from __future__ import annotations

from collections.abc import Sequence

from attn_select.backends.reasons import unsupported
from attn_select.backends.spec import Reason, StateCapabilities
from attn_select.layer.state import StateConfig


def state_reasons(capabilities: StateCapabilities, config: StateConfig, elsewhere: Sequence[Reason]) -> list[Reason]:
    """Return every reason against a layer, those of device and libraries among them."""
    found: list[Reason] = []
    recurrences, dtypes, stored = capabilities.recurrences, capabilities.dtypes, capabilities.state_dtypes
    if config.recurrence not in recurrences.value:
        found.append(unsupported("recurrence", "recurrence", config.recurrence, list(recurrences.value)))
    found += elsewhere
    for code, what, dtype, accepted in (
        ("dtype", "dtype", config.dtype, [*dtypes.value]),
        ("state-dtype", "state dtype", config.state_dtype, [*stored.value]),
    ):
        if dtype not in accepted:
            found.append(unsupported(code, what, dtype, accepted, f"--{code} {accepted[0]}"))
    for code, what, size, sizes in (
        ("head-size", "head size", config.head_size, capabilities.head_sizes.value),
        ("v-head-size", "V head size", config.v_head_size, capabilities.v_head_sizes.value),
    ):
        if not sizes.accepts(size):
            found.append(unsupported(code, what, size, str(sizes)))
    drafts, most = config.num_speculative_tokens, capabilities.speculative_tokens.value
    if drafts > most:
        supported = f"at most {most}" if most else 0
        found.append(
            unsupported("speculative-tokens", "speculative tokens", drafts, supported, f"--speculative-tokens {most}")
        )
    return found

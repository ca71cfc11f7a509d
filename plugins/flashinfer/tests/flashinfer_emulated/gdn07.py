"""``chunk_gated_delta_rule`` as FlashInfer 0.7.2.post1 has it, with more arguments than in 0.6.14."""

from __future__ import annotations

from typing import Any

import flashinfer_emulated as fi
from flashinfer_emulated.gdn06 import computed


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: Any = False,
    output: Any = None,
    output_state: Any = None,
    state_checkpoints: Any = None,
    checkpoint_cu_starts: Any = None,
    checkpoint_every_n_tokens: Any = 0,
    use_cp: Any = "auto",
    state_indices: Any = None,
    _cp_chunk_len: Any = None,
    backend: Any = "auto",
    max_seqlen: Any = None,
) -> Any:
    fi.called("chunk_gated_delta_rule", locals())
    return computed(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, output_state)

"""torch's dtypes by the names of ``attn_select.layer.dtypes``."""

from __future__ import annotations

import torch

from attn_select.errors import ConfigError, show

FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PLAIN_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def storage_dtype(cache_dtype: str) -> torch.dtype:
    """Return the torch dtype that stores a cache's dtype, uint8 for fp8_ds_mla; ConfigError where none does (nvfp4)."""
    known = {**PLAIN_DTYPES, **FP8_DTYPES, "fp8_ds_mla": torch.uint8}
    if cache_dtype not in known:
        text = (
            f"kv_cache_dtype = {show(cache_dtype)}: a cache of it cannot be allocated; accepted are {', '.join(known)}"
        )
        raise ConfigError(text, fields=["kv_cache_dtype"])
    return known[cache_dtype]

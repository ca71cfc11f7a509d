"""Views of a cache: made once, and without a hold on the engine's memory."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASHINFER_NHD
from attn_select.runtime.kv_cache import CacheView, allocate_kv_cache, key_value_views

CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64)


def key_and_value() -> CacheView[tuple[Tensor, Tensor]]:
    return CacheView(lambda kv_cache: key_value_views(kv_cache, FLASHINFER_NHD, CONFIG))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_they_are_made_once_and_keep_no_cache_alive(mode: type[torch.no_grad]) -> None:
    views = key_and_value()
    with mode():
        cache = allocate_kv_cache(FLASHINFER_NHD, CONFIG, 5, 16, "cpu")
        first = views(cache)
        assert first[1].data_ptr() == cache[:, 1].data_ptr()
        assert views(cache) is first
        gone, memory = weakref.ref(cache), weakref.ref(first[0])
        del cache, first
        gc.collect()
    assert gone() is None
    assert memory() is None


def test_a_cache_that_got_other_memory_has_other_views() -> None:
    views = key_and_value()
    cache = allocate_kv_cache(FLASHINFER_NHD, CONFIG, 5, 16, "cpu")
    views(cache)
    cache.data = torch.ones_like(cache)
    assert views(cache)[0].data_ptr() == cache.data_ptr()
    assert views(cache)[1].all()


def test_a_copy_sees_the_engines_cache() -> None:
    views = key_and_value()
    cache = allocate_kv_cache(FLASHINFER_NHD, CONFIG, 5, 16, "cpu")
    views(cache)
    assert copy.deepcopy(views)(cache)[0].data_ptr() == cache.data_ptr()

"""K and V of a cache: made once, and without a hold on the engine's memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch

from attn_select.config import AttentionConfig
from attn_select.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.runtime.kv_cache import allocate_kv_cache, key_value_views
from attn_select_flash_attn.views import CacheViews, key_value_halves, latent_parts

CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64)


@dataclass
class Context:
    kv_layout: str
    config: AttentionConfig = CONFIG


def views_of(layout: str, config: AttentionConfig = CONFIG) -> CacheViews:
    return CacheViews(key_value_halves(Context(layout, config)))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND])
@pytest.mark.parametrize("v_head_size", [None, 32])
def test_they_are_the_layouts_views(layout: str, v_head_size: int | None) -> None:
    config = CONFIG.model_copy(update={"v_head_size": v_head_size})
    cache = allocate_kv_cache(layout, config, 5, 16, "cpu")
    for made, wanted in zip(views_of(layout, config)(cache), key_value_views(cache, layout, config), strict=True):
        assert made.data_ptr() == wanted.data_ptr()
        assert made.shape == wanted.shape
        assert made.stride() == wanted.stride()


def test_latents_and_rope_parts_have_one_head() -> None:
    cache = torch.zeros(5, 64, 576)
    latent, rope = latent_parts([512, 64])(cache)
    assert latent.shape == (5, 64, 1, 512)
    assert rope.shape == (5, 64, 1, 64)
    assert rope.data_ptr() == cache[..., 512:].data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_they_are_made_once_and_keep_no_cache_alive(mode: type[torch.no_grad]) -> None:
    views = views_of(FLASHINFER_NHD)
    with mode():
        cache = allocate_kv_cache(FLASHINFER_NHD, CONFIG, 5, 16, "cpu")
        first = views(cache)
        assert views(cache)[0] is first[0]
        gone = weakref.ref(cache)
        memory = weakref.ref(first[0])
        del cache, first
        gc.collect()
    assert gone() is None
    assert memory() is None


def test_another_cache_has_other_views() -> None:
    views = views_of(FLASHINFER_NHD)
    caches = [allocate_kv_cache(FLASHINFER_NHD, CONFIG, count, 16, "cpu") for count in (5, 5, 7)]
    for cache in (*caches, caches[0]):
        assert views(cache)[0].data_ptr() == cache.data_ptr()
        assert len(views(cache)[0]) == len(cache)
    assert views(caches[0])[0].data_ptr() == caches[0].data_ptr()
    caches.pop()
    gc.collect()
    assert views(caches[0])[0].data_ptr() == caches[0].data_ptr()


def test_a_cache_that_got_other_memory_has_other_views() -> None:
    views = views_of(FLASHINFER_NHD)
    cache = allocate_kv_cache(FLASHINFER_NHD, CONFIG, 5, 16, "cpu")
    views(cache)
    cache.data = torch.ones_like(cache)
    assert views(cache)[0].data_ptr() == cache.data_ptr()
    assert views(cache)[1].all()

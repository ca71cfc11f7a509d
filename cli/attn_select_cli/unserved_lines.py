"""Layers that no backend here has a kernel for, as text and as JSON, with the engines' own backends for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_select.decide.cache_text import shared_cache_lines
from attn_select.decide.lines import HANG, Line, byte_text, row
from attn_select.engines import ENGINES
from attn_select.engines.names import EngineKernel, engine_table
from attn_select.layer.models.unserved import UnservedLayers
from attn_select.machine.device import Device


def unserved_lines(layers: UnservedLayers, device: Device) -> list[Line]:
    """Return what is known of layers of one kind, and which engines serve them on a device."""
    heads = _known(
        (layers.num_heads, f"{layers.num_heads} query heads"),
        (layers.num_kv_heads, f"{layers.num_kv_heads} KV head{'s' if layers.num_kv_heads != 1 else ''}"),
        (layers.head_size, f"head size {layers.head_size}"),
    )
    chosen = _known(
        (layers.tokens, f"at most {layers.tokens} tokens of the context"),
        (layers.block_size, f"{layers.block_size} tokens together"),
        (layers.window, f"window {layers.window}"),
        (layers.indexer_heads, f"indexer of {layers.indexer_heads} heads of {layers.indexer_head_size}"),
    )
    lines: list[Line] = [
        [(f"{layers.kind} × {layers.count}  ", "title"), HANG, (heads, "")],
        row("no kernel here", (f"sparse attention to {layers.attends_to}", ""), style="rejected"),
    ]
    if chosen:
        lines.append(row("", (chosen, "dim")))
    if layers.bytes_per_token is not None:
        own, indexer, owners = layers.bytes_per_token, layers.indexer_bytes_per_token, layers.owners
        text = f"{own:g} bytes per token and layer in {layers.cache_dtype}"
        text += f" and {indexer:g} of the indexer's keys" if indexer else ""
        total = byte_text(round(own * owners.caches + indexer * owners.indexers))
        whose = f"all {layers.count}" if owners.caches == layers.count else f"the {owners.caches} that own one"
        lines.append(row("KV cache", (f"{text}, {total} per token for {whose}", "")))
        lines += shared_cache_lines(owners)
    for index, table in enumerate(map(engine_table, ENGINES)):
        text = engine_names(table.kernels_of(layers, device)) or "no backend is known"
        lines.append(row("" if index else "engines", (f"{table.engine} {table.release}: {text}", "")))
    return lines


def unserved_data(layers: UnservedLayers, device: Device) -> dict[str, Any]:
    """Return the same as plain data; ``docs/json.md`` documents it."""
    engines = {key: engine_backends(engine_table(key).kernels_of(layers, device)) for key in ENGINES}
    return {**layers.to_dict(), "engines": engines}


def engine_backends(kernels: Sequence[EngineKernel]) -> list[dict[str, Any]]:
    """Return an engine's own backends for layers as plain data."""
    return [{"name": each.name, "default": each.default, "source": each.source} for each in kernels]


def engine_names(kernels: Sequence[EngineKernel]) -> str:
    """Return in words what an engine serves layers with."""
    return ", ".join(each.name if each.default else f"{each.name} by name" for each in kernels)


def _known(*facts: tuple[int | None, str]) -> str:
    """Return the texts of those numbers that the model's config says."""
    return ", ".join(text for number, text in facts if number is not None)

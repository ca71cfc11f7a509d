"""Which kind each layer of a decoder is: from the config's own list, or by the rule of its config class.

Kinds are transformers' names (``ALLOWED_ATTN_LAYER_TYPES``, configuration_utils.py 5.23.0), with older spellings
mapped to them. The rules are what each ``configuration_*.py`` does when ``layer_types`` is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attn_select.errors import ModelError
from attn_select.layer.models.data_files import defaults
from attn_select.layer.models.fields import MAX_LAYERS, Fields
from attn_select.layer.models.unserved import KINDS

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, CROSS = "indexed_attention", "cross_attention"
LINEAR, CONV = "linear_attention", "conv"
HYBRID = "hybrid"
"""Attention and a state in one layer."""

ATTENTION = (FULL, SLIDING, CHUNKED, INDEXED, HYBRID, CROSS)
NO_ATTENTION = ("moe", "mlp", "none")
"""Layers of neither attention nor a state; ``none``: attention that was taken out of a model (Nemotron-NAS)."""
NOT_ATTENTION = (LINEAR, CONV, *NO_ATTENTION)
UNSUPPORTED = {"window_attention": "windows of an image"}
"""Kinds of attention that no text model has, each with what it attends to."""
DRAFT_LAYERS = "num_nextn_predict_layers"
"""The layers for multi-token prediction, which a model has beside its own."""
NO_MODEL_FITS = "describe one layer with --num-heads and --head-size and no --model"
NO_MODEL = f"add it, or {NO_MODEL_FITS}"


def layer_types(fields: Fields) -> list[str]:
    """Return the kind of every layer, in order."""
    for name in ("layer_types", "layers_block_type"):
        if (listed := fields.list_of(str, name, "layer types")) is not None:
            kinds = _checked(fields, name, listed)
            break
    else:
        kinds = _by_rule(fields, fields.family.layers)
    return [_own(fields, kind) for kind in kinds]


def _by_rule(fields: Fields, rule: Sequence[Any]) -> list[str]:
    """Return what a rule of ``Family.layers`` says: its name and its arguments."""
    name, *arguments = rule
    return _RULES[name](fields, *arguments)


def _own(fields: Fields, kind: str) -> str:
    """Return what the family means by a kind: Qwen4Exp calls its sparse layers full attention, for one."""
    found = fields.family.spellings.get(kind, kind)
    if found == FULL and fields.family.model_type == "step5" and _step5_is_sparse(fields):
        return INDEXED
    # Qwen4ExpTextConfig: without an indexer they are dense; Dots3NoteTextConfig: where it is switched off.
    if found == "qsa" and fields.get("indexer_n_heads") is None:
        return FULL
    return FULL if found == INDEXED and fields.raw.get("use_dsa") is False else found


def _step5_is_sparse(fields: Fields) -> bool:
    """Whether an indexer chooses for the full layers (vLLM 0.33.0 models/step5/nvidia/config.py)."""
    section = fields.get("sparse_config")
    return isinstance(section, dict) and section.get("enabled") is not False


def draft_types(fields: Fields, kinds: list[str]) -> list[str]:
    """Return the kind of every layer that only drafts run, behind the model's own ``kinds``; empty without any."""
    count = fields.integer(DRAFT_LAYERS, 0, MAX_LAYERS) or 0
    listed = fields.list_of(str, "layer_types", "layer types") or []
    if len(listed) == len(kinds) + count:
        spelled = defaults()["spellings"]
        return [_own(fields, spelled.get(entry, entry)) for entry in listed[len(kinds) :]]
    last = next((kind for kind in reversed(kinds) if kind in ATTENTION or kind in KINDS), None)
    return [kind] * count if (kind := fields.family.drafts or last) else []


def _checked(fields: Fields, name: str, listed: list[str]) -> list[str]:
    count = fields.heads("num_hidden_layers")
    # Layers for multi-token prediction may be listed behind the model's own (Step 3.5).
    extra = fields.integer(DRAFT_LAYERS, 0) or 0
    if not listed or len(listed) > MAX_LAYERS:
        raise fields.wrong(name, listed, f"from 1 to {MAX_LAYERS} layer types")
    if count is not None and fields.family.layers[0] != "nemotron_h" and len(listed) not in (count, count + extra):
        raise ModelError(f"{fields.where}: {name} has {len(listed)} entries for num_hidden_layers = {count}")
    spelled = defaults()["spellings"]
    known = {entry: spelled.get(entry, entry) for entry in set(listed)}
    for entry, kind in known.items():
        if kind not in (*ATTENTION, *NOT_ATTENTION, *UNSUPPORTED, *KINDS, *fields.family.spellings):
            accepted = ", ".join(dict.fromkeys((*ATTENTION, *NOT_ATTENTION, *fields.family.spellings)))
            raise fields.wrong(f"{name}[{listed.index(entry)}]", entry, f"one of {accepted}")
    kinds = [known[entry] for entry in listed[: count if count and len(listed) == count + extra else None]]
    if fields.family.variant == "gemma4":  # Gemma4TextConfig forces it
        kinds[-1] = FULL
    return kinds


def _count(fields: Fields) -> int:
    count = fields.heads("num_hidden_layers")
    if count is None:
        raise ModelError(f"{fields.where}: num_hidden_layers is missing", hint=NO_MODEL)
    return count


def window(fields: Fields) -> int | None:
    """Return the config's sliding window in tokens, None where it is switched off."""
    if fields.get("use_sliding_window") is not None and not fields.flag("use_sliding_window"):
        return None
    return fields.tokens("sliding_window")


def _uniform(fields: Fields, kind: str = SLIDING) -> list[str]:
    return [kind if window(fields) else FULL] * _count(fields)


def _cycle(fields: Fields, kinds: Sequence[str], first: Sequence[str] = (), last: str | None = None) -> list[str]:
    """The same kinds again and again; the first layers and the last one may be others."""
    count = _count(fields)
    found = [*first, *[kinds[i % len(kinds)] for i in range(len(first), count)]][:count]
    return found if last is None else [*found[:-1], last]


def _listed(fields: Fields, field: str, kind: str, rest: str, otherwise: Sequence[Any], start: int = 0) -> list[str]:
    """One kind where a field lists the layer, counted from ``start``; without the field a default list, or a rule."""
    listed = fields.list_of(int, field, "layer numbers" + (" from 1" if start else ""))
    if listed is None and otherwise[0] in _RULES:
        return _by_rule(fields, otherwise)
    numbers = set(otherwise if listed is None else listed)
    return [kind if i + start in numbers else rest for i in range(_count(fields))]


def _flags(fields: Fields, one: str, zero: str, otherwise: Sequence[Any]) -> list[str]:
    """By a list with a 1 or a 0 per layer."""
    listed = fields.list_of(int, "layer_flags", "0 and 1, one per layer")
    if listed is None:
        return _by_rule(fields, otherwise)
    if len(listed) != (count := _count(fields)) or set(listed) - {0, 1}:
        raise fields.wrong(fields.name_of("layer_flags"), listed, f"0 or 1 for each of {count} layers")
    return [one if entry else zero for entry in listed]


def _every(fields: Fields, period: int, field: str = "", rest: str = SLIDING) -> list[str]:
    """Every ``period``-th layer is full; all are without a window. EXAONE 4 also writes the pattern as ``LLLG``."""
    if field and (found := fields.get(field)) is not None:
        if isinstance(found, str) and found and set(found) <= {"L", "G"}:
            return [FULL if found[i % len(found)] == "G" else rest for i in range(_count(fields))]
        period = fields.integer(field, 0) or 0
    if rest == SLIDING and not window(fields):
        period = 0
    return [rest if period and (i + 1) % period else FULL for i in range(_count(fields))]


def _every_from_end(fields: Fields, period: int) -> list[str]:
    """The last layer is full, and every ``period``-th before it (MuseSparkTextConfig)."""
    count = _count(fields)
    return [SLIDING if (count - 1 - i) % period else FULL for i in range(count)]


def _every_and_last(fields: Fields, period: int, rest: str) -> list[str]:
    kinds = _every(fields, period, rest=rest)
    if rest == SLIDING or FULL not in kinds:  # Gemma4TextConfig; OlmoHybridConfig
        kinds[-1] = FULL
    return kinds


def _first(fields: Fields, period: int, field: str = "") -> list[str]:
    period = (fields.integer(field) if field else None) or period
    return [SLIDING if i % period else FULL for i in range(_count(fields))]


def _group(fields: Fields) -> list[str]:
    """The last layer of each group attends, and what is left over behind the groups (Ling 3)."""
    size, count = fields.integer("layer_group_size") or 1, _count(fields)
    return [LINEAR if (i + 1) % size and i < count // size * size else FULL for i in range(count)]


def _window_from(fields: Fields) -> list[str]:
    start = fields.integer("max_window_layers", 0) or 0
    return [SLIDING if window(fields) and i >= start else FULL for i in range(_count(fields))]


def _alternate_below(fields: Fields) -> list[str]:
    end = fields.integer("max_window_layers", 0) or 0
    return [SLIDING if window(fields) and i % 2 == 0 and i < end else FULL for i in range(_count(fields))]


def _no_rope(fields: Fields, with_rope: str, without: str) -> list[str]:
    count = _count(fields)
    rope = fields.list_of(int, "no_rope_layers", "0 and 1, one per layer")
    if not rope:  # Llama 4 publishes an empty list for the default
        period = fields.integer("no_rope_layer_interval") or 4
        rope = [int((i + 1) % period != 0) for i in range(count)]
    if len(rope) < count:
        raise ModelError(f"{fields.where}: no_rope_layers has {len(rope)} entries for num_hidden_layers = {count}")
    if without == SLIDING and not window(fields):
        without = FULL
    return [with_rope if entry else without for entry in rope[:count]]


def _period(fields: Fields, kind: str, first: Sequence[str] = ()) -> list[str]:
    """One kind in every period, behind the first layers (Jamba, Zamba)."""
    period, offset = fields.integer("attn_layer_period") or 1, fields.integer("attn_layer_offset", 0)
    count = _count(fields)
    return [*first, *[kind if i % period == offset else LINEAR for i in range(count - len(first))]][:count]


def _ratios(fields: Fields, by_ratio: Mapping[str, str], otherwise: Sequence[Any] = ()) -> list[str]:
    """By ``compress_ratios`` of DeepSeek-V4 and V4.1; what is listed behind the model's layers is for drafts."""
    count, listed = _count(fields), fields.list_of(int, "compress_ratios", "integers, one per layer")
    if listed is None and otherwise:
        return _by_rule(fields, otherwise)
    kinds = {int(ratio): kind for ratio, kind in by_ratio.items()}
    accepted = f"one of {', '.join(by_ratio)}"
    if listed is None:
        raise ModelError(f"{fields.where}: compress_ratios is missing: {accepted} per layer")
    if len(listed) < count or set(listed[:count]) - set(kinds):
        raise fields.wrong("compress_ratios", listed, f"{accepted} for each of {count} layers")
    return [kinds[ratio] for ratio in listed[:count]]


def _nemotron_h(fields: Fields) -> list[str]:
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return [LINEAR, "moe", FULL, "mlp"]
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*E-") or len(pattern) > MAX_LAYERS:
        raise fields.wrong("hybrid_override_pattern", pattern, "a string of M (Mamba), * (attention), E and - (MLP)")
    kinds = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
    return [kinds[letter] for letter in pattern]


def _block_types(fields: Fields) -> list[str]:
    blocks = fields.list_of(str, "block_types", "'recurrent' and 'attention'")
    if not blocks or set(blocks) - {"recurrent", "attention"}:
        raise fields.wrong("block_types", blocks, "a list of 'recurrent' and 'attention'")
    return [LINEAR if blocks[i % len(blocks)] == "recurrent" else SLIDING for i in range(_count(fields))]


def _attention_types(fields: Fields) -> list[str]:
    """GPT-Neo: ``[[["global", "local"], 12]]`` is twelve times the pair."""
    count = _count(fields)
    groups = fields.get("attention_types")
    if groups is None:
        groups = [[["global", "local"], (count + 1) // 2]]
    kinds: list[str] = []
    for group in groups if isinstance(groups, list) else [groups]:
        match group:
            case [[*names], int(times)] if 0 <= times <= MAX_LAYERS and all(n in ("global", "local") for n in names):
                kinds += [defaults()["spellings"][name] for name in names * min(times, count)]
            case _:
                raise fields.wrong("attention_types", groups, "a list like [[['global', 'local'], 12]]")
    if len(kinds) < count:
        raise ModelError(f"{fields.where}: attention_types names {len(kinds)} layers for num_hidden_layers = {count}")
    return kinds[:count]


def _twice(fields: Fields) -> list[str]:
    """LongCat-Flash: two attention blocks in each of ``num_layers`` layers."""
    return [FULL] * (2 * _count(fields))


def blocks(fields: Fields) -> list[Any]:
    """Return ``block_configs`` of a Nemotron NAS model (vLLM's nemotron_nas.py), one per layer."""
    found = fields.get("block_configs")
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_LAYERS:
        raise fields.wrong("block_configs", found, "a list with one object per layer")
    return found


def attention_block(fields: Fields, block: Any) -> dict[str, Any]:
    """Return the attention part of one entry of ``block_configs``."""
    attention = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(attention, dict):
        raise fields.wrong("block_configs[]", block, "an object with an object 'attention'")
    return attention


def _nemotron_nas(fields: Fields) -> list[str]:
    return ["none" if attention_block(fields, block).get("no_op") else FULL for block in blocks(fields)]


_RULES: dict[str, Callable[..., list[str]]] = {
    "uniform": _uniform,
    "cycle": _cycle,
    "listed": _listed,
    "flags": _flags,
    "every": _every,
    "every_from_end": _every_from_end,
    "every_and_last": _every_and_last,
    "first": _first,
    "group": _group,
    "window_from": _window_from,
    "alternate_below": _alternate_below,
    "no_rope": _no_rope,
    "period": _period,
    "ratios": _ratios,
    "nemotron_h": _nemotron_h,
    "block_types": _block_types,
    "attention_types": _attention_types,
    "twice": _twice,
    "nemotron_nas": _nemotron_nas,
}

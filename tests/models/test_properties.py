"""Whatever stands in a config: only the documented errors come out, and what comes out adds up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from attn_select.errors import ConfigError, ModelError, UnknownNameError
from attn_select.layer.models import LayerKinds, ModelSource, layer_kinds
from attn_select.layer.models.data_files import defaults

T = TypeVar("T")
RAW = [json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("data/configs/*/config.json"))]
TABLE = defaults()
TYPES = sorted({*TABLE["types"], *TABLE["remote"], *TABLE["wrappers"], *TABLE["unsupported"]})
STACKS = [name for name, row in TABLE["types"].items() if row.get("reader") != "encoder_decoder"]
NAMES = sorted(
    {name for raw in RAW for part in (raw, *(v for v in raw.values() if isinstance(v, dict))) for name in part}
    | {name for row in TABLE["types"].values() for name in row["defaults"]}
    | {"layer_types", "layers_block_type", "text_config", "hybrid_override_pattern", "attention_types", "block_configs"}
    | {"linear_attn_config", "attn_layer_indices", "no_rope_layers", "cross_attention_layers", "hybrid_layer_pattern"}
    | {"attention_other_setting", "num_attention_heads_per_layer", "use_mla", "is_causal", "hybrid_layer_ids"}
    | {"use_bidirectional_attention", "attn_config", "n_head_kv", "multi_query_attention", "num_nextn_predict_layers"}
)

words = ["full_attention", "sliding_attention", "mamba", "M*-", "bfloat16", "float32", "all", *TYPES]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 130)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(words)
)
keys = st.sampled_from(NAMES) | st.text(max_size=4)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=6), max_leaves=12
)


def outcome(call: Callable[[], T]) -> T | str:
    """Return what a call returns, or the message of the documented error that it raises."""
    try:
        return call()
    except (ModelError, ConfigError, UnknownNameError) as error:
        return error.message


def check_read(raw: dict[str, Any], **arguments: Any) -> LayerKinds | None:
    """Read a config; None where a documented error says why not."""
    model_type = raw.get("model_type")
    source = ModelSource("a config", "", model_type if isinstance(model_type, str) else "", raw, "a test")
    found = outcome(lambda: layer_kinds(source, **arguments))
    if isinstance(found, str):
        assert 0 < len(found) < 1500
        return None
    assert found.kinds or found.unserved
    assert all(kind.count > 0 for kind in found.kinds)
    assert len({(kind.kind, kind.config) for kind in found.kinds}) == len(found.kinds)
    return found


@given(data=st.data(), raw=st.sampled_from(RAW), changes=st.integers(1, 4), ranks=st.sampled_from([1, 2, 3, 8, 128]))
def test_any_mutation_of_a_published_config(data: st.DataObject, raw: dict[str, Any], changes: int, ranks: int) -> None:
    """Fields replaced, taken out or added, in the config and in its text part."""
    changed: dict[str, Any] = json.loads(json.dumps(raw))
    for _ in range(changes):
        parts = [changed, *(part for part in changed.values() if isinstance(part, dict))]
        part = data.draw(st.sampled_from(parts))
        name = data.draw(st.sampled_from([*part, *NAMES]))
        if data.draw(st.booleans()):
            part[name] = data.draw(values)
        else:
            part.pop(name, None)
    check_read(changed, tensor_parallel_size=ranks)


@given(
    model_type=st.sampled_from(STACKS),
    count=st.integers(1, 130),
    heads=st.sampled_from([8, 16, 64]),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_layers_add_up(model_type: str, count: int, heads: int, ranks: int) -> None:
    """All layers are counted where nothing says that some are left out; tensor parallelism changes no count."""
    raw = {"model_type": model_type, "num_hidden_layers": count, "num_attention_heads": heads}
    raw |= {"num_key_value_heads": 8, "hidden_size": heads * 64, "dtype": "bfloat16"}
    found = check_read(raw)
    # A list of its own; two blocks in each layer; attention and a state in one layer.
    if found is None or model_type in ("nemotron_h", "longcat_flash", "falcon_h1", "zamba", "zamba2"):
        return
    total = sum(kind.count for kind in (*found.kinds, *found.unserved))
    left_out = [warning for warning in found.warnings if "layers are left out" in warning or "have neither" in warning]
    assert total + sum(int(warning.split(" of ")[0]) for warning in left_out) == count
    shared = check_read(raw, tensor_parallel_size=ranks)
    assert shared is not None
    assert [(kind.kind, kind.count) for kind in shared.kinds] == [(kind.kind, kind.count) for kind in found.kinds]
    whole = [config.num_heads for config in found.attention_configs]
    assert [config.num_heads * ranks for config in shared.attention_configs] == whole

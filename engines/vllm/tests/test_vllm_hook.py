"""The wrapped choice of an emulated vLLM: what runs there with the plugin, and what stays vLLM's."""

from __future__ import annotations

import pickle
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_emulated import LLAMA, AttentionSelectorConfig, engine_config
from vllm_layers import HEAD, MLA_LAYERS, mine, serving, vllms

from attn_select import AttentionConfig, clear_cache
from attn_select.backends import registry
from attn_select.backends.registry import load_plugins
from attn_select.errors import AttnSelectError, ConfigError, RulesError, RuntimeMissingError
from attn_select_vllm.names import OWN_KERNELS, OWN_PREFIX, EngineBackend

ASKED = AttentionSelectorConfig(head_size=32, dtype="torch.float32", kv_cache_dtype="auto", block_size=None)


def rules_file(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine read a rule."""
    monkeypatch.setenv("ATTN_SELECT_RULES", str(mine(text, folder)))
    clear_cache()


@pytest.fixture
def prefers_our_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules_file('prefer = ["TORCH_SDPA"]', tmp_path, monkeypatch)


asked_for = pytest.mark.usefixtures("prefers_our_kernel")
"""Tests of what runs where a user asks for attn-select's kernels: on a CPU vLLM's own choice stays otherwise."""


def started(vllm: Any, config: Any = None, version: str = "0.32.0") -> Any:
    """The emulated engine with the plugin."""
    engine = vllm(config or engine_config(LLAMA), version)
    from attn_select_vllm.plugin import register

    register()
    return engine


@asked_for
def test_the_entry_point_wraps_the_platform(vllm: Any) -> None:
    engine = vllm(engine_config(LLAMA))
    from attn_select_vllm.plugin import register

    register()
    register()
    assert {name for name in engine.registry.__members__ if name.startswith(OWN_PREFIX)} == {
        OWN_PREFIX + name for name in OWN_KERNELS
    }
    path = engine.platform.get_attn_backend_cls(None, attn_selector_config=ASKED, num_heads=None)
    assert path == OWN_KERNELS["TORCH_SDPA"]
    assert engine.platform.get_attn_backend_cls(None, attn_selector_config=ASKED) == path
    (block,) = engine.log.lines
    assert "chose for full_attention: TORCH_SDPA (attn-select's kernel, as ATTN_SELECT_TORCH_SDPA)" in block
    assert "4 query heads, 2 KV heads, head size 32, float32" in block
    assert "TRITON_ATTN" in block
    assert "selector_rules.toml:" in block


def test_vllms_own_choice_stays_on_a_cpu(vllm: Any) -> None:
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert engine.log.lines[0].startswith(f"{HEAD}leaves full_attention to vLLM's CPU_ATTN: ")


@pytest.mark.parametrize("error", [ValueError("No valid attention backend found"), NotImplementedError("on CPU")])
def test_what_vllm_has_no_backend_for_is_ours(error: Exception, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("vllm_emulated.Platform.get_attn_backend_cls", has_none)
    assert started(vllm).platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


def test_a_pair_is_asked_for_both_of_its_kernels(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm)
    from attn_select_vllm.hook import judge

    engine.platform.device_name = "cuda"
    selection = serving(AttentionConfig(num_heads=16, num_kv_heads=8, head_size=256), "h200")
    judged = (selection, engine.platform, ASKED, engine.config, vllms("FLASH_ATTN"))
    pair = "ATTN_SELECT_FLASH_ATTN_TRITON_ATTN"
    assert judge(*judged).engine == EngineBackend(pair, own=True)

    def missing(_: Any) -> None:
        raise RuntimeMissingError("no kernels")

    monkeypatch.setattr(type(load_plugins().specs["FLASH_ATTN"]), "get_class", missing)
    assert judge(*judged).engine == vllms("FLASH_ATTN")
    assert pair in judge(*judged).refused


@pytest.mark.parametrize("rule", ["", 'prefer = ["FLASHINFER_MLA"]'])
def test_vllms_own_choice_of_mla_prefill_stays(vllm: Any, rule: str, tmp_path: Path) -> None:
    engine = started(vllm)
    from attn_select_vllm.mla_prefill import choose_prefill

    selection = serving(MLA_LAYERS, "h100", **({"rules": mine(rule, tmp_path)} if rule else {}))
    choice = choose_prefill(selection, engine.platform, engine.config)
    asked = engine.config.attention_config.mla_prefill_backend
    assert choice.own == vllms("FLASH_ATTN")
    assert (choice.engine, asked and asked.name) == (
        (vllms("FLASHINFER"), "FLASHINFER") if rule else (choice.own, None)
    )


RELEASES_OF_EACH_REGISTRY = ("0.26.0", "0.32.0")
"""Until 0.26 vLLM's registry overrides backends and makes none; later ones make members of their own."""


@pytest.mark.parametrize("version", RELEASES_OF_EACH_REGISTRY)
def test_own_kernels_can_be_asked_for_by_name(vllm: Any, version: str) -> None:
    engine = started(vllm, version=version)
    for name, path in OWN_KERNELS.items():
        found = engine.registry[OWN_PREFIX + name]  # what a string on the command line goes through
        assert isinstance(found, engine.registry)
        assert (found.name, found.get_path()) == (OWN_PREFIX + name, path)
        asked = ASKED._replace(use_mla="MLA" in name)
        assert engine.platform.get_attn_backend_cls(found, asked) == path


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", [*OWN_KERNELS])
def test_a_name_for_the_wrong_kind_of_layers_is_an_error(vllm: Any, name: str, sparse: bool) -> None:
    """Before, its class was made with the other kind's arguments: a TypeError."""
    engine = started(vllm)
    asked = ASKED._replace(use_mla=sparse or "MLA" not in name, use_sparse=sparse)

    with pytest.raises(ConfigError) as failed:
        engine.platform.get_attn_backend_cls(engine.registry[OWN_PREFIX + name], asked)
    assert failed.value.fields == ("attention_backend",)
    served = "dense MLA" if "MLA" in name else "layers with keys and values per head"
    assert f"it serves {served} alone" in failed.value.message


@pytest.mark.parametrize("version", RELEASES_OF_EACH_REGISTRY)
def test_a_name_reaches_a_process_that_has_loaded_no_plugin(vllm: Any, version: str) -> None:
    first = started(vllm, version=version)
    sent = pickle.dumps(first.registry["ATTN_SELECT_TRITON_ATTN"])
    for name in [name for name in sys.modules if name.startswith("attn_select_vllm")]:
        del sys.modules[name]
    second = vllm(engine_config(LLAMA), version)
    assert "ATTN_SELECT_TRITON_ATTN" not in second.registry.__members__
    assert pickle.loads(sent) is second.registry["ATTN_SELECT_TRITON_ATTN"]


def test_ranks_have_their_share_of_the_heads(vllm: Any) -> None:
    engine = started(vllm, engine_config(LLAMA, tensor_parallel=2))
    engine.platform.get_attn_backend_cls(None, ASKED)
    assert "2 query heads, 1 KV head," in engine.log.lines[0]


def test_an_explicit_backend_wins(vllm: Any) -> None:
    engine = started(vllm)
    chosen = engine.registry["CPU_ATTN"]
    assert engine.platform.get_attn_backend_cls(chosen, ASKED) == "vllm.CPU_ATTN"
    # Gemma 4 and ``attention_config`` name one too: nothing says who did.
    assert "to CPU_ATTN: --attention-backend, attention_config or the model asks for it" in engine.log.lines[0]
    own = engine.registry["ATTN_SELECT_TRITON_ATTN"]
    assert engine.platform.get_attn_backend_cls(own, ASKED) == OWN_KERNELS["TRITON_ATTN"]


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"use_mm_prefix": True}, "passes no image ranges"),
    ({"use_kv_connector": True}, "serves no KV connector"),
    ({"use_non_causal": True}, "passes no non-causal batches"),
    ({"use_per_head_quant_scales": True, "use_mla": True}, "passes no scales per head with MLA"),
    ({"attn_type": "encoder_decoder"}, "serves decoder layers alone"),
]


@asked_for
def test_encoders_run_our_kernels(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm, engine_config({**LLAMA, "model_type": "bert"}))
    asked = ASKED._replace(attn_type="encoder_only")
    assert engine.platform.get_attn_backend_cls(None, asked) == "vllm.CPU_ATTN"
    of_release_0_32(monkeypatch)
    assert engine.platform.get_attn_backend_cls(None, asked) == OWN_KERNELS["TORCH_SDPA"]


@pytest.mark.parametrize(("asked", "reason"), LIMITS)
def test_an_explicit_own_backend_is_held_to_the_limits(vllm: Any, asked: dict[str, Any], reason: str) -> None:
    engine = started(vllm)
    name = "ATTN_SELECT_TRITON_MLA" if asked.get("use_mla") else "ATTN_SELECT_TORCH_SDPA"
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: .*{reason}"):
        engine.platform.get_attn_backend_cls(engine.registry[name], ASKED._replace(**asked))


@asked_for
def test_an_engine_that_speculates_after_one_that_does_not(vllm: Any) -> None:
    """vLLM keeps choices by what its selector is asked, which says nothing of speculation."""
    engine = started(vllm)
    from vllm.v1.attention import selector

    assert selector._cached_get_attn_backend(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]
    engine.config.speculative_config = Speculation
    assert selector._cached_get_attn_backend(None, ASKED) == "vllm.CPU_ATTN"


@pytest.mark.parametrize(
    ("name", "capability", "says"),
    [("cuda", (9, 0), "it runs on cuda 9.0, and attn-select sees CPU"), ("rocm", (9, 4), "it runs on rocm, and")],
)
def test_a_device_that_attn_select_does_not_see_is_vllms(
    vllm: Any, name: str, capability: tuple[int, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container without NVML, and ROCm, whose capabilities are no CUDA's."""
    monkeypatch.setattr("attn_select.machine.detection.load_nvml", no_nvml)
    clear_cache()
    engine = started(vllm)
    engine.platform.device_name, type(engine.platform).capability = name, capability
    for _ in range(2):
        assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (line,) = engine.log.lines
    assert line.startswith("WARNING attn-select-vllm takes no part in vLLM 0.32.0, which chooses attention by itself: ")
    assert says in line


def no_nvml() -> Any:
    raise OSError("no NVML")


@pytest.mark.parametrize("broken", ["rules", "workload"])
def test_settings_that_cannot_be_read_do_not_end_the_engine(
    vllm: Any, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "rules":
        rules_file('prefers = ["FLASH_ATTN"]', tmp_path, monkeypatch)
    else:
        monkeypatch.setenv("ATTN_SELECT_WORKLOAD", "chatt")
        clear_cache()
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (line,) = engine.log.lines
    assert ("mine.toml:" if broken == "rules" else "chatt") in line
    assert "ATTN_SELECT_STRICT=1" in line
    monkeypatch.setenv("ATTN_SELECT_STRICT", "1")
    with pytest.raises(AttnSelectError):
        engine.platform.get_attn_backend_cls(None, ASKED)


def test_the_working_directorys_rules_are_not_an_engines(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "selector_rules.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "sdpa"\nprefer = ["TORCH_SDPA"]\n')
    monkeypatch.chdir(tmp_path)
    clear_cache()
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    monkeypatch.setenv("ATTN_SELECT_RULES", str(rules))
    clear_cache()
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


def of_release_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backend import AttentionBackend

    monkeypatch.setattr(AttentionBackend, "supported_kv_cache_layouts", lambda: None, raising=False)


def test_cross_attention_runs_our_kernels_from_0_32(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm, engine_config({**LLAMA, "model_type": "whisper"}))
    from attn_select_vllm.kernels.limits import limits

    asked = ASKED._replace(attn_type="encoder_decoder")
    assert limits(asked, engine.config) == ["the adapter serves decoder layers alone"]
    of_release_0_32(monkeypatch)
    assert limits(asked, engine.config) == []


@asked_for
def test_images_are_passed_on_from_0_32(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm)
    of_release_0_32(monkeypatch)
    from attn_select_vllm.kernels.limits import limits

    asked = ASKED._replace(use_mm_prefix=True)
    assert engine.platform.get_attn_backend_cls(None, asked) == OWN_KERNELS["TORCH_SDPA"]
    clamped = engine_config({**LLAMA, "model_type": "gemma4_text"})
    assert limits(asked, clamped) == ["the windows of this model end its images too, and the kernels' windows do not"]


def test_connectors_read_caches_of_vllms_own_shape(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm)
    of_release_0_32(monkeypatch)
    from attn_select_vllm.kernels.limits import limits

    asked = ASKED._replace(use_kv_connector=True)
    engine.platform.device_name = "cuda"
    assert limits(asked, engine.config) == limits(asked._replace(use_mla=True), engine.config) == []
    shared = SimpleNamespace(
        **vars(engine.config) | {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}
    )
    without = asked._replace(use_kv_connector=False)
    for asked in (without, without._replace(use_mla=True)):
        assert limits(asked, shared) == []
    reason = "the adapter serves decode context parallelism with MLA, or of decoders without drafts and halved batches"
    assert limits(without._replace(attn_type="encoder_decoder"), shared) == [reason]
    shared.parallel_config.use_ubatching = True
    assert limits(without, shared) == [reason]
    assert limits(without._replace(use_mla=True), shared) == []
    shared.parallel_config.use_ubatching, shared.speculative_config = False, SimpleNamespace()
    assert limits(without, shared) == [reason]
    assert limits(without._replace(use_mla=True), shared) == []


@asked_for
def test_no_store_is_shared_with_vllms_own_backends_for_cpus(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """These pack what they write: before, an engine with attn-select read other numbers there, without a word."""
    engine = started(vllm)
    of_release_0_32(monkeypatch)
    asked = ASKED._replace(use_kv_connector=True)
    assert engine.platform.get_attn_backend_cls(None, asked) == "vllm.CPU_ATTN"
    with pytest.raises(ConfigError, match="pack what they write"):
        engine.platform.get_attn_backend_cls(engine.registry["ATTN_SELECT_TORCH_SDPA"], asked)


def test_a_backend_that_vllm_does_not_have_is_named(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules_file('prefer = ["FLEX_ATTENTION", "TORCH_SDPA"]', tmp_path, monkeypatch)
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]
    assert "  FLEX_ATTENTION is not taken: vLLM has no backend that stands for it" in engine.log.lines[0]


def test_a_rule_of_a_backend_that_nobody_knows_is_warned_of(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules_file('prefer = ["TORCH_SPDA"]', tmp_path, monkeypatch)
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (warning,) = [line for line in engine.log.lines if line.startswith("WARNING")]
    assert "TORCH_SPDA" in warning
    assert "TORCH_SDPA" in warning
    monkeypatch.setenv("ATTN_SELECT_STRICT", "1")
    with pytest.raises(RulesError):
        engine.platform.get_attn_backend_cls(None, ASKED)


def test_what_to_install_where_no_plugin_serves_the_device(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the plugin of Triton on a CPU."""
    found = registry.entry_points

    def of_triton(group: str) -> Any:
        names, *rest = found(group)
        return [entry for entry in names if entry.name == "triton"], *rest

    monkeypatch.setattr(registry, "entry_points", of_triton)
    clear_cache()
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert "  TORCH_SDPA would run: pip install " in engine.log.lines[0]


@asked_for
@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("use_adaptive_verification", "the adapter plans from query lengths on the host"),
        ("use_rswa", "the adapter passes no windows beside references"),
        ("use_what_comes_next", "the adapter does not know use_what_comes_next"),
    ],
)
def test_flags_of_later_releases_are_refused(vllm: Any, flag: str, reason: str) -> None:
    engine = started(vllm)
    from attn_select_vllm.kernels.limits import limits

    later = namedtuple("Later", [*ASKED._fields, flag])
    assert engine.platform.get_attn_backend_cls(None, later(*ASKED, True)) == "vllm.CPU_ATTN"
    assert limits(later(*ASKED, True), engine.config) == [reason]
    assert engine.platform.get_attn_backend_cls(None, later(*ASKED, False)) == OWN_KERNELS["TORCH_SDPA"]


class Speculation:
    num_speculative_tokens = 2
    method = "dflash"


class ByNGrams(Speculation):
    method = "ngram"


class ByEagle(Speculation):
    method = "eagle"


@asked_for
@pytest.mark.parametrize("speculation", [ByNGrams, ByEagle])
def test_uniform_drafts_run_our_kernels(
    vllm: Any, speculation: type[Speculation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(vllm, engine_config(LLAMA, speculative_config=speculation))
    of_release_0_32(monkeypatch)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


@pytest.mark.parametrize(("second_runner", "most"), [(False, 5), (True, 3)])
def test_drafts_at_once_lengthen_decodes(vllm: Any, second_runner: bool, most: int) -> None:
    """vLLM's first runner appends them to the drafts that are verified."""

    class AtOnce(ByEagle):
        parallel_drafting = True
        draft_model_config = None

    vllm(config := engine_config(LLAMA, speculative_config=AtOnce, use_v2_model_runner=second_runner))
    from attn_select_vllm.layers import layer_config

    assert layer_config(ASKED, config, None).max_decode_query_len == most


def test_a_drafters_layers_are_read_in_its_own_config(vllm: Any) -> None:
    drafter = engine_config({**LLAMA, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}).model_config

    class ByModel(Speculation):
        draft_model_config = drafter

    vllm(config := engine_config(LLAMA, speculative_config=ByModel))
    from attn_select_vllm.layers import layer_config

    own, drafting = (layer_config(ASKED._replace(head_size=size), config, None) for size in (32, 64))
    assert (own.num_heads, own.num_kv_heads, own.head_size) == (4, 2, 32)
    assert (drafting.num_heads, drafting.num_kv_heads, drafting.head_size) == (2, 1, 64)


def test_ahead_of_a_gpu_kernels_count_the_keys_on_the_device(vllm: Any) -> None:
    engine = vllm(config := engine_config(LLAMA, speculative_config=ByNGrams))
    engine.platform.device_name = "cuda"
    from attn_select_vllm.kernels.limits import speculation_limits

    assert speculation_limits(config, "TRITON_ATTN") == speculation_limits(config, "TRITON_MLA") == []
    assert speculation_limits(config, "TORCH_SDPA") == [
        "speculation leaves the host with bounds of the lengths, and TORCH_SDPA plans from exact ones"
    ]


@asked_for
def test_what_the_adapter_does_not_do_is_vllms(vllm: Any) -> None:
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED._replace(use_mm_prefix=True)) == "vllm.CPU_ATTN"
    assert "ATTN_SELECT_TORCH_SDPA is not taken: the adapter passes no image ranges" in engine.log.lines[0]


def test_drafts_that_were_not_run_are_vllms(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm(config := engine_config(LLAMA, speculative_config=ByEagle))
    from attn_select_vllm.kernels.limits import speculation_limits

    assert speculation_limits(config, "TRITON_ATTN") == [
        "the adapter was run with drafts by ngram, suffix alone, not by eagle"
    ]
    of_release_0_32(monkeypatch)
    assert speculation_limits(config, "TRITON_ATTN") == []
    config.speculative_config = Speculation
    (said,) = speculation_limits(config, "TRITON_ATTN")
    assert said.endswith("draft_model, eagle, eagle3, mtp alone, not by dflash")


def test_layers_that_attn_select_does_not_know_are_vllms(vllm: Any) -> None:
    engine = started(vllm)
    asked = ASKED._replace(kv_cache_dtype="int8_per_token_head")
    assert engine.platform.get_attn_backend_cls(None, asked) == "vllm.CPU_ATTN"
    assert "leaves full_attention to vLLM: kv_cache_dtype = 'int8_per_token_head'" in engine.log.lines[0]


@asked_for
def test_an_unlisted_release_runs_without_us(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm(engine_config(LLAMA), "0.99.0")
    from attn_select_vllm.plugin import register

    register()
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (line,) = engine.log.lines
    assert line.startswith("WARNING attn-select-vllm takes no part in vLLM 0.99.0")
    monkeypatch.setenv("ATTN_SELECT_ANY_VERSION", "1")
    register()
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


@pytest.mark.parametrize("error", [AttributeError, TypeError, KeyError])
def test_an_interface_that_moved_ends_in_vllms_choice(vllm: Any, error: type[Exception]) -> None:
    engine = started(vllm)

    def moved(_: Any) -> int:
        raise error("it has moved")

    engine.config.model_config.get_num_kv_heads = moved
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert (
        "takes no part in vLLM 0.32.0, which chooses attention by itself: an interface has moved"
        in (engine.log.lines[0])
    )


def test_workers_leave_the_release_to_the_first_process(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "the engine's first process")
    engine = vllm(engine_config(LLAMA), "0.99.0")
    from attn_select_vllm.plugin import register

    register()
    assert engine.log.lines == []
    monkeypatch.setenv("ATTN_SELECT_ANY_VERSION", "1")
    register()
    del engine.config.model_config.get_num_kv_heads
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert "an interface has moved" in engine.log.lines[0]


def test_a_platform_without_the_method_is_left_alone(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm(engine_config(LLAMA))
    import vllm_emulated

    monkeypatch.delattr(vllm_emulated.Platform, "get_attn_backend_cls")
    from attn_select_vllm.plugin import register

    register()
    assert "an interface has moved (AttributeError" in engine.log.lines[0]

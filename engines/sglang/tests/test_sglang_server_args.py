"""Real ``ServerArgs`` of the installed SGLang, resolved for GPUs that are not here: what attn-select makes of them.

Each case runs in a process of its own, since SGLang loads its plugins and remembers its machine once per process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_select import configs_from_model, select_model
from attn_select.engines.own_choice import SERVING
from attn_select.machine.device import lookup
from attn_select_sglang.choice import choose

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

GPUS = ("a100", "a10", "l40s", "h100", "h20", "h200", "b200", "b300", "rtx5090", "rtx-pro-6000")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PROGRAM = """
import json, logging, sys
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from attn_select.machine.detection import Detection
from attn_select.machine.device import lookup
import sglang.version
model, cases = sys.argv[1], json.loads(sys.argv[2])
sglang.version.__version__ = sys.argv[3] or sglang.version.__version__
load_plugins()
for gpu, given in cases:
    device = lookup(gpu)
    platform = {"is_cuda": True, **given.pop("platform", {})}
    if "attn_select_sglang.hook" in sys.modules:
        hook = sys.modules["attn_select_sglang.hook"]
        hook.detect_device = lambda seen=given.pop("detected", gpu): Detection(lookup(seen))
        hook.current_platform.is_out_of_tree = lambda found=given.pop("out_of_tree", False): found
    major = device.compute_capability[0]
    facts = {"is_sm90": major == 9, "is_sm100": major == 10, "is_sm120": major == 12, "is_blackwell": major in (10, 12)}
    with override_platform(**platform, has_flashinfer=True, is_hopper_with_cuda_12_3=major == 9, **facts):
        arguments = ServerArgs(model_path=model, device="cuda", **given)
        arguments.resolve_once()
        found = arguments.resolved_dict()
    print(json.dumps({name: found[f"{name}attention_backend"] for name in ("", "prefill_", "decode_")}))
"""


def resolved(
    folder: Path, config: dict[str, Any], cases: list[tuple[str, dict[str, Any]]], version: str = "", **environment: str
) -> tuple[list[dict[str, str | None]], str]:
    """Return the attention backends of each case, and the log."""
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(cases), version]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_ten_gpus_get_what_select_says(tmp_path: Path, config: dict[str, Any]) -> None:
    found, log = resolved(tmp_path, config, [(gpu, {}) for gpu in GPUS])
    assert len(found) == len(GPUS)
    for gpu, fields in zip(GPUS, found, strict=True):
        kinds = configs_from_model(config, device=lookup(gpu))
        choice = choose(select_model(kinds.configs, gpu, workload=SERVING), True, config["architectures"][0])
        assert choice.decode is not None
        assert (fields["prefill_"] or fields[""], fields["decode_"] or fields[""]) == (choice.prefill, choice.decode)
    # On 10.x SGLang's DeepSeek names a backend itself, which is left alone.
    by_model = ["b200", "b300"] if config is DEEPSEEK else []
    assert log.count("leaves attention to SGLang: --attention-backend trtllm_mla") == len(by_model)
    assert log.count("chose for SGLang: attention_backend") == len(GPUS) - len(by_model)
    own = log.count("times of attn-select's kernel, and SGLang runs one of its own: TRITON_ATTN")
    assert own == (2 if config is LLAMA else 0)  # decodes of an H100 and an H200
    assert "Candidates for decode" in log
    assert "selector_rules.toml:" in log
    for fact in ("kernel from", "CUDA graphs", "KV cache  "):  # of attn-select's kernels, which do not run here
        assert fact not in log


def test_an_explicit_flag_and_a_device_that_attn_select_does_not_see_are_sglangs(tmp_path: Path) -> None:
    rocm = {"platform": {"is_cuda": False, "is_hip": True}, "detected": "cpu"}
    no_nvml = {"detected": "cpu"}
    given = [{"attention_backend": "triton"}, {"decode_attention_backend": "flashinfer"}, rocm, no_nvml]
    found, log = resolved(tmp_path, LLAMA, [("h100", each) for each in given])
    assert (found[0][""], found[1]["decode_"]) == ("triton", "flashinfer")
    assert [fields[""] for fields in found[2:]] == ["fa3", "fa3"]  # what SGLang takes on Hopper by itself
    for reason in (
        "leaves attention to SGLang: --attention-backend triton is given",
        "leaves attention to SGLang: --decode-attention-backend flashinfer is given",
        "it runs on another device than CUDA's",
        "it runs on a GPU of CUDA, and attn-select sees",
    ):
        assert log.count(reason) == 1
    assert "chose for SGLang" not in log


def test_rules_decide(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "mine"\nprefer = ["TRITON_ATTN"]\n')
    found, log = resolved(tmp_path, LLAMA, [("h100", {})], ATTN_SELECT_RULES=str(rules))
    assert found[0][""] == "triton"
    assert "rules.toml:2" in log


def test_it_takes_no_part_in_another_release(tmp_path: Path) -> None:
    found, log = resolved(tmp_path, LLAMA, [("h100", {}), ("a100", {})], version="9.9.9")
    assert [fields[""] for fields in found] == ["fa3", "flashinfer"]  # SGLang's own
    assert "attn-select-sglang takes no part in SGLang 9.9.9" in log
    assert "chose for SGLang" not in log


WHISPER = LLAMA | {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_mel_bins": 16,
}


def test_whispers_backend_is_sglangs_own(tmp_path: Path) -> None:
    """Its cross-attention asserts later with another one."""
    found, log = resolved(tmp_path, WHISPER, [("h100", {}), ("a100", {})])
    assert [fields[""] for fields in found] == ["flashinfer", "flashinfer"]
    assert "chose for SGLang" not in log


def test_settings_that_cannot_be_read_do_not_end_the_start(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "mine"\nprefers = ["TRITON_ATTN"]\n')
    found, log = resolved(tmp_path, LLAMA, [("h100", {})], ATTN_SELECT_RULES=str(rules))
    assert found[0][""] == "fa3"
    assert "rules.toml:" in log
    assert "ATTN_SELECT_STRICT=1" in log

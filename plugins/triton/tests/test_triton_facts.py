"""What the golden files do not show: workspaces, sources, what this machine lacks, what compiles together."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig
from attn_select.machine.detection import Detection
from attn_select.machine.device import CPU, Device
from attn_select.testing import check_sources, codes_of, gqa_layer, mla_layer, plan_of
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA

SPECS = (TRITON_ATTN, TRITON_MLA, PAGED_ATTENTION)
GPUS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
H100 = Device("h100", (9, 0), sm_count=132)


def layer_of(spec: BackendSpec, **asked: Any) -> AttentionConfig:
    return mla_layer(**asked) if spec is TRITON_MLA else gqa_layer(**asked)


def test_workspaces() -> None:
    """They follow from SMs, heads and widths, on each device others: the golden files leave them out."""
    plan, one = plan_of(TRITON_ATTN, gqa_layer(), H100), plan_of(TRITON_MLA, mla_layer(), H100)
    # 2 x 8 programs on each of 132 SMs, 16 rows of 128 accumulators, maximum and sum in float32.
    assert plan.workspace_bytes == 2 * 8 * 132 * 16 * 130 * 4
    assert plan_of(TRITON_ATTN, gqa_layer(num_speculative_tokens=7), H100).workspace_bytes == 2 * plan.workspace_bytes
    assert plan_of(TRITON_ATTN, gqa_layer(), (9, 0)).workspace_bytes > plan.workspace_bytes
    assert plan_of(TRITON_ATTN, gqa_layer(batch_invariant=True), H100).workspace_bytes == 0
    for mib in (0, 7):
        prefill = plan_of(TRITON_ATTN, gqa_layer(), H100, "prefill", options={"gather_workspace_mib": mib})
        assert prefill.workspace_bytes == plan.workspace_bytes + (mib << 20)
    assert one.workspace_bytes == 4 * 132 * 64 * (512 + 2) * 4
    assert plan_of(TRITON_MLA, mla_layer(num_heads=16), H100).workspace_bytes == one.workspace_bytes // 4
    assert plan_of(TRITON_MLA, mla_layer(batch_invariant=True), H100).workspace_bytes == 0


@pytest.mark.parametrize("release", ["3.6.1", "3.9.0", "3.11.0+git1234"])
def test_an_assumed_machine_and_a_real_one_get_the_same_gluon_kernels(release: str) -> None:
    for spec, layer, phase in ((TRITON_ATTN, gqa_layer(), "prefill"), (TRITON_MLA, mla_layer(), "decode")):
        plan = plan_of(spec, layer, H100, phase, pins={"triton": release})
        installed = {"torch": "2.13.0", "triton": release}
        here = plan_of(spec, layer, replace(H100, local=True), phase, installed=installed)
        assert (here.kernel, here.unverified) == (plan.kernel, plan.unverified)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_needs_a_compiler_here(spec: BackendSpec, tmp_path: Any) -> None:
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    path = str(tmp_path)
    for variables, local, expected in (
        ({"PATH": path}, True, {"compiler-missing"}),
        ({"PATH": path}, False, set()),
        ({"PATH": path, "CC": "mycc -O2"}, True, set()),
        ({"PATH": path, "CC": "othercc"}, True, {"compiler-missing"}),
    ):
        installed = {"torch": "2.9.0", "triton": "3.6.0"}
        device = replace(H100, local=local)
        assert codes_of(spec, layer_of(spec), device, installed=installed, variables=variables) == expected


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_once_per_shape_class(spec: BackendSpec) -> None:
    key = spec.compile_key(layer_of(spec))
    assert key == spec.compile_key(layer_of(spec, cuda_graph="UNIFORM_BATCH"))
    others: list[dict[str, Any]] = [{"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"block_size": 64}]
    assert key not in [spec.compile_key(layer_of(spec, **asked)) for asked in others]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_fact_has_a_source(spec: BackendSpec) -> None:
    check_sources(spec, least=20)


@pytest.mark.parametrize("device", [H100, CPU], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_load_begins_to_hash_triton_for_a_gpu(
    spec: BackendSpec, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from attn_select_triton.runtime import hashing

    hashed: list[str] = []
    begin = cache(hashing.begin_hashing.__wrapped__)
    monkeypatch.setattr(hashing, "begin_hashing", begin)
    monkeypatch.setattr(hashing, "detect_device", lambda: Detection(device))

    def hash_it() -> None:
        hashed.append(threading.current_thread().name)

    monkeypatch.setattr(hashing.triton_cache, "triton_key", hash_it, raising=False)
    for _ in range(2):
        spec.get_class()
    if (thread := begin()) is not None:
        thread.join()
    assert hashed == ([] if device is CPU else ["triton_key"])
    monkeypatch.delattr(hashing.triton_cache, "triton_key")
    begin.cache_clear()
    assert begin() is None

"""Ask the installed vLLM what it does with commands, on a GPU that is not here.

    python ask_vllm.py < asked > said

A line of ``asked`` is JSON: ``gpu`` (``capability``, ``name``, ``sm_count``, ``memory_gib``, ``arch``), ``model`` (a
folder that holds config.json), ``arguments``, ``environment``. Lines about one GPU stand together, and all are of one
``arch``. A line of ``said`` answers it: ``names`` (the backends by vLLM's kind of layers), ``refused`` (vLLM's words),
or ``unasked`` (an error that vLLM does not mean).

vLLM's own code runs from its argument parser to the plan of its KV cache: the whole model is made, without memory for
its weights, and each of its layers chooses. Nothing is computed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_not_here import Gpu, driver_that_is_not_here, gpu_that_is_not_here

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# vLLM does not look for Triton's driver then.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

LARGE = 1 << 16
"""Elements from which a tensor gets no memory."""


class Group:
    """A group of ranks of which this process is the first, and nothing is sent."""

    def __init__(self, size: int) -> None:
        self.world_size, self.ranks = size, list(range(size))
        self.rank = self.rank_in_group = self.local_rank = self.first_rank = 0
        self.last_rank = size - 1
        self.is_first_rank, self.is_last_rank = True, size == 1
        self.cpu_group = self.device_group = self
        self.device_communicator = self.mq_broadcaster = None
        self.unique_name = "nobody"

    def size(self) -> int:
        """Return the number of ranks, as torch's groups do."""
        return self.world_size

    def barrier(self) -> None:
        """Wait for nobody."""

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Return what each rank says, of which only this one is here."""
        return obj


def prepare(gpu: Gpu) -> None:
    """Make vLLM believe in the GPU, with everything that it looks for on the machine."""
    import torch

    driver_that_is_not_here(gpu)
    if gpu.arch is None:
        gpu_that_is_not_here(gpu)
    else:
        from rocm_not_here import rocm_that_is_not_here

        rocm_that_is_not_here(gpu)
    from vllm.model_executor.models import registry
    from vllm.utils import flashinfer
    from vllm.v1.worker.workspace import init_workspace_manager

    registry._run_in_subprocess = lambda function: function()  # the platform is this process's alone
    registry._LazyRegisteredModel._load_modelinfo_from_cache = lambda self, digest: None
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda self, info, digest: None
    flashinfer.has_nvidia_artifactory = lambda: True  # the network is not asked for TRT-LLM's kernels
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    torch.cuda.is_available = lambda: True
    memory = int(gpu.memory_gib * (1 << 30))
    torch.accelerator.get_memory_info = torch.cuda.mem_get_info = lambda device=None: (memory, memory)
    torch.accelerator.empty_cache = torch.cuda.empty_cache = lambda: None
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (), {"__init__": lambda self, *args, **kwargs: None}))
    init_workspace_manager(torch.device("cpu"))


@contextlib.contextmanager
def variables(environment: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def without_weights() -> Any:
    """Return a context in which large tensors have no memory, and small ones lie in the CPU's."""
    from torch.overrides import TorchFunctionMode

    class WithoutWeights(TorchFunctionMode):
        @staticmethod
        def is_gpu(device: Any) -> bool:
            return type(device) is int or str(device).startswith("cuda")

        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(function, "__name__", "")
            if name in ("empty", "zeros", "ones", "full"):
                size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
                large = math.prod(size[0] if size and not isinstance(size[0], int) else size) >= LARGE
                kwargs["device"] = "meta" if large else "cpu"
            elif name == "_parse_to":
                args = tuple("meta" if self.is_gpu(one) else one for one in args)
            elif self.is_gpu(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    return WithoutWeights()


def make_layers(config: Any) -> dict[str, Any]:
    """Make the model on no device, and return its layers by name."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    parallel = config.parallel_config
    tensor = parallel.tensor_parallel_size
    one = Group(1)
    sizes = {"_TP": tensor, "_EP": tensor, "_WORLD": tensor, "_DCP": parallel.decode_context_parallel_size}
    for group in ("_PP", "_DP", "_PCP"):
        setattr(parallel_state, group, one)
    for group, size in sizes.items():
        setattr(parallel_state, group, Group(size))
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), without_weights():
        initialize_model(config)
    return config.compilation_config.static_forward_context


def plan_cache(config: Any) -> None:
    """Go through what vLLM checks and plans once its layers are made: block size, ranks, cache."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    from vllm.v1.worker.cp_utils import check_attention_cp_compatibility
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with set_current_vllm_config(config):
        current_platform.update_block_size_for_backend(config)
        config.validate_block_size()
        check_attention_cp_compatibility(config)
        specs = get_kv_cache_spec(config)
        if specs:
            layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
            resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], list(specs.values()))
            get_kv_cache_configs(config, [specs], [1 << 50], get_global_kv_cache_groups(config, [specs]))


def chosen(layers: dict[str, Any]) -> dict[str, list[str]]:
    """Return the backends that layers chose, by vLLM's kind of their cache, and MLA's prefill backends."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_spec_kind

    paths = {member.get_path(): name for name, member in AttentionBackendEnum.__members__.items() if member.value}
    names: dict[str, dict[str, None]] = {}
    for layer in layers.values():
        backend = getattr(layer, "attn_backend", None)
        if backend is None or backend.is_ssm():
            continue
        mla = backend.is_mla()
        windowed = not mla and layer.sliding_window is not None
        kind = get_attn_spec_kind(mla, windowed, getattr(layer, "attn_type", "decoder")).value
        name = paths.get(".".join(backend.full_cls_name()), backend.get_name())
        names.setdefault(kind, {})[name] = None
        prefill = getattr(layer, "prefill_backend", None)
        if mla and prefill is not None and not backend.is_sparse():
            names.setdefault("mla_prefill", {})[prefill.get_name()] = None
    return {key: [*found] for key, found in names.items()}


def refuses(error: Exception) -> bool:
    """Whether vLLM means an error: it is raised by a statement of its own, or by dividing heads that are none.

    Any other error is of a machine without a GPU, or of a config that lacks what vLLM reads.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    stated = "vllm" in Path(last.filename).parts and (last.line or "").startswith(("raise ", "assert "))
    return stated or type(error).__name__ == "ValidationError" or isinstance(error, AssertionError | ZeroDivisionError)


def ask(parser: Any, one: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM does with one command."""
    from vllm.engine.arg_utils import EngineArgs

    words = ["--model", one["model"], "--skip-tokenizer-init", "--load-format", "dummy", *one["arguments"]]
    said = io.StringIO()
    try:
        with variables(one["environment"]):
            with contextlib.redirect_stderr(said):
                parsed = parser.parse_args(words)
            config = EngineArgs.from_cli_args(parsed).create_engine_config()
            layers = make_layers(config)
            plan_cache(config)
            return {"names": chosen(layers)}
    except SystemExit:
        return {"refused": said.getvalue().strip()[-300:]}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        text = f"{type(error).__name__}: {error}".partition(" [type=")[0][:400]
        return {"refused" if refuses(error) else "unasked": f"{text} ({place})"}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    lines = [json.loads(line) for line in sys.stdin]
    gpu = Gpu(**lines[0]["gpu"])
    prepare(gpu)
    from vllm.engine.arg_utils import EngineArgs, FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    before = None
    for one in lines:
        if before != (one["gpu"], one["environment"]):  # vLLM remembers what it answered under others
            gpu.become(Gpu(**one["gpu"]))
        before = one["gpu"], one["environment"]
        print(json.dumps(ask(parser, one)), file=out, flush=True)


if __name__ == "__main__":
    main()

"""Hybrid models of transformers generate the same tokens where their state layers run through a pool of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from attn_select import select  # noqa: E402
from attn_select.layer.models import configs_from_model  # noqa: E402
from attn_select.layer.state import StateConfig  # noqa: E402
from attn_select.runtime import prepare_batch  # noqa: E402
from attn_select.runtime.states import Gates, LinearAttention, StateCache, StateGroup, StatePool  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

Inputs = tuple[Tensor, Tensor, Tensor | None]
"""Channels ``(B, T, width)``, log-decay ``(B, T, …)`` and write strength ``(B, T, heads)`` of a layer."""


def gated_delta_net(module: Any, hidden: Tensor) -> tuple[Inputs, Callable[[Tensor], Tensor]]:
    """Qwen3NextGatedDeltaNet: what goes into its recurrence, and what it does with the output."""
    query, key, value, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    channels = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
    log_decay = -module.A_log.float().exp() * functional.softplus(a.float() + module.dt_bias)

    def finish(output: Tensor) -> Tensor:
        normed = module.norm(output.reshape(-1, output.shape[-1]), z.reshape(-1, z.shape[-1]))
        return module.out_proj(normed.view(*hidden.shape[:2], -1))

    return (channels, log_decay, b.sigmoid()), finish


def kimi_delta_attention(module: Any, hidden: Tensor) -> tuple[Inputs, Callable[[Tensor], Tensor]]:
    """KimiLinearDeltaAttention."""
    channels = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)

    def finish(output: Tensor) -> Tensor:
        gate = module.g_b_proj(module.g_a_proj(hidden)).view(output.shape)
        return module.o_proj(module.o_norm(output, gate).flatten(2))

    return (channels, module.forget_gate(hidden), torch.sigmoid(module.b_proj(hidden))), finish


def mamba2(module: Any, hidden: Tensor) -> tuple[Inputs, Callable[[Tensor], Tensor]]:
    """NemotronHMamba2Mixer."""
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, channels, dt = module.in_proj(hidden).split(sizes, dim=-1)
    step = functional.softplus(dt.float() + module.dt_bias).clamp(*module.time_step_limit)

    def finish(output: Tensor) -> Tensor:
        return module.out_proj(module.norm(output.flatten(2), gate))

    return (channels, -torch.exp(module.A_log.float()) * step, step), finish


MODELS = {
    "qwen3-next": (
        transformers.Qwen3NextConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        "Qwen3NextGatedDeltaNet",
        gated_delta_net,
    ),
    "kimi-linear": (
        transformers.KimiLinearConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            pad_token_id=0,
            linear_attn_config={"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
            num_experts=4,
            num_experts_per_token=2,
        ),
        "KimiLinearDeltaAttention",
        kimi_delta_attention,
    ),
    "nemotron-h": (
        transformers.NemotronHConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=64,
            layers_block_type=["mamba", "attention", "mamba", "mamba"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=24,
            chunk_size=16,
        ),
        "NemotronHMamba2Mixer",
        mamba2,
    ),
}


class PooledStates:
    """Runs the state layers of a model through one pool; every row of a batch is a request."""

    def __init__(self, model: Any, class_name: str, inputs: Callable[..., Any], num_slots: int) -> None:
        read = configs_from_model(model.config, overrides={"dtype": "float32"})
        config = next(kind.config for kind in read.kinds if isinstance(kind.config, StateConfig))
        self.group = StateGroup(select(config, "cpu"))
        self.pool = StatePool(num_slots)
        self.requests: list[str] = []
        self.inputs = inputs
        self._step: tuple[int, Any] = (0, None)
        modules = [module for module in model.modules() if type(module).__name__ == class_name]
        assert len(modules) == sum(kind.count for kind in read.kinds if kind.config is config)
        for module in modules:
            cache = self.group.allocate(num_slots)
            cache.state.fill_(torch.nan)
            assert cache.conv is not None
            cache.conv.fill_(torch.nan)
            conv = module.conv1d
            layer = LinearAttention(self.group, conv.weight.squeeze(1), conv.bias, skip=getattr(module, "D", None))
            module.forward = self._forward(module, layer, cache, first=module is modules[0])

    def start(self, requests: list[str]) -> None:
        """Serve these requests from now on, which are new."""
        for request in requests:
            self.pool.add(request)
        self.requests = requests

    def end(self) -> None:
        """Give back all slots."""
        for request in self.requests:
            self.pool.free(request)

    def _forward(self, module: Any, layer: LinearAttention, cache: StateCache, first: bool) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            rows, tokens = hidden_states.shape[:2]
            if first:  # the metadata is that of all layers
                common = prepare_batch([tokens] * rows, [tokens] * rows)
                self._step = tokens, self.group.build(common, self.pool.step(dict.fromkeys(self.requests, tokens)))
            (channels, log_decay, strength), finish = self.inputs(module, hidden_states)
            gates = Gates(log_decay.flatten(0, 1), None if strength is None else strength.flatten(0, 1))
            output = layer(channels.flatten(0, 1), gates, cache, self._step[1])
            return finish(output.view(rows, tokens, *output.shape[1:]))

        return forward


@pytest.mark.parametrize("name", MODELS)
def test_generates_the_same_tokens(name: str) -> None:
    config, class_name, inputs = MODELS[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # random, so that tokens depend on the states
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = [torch.randint(1, 96, (rows, length)) for rows, length in ((1, 5), (3, 70), (2, 33))]
    expected = [model.generate(prompt, attention_mask=torch.ones_like(prompt), **options) for prompt in prompts]
    pooled = PooledStates(model, class_name, inputs, num_slots=3)
    for prompt, tokens in zip(prompts, expected, strict=True):
        pooled.start([f"request {row}" for row in range(prompt.shape[0])])
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        pooled.end()  # the next requests get slots that these used
        assert found.tolist() == tokens.tolist()
        assert len(set(tokens[0, prompt.shape[1] :].tolist())) > 3, "the tokens say nothing about the states"

"""transformers models as 8 bits make them: projections' weights and inputs rounded, or keys and values. The oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.models.tiny_models import make_tiny_model
from tests.ops.fp8_oracle import fake_quantized, rounded

KEPT = (  # too small to be worth it, nearly all
    "in_proj_a", "in_proj_b", "a_proj", "b_proj", "in_proj_ba", "shared_expert_gate", "router.proj",
    "per_layer_input_gate", "per_layer_projection",
    "x_proj", "dt_proj",  # of Mamba
    "kv_b_proj",  # multiplied head by head
)  # fmt: skip
_NEARLY = 0.1  # nats: a sum in another order is another last bit, with which a number may round to the next integer
_TRIES = 8


def with_fake_quantized_projections(
    variant: str, rounding: Callable[[torch.Tensor], torch.Tensor] = fake_quantized, **overrides: Any
) -> transformers.PreTrainedModel:
    """The variant with every linear layer and expert of its body quantized and back: rows of weights, and tokens as
    they come."""
    model = make_tiny_model(variant, **overrides)
    fake_quantize(model, rounding)
    return model


def fake_quantize(model: transformers.PreTrainedModel, rounding: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same with a model that there is."""
    for name, module in list(model.base_model.layers.named_modules()):
        if name.endswith(KEPT):
            continue
        if isinstance(module, nn.Linear):
            module.weight.data = rounding(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))
        elif are_experts(module):
            inputs = 1 if "GptOss" in type(module).__name__ else 2  # weights [X, O, I], of gpt-oss [X, I, O]
            first = module.gate_up_proj if module.has_gate else module.up_proj
            for weight in (first, module.down_proj):
                weight.data = rounding(weight.data.transpose(inputs, 2)).transpose(inputs, 2).contiguous()
            round_inputs_of_experts(module, rounding)


def are_experts(module: nn.Module) -> bool:
    """Whether it is what transformers has as one module for all experts of a layer."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter)


def round_inputs_of_experts(experts: nn.Module, rounding: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make both products see tokens as quantizing them makes them."""
    experts.config._experts_implementation = "grouped_mm"  # which calls `_apply_gate`; its own loop may not
    if experts.has_gate:
        gates = experts._apply_gate
        experts._apply_gate = lambda gate_up: rounding(gates(gate_up))
    else:
        experts.act_fn.register_forward_hook(lambda _, __, out: rounding(out))
    experts.register_forward_pre_hook(lambda _, given: (rounding(given[0]), *given[1:]))


def round_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
    model: transformers.PreTrainedModel,
    rounded: Callable[[torch.Tensor], torch.Tensor] = rounded,
) -> None:
    """Make the model's own attention see its keys and values through fp8, or as `rounded` makes them."""
    module = import_module(type(model).__module__)
    own = module.eager_attention_forward

    def attention(layer: nn.Module, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
        return own(layer, query, rounded(key).to(key.dtype), rounded(value).to(value.dtype), *args, **kw)

    if model.config.to_dict().get("kv_lora_rank") is None:
        monkeypatch.setattr(module, "eager_attention_forward", attention)
        return
    for layer in model.model.layers:  # what is kept are latents
        layer.self_attn.expand_kv = partial(_of_rounded, rounded, layer.self_attn.expand_kv)


def _of_rounded(rounded: Callable[..., torch.Tensor], expand_kv: Callable[..., Any], *kept: torch.Tensor) -> Any:
    return expand_kv(*[rounded(one).to(one.dtype) for one in kept])


def assert_best(model: transformers.PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token is the likeliest after those before it, or nearly so; nearly all are.

    Where the model itself cannot tell: with embeddings that differ in their last bits numbers round to other integers,
    of which a router may choose other experts. Then by one of such embeddings.
    """
    regrets = _regrets(model, prompt, output)
    for seed in range(_TRIES if regrets.max() >= _NEARLY else 0):
        with _last_bits_changed(model.get_input_embeddings().weight.data, seed):
            regrets = regrets.minimum(_regrets(model, prompt, output))
    assert regrets.max() < _NEARLY
    assert (regrets > 0).sum() <= 2


@torch.no_grad()
def _regrets(model: transformers.PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    logprobs = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.amax(-1) - logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]


@contextmanager
def _last_bits_changed(weight: torch.Tensor, seed: int) -> Iterator[None]:
    whole = weight.clone()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.mul_(1 + torch.finfo(torch.float32).eps * noise)
    yield
    weight.copy_(whole)


@torch.no_grad()
def generate(model: transformers.PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens after the prompt, without an end."""
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    return output[0, len(prompt) :].tolist()

"""Mixtures of experts in the place of a layer's MLP, and beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.experts import MoEConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import MLP, ExpertLinear, Linear, dense_mlp, empty_parameter
from bulkrun.models.decoder.norms import RMSNorm

_ACTIVATIONS: Mapping[str, ops.ExpertActivation] = {"silu": None, "gelu_tanh": "gelu_tanh", "relu2": "relu2"}


class SharedExpert(nn.Module):
    """The MLP that every token goes through, beside those picked for it, where it has a gate as much as that says."""

    def __init__(self, config: DecoderConfig, size: int, *, has_gate: bool) -> None:
        super().__init__()
        self.mlp = dense_mlp(config, size)
        self.gate = Linear(config.hidden_size, 1) if has_gate else None

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self.mlp(x_TE) if self.gate is None else self.gate(x_TE).sigmoid() * self.mlp(x_TE)


class SparseMLP(nn.Module):
    """A mixture of experts: a router picks a few gated MLPs for each token."""

    in_float32 = ("score_bias", "expert_scale")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.moe is not None, "only sparse layers have experts"
        self.moe = config.moe
        hidden_size, size = config.hidden_size, config.moe.intermediate_size
        self.router = Linear(hidden_size, config.moe.num_experts, bias=config.moe.has_biases)
        if config.moe.routes_in_float32:
            self.router.in_float32 = ("weight",)
        self.score_bias = empty_parameter(config.moe.num_experts) if config.moe.has_score_bias else None
        self.expert_scale = empty_parameter(config.moe.num_experts) if config.moe.beside_mlp else None
        self.activation = _expert_activation(config, config.moe)
        self.fused_experts = ops.fused_experts  # `make_invariant` puts another op of its contract here
        num_ups = 2 * size if config.has_mlp_gates else size
        self.gate_up_proj = ExpertLinear(config, config.moe, hidden_size, num_ups)
        self.down_proj = ExpertLinear(config, config.moe, size, hidden_size)
        shared_size, has_gate = config.moe.shared_size, config.moe.gates_shared
        self.shared = None if shared_size is None else SharedExpert(config, shared_size, has_gate=has_gate)

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] -> [T, E]; what the step says of sequences plays no role."""
        picked_TE = self.picked(x_TE, self.router(x_TE.float() if self.moe.routes_in_float32 else x_TE))
        if self.shared is None:
            return picked_TE
        total_TE = picked_TE + self.shared(x_TE)
        return total_TE / 2 if self.moe.averages_shared else total_TE

    def picked(self, x_TE: torch.Tensor, logits_TX: torch.Tensor) -> torch.Tensor:
        """[T, E] through the experts that the router's logits say -> [T, E]."""
        weights_Tk, ids_Tk = self._route(logits_TX)
        if self.expert_scale is not None:
            weights_Tk = weights_Tk * self.expert_scale[ids_Tk]
        if not self.moe.weighs_inputs:
            return self._through(x_TE, weights_Tk, ids_Tk)
        x_PE = (x_TE.unsqueeze(1) * weights_Tk.to(x_TE.dtype).unsqueeze(-1)).flatten(0, 1)  # of each pair its own
        out_PE = self._through(x_PE, torch.ones_like(weights_Tk).view(-1, 1), ids_Tk.view(-1, 1))
        return out_PE if ids_Tk.shape[1] == 1 else out_PE.view(*ids_Tk.shape, -1).sum(1)

    def _through(self, x_TE: torch.Tensor, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor) -> torch.Tensor:
        return self.fused_experts(
            x_TE, self.gate_up_proj.experts, self.down_proj.experts, weights_Tk, ids_Tk, self.biases, self.activation
        )

    def _route(self, logits_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe = self.moe
        if moe.scores == "softmax":
            return ops.route_top_k(
                logits_TX, moe.num_experts_per_tok, renormalize=moe.renormalize, bias_X=self.score_bias,
                scale=moe.weights_scale, groups=moe.groups,
            )  # fmt: skip
        return ops.route_by_sigmoid(
            logits_TX, self.score_bias, moe.num_experts_per_tok, renormalize=moe.renormalize, scale=moe.weights_scale,
            groups=moe.groups,
        )  # fmt: skip

    @property
    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of gates and ups [X, 2 I], and of downs [X, E]."""
        gate_up, down = self.gate_up_proj.bias, self.down_proj.bias
        return None if gate_up is None or down is None else (gate_up, down)

    @property
    def is_packed(self) -> bool:
        """Whether the experts are laid out for a product of our own."""
        return ops.are_packed(self.gate_up_proj.experts)


def _expert_activation(config: DecoderConfig, moe: MoEConfig) -> ops.ExpertActivation:
    if moe.swiglu is not None:
        return ops.ClampedSwiglu(*moe.swiglu)
    return _ACTIVATIONS[config.activation]


class DenseBesideExperts(nn.Module):
    """Each with norms of its own before and after, and the router with one more; what both give is added up."""

    def __init__(self, config: DecoderConfig, dense_size: int) -> None:
        super().__init__()
        self.dense, self.experts = MLP(config, dense_size), SparseMLP(config)
        size = config.hidden_size
        self.dense_norm, self.dense_out = RMSNorm(config, size), RMSNorm(config, size)
        self.experts_norm, self.experts_out = RMSNorm(config, size), RMSNorm(config, size)
        self.router_norm, self.router_scale = RMSNorm(config, size), size**-0.5

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] of the residual stream as it is -> [T, E]; what the step says of sequences plays no role."""
        dense_TE = self.dense_out(self.dense(self.dense_norm(x_TE)))
        logits_TX = self.experts.router(self.router_norm(x_TE)).float() * self.router_scale
        return dense_TE + self.experts_out(self.experts.picked(self.experts_norm(x_TE), logits_TX))

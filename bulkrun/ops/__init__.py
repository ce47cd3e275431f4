"""Functions of tensors: each op's contract and pure-torch reference; kernels sit beside them. Knows no model.

Callers import ops from here. References lie in rooms (attention, linear_attention, matmul, experts, sampling) or beside
this file. Whether an op's reference, its Triton twin (`triton/<op>.py`) or its compiled one for CPUs (`cpu/<op>.py`)
runs is chosen here, by device; all have one signature.
"""

from bulkrun.ops.attention.invariant_attention import invariant_attention as _invariant_attention
from bulkrun.ops.attention.invariant_attention import is_invariant_attention
from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as _norm_rotary_store
from bulkrun.ops.attention.packed_attention import TextLens
from bulkrun.ops.attention.packed_attention import packed_attention as _packed_attention
from bulkrun.ops.attention.paged_attention import copy_kv, store_kv
from bulkrun.ops.attention.paged_attention import paged_attention as _paged_attention
from bulkrun.ops.attention.rotary import rotary_cos_sin
from bulkrun.ops.cut_gates import cut_gates_ as _cut_gates
from bulkrun.ops.dispatch import by_device
from bulkrun.ops.experts.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.experts.expert_pairs import ExpertActivation, expert_by_expert, gated, of_expert
from bulkrun.ops.experts.expert_sizes import ExpertSizes
from bulkrun.ops.experts.grouped_experts import sum_by_token
from bulkrun.ops.experts.moe import (
    ExpertWeights,
    are_packed,
    four_bit_experts,
    fp8_experts,
    fused_experts,
    pack_experts,
    waits_for_gpu,
)
from bulkrun.ops.experts.routing import route_by_sigmoid, route_top_k
from bulkrun.ops.gelu_mul import gelu_mul as _gelu_mul
from bulkrun.ops.layer_norm import add_layer_norm as _add_layer_norm
from bulkrun.ops.linear_attention.causal_conv import causal_conv as _causal_conv
from bulkrun.ops.linear_attention.gated_delta_rule import gated_delta_rule as _gated_delta_rule
from bulkrun.ops.linear_attention.gated_rms_norm import gated_rms_norm as _gated_rms_norm
from bulkrun.ops.linear_attention.selective_scan import selective_scan as _selective_scan
from bulkrun.ops.linear_attention.state_space import state_space as _state_space
from bulkrun.ops.matmul.four_bit_linear import four_bit_linear as _four_bit_linear
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.matmul.fp8_linear import fp8_linear as _fp8_linear
from bulkrun.ops.matmul.fp8_linear import quantize_rows as _quantize_rows
from bulkrun.ops.matmul.int8_linear import int8_linear as _int8_linear
from bulkrun.ops.matmul.invariant_linear import invariant_linear as _invariant_linear
from bulkrun.ops.matmul.invariant_linear import is_invariant_linear, make_panels
from bulkrun.ops.matmul.linear import linear, pack_linear_weight
from bulkrun.ops.relu_squared import relu_squared
from bulkrun.ops.residual_streams import correct_streams as _correct_streams
from bulkrun.ops.residual_streams import predict_streams as _predict_streams
from bulkrun.ops.residual_streams import with_rms_of as _with_rms_of
from bulkrun.ops.rms_norm import add_rms_norm as _add_rms_norm
from bulkrun.ops.rms_norm import rms_norm as _rms_norm
from bulkrun.ops.sampling.draw_tokens import draw_tokens as _draw_tokens
from bulkrun.ops.sampling.greedy_tokens import greedy_tokens as _greedy_tokens
from bulkrun.ops.sampling.shape_logits import apply_penalties as _apply_penalties
from bulkrun.ops.sampling.shape_logits import apply_token_masks as _apply_token_masks
from bulkrun.ops.sampling.token_logprobs import token_logprobs as _token_logprobs
from bulkrun.ops.silu_mul import silu_mul as _silu_mul
from bulkrun.ops.step_inputs import StepBuffers
from bulkrun.ops.step_inputs import append_tokens as _append_tokens
from bulkrun.ops.step_inputs import step_inputs as _step_inputs
from bulkrun.ops.xielu import xielu as _xielu

add_layer_norm = by_device(_add_layer_norm)
add_rms_norm = by_device(_add_rms_norm)
append_tokens = by_device(_append_tokens, has_triton=False)
apply_penalties = by_device(_apply_penalties)
apply_token_masks = by_device(_apply_token_masks)
causal_conv = by_device(_causal_conv)
correct_streams = by_device(_correct_streams)
cut_gates_ = by_device(_cut_gates)
draw_tokens = by_device(_draw_tokens)
four_bit_linear = by_device(_four_bit_linear)
fp8_linear = by_device(_fp8_linear)
gated_delta_rule = by_device(_gated_delta_rule)
gated_rms_norm = by_device(_gated_rms_norm)
gelu_mul = by_device(_gelu_mul)
greedy_tokens = by_device(_greedy_tokens, has_triton=False)
int8_linear = by_device(_int8_linear, has_triton=False)
invariant_attention = by_device(_invariant_attention)
invariant_linear = by_device(_invariant_linear)
norm_rotary_store = by_device(_norm_rotary_store)
packed_attention = by_device(_packed_attention)
paged_attention = by_device(_paged_attention)
predict_streams = by_device(_predict_streams)
quantize_rows = by_device(_quantize_rows)
rms_norm = by_device(_rms_norm)
selective_scan = by_device(_selective_scan)
silu_mul = by_device(_silu_mul)
state_space = by_device(_state_space)
step_inputs = by_device(_step_inputs)
token_logprobs = by_device(_token_logprobs)
with_rms_of = by_device(_with_rms_of)
xielu = by_device(_xielu)

__all__ = [
    "AttentionMetadata",
    "ClampedSwiglu",
    "ExpertActivation",
    "ExpertSizes",
    "ExpertWeights",
    "Fp8Weight",
    "StepBuffers",
    "TextLens",
    "add_layer_norm",
    "add_rms_norm",
    "append_tokens",
    "apply_penalties",
    "apply_token_masks",
    "are_packed",
    "causal_conv",
    "copy_kv",
    "correct_streams",
    "cut_gates_",
    "draw_tokens",
    "expert_by_expert",
    "four_bit_experts",
    "four_bit_linear",
    "fp8_experts",
    "fp8_linear",
    "fused_experts",
    "gated",
    "gated_delta_rule",
    "gated_rms_norm",
    "gelu_mul",
    "greedy_tokens",
    "int8_linear",
    "invariant_attention",
    "invariant_linear",
    "is_invariant_attention",
    "is_invariant_linear",
    "linear",
    "make_panels",
    "norm_rotary_store",
    "of_expert",
    "pack_experts",
    "pack_linear_weight",
    "packed_attention",
    "paged_attention",
    "predict_streams",
    "quantize_rows",
    "relu_squared",
    "rms_norm",
    "rotary_cos_sin",
    "route_by_sigmoid",
    "route_top_k",
    "selective_scan",
    "silu_mul",
    "state_space",
    "step_inputs",
    "store_kv",
    "sum_by_token",
    "token_logprobs",
    "waits_for_gpu",
    "with_rms_of",
    "xielu",
]

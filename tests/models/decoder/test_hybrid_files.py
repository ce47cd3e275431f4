"""Files of models with states as they are on the hub: their own words for sizes, layers and tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from tests.models.decoder.test_decoder import random_tokens, whole_prompt_logits
from tests.models.load import load_model
from tests.models.paged_driver import tolerance_of
from tests.models.tiny_models import VARIANTS, make_tiny_model, save_published, save_tiny_model

LFM2 = {  # as LiquidAI/LFM2-1.2B has them
    "block_dim": 48,
    "block_ff_dim": 72,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 16,
    "block_auto_adjust_ff_dim": True,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 48,
    "norm_eps": 1e-03,
    "full_attn_idxs": [1, 3],
    "num_heads": 6,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "tie_embedding": True,
}
LFM2_MOE = {
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-03,
    "num_dense_layers": 2,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "tie_embedding": True,
}
NEMOTRON = {  # as nvidia/NVIDIA-Nemotron-Nano-9B-v2 and NVIDIA-Nemotron-3-Nano-30B-A3B have them
    "hybrid_override_pattern": "M-M*E",
    "num_hidden_layers": 5,
    "attention_bias": False,
    "layer_norm_epsilon": 1e-3,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "residual_in_fp32": False,
    "rms_norm_eps": 0.5,
    "time_step_limit": [0.0, float("inf")],
    "use_bias": False,
    "use_conv_bias": True,
}
FALCON = {  # as tiiuae/Falcon-H1-0.5B-Instruct has them
    "attn_layer_indices": None,
    "head_dim": 8,
    "key_multiplier": 0.39,
    "lm_head_multiplier": 0.0195,
    "mamba_conv_bias": True,
    "mamba_d_head": 16,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "mlp_expansion_factor": 8,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rope_theta": 100_000_000_000.0,
    "time_step_limit": [0.0, float("inf")],
}
LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    "full_attention": {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
}
OLMO_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
OLMO = {  # as OLMo-core's converter writes them
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-3,
    "rope_theta": None,
}
GRANITE = {"init_method": "mup", "normalization_function": "rmsnorm", "mamba_chunk_size": 256, "mamba_expand": 2}


@pytest.mark.parametrize("sizes", [None, (24, 24, 128), (59, 59, 58)])
def test_olmo_hybrids_convolution_may_be_cut_anyhow(sizes: tuple[int, ...] | None, tmp_path: Path) -> None:
    """In its three as published, in equal ones as transformers 5.24 writes it, and not at all as it holds it."""
    path = save_tiny_model(tmp_path, "olmo_hybrid")
    stored = load_file(path / "model.safetensors")
    for layer in (0, 2, 3):
        prefix = f"model.layers.{layer}.linear_attn."
        names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([stored.pop(name) for name in names])
        parts = [whole] if sizes is None else [part.contiguous() for part in whole.split(sizes)]
        stored |= dict(zip(names if sizes else [f"{prefix}conv1d.weight"], parts, strict=True))
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    tokens = random_tokens(40, seed=4)
    ours = whole_prompt_logits(load_model(path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = make_tiny_model("olmo_hybrid")(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance_of("olmo_hybrid"), rtol=0)


@pytest.mark.parametrize(
    ("variant", "left_out", "keys"),
    [
        ("lfm2_moe", ("tie_word_embeddings",), LFM2_MOE),
        ("lfm3", ("layer_types",), {"norm_eps": 1e-3, "num_hidden_layers": 6}),
        ("lfm3", (), {"rms_norm_eps": 1e-3, "rope_parameters": LFM3_ROPE}),
        ("lfm2_biases", (), {"norm_eps": 1e-3, "conv_L_cache": 2}),
        ("qwen3_5", (), {"linear_conv_kernel_dim": 2}),
        ("nemotron_h", ("layers_block_type", "intermediate_size"), NEMOTRON | {"hybrid_override_pattern": "MM*EE"}),
        ("nemotron_h", ("layers_block_type",), NEMOTRON | {"norm_topk_prob": False}),
        ("nemotron_h", (), {"conv_kernel": 3, "use_bias": True}),
        ("nemotron_h_moe", (), {"use_conv_bias": False}),
        ("falcon_h1", ("mamba_n_groups",), FALCON),
        (
            "falcon_h1",
            ("mlp_multipliers", "ssm_multipliers", "ssm_in_multiplier"),
            {"mamba_d_head": 16, "head_dim": 16},
        ),
        ("olmo_hybrid", (*OLMO_SIZES, "layer_types"), OLMO | {"num_hidden_layers": 5}),
        ("olmo_hybrid", ("layer_types", "linear_num_value_heads"), OLMO | {"num_hidden_layers": 3}),
        ("olmo_hybrid", (), OLMO | {"attention_bias": True, "linear_allow_neg_eigval": False, "rope_theta": 3e3}),
        ("olmo_hybrid", (), {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
        ("olmo_hybrid", (), {"rope_parameters": None}),
        ("bamba", (), {"attn_rotary_emb": 4, "partial_rotary_factor": 0.25, "attn_layer_indices": [0, 3]}),
        ("jamba", (), {"mamba_inner_layernorms": True, "n_ctx": 262144, "norm_topk_prob": True}),
        ("jamba_dense", ("num_experts_per_tok",), {"mamba_inner_layernorms": True, "tie_word_embeddings": True}),
        ("mamba", (), {"d_inner": 144, "d_model": 48, "n_layer": 3, "ssm_cfg": {}, "rms_norm": True, "expand": 2}),
        ("mamba", (), {"conv_kernel": 2}),
        ("mamba2", (), {"conv_kernel": 2, "layer_norm_epsilon": 1e-3, "rms_norm_eps": 0.5}),  # which is another key
        (
            "falcon_mamba",
            (),
            {"rms_norm_eps": 0.5, "expand": 16, "time_step_scale": 1.0, "rescale_prenorm_residual": False},
        ),
        ("granite_4", (), GRANITE | {"position_embedding_type": "rope", "mamba_d_head": "auto"}),
        ("granite_h", ("mamba_d_head",), GRANITE | {"mamba_d_head": "auto", "position_embedding_type": "nope"}),
        ("granite_h_moe", (), GRANITE | {"time_step_limit": [0.0, float("inf")]}),
        ("lfm2", ("intermediate_size", "layer_types", "tie_word_embeddings"), LFM2),
        ("lfm2", ("layer_types",), LFM2 | {"tie_embedding": False, "block_ffn_dim_multiplier": 1.4}),
    ],
)
def test_a_published_file_means_what_it_means_to_transformers(
    variant: str, left_out: tuple[str, ...], keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, changes = VARIANTS[variant]
    monkeypatch.setitem(VARIANTS, variant, (architecture, {k: v for k, v in changes.items() if k not in left_out}))
    reference = save_published(tmp_path, variant, **keys)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in left_out}))
    tokens = random_tokens(60, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance_of(variant), rtol=0)
    config = ModelConfig.from_dir(tmp_path)
    assert isinstance(config, DecoderConfig)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != config.tie_word_embeddings

"""Frequencies and what cosines are multiplied by, of every key that a scaling may have, beside transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.rotary_frequencies import rotary_frequencies

SIZES = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
         "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "rope_theta": 5e4}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
FACTORS = [1.0 + pair / 9 for pair in range(16)]
LONG = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": [2.0] * 16}
REACHES = {"original_max_position_embeddings": 512}  # of longrope: 4096 positions are 8 times as far


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "proportional", "factor": 3.0},
        LLAMA3,
        LLAMA3 | {"low_freq_factor": 0.5},
        LLAMA3 | {"high_freq_factor": 9.0},
        LLAMA3 | {"original_max_position_embeddings": 64},
        YARN,
        YARN | {"beta_fast": 9.0},
        YARN | {"beta_slow": 3.0},
        YARN | {"truncate": False},
        YARN | {"attention_factor": 0.7},
        YARN | {"attention_factor": 0.7, "mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"mscale": 0.5},  # alone it is none
        YARN | {"mscale_all_dim": 0.5},
        YARN | {"beta_slow": 1e-9},  # a ramp to the last dimension
        YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
        LONG | REACHES,
        LONG | REACHES | {"factor": 3.0},
        LONG | REACHES | {"factor": 1.0},
        LONG | REACHES | {"attention_factor": 1.3},
    ],
    ids=str,
)
def test_every_key_of_a_scaling_means_what_it_does_to_transformers(rope: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(**SIZES, rope_parameters=rope | {"rope_theta": 5e4})
    length = 512 if rope["rope_type"] == "longrope" else None  # within which short factors hold
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu", seq_len=length)
    ours = ModelConfig.from_dict(SIZES | {"architectures": ["LlamaForCausalLM"], "rope_scaling": rope})
    assert isinstance(ours, DecoderConfig)
    (found,) = ours.ropes
    assert found is not None
    torch.testing.assert_close(rotary_frequencies(found, ours.head_dim), expected, rtol=1e-6, atol=0)
    assert found.attention_factor == pytest.approx(attention_factor, rel=1e-12)

"""config.json in its dialects, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from bulkrun.errors import ModelError
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2}


def read(raw: dict[str, Any]) -> DecoderConfig:
    config = ModelConfig.from_dict(raw)
    assert isinstance(config, DecoderConfig)
    return config


def test_absent_keys_have_transformers_defaults() -> None:
    config = read(LLAMA)
    assert (config.head_dim, config.rms_norm_eps, config.max_position_embeddings) == (16, 1e-6, 2048)
    assert (config.ropes, config.dtype) == ((RopeConfig(theta=10_000.0),) * 2, "float32")
    assert (config.tie_word_embeddings, config.qkv_bias, config.qk_norm) == (False, False, "none")
    assert config.sliding_windows == (None, None)
    assert config.eos_token_ids == ()


# without them no layer attends, or there are no experts, or heads do not go together
NEEDED: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "FalconH1ForCausalLM": {"mamba_n_heads": 8},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 6},
    "HeliumForCausalLM": {"num_attention_heads": 20, "hidden_size": 640},
    "JambaForCausalLM": {"num_hidden_layers": 6},
    "KimiLinearForCausalLM": {"num_hidden_layers": 6},
    "Mamba2ForCausalLM": {"num_heads": 16},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]},
}
OWN_EPS = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "cohere2_moe": "layer_norm_eps",
    "falcon": "layer_norm_epsilon",
    "falcon_mamba": "layer_norm_epsilon",
    "gptj": "layer_norm_epsilon",
    "codegen": "layer_norm_epsilon",
    "gpt_neox": "layer_norm_eps",
    "jais2": "layer_norm_eps",
    "lfm2": "norm_eps",
    "lfm2_moe": "norm_eps",
    "lfm3": "norm_eps",
    "mamba": "layer_norm_epsilon",
    "mamba2": "layer_norm_epsilon",
    "nemotron": "norm_eps",
    "nemotron_h": "layer_norm_epsilon",
    "phi": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}

WITHOUT_OWN_EPS = {"olmo": 1e-5}  # transformers has it in its code
KV_HEADS = {"falcon": 1, "gptj": 32, "codegen": 32, "gpt_neox": 32, "nemotron": 32}  # where transformers names none


def sizes_of(name: str) -> dict[str, Any]:
    """A file that leaves out what it can, of layers enough for all that comes back every so many."""
    sizes = {key: value for key, value in LLAMA.items() if key not in ("architectures", "num_key_value_heads")}
    sizes |= {"hidden_size": 512, "num_attention_heads": 32, "pad_token_id": 0, "num_hidden_layers": 12}
    return sizes | NEEDED.get(name, {})


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_writes_for_it(name: str) -> None:
    """Windows, multipliers, biases, experts: all that `test_sizes_that_a_file_leaves_out` does not ask for by name."""
    sizes, named = sizes_of(name), {"architectures": [name]}
    written = getattr(transformers, name).config_class(**sizes).to_dict()
    assert read(sizes | named) == dataclasses.replace(read(written | named), eos_token_ids=())


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_that_a_file_leaves_out_are_those_of_transformers(name: str) -> None:
    sizes = sizes_of(name)
    theirs = getattr(transformers, name).config_class(**sizes)
    ours = read(sizes | {"architectures": [name]})
    has_attention = any(ours.attends)
    assert not has_attention or ours.max_position_embeddings == theirs.max_position_embeddings
    theirs.allow_global_per_layer_attribute_access = True  # layers of Gemma 4 may differ
    if not has_attention:
        assert ours.num_state_layers == theirs.num_hidden_layers and not ours.kv_size
    elif ours.latent is None:
        assert ours.num_kv_heads == KV_HEADS.get(theirs.model_type, getattr(theirs, "num_key_value_heads", None))
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    else:  # what all heads share of a token
        assert dataclasses.asdict(ours.latent).items() <= theirs.to_dict().items()
        assert (ours.num_kv_heads, ours.head_dim) == (1, ours.latent.key_dim)
    eps = WITHOUT_OWN_EPS.get(theirs.model_type)
    assert ours.rms_norm_eps == (eps or getattr(theirs, OWN_EPS.get(theirs.model_type, "rms_norm_eps")))
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope or {"rope_theta": 10_000.0}  # GPT-J's code has it
    of_kinds = [rope] if "rope_theta" in rope else rope.values()  # of layers
    assert {one.theta for one in ours.ropes if one is not None} <= {kind["rope_theta"] for kind in of_kinds}


def test_llamas_first_spelling_is_llama() -> None:
    assert read(LLAMA | {"architectures": ["LLaMAForCausalLM"]}) == read(LLAMA)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    assert read(old).ropes == read(new).ropes
    assert read(old).ropes[0].theta == 5e5


def test_scaling_that_a_card_says_to_add_keeps_the_base_frequency() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    written = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e6, "short_factor": [1.0]}
    both = read(LLAMA | {"rope_parameters": written, "rope_scaling": yarn})
    assert both.ropes == read(LLAMA | {"rope_theta": 1e6, "rope_scaling": yarn}).ropes
    assert read(LLAMA | {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None}).ropes[0].theta == 1e6


def test_old_and_new_dtype_keys_and_eos_lists() -> None:
    old = read(LLAMA | {"torch_dtype": "bfloat16", "eos_token_id": [5, 6]})
    new = read(LLAMA | {"dtype": "bfloat16", "eos_token_id": 5})
    assert old.dtype == new.dtype == "bfloat16"
    assert (old.eos_token_ids, new.eos_token_ids) == ((5, 6), (5,))


def test_windows_by_family() -> None:
    mistral, qwen2 = LLAMA | {"architectures": ["MistralForCausalLM"]}, LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
    assert read(mistral).sliding_windows == (4096, 4096)
    assert read(mistral | {"sliding_window": None}).sliding_windows == (None, None)
    assert read(LLAMA | {"sliding_window": 7}).sliding_windows == (None, None)
    assert read(qwen2 | {"sliding_window": 7}).sliding_windows == (None, None)
    switched = qwen2 | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
    assert read(switched).sliding_windows == (None, 7)
    by_type = switched | {"layer_types": ["sliding_attention", "full_attention"]}
    assert read(by_type).sliding_windows == (7, None)
    assert read(by_type | {"num_hidden_layers": 1}).sliding_windows == (7,)
    ministral = mistral | {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}
    assert read(ministral).sliding_windows == (None, 7)


def test_biases_by_family() -> None:
    qwen2 = read(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    llama = read(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, r"BertModel is not supported; decoders that generate text are"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, r"T5\w+ is not .*an encoder-"),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral9"}},
         r"Mistral3\w+ is not .* vision or audio part; .* 'mistral9', and those that run as text are mistral, minis"),
        ({"architectures": ["Glm4vForConditionalGeneration"]}, r"Glm4v\w+ is not .* these run as text: Gemma3For"),
        ({"architectures": ["PhiXForCausalLM"], "audio_config": {"layers": 1}}, r"PhiX.* a vision or audio part"),
        ({"architectures": None, "model_type": "persimmon"}, r"model type persimmon alone does not tell"),
        ({"architectures": ["LlamaModel"], "model_type": "mistral"}, r"LlamaModel is not supported; decoders that"),
        ({"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "auto_map": {"AutoConfig": "c.C"}},
         r"InternLM2ForCausalLM is not supported: .* 'internlm2', and the code .* never run; take a conversion"),
        ({"architectures": ["NewForCausalLM"], "model_type": "new"},
         r"NewForCausalLM is not supported: transformers \S+ has no model type 'new'; take a conversion"),
        ({"architectures": ["ZambaForCausalLM"], "mamba_d_state": 16}, r"Zamba\w+ is not supported: layers that keep"),
        ({"architectures": ["MiniMaxForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
         r"MiniMaxForCausalLM is not supported: layers of type linear_attention; full_attention and sli"),
        (QWEN3_5 | {"layer_types": ["linear_attention", "mamba"]}, r"layer type 'mamba' is not supported; linear_att"),
        (QWEN3_5 | {"layer_types": ["linear_attention"] * 2}, r"none of 2 layers has full_attention, and at least"),
        (QWEN3_5 | {"linear_num_key_heads": 3}, r"delta nets of 32 value heads over 3 key heads behind a convolution"),
        (QWEN3_5 | {"linear_conv_kernel_dim": 1}, r"a convolution over 1 tokens are not supported; value heads must"),
        (QWEN3_5 | {"linear_key_head_dim": 0}, r"key 'linear_key_head_dim' is 0, not a whole number above 0"),
        ({"architectures": ["RwkvForCausalLM"], "attention_hidden_size": 64}, r"RwkvForCausalLM .* a recurrent model"),
        ({"architectures": ["OPTForCausalLM"], "max_position_embeddings": None}, r"none of max_position_emb"),
        ({"rope_theta": None}, r"key 'rope_theta' is None, not a number above 0"),
        ({"hidden_size": 64.5}, r"key 'hidden_size' is 64.5, not a"),
        ({"rope_scaling": "linear"}, r"a value is of another kind than its key's \('str' object has no"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, r"a value is of another kind .*float: 'x'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "9"}, r"key 'sliding_window' is '9', not a whole"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, r"key 'sliding_window' is -1, not a whole"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
         r"key 'layer_types' has 1 values for 2 layers"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, r"'no_rope_layers' has 1 values for 2"),
        ({"eos_token_id": "2"}, r"key 'eos_token_id' is '2', neither a token id nor a list of them"),
        ({"eos_token_id": [[2]]}, r"key 'eos_token_id' is \[\[2\]\], neither"),
        ({"num_hidden_layers": 10**9}, r"key 'num_hidden_layers' is 1000000000, not a number of layers"),
        ({"head_dim": "x"}, r"key 'head_dim' is 'x', not a"),
        ({"rms_norm_eps": float("nan")}, r"key 'rms_norm_eps' is nan, not a"),
        ({"num_attention_heads": None}, r"key 'num_attention_heads' is None"),
        ({"max_position_embeddings": "2048"}, r"key 'max_position_embeddings' is '2048', not a whole"),
        ({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 8}, r"not supported: sparse attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, r"makes this an encoder"),
        ({"architectures": ["MixtralForCausalLM"], "intermediate_size": 99}, r"experts of 64 by 99 .* multiples of 8"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5},
         r"key 'num_experts_per_tok' is 5, and there are 4 experts; download"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": None}, r"experts_per_tok' is None, not a"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 0}, r"'moe_intermediate_size' is 0, not"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": "8"}, r"'num_experts' is '8', not a whole"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, r"'decoder_sparse_step' is 0, not a"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported; silu is"),
        ({"quantization_config": {"quant_method": "exl3"}}, r"quantized with exl3 are not supported"),
        ({"quantization_config": "fp8"}, r"quantized with fp8 are not supported"),
        ({"quantization_config": {"quant_algo": "FP8"}}, r"json: quantized weights are not supported; use the model"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"json: quantized weights are not supported; use"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, r"quantized with compressed-tensors are not"),
        ({"rope_parameters": {"rope_type": "axial"}}, r"rope type 'axial' is not supported.*yarn, longrope"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported"),
        ({"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": [30]}, r"softcapping' is \[30\], not a"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 0}, r"softcapping' is 0, not .* above 0"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": "8"}, r"'logits_scaling' is '8', not a number"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 2}, r"factor 2.0 turns 32 of .* 16 dim"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.6}, r"factor 0.6 turns 9 of .* pairs"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.06}, r"factor 0.06 turns 0 of .* 16 dim"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.5]}}, r"short_factor has 1 numbers, and 8 pairs"),
        ({"rope_scaling": {"type": "longrope"}}, r"short_factor has 0 numbers, and 8 pairs .* config\.json"),
        ({"torch_dtype": "float8_e4m3fn"}, r"dtype float8_e4m3fn is not supported; these are: bfloat16"),
        ({"num_key_value_heads": 3}, r"4 query heads over 3 key heads"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
         r"layer type 'chunked_attention' is not supported"),
    ],
)  # fmt: skip
def test_unsupported_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(ModelError, match=message) as error:
        ModelConfig.from_dir(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not readable as JSON"),
        pytest.param("[" * 100_000, "not readable as JSON", id="deep"),
        ("[1]", "holds a list"),
        ("{}", "names no architectures, and model type unknown alone does not tell; add the class"),
    ],
)
def test_broken_config_file_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", r"an adapter \(LoRA\): name its base as the model"),
        ("model-Q4_K_M.gguf", r"GGUF, which is not read; download the model's safetensors"),
        ("params.json", r"its maker's own format; download the one in Hugging Face's"),
    ],
)
def test_a_directory_of_another_format_is_called_so(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=rf"config\.json: no such file; .*{message}"):
        ModelConfig.from_dir(tmp_path)


def test_key_heads_within_the_attentions_own_keys() -> None:
    raw = {"architectures": ["DbrxForCausalLM"], "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
    config = ModelConfig.from_dict(raw | {"vocab_size": 99, "attn_config": {"kv_n_heads": 2}})
    assert (config.num_heads, config.num_kv_heads) == (4, 2)


def test_missing_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}))
    with pytest.raises(ModelError, match="key 'hidden_size' is missing"):
        ModelConfig.from_dir(tmp_path)


GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 3, "head_dim": 32}


def test_gemma3_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = GEMMA3 | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": scaling,
        "sliding_window_pattern": 3,
    }
    new = GEMMA3 | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **scaling},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    assert read(old).ropes == read(new).ropes
    assert read(old).sliding_windows == read(new).sliding_windows == (4096, 4096, None)
    assert [(rope.theta, rope.factor) for rope in read(old).ropes if rope] == [(1e4, 1.0), (1e4, 1.0), (1e6, 8.0)]


def test_the_end_of_a_turn_stands_beside_the_text_part() -> None:
    text = {key: value for key, value in GEMMA3.items() if key != "architectures"}
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    config = read(wrapper | {"text_config": text | {"eos_token_id": 1}})
    assert (config.eos_token_ids, config.head_dim) == ((1, 106), 32)
    assert read(
        {"architectures": wrapper["architectures"], "text_config": text | {"eos_token_id": 9}}
    ).eos_token_ids == (9,)
    assert read(wrapper | text | {"text_config": None}).num_layers == 3
    with pytest.raises(ModelError, match=r"key 'text_config' is \[1\], not an object"):
        read(wrapper | {"text_config": [1]})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_type_tells_the_family_where_no_architecture_does(name: str) -> None:
    family, body = FAMILIES[name], name.removesuffix("ForCausalLM")
    assert family.model_type == getattr(transformers, name).config_class.model_type
    raw = LLAMA | {"model_type": family.model_type, "hidden_act": family.keys.get("hidden_act", "silu"), "head_dim": 16}
    raw |= {"num_hidden_layers": 4, "mamba_n_heads": 8, **NEEDED.get(name, {})}
    named = read(raw | {"architectures": [name]})
    for names in (None, [], [f"{body}Model"]):
        assert read(raw | {"architectures": names}) == named


def test_gemma_scales_embeddings_and_queries_and_ties_by_default() -> None:
    gemma2 = read(GEMMA3 | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 144})
    assert (gemma2.embedding_multiplier, gemma2.attention_scale, gemma2.head_dim) == (8.0, 1 / 12, 32)
    assert (gemma2.attention_soft_cap, gemma2.logits_soft_cap, gemma2.tie_word_embeddings) == (50.0, 30.0, True)
    assert read(GEMMA3 | {"hidden_activation": None}).activation == "gelu_tanh"
    assert (gemma2.activation, gemma2.norms, gemma2.norm_offset) == ("gelu_tanh", "sandwich", 1.0)
    assert gemma2.sliding_windows == (4096, None, 4096)
    assert (read(GEMMA3).attention_soft_cap, read(GEMMA3).logits_soft_cap) == (None, None)


def test_the_first_gemmas_gelu_means_its_tanh_form() -> None:
    gemma = LLAMA | {"architectures": ["GemmaForCausalLM"]}
    assert read(gemma).activation == read(gemma | {"hidden_act": "gelu"}).activation == "gelu_tanh"
    with pytest.raises(ModelError, match=r"hidden_act 'silu' is not supported; gelu_pytorch_tanh is"):
        read(gemma | {"hidden_act": "silu"})
    with pytest.raises(ModelError, match=r"hidden_activation 'gelu' is not supported; gelu_pytorch_tanh is"):
        read(GEMMA3 | {"hidden_activation": "gelu"})  # there it is another one


def test_phi3_longrope_ends_at_the_original_context() -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    phi3 = LLAMA | {
        "architectures": ["Phi3ForCausalLM"],
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", **factors},
    }
    config = read(phi3)
    rope = config.ropes[0]
    assert rope is not None
    assert (config.max_position_embeddings, rope.rope_type, rope.factor) == (64, "longrope", 8.0)
    assert (rope.short_factor, rope.partial_rotary_factor) == ((1.0,) * 6, 0.75)
    assert rope.attention_factor == pytest.approx(1.5**0.5)
    assert read(phi3 | {"rope_scaling": None}).max_position_embeddings == 512
    assert read(phi3 | {"original_max_position_embeddings": None}).max_position_embeddings == 512


def test_the_context_that_a_scaling_buys() -> None:
    """As the cards of Qwen have it: yarn beside the positions of before."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    for keys in (
        {"rope_scaling": yarn},
        {"rope_parameters": yarn},
        {"rope_scaling": yarn, "max_position_embeddings": 8192},
    ):
        config = read(LLAMA | keys)
        assert (config.max_position_embeddings, config.reachable_positions) == (8192, 8192)
    assert read(LLAMA | {"rope_scaling": yarn | {"factor": 0.5}}).max_position_embeddings == 2048
    no_factor = read(LLAMA | {"rope_scaling": yarn | {"factor": None}, "max_position_embeddings": 8192})
    assert (no_factor.max_position_embeddings, no_factor.ropes[0].factor) == (8192, 4.0)
    unsaid = read(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    linear = read(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    for config in (unsaid, linear):
        assert (config.max_position_embeddings, config.reachable_positions) == (2048, 8192)
    assert read(LLAMA).reachable_positions == 2048
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}
    assert read(LLAMA | {"rope_scaling": llama3}).reachable_positions == 2048


def test_dynamic_scaling_ends_where_it_would_begin() -> None:
    dynamic = read(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e5})
    assert dynamic.ropes == read(LLAMA | {"rope_theta": 5e5}).ropes
    assert (dynamic.max_position_embeddings, dynamic.reachable_positions) == (2048, 2048)


def test_smollm3_layers_without_rope_and_their_windows() -> None:
    smollm3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
    assert [rope is not None for rope in read(smollm3).ropes] == [True, True, True, False]
    named = read(smollm3 | {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 9})
    assert [rope is not None for rope in named.ropes] == [True, False, True, False]
    assert named.sliding_windows == (None, 9, None, 9)
    assert read(smollm3 | {"no_rope_layers": [0] * 4}).reachable_positions == 32_768


def test_experts_by_family_and_under_both_names() -> None:
    qwen = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32, "num_experts": 16}
    moe = read(qwen | {"mlp_only_layers": [0]}).moe
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size, moe.renormalize) == (16, 8, 32, False)
    assert moe.sparse_layers == (False, True)
    renamed = {key: value for key, value in qwen.items() if key != "num_experts"} | {"num_local_experts": 16}
    assert read(renamed | {"mlp_only_layers": [0]}).moe == moe
    mixtral = read(LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}).moe
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.num_experts_per_tok, mixtral.intermediate_size) == (4, 2, 96)
    assert (mixtral.renormalize, mixtral.sparse_layers) == (True, (True, True))


def test_keys_of_another_family_mean_nothing() -> None:
    strays = {"attn_logit_softcapping": 5.0, "residual_multiplier": 0.1, "num_experts": 8, "no_rope_layers": [0, 0],
              "num_local_experts": 8,
              "query_pre_attn_scalar": 3, "logits_scaling": 7.0}  # fmt: skip
    assert read(LLAMA | strays) == read(LLAMA)


def test_what_hybrids_say_in_words_of_their_own_is_checked() -> None:
    granite = LLAMA | {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 4, "num_hidden_layers": 2}
    granite |= {"layer_types": ["mamba", "attention"]}
    nemotron = LLAMA | {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-E"}
    lfm2 = LLAMA | {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1]}
    assert read(granite).attends == (False, True)
    assert read(nemotron).attends == (False, True, False, False)
    assert read(lfm2).intermediate_size == 256  # two thirds of 96, in whole 256
    mamba = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    assert read(mamba | {"architectures": ["MambaForCausalLM"], "expand": 3}).intermediate_size == 192
    for raw, message in (
        (granite | {"mamba_n_heads": 5}, "are not the 128 that mamba_expand makes them"),
        (granite | {"mamba_d_head": 16}, "4 Mamba heads of 16 are not the 128 that mamba_expand makes them"),
        (granite | {"mamba_n_groups": 3}, "of 4 heads in 3 groups behind a convolution over 4 tokens"),
        (granite | {"mamba_d_conv": 1}, "of 4 heads in 1 groups behind a convolution over 1 tokens is not supported"),
        (granite | {"time_step_limit": [0.01, 1.0]}, r"'time_step_limit' is \[0.01, 1.0\]; only steps without limits"),
        (granite | {"time_step_limit": [0.0, 0.1]}, r"'time_step_limit' is \[0.0, 0.1\]; only steps without limits"),
        (granite | {"num_hidden_layers": 10**12}, "'num_hidden_layers' is 1000000000000, not a number of layers"),
        (nemotron | {"hybrid_override_pattern": "M*?"}, r"layer type '\?' is not supported; mamba, attention, mlp and"),
        (nemotron | {"hybrid_override_pattern": "M-"}, "none of 2 layers has attention"),
        (nemotron | {"hybrid_override_pattern": None}, "neither layers_block_type nor hybrid_override_pattern says"),
        (nemotron | {"n_group": 2}, "n_group other than 1, are not supported"),
        (nemotron | {"moe_latent_size": 8}, "moe_latent_size, and n_group other than 1, are not supported"),
        (nemotron | {"mlp_hidden_act": "silu"}, "hidden_act 'silu' is not supported; relu2 is"),
        (nemotron | {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported; silu is"),
        (lfm2 | {"full_attn_idxs": []}, "none of 2 layers has full_attention"),
        (lfm2 | {"conv_L_cache": 1}, "'conv_L_cache' is 1, and a convolution sees at least 2 tokens"),
        (lfm2 | {"architectures": ["Lfm3ForCausalLM"], "use_sandwich_norm": False}, "use_sandwich_norm false is not"),
    ):
        with pytest.raises(ModelError, match=message):
            read(raw)

"""How a text becomes a vector, as the files of published models say it, and what of it is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.settings import EmbeddingArgs
from tests.models.tiny_encoders import save_dense, write_json, write_modules

BERT: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 100, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip
QWEN3 = BERT | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8}


def read(path: Path, raw: dict[str, Any] | None = None) -> EmbeddingConfig:
    write_json(path / "config.json", raw or BERT)
    return EmbeddingConfig.from_dir(path)


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", BERT)
    write_modules(tmp_path)
    code = (
        "import sys; from bulkrun.models.config.embedding_config import EmbeddingConfig; "
        "EmbeddingConfig.from_dir(sys.argv[1]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_model_without_files_of_its_own_leaves_pooling_open(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.pooling, config.normalize, config.dense, config.dimensions) == (None, True, (), 24)
    assert (dict(config.prompts), config.default_prompt_name) == ({}, None)
    assert config.max_model_len == 512
    with pytest.raises(ModelError, match=r"embedding\.pooling: .* no modules\.json.*set it to cls, mean or last"):
        config.with_args(EmbeddingArgs())
    assert config.with_args(EmbeddingArgs(pooling="cls", normalize=False)).normalize is False


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, "last"),
        ({"pooling_mode": "cls", "embedding_dimension": 24}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"], "include_prompt": True}, "mean"),
    ],
)
def test_pooling_is_read_from_old_and_new_keys(pooling: dict[str, Any], expected: str, tmp_path: Path) -> None:
    write_modules(tmp_path, pooling)
    assert read(tmp_path).pooling == expected
    assert read(tmp_path).with_args(EmbeddingArgs()).pooling == expected
    assert read(tmp_path).with_args(EmbeddingArgs(pooling="last")).pooling == "last"


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling max is not supported"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, r"pooling cls \+ mean is not supported"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling weightedmean is"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "pooling mean_sqrt_len_tokens is"),
        ({"pooling_mode_first_and_last": True}, "pooling pooling_mode_first_and_last is"),
        ({"pooling_mode": ["mean", "cls"]}, r"pooling mean \+ cls is"),
        ({"pooling_mode": 5}, r"a value is of another kind"),
        ({"embedding_dimension": 24}, "pooling none is"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt false"),
    ],
)
def test_other_poolings_are_refused_by_name(pooling: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_modules(tmp_path, pooling)
    with pytest.raises(ModelError, match=rf"1_Pooling/config\.json: {message}"):
        read(tmp_path)


def test_without_a_normalize_module_vectors_keep_their_length(tmp_path: Path) -> None:
    write_modules(tmp_path, normalize=False)
    assert read(tmp_path).normalize is False
    assert read(tmp_path).with_args(EmbeddingArgs(normalize=True)).normalize is True


def test_dense_modules_in_their_order_give_the_dimensions(tmp_path: Path) -> None:
    write_modules(tmp_path, dense=[torch.nn.Linear(24, 40, bias=False), torch.nn.Linear(40, 16)])
    config = read(tmp_path)
    assert [(one.path.name, one.has_bias, one.activation) for one in config.dense] == [
        ("2_Dense", False, "Tanh"), ("3_Dense", True, "Tanh"),
    ]  # fmt: skip
    assert config.dimensions == 16
    assert config.vector_size(EmbeddingArgs()) == 16
    assert config.vector_size(EmbeddingArgs(dimensions=3)) == 3
    for wrong in (0, 17):
        with pytest.raises(UsageError, match=rf"embedding\.dimensions: {wrong} is not from 1 to the 16"):
            config.vector_size(EmbeddingArgs(dimensions=wrong))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softshrink"}, "activation_function Softshrink is not"),
        ({"in_features": 25}, r"in_features 25, but what comes before it in .*modules\.json has 24"),
        ({"in_features": None}, "a value is of another kind"),
        ({"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings' is not supported"),
    ],
)
def test_dense_modules_that_are_others_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_modules(tmp_path, dense=[torch.nn.Linear(24, 8)])
    file = tmp_path / "2_Dense" / "config.json"
    write_json(file, json.loads(file.read_text()) | changes)
    with pytest.raises(ModelError, match=rf"2_Dense/config\.json: {message}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["sentence_transformers.models.Transformer"], "modules Transformer: Transformer, Pooling, any number"),
        (["a.Transformer", "a.Pooling", "a.LayerNorm"], "modules Transformer, Pooling, LayerNorm: "),
        (["a.Transformer", "a.Pooling", "a.Normalize", "a.Dense"], "modules .*Normalize, Dense: "),
        (["a.Transformer", "a.WeightedLayerPooling", "a.Pooling"], "modules Transformer, WeightedLayerPooling"),
        (["a.CLIPModel"], "modules CLIPModel: "),
        ([], "modules none: "),
    ],
)
def test_other_modules_are_refused_by_name(modules: list[str], message: str, tmp_path: Path) -> None:
    entries = [
        {"path": f"{number}" if number else "", "type": name.replace("a.", "sentence_transformers.models.")}
        for number, name in enumerate(modules)
    ]
    write_json(tmp_path / "modules.json", entries)
    with pytest.raises(ModelError, match=rf"modules\.json: {message}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "", "type": "custom_st.Transformer"}, r"module custom_st\.Transformer is code of the model's own"),
        ({"path": "0_BERT", "type": "sentence_transformers.models.Transformer"}, "the transformer lies in '0_BERT'"),
        ({"path": "../x", "type": "sentence_transformers.models.Transformer"}, "'../x' is not inside"),
        ({"type": "sentence_transformers.models.Transformer"}, "is no module with a type and a path"),
    ],
)
def test_a_transformer_from_elsewhere_is_refused(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_json(tmp_path / "modules.json", [entry, {"path": "1", "type": "sentence_transformers.models.Pooling"}])
    with pytest.raises(ModelError, match=rf"modules\.json: .*{message}"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "null"])
def test_a_broken_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json: .*download (it|the model) again"):
        read(tmp_path)


def test_a_module_without_its_folder_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json: no such file, but modules\.json names its folder"):
        read(tmp_path)


def test_prompts_have_names_and_one_may_be_the_default(tmp_path: Path) -> None:
    file = tmp_path / "config_sentence_transformers.json"
    write_json(file, {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"})
    config = read(tmp_path)
    assert dict(config.prompts) == {"query": "query: ", "document": ""}
    assert config.default_prompt_name == "query"
    write_json(file, {"prompts": {"query": "query: "}, "default_prompt_name": "doc"})
    with pytest.raises(ModelError, match=r"default_prompt_name 'doc' is none of the prompts \(query\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": 256}}, 256),
        ({"sentence_roberta_config.json": {"max_seq_length": 128}}, 128),
        ({"sentence_bert_config.json": {"max_seq_length": 4096}}, 512),
        (
            {"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 99}},
            99,
        ),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 512),
    ],
)
def test_the_longest_text_is_what_the_files_say_unless_asked_for_more(
    files: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        write_json(tmp_path / name, content)
    config = read(tmp_path)
    assert config.max_model_len == config.model_len(None) == expected
    assert config.model_len(512) == 512
    with pytest.raises(UsageError, match=r"engine\.max_model_len: 513 is above the model's 512 positions"):
        config.model_len(513)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 8194}, 8192),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 0}, 512),
        ({"model_type": "camembert", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
    ],
)
def test_positions_behind_the_padding_tokens_are_left_out(raw: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert read(tmp_path, BERT | raw).model.max_position_embeddings == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_lower_case": True}, "do_lower_case true is not applied here"),
        ({"max_seq_length": "256"}, "max_seq_length '256' is not a number of tokens"),
        ({"config_args": {"is_causal": False, "trust_remote_code": True}}, "config_args is_causal: not applied"),
        ({"modality_config": {"text": {"method_output_name": "pooler_output"}}}, "'pooler_output' is not supported"),
    ],
)
def test_keys_that_would_make_other_vectors_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_json(tmp_path / "sentence_bert_config.json", content)
    with pytest.raises(ModelError, match=rf"sentence_bert_config\.json: .*{message}"):
        read(tmp_path)


def test_lower_case_is_no_matter_where_the_tokenizer_sees_to_it(tmp_path: Path) -> None:
    write_json(tmp_path / "sentence_bert_config.json", {"do_lower_case": True, "max_seq_length": 20})
    write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": True})
    assert read(tmp_path).max_model_len == 20


@pytest.mark.parametrize(
    "raw",
    [
        QWEN3,
        QWEN3 | {"architectures": ["Qwen3Model"]},
        QWEN3 | {"architectures": ["MistralModel"], "model_type": "mistral"},
        QWEN3 | {"architectures": ["LlamaModel"], "model_type": "llama"},
        QWEN3 | {"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"},
    ],
)
def test_causal_decoders_of_the_families_are_fast(raw: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(read(tmp_path, raw).model, DecoderConfig)


QWEN2_BOTH_WAYS = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "is_causal": False}
GEMMA3_BOTH_WAYS = {
    "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "use_bidirectional_attention": True,
    "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "windows"), [(QWEN2_BOTH_WAYS, (None, None)), (GEMMA3_BOTH_WAYS, (257, None))], ids=["qwen2", "gemma3"]
)
def test_decoders_that_look_both_ways_are_not_causal(
    raw: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Gemma's window counts both sides, and transformers halves it in the same way."""
    model = read(tmp_path, QWEN3 | raw).model
    assert isinstance(model, DecoderConfig) and not model.is_causal
    assert model.sliding_windows == windows


@pytest.mark.parametrize(
    "raw",
    [
        BERT | {"architectures": ["BertForMaskedLM"]},
        BERT | {"architectures": None},
        BERT | {"auto_map": {"AutoModel": "modeling.BertModel"}},
        QWEN3 | QWEN2_BOTH_WAYS | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        QWEN3 | {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        BERT | {"architectures": ["ModernBertModel"], "model_type": "modernbert"},
    ],
)
def test_all_others_run_through_transformers(raw: dict[str, Any], tmp_path: Path) -> None:
    assert not isinstance(read(tmp_path, raw).model, DecoderConfig)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True, "architectures": ["T5EncoderModel"]}, "T5EncoderModel .* an encoder-decoder"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized with bitsandbytes"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized with fp8 are read for"),
        ({"architectures": ["NewModel"], "model_type": "new", "auto_map": {"AutoModel": "x.NewModel"}}, "never run"),
        ({"architectures": ["JinaBertForMaskedLM"], "auto_map": {"AutoModel": "x.JinaBertModel"}}, "Jina.* never run"),
        ({"architectures": ["CLIPModel"], "model_type": "clip", "vision_config": {"a": 1}}, "vision or audio"),
        ({"num_attention_heads": None}, "none of num_attention_heads"),
        (
            {"architectures": ["BigBirdModel"], "model_type": "big_bird"},
            "BigBird.* set attention_type to original_full",
        ),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        read(tmp_path, BERT | changes)


def test_a_dense_module_may_leave_its_bias_and_activation_to_the_defaults(tmp_path: Path) -> None:
    write_modules(tmp_path, dense=[torch.nn.Linear(24, 8)])
    save_dense(tmp_path / "2_Dense", torch.nn.Linear(24, 8))
    write_json(tmp_path / "2_Dense" / "config.json", {"in_features": 24, "out_features": 8})
    assert [(one.has_bias, one.activation) for one in read(tmp_path).dense] == [(True, "Tanh")]

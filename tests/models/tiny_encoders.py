"""Small random-weight encoders on disk, with sentence-transformers' files beside them: the ground truth of embedding.

Weights are random, but so that a token's hidden state depends on the token, its neighbours and its position. What
transformers' own model gives for each text alone, pooled as naively as can be, is what a vector must be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tests.models.tiny_models import DELTA_NET, SIZES

_SMALL: dict[str, Any] = SIZES | {
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
_BEHIND_PADDING = {"pad_token_id": 1, "max_position_embeddings": 98}
_GEMMA = {
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
_BERT_LIKE = {"type_vocab_size": 2}
_IN_PANELS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}  # sizes that are compiled

# name -> (class that is saved, what differs from _SMALL)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _BERT_LIKE),
    "bert_masked_lm": ("BertForMaskedLM", _BERT_LIKE),
    "roberta": ("RobertaModel", _BERT_LIKE | _BEHIND_PADDING),
    "roberta_classifier": ("RobertaForSequenceClassification", _BERT_LIKE | _BEHIND_PADDING),
    "xlm_roberta": ("XLMRobertaModel", _BERT_LIKE | _BEHIND_PADDING),
    "distilbert": ("DistilBertModel", {"dim": 48, "hidden_dim": 72, "n_layers": 3, "n_heads": 6}),
    "mpnet": ("MPNetModel", _BEHIND_PADDING),
    "bert_in_panels": ("BertModel", _BERT_LIKE | _IN_PANELS),
    "bert_tanh_in_panels": ("BertModel", _BERT_LIKE | _IN_PANELS | {"hidden_act": "gelu_new"}),
    "xlm_roberta_in_panels": ("XLMRobertaModel", _BERT_LIKE | _BEHIND_PADDING | _IN_PANELS),
    "distilbert_in_panels": ("DistilBertModel", _IN_PANELS | {"hidden_dim": 192, "n_layers": 3}),
    "mpnet_in_panels": ("MPNetModel", _BEHIND_PADDING | _IN_PANELS),
    "modernbert": ("ModernBertModel", {"local_attention": 16, "global_attn_every_n_layers": 3}),
    "modernbert_in_panels": (
        "ModernBertModel",
        {"local_attention": 16, "global_attn_every_n_layers": 3} | _IN_PANELS,
    ),
    "gemma3_both_ways": ("Gemma3TextModel", _GEMMA | {"use_bidirectional_attention": True}),
    "gemma3_both_ways_in_panels": ("Gemma3TextModel", _GEMMA | {"use_bidirectional_attention": True} | _IN_PANELS),
    "qwen2_both_ways": ("Qwen2Model", {"num_key_value_heads": 2, "is_causal": False}),
    "qwen2_both_ways_in_panels": ("Qwen2Model", {"num_key_value_heads": 2, "is_causal": False} | _IN_PANELS),
    "gpt2": ("GPT2Model", {}),
}


# name -> (class that is saved, what differs from _SMALL)
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", _BERT_LIKE),
    "bert_in_panels": ("BertForSequenceClassification", _BERT_LIKE | _IN_PANELS),
    "electra_in_panels": ("ElectraForSequenceClassification", _BERT_LIKE | _IN_PANELS | {"embedding_size": 64}),
    "albert": ("AlbertForSequenceClassification", _BERT_LIKE | {"embedding_size": 32}),
    "roberta": ("RobertaForSequenceClassification", _BERT_LIKE | _BEHIND_PADDING),
    "xlm_roberta_in_panels": ("XLMRobertaForSequenceClassification", _BERT_LIKE | _BEHIND_PADDING | _IN_PANELS),
    "distilbert_in_panels": (
        "DistilBertForSequenceClassification",
        _IN_PANELS | {"hidden_dim": 192, "n_layers": 3},
    ),
    "mpnet_in_panels": ("MPNetForSequenceClassification", _BEHIND_PADDING | _IN_PANELS),
    "modernbert_in_panels": ("ModernBertForSequenceClassification", {"local_attention": 16} | _IN_PANELS),
    "modernbert_mean": ("ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    "deberta_v2": ("DebertaV2ForSequenceClassification", {"relative_attention": True, "position_buckets": 8}),
    "deberta_v2_with_types": (
        "DebertaV2ForSequenceClassification",
        {"relative_attention": True, "position_buckets": 8, "type_vocab_size": 2},
    ),
    "qwen2": ("Qwen2ForSequenceClassification", {"num_key_value_heads": 2}),
    "qwen3_5": ("Qwen3_5TextForSequenceClassification", DELTA_NET | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForSequenceClassification", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": ("LlamaForSequenceClassification", {"num_key_value_heads": 2, "pad_token_id": None}),
    "gemma2": ("Gemma2ForSequenceClassification", _GEMMA),
    "phi3": ("Phi3ForSequenceClassification", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "mixtral": ("MixtralForSequenceClassification", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen2_both_ways": ("Qwen2ForSequenceClassification", {"num_key_value_heads": 2, "is_causal": False}),
    "gpt2": ("GPT2ForSequenceClassification", {}),
    "gpt_neox": ("GPTNeoXForSequenceClassification", {"pad_token_id": 0}),
    "falcon": ("FalconForSequenceClassification", {"pad_token_id": 0, "ffn_hidden_size": 64}),
}
OWN_DECODERS = (
    "qwen2",
    "qwen3",
    "qwen3_5",
    "llama",
    "gemma2",
    "phi3",
    "mixtral",
    "gpt_neox",
    "falcon",
)  # of these what the engine's decoder runs


def save_tiny_encoder(path: Path, variant: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a variant as a Hugging Face checkpoint in float32 and return its directory."""
    return _save(path, *ENCODERS[variant], seed, overrides)


def save_encoder_in_panels(path: Path, architecture: str, **changes: Any) -> Path:
    """The same of a class of transformers that is none of the variants, in sizes that are compiled."""
    return _save(path, architecture, _BERT_LIKE | _BEHIND_PADDING | _IN_PANELS, 0, changes)


def save_tiny_classifier(path: Path, variant: str, *, seed: int = 0, **overrides: Any) -> Path:
    """The same of a classifier: of three labels, a, b and c, unless `overrides` say otherwise."""
    labels = {"num_labels": 3, "id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    return _save(path, *CLASSIFIERS[variant], seed, labels | overrides)


def _save(path: Path, architecture: str, changes: dict[str, Any], seed: int, overrides: dict[str, Any]) -> Path:
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**deepcopy(_SMALL | changes | overrides))).float().eval()
        _randomize(model)
    model.save_pretrained(path)
    return path


def write_words(folder: Path, words: Sequence[str]) -> Path:
    """Give a saved BERT a tokenizer of these words, made as its tokenizer_config.json says, if there is one."""
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def write_modules(
    path: Path, pooling: dict[str, Any] | None = None, *, dense: Sequence[nn.Linear] = (), normalize: bool = True
) -> None:
    """Put sentence-transformers' files beside a model: `pooling` is its config, each Dense is followed by Tanh."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    folders = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    for folder in folders:
        (path / folder).mkdir(exist_ok=True)
    write_json(path / "modules.json", [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ])  # fmt: skip
    write_json(path / "1_Pooling" / "config.json", pooling or {"pooling_mode": "mean"})
    for number, linear in enumerate(dense, 2):
        save_dense(path / f"{number}_Dense", linear)


def save_dense(folder: Path, linear: nn.Linear) -> None:
    """A Dense module with Tanh."""
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_json(folder / "config.json", config)
    tensors = {f"linear.{name}": parameter.detach().clone() for name, parameter in linear.named_parameters()}
    save_file(tensors, folder / "model.safetensors")


def write_json(file: Path, content: Any) -> None:
    """A JSON file."""
    file.write_text(json.dumps(content))


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.lower().endswith("norm.weight") or ("ln_" in name and name.endswith("weight")):
            parameter.uniform_(0.5, 1.5)
        elif parameter.ndim == 1:
            parameter.normal_(std=0.1)
        else:
            parameter.normal_(
                std=1.0 if "embed" in name or name[:3] in ("wte", "wpe") else 1.5 * parameter.shape[-1] ** -0.5
            )


@torch.no_grad()
def hidden_states(path: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """transformers' last hidden states [len, E] of each text alone, in float32."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(input_ids=torch.tensor([list(text)])).last_hidden_state[0] for text in texts]


@torch.no_grad()
def class_logits(path: Path, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """transformers' logits float32 [S, C] of each text alone."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    return torch.cat([model(input_ids=torch.tensor([list(text)])).logits for text in texts])


def pooled(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector [E] of a text's hidden states [len, E]."""
    return {"cls": hidden[0], "last": hidden[-1], "mean": sum(hidden) / len(hidden)}[pooling]

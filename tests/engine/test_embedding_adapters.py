"""Vectors and labels of models with a LoRA adapter: those of PEFT, which leaves the weights as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from bulkrun.engine.embedding_engine import EmbeddingEngine
from bulkrun.errors import ModelError
from bulkrun.models.config.adapter_config import AdapterConfig
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.settings import ClassificationArgs, EmbeddingArgs
from tests.engine.test_embedding_engine import TOLERANCE, embed, save_body, texts
from tests.models.tiny_adapters import QKV, save_adapter
from tests.models.tiny_encoders import save_tiny_classifier, save_tiny_encoder, write_json, write_modules
from tests.models.tiny_models import save_tiny_model

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"target_modules": ["query", "value", "dense"]},
    "bert_in_panels": {"target_modules": ["query", "value", "dense"]},  # compiled
    "xlm_roberta": {"target_modules": ["query", "word_embeddings"], "bias": "all"},
    "modernbert": {"target_modules": ["Wqkv", "Wo"]},
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert_in_panels": {"target_modules": ["query", "value"]},
    "roberta": {"target_modules": ["query", "dense"]},
    "qwen3": {"target_modules": QKV},
}


def load(path: Path, adapter: Path, made: EmbeddingArgs | ClassificationArgs, **settings: Any) -> EmbeddingEngine:
    return EmbeddingEngine.from_model_dir(path, made, dtype="float32", device="cpu", adapter=adapter, **settings)


@torch.no_grad()
def last_states(path: Path, adapter: Path, lora: dict[str, Any]) -> torch.Tensor:
    """The last token's state [S, E] of each text alone, with a new adapter of the body."""
    base = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    model = save_adapter(adapter, base, **lora)
    return torch.stack([model(input_ids=torch.tensor([text])).last_hidden_state[0, -1] for text in texts()])


@pytest.mark.parametrize("variant", ENCODERS)
def test_vectors_are_pefts(variant: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path / "base", variant)
    theirs = last_states(path, tmp_path / "adapter", ENCODERS[variant])
    engine = load(path, tmp_path / "adapter", EmbeddingArgs(pooling="last", normalize=False))
    torch.testing.assert_close(embed(engine, texts()), theirs, **TOLERANCE)


def test_a_decoder_that_embeds_takes_one_with_or_without_a_head(tmp_path: Path) -> None:
    path = save_body(tmp_path / "base", "qwen3")
    made = EmbeddingArgs(pooling="last", normalize=False)
    theirs = last_states(path, tmp_path / "adapter", {"target_modules": QKV})
    torch.testing.assert_close(embed(load(path, tmp_path / "adapter", made), texts()), theirs, **TOLERANCE)


def test_an_encoder_is_not_blamed_for_the_adapter_of_another(tmp_path: Path) -> None:
    path, adapter = save_tiny_encoder(tmp_path / "base", "bert"), tmp_path / "adapter"
    last_states(save_tiny_encoder(tmp_path / "other", "modernbert"), adapter, ENCODERS["modernbert"])
    with pytest.raises(
        ModelError, match=rf"^{adapter}: it changes layers\.0\.attn\.W\w+\.weight, which the model does not"
    ):
        load(path, adapter, EmbeddingArgs(pooling="last"))


def test_how_vectors_are_made_is_the_adapters_to_say(tmp_path: Path) -> None:
    """As sentence-transformers saves one: its modules, Dense included, are those it was trained with."""
    path, dense = save_tiny_encoder(tmp_path / "base", "bert_in_panels"), torch.nn.Linear(64, 10)
    write_modules(path)  # mean and normalize
    theirs = last_states(path, tmp_path / "adapter", ENCODERS["bert_in_panels"])
    write_modules(tmp_path / "adapter", {"pooling_mode": "lasttoken"}, dense=[dense], normalize=False)
    write_json(tmp_path / "adapter" / "config_sentence_transformers.json", {"prompts": {"query": "Q: "}})
    with torch.no_grad():
        expected = dense(theirs).tanh()
    torch.testing.assert_close(
        embed(load(path, tmp_path / "adapter", EmbeddingArgs(normalize=False)), texts()), expected, **TOLERANCE
    )
    config = EmbeddingConfig.from_dir(path, tmp_path / "adapter")
    assert (config.pooling, config.normalize, dict(config.prompts)) == ("last", False, {"query": "Q: "})


@pytest.mark.parametrize("variant", CLASSIFIERS)
def test_labels_are_pefts_and_the_head_is_the_adapters(variant: str, tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path / "base", variant)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    model = save_adapter(tmp_path / "adapter", base, task_type="SEQ_CLS", **CLASSIFIERS[variant])
    with torch.no_grad():
        theirs = torch.cat([model(input_ids=torch.tensor([text])).logits for text in texts()])
    engine = load(path, tmp_path / "adapter", ClassificationArgs(activation="none"))
    torch.testing.assert_close(embed(engine, texts()), theirs, **TOLERANCE)


@pytest.mark.parametrize(("kind", "variant"), [("encoder", "xlm_roberta"), ("encoder", "bert"), ("decoder", "qwen3")])
def test_one_may_bring_the_head_of_a_base_that_has_none(kind: str, variant: str, tmp_path: Path) -> None:
    save = save_tiny_encoder if kind == "encoder" else save_tiny_model
    path, lora = save(tmp_path / "base", variant), {"target_modules": QKV if kind == "decoder" else ["query", "value"]}
    base = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=4, dtype=torch.float32)
    model = save_adapter(tmp_path / "adapter", base.eval(), task_type="SEQ_CLS", **lora)
    with torch.no_grad():
        theirs = torch.cat([model(input_ids=torch.tensor([text])).logits for text in texts()])
    engine = load(path, tmp_path / "adapter", ClassificationArgs(activation="none"))
    assert engine.dimensions == 4
    torch.testing.assert_close(embed(engine, texts()), theirs, **TOLERANCE)
    assert ClassificationConfig.from_dir(path, tmp_path / "adapter").labels == (
        "LABEL_0",
        "LABEL_1",
        "LABEL_2",
        "LABEL_3",
    )
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("SEQ_CLS", "FEATURE_EXTRACTION"))
    with pytest.raises(ModelError, match="none ends in ForSequenceClassification"):
        load(path, tmp_path / "adapter", ClassificationArgs(activation="none"))


def test_one_may_be_added_to_the_head_too(tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path / "base", "qwen3")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    model = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "score"])
    with torch.no_grad():
        theirs = torch.cat([model(input_ids=torch.tensor([text])).logits for text in texts()])
    engine = load(path, tmp_path / "adapter", ClassificationArgs(activation="none"))
    torch.testing.assert_close(embed(engine, texts()), theirs, **TOLERANCE)


@pytest.mark.parametrize("variant", ["qwen3", "bert"])
def test_a_head_of_other_labels_is_the_adapters_to_answer_for(variant: str, tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path / "base", variant)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, ignore_mismatched_sizes=True
    )
    targets = QKV if variant == "qwen3" else ["query"]
    save_adapter(tmp_path / "adapter", base, task_type="SEQ_CLS", target_modules=targets)
    with pytest.raises(ModelError, match=r"adapter: its (score\.weight|classifier\.bias) is \[2.*the model's \[3"):
        load(path, tmp_path / "adapter", ClassificationArgs(activation="none"))


def test_what_of_a_head_is_in_neither_is_named_with_what_to_do(tmp_path: Path) -> None:
    """PEFT saves the last layer of a head by itself, and of ModernBERT there is another before it."""
    path = save_tiny_encoder(tmp_path / "base", "modernbert")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    save_adapter(tmp_path / "adapter", base, task_type="SEQ_CLS", target_modules=["Wqkv"])
    with pytest.raises(ModelError, match=r"missing keys: head\.dense\.weight.*train the adapter with that module"):
        load(path, tmp_path / "adapter", ClassificationArgs(activation="none"))


def test_a_head_without_rows_is_none(tmp_path: Path) -> None:
    save_file({"base_model.model.score.weight": torch.tensor(1.0)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1, "task_type": "SEQ_CLS"}')
    assert AdapterConfig.from_dir(tmp_path).num_labels() is None


def test_one_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path / "base", "bert")
    other = save_tiny_encoder(tmp_path / "other", "bert", vocab_size=140)
    last_states(other, tmp_path / "adapter", {"target_modules": ["word_embeddings"]})
    with pytest.raises(ModelError, match=r"adapter: its embeddings\.word_embeddings\.weight is"):
        load(path, tmp_path / "adapter", EmbeddingArgs(pooling="last"))

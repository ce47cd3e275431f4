"""What a classifier's config.json says of its labels and scores, as transformers and sentence-transformers read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.settings import ClassificationArgs

BERT: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 100, "hidden_size": 24,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512,
    "torch_dtype": "float32",
}  # fmt: skip
ONE = {"id2label": {"0": "LABEL_0"}}
IDENTITY = "torch.nn.modules.linear.Identity"


def read(folder: Path, **keys: Any) -> ClassificationConfig:
    (folder / "config.json").write_text(json.dumps(BERT | keys))
    return ClassificationConfig.from_dir(folder)


def test_labels_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    labels = {str(number): name for number, name in reversed(list(enumerate("abcdefghijkl")))}
    assert read(tmp_path, id2label=labels).labels == tuple("abcdefghijkl")


def test_without_names_there_are_two_labels(tmp_path: Path) -> None:
    assert read(tmp_path).labels == ("LABEL_0", "LABEL_1")
    assert read(tmp_path, num_labels=3).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "softmax"),
        (ONE, "sigmoid"),
        (ONE | {"problem_type": "regression"}, "none"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        (ONE | {"sbert_ce_default_activation_function": IDENTITY}, "none"),
        (ONE | {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0"}}, "none"),
        (ONE | {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        (ONE | {"problem_type": "single_label_classification"}, "sigmoid"),  # softmax over one label is always 1
        (ONE | {"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, "softmax"),
        ({"sentence_transformers": {"version": "5.0"}}, "softmax"),
    ],
)
def test_scores_are_what_the_files_say(keys: dict[str, Any], activation: str, tmp_path: Path) -> None:
    assert read(tmp_path, **keys).activation_of(ClassificationArgs()) == activation


def test_an_activation_that_is_not_known_is_for_the_job_to_set(tmp_path: Path) -> None:
    config = read(tmp_path, **ONE, sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh")
    with pytest.raises(ModelError, match=r"classification\.activation: .* is not known here; set it to"):
        config.activation_of(ClassificationArgs())
    assert config.activation_of(ClassificationArgs(activation="none")) == "none"
    with pytest.raises(ModelError, match="softmax over the model's one label is always 1"):
        config.activation_of(ClassificationArgs(activation="softmax"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["BertModel"]}, r"config\.json: architectures: BertModel, and none ends in"),
        ({"architectures": None}, r"architectures: none, and none ends in"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label: its numbers are \[0, 2\], not 0 to 1"),
        ({"id2label": {"zero": "a"}}, "a value is of another kind"),
        ({"problem_type": "ranking"}, "problem_type 'ranking' is not supported; these are: single_label"),
    ],
)
def test_what_is_wrong_is_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **keys)


def test_a_text_may_be_as_long_as_the_tokenizer_says(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    config = read(tmp_path)
    assert (config.model_len(None), config.model_len(300)) == (256, 300)
    with pytest.raises(UsageError, match=r"engine\.max_model_len: 513 is above the model's 512 positions"):
        config.model_len(513)


def test_a_classifier_writes_no_text_and_the_error_says_what_it_does(tmp_path: Path) -> None:
    read(tmp_path)
    with pytest.raises(
        ModelError, match=r"BertForSequenceClassification makes labels of texts .* write task: classify"
    ):
        ModelConfig.from_dir(tmp_path)


def test_a_broken_tokenizer_config_is_not_called_a_broken_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max')
    with pytest.raises(ModelError, match=rf"^{tmp_path}/tokenizer_config\.json: not readable as JSON"):
        read(tmp_path)

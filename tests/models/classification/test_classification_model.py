"""Scores are transformers' own for each text alone, whatever the head, the crowd and the way the model is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.errors import ModelError, UsageError
from bulkrun.models.classification import decoder_classifier
from bulkrun.models.classification.classification_model import ClassificationModel
from bulkrun.models.classification.classification_model_loader import load_classification_model
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.ops.cpu.encoder_stack import can_stack_encoder
from bulkrun.settings import ClassificationArgs, EngineArgs, ScoreActivation
from tests.models.tiny_encoders import CLASSIFIERS, OWN_DECODERS, class_logits, save_tiny_classifier, save_tiny_encoder
from tests.models.tiny_models import VOCAB_SIZE, edit_weights
from tests.models.tiny_packed import save_tiny_packed
from tests.models.tiny_quantized import save_tiny_quantized

LENS = (1, 1, 2, 17, 30, 96)


def load(
    path: Path, activation: ScoreActivation | None = None, dtype: torch.dtype = torch.float32, **engine: Any
) -> ClassificationModel:
    config = ClassificationConfig.from_dir(path)
    args = ClassificationArgs(activation=activation)
    options = LoadOptions.of(EngineArgs(**engine), dtype, torch.device("cpu"))
    return load_classification_model(path, config, args, options)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENS]


@pytest.mark.parametrize("variant", CLASSIFIERS)
def test_scores_are_those_of_transformers_for_each_text_alone(variant: str, tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, variant)
    classifier, expected = load(path), class_logits(path, texts()).softmax(-1)
    assert expected.std(0).max() > 0.01, "texts that all get the same would hide a wrong one"
    torch.testing.assert_close(classifier(texts()), expected, rtol=0, atol=1e-5)
    alone = torch.cat([classifier([text]) for text in texts()])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    is_compiled = variant.endswith("in_panels") and can_stack_encoder(torch.float32, 64, 128, 16)
    assert isinstance(classifier.encoder, PaddedEncoder) != (is_compiled or variant in OWN_DECODERS)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("variant", ["bert_in_panels", "modernbert_in_panels", "llama"])
def test_deterministic_scores_have_the_same_bits_in_any_crowd(
    variant: str, activation: ScoreActivation, tmp_path: Path
) -> None:
    """torch has a sigmoid for whole registers of numbers and another one for what is left at the end."""
    if not can_stack_encoder(torch.float32, 64, 128, 16):
        pytest.skip("encoders are not compiled here")
    classifier = load(save_tiny_classifier(tmp_path, variant), activation, deterministic=True)
    crowd = sorted(texts() * 4, key=len)
    assert torch.equal(classifier(crowd), torch.cat([classifier([text]) for text in crowd]))


def test_deterministic_is_refused_where_transformers_computes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"engine\.deterministic: on this device BertForSequenceClassification runs"):
        load(save_tiny_classifier(tmp_path, "bert"), deterministic=True)


@pytest.mark.parametrize("settings", [{"dtype": torch.bfloat16}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("variant", ["bert", "bert_in_panels", "llama"])
def test_fewer_bits_keep_each_text_its_own_scores(variant: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Logits are nearer to the text's own in float32 than to any other text's."""
    path = save_tiny_classifier(tmp_path, variant)
    exact, near = class_logits(path, texts()), load(path, "none", **settings)(texts())
    assert near.dtype == torch.float32 and not torch.equal(near, exact)
    assert torch.cdist(near, exact).argmin(-1).tolist() == list(range(len(LENS)))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_activations_are_torchs_own(activation: ScoreActivation, tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, "bert")
    logits = class_logits(path, texts())
    expected = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[activation]
    torch.testing.assert_close(load(path, activation)(texts()), expected, rtol=1e-5, atol=1e-5)


def test_a_regression_is_a_number(tmp_path: Path) -> None:
    one = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    path = save_tiny_classifier(tmp_path, "bert_in_panels", **one)
    scores = load(path)(texts())
    assert scores.shape == (len(LENS), 1)
    torch.testing.assert_close(scores, class_logits(path, texts()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", ["classifier__weight", "bert__pooler__dense__weight"])
def test_a_head_without_weights_is_refused_and_never_random(missing: str, tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, "bert")
    edit_weights(path, **{missing: None})
    with pytest.raises(ModelError, match=missing.replace("__", r"\.").removeprefix(r"bert\.")):
        load(path)


def test_more_labels_than_outputs_are_refused(tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, "gpt2")
    config = json.loads((path / "config.json").read_text())
    labels = {str(number): "abcde"[number] for number in range(5)}
    (path / "config.json").write_text(json.dumps(config | {"id2label": labels}))
    with pytest.raises(ModelError, match=r"mismatched keys: .*score\.weight"):
        load(path)


@pytest.mark.parametrize(
    ("save", "form", "variant"),
    [
        (save_tiny_quantized, "ct_channel", "qwen3"),
        (save_tiny_packed, "awq", "qwen3"),
        (save_tiny_quantized, "block", "gpt_neox"),
    ],
)
def test_decoders_that_are_stored_quantized_classify(save: Any, form: str, variant: str, tmp_path: Path) -> None:
    """As the same weights dequantized do in transformers; of those the head is none."""
    stored, plain = save(tmp_path, variant, form)
    head = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)) / 7
    for path in (stored, plain):
        edit_weights(path, score__weight=head, lm_head__weight=None)
        raw = json.loads((path / "config.json").read_text())
        classifier = raw["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        names = {"id2label": {"0": "a", "1": "b", "2": "c"}, "architectures": [classifier]}
        (path / "config.json").write_text(json.dumps(raw | names))
    expected = class_logits(plain, texts())
    torch.testing.assert_close(load(stored, "none")(texts()), expected, rtol=0, atol=1e-4)


def test_quantized_weights_do_not_reach_transformers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes the last block of a matrix for a whole one, where the head is not known here."""
    monkeypatch.setattr(decoder_classifier, "_THAT_HEAD_TOO", ())
    stored, _ = save_tiny_quantized(tmp_path, "gpt_neox", "block")
    raw = json.loads((stored / "config.json").read_text())
    names = {"id2label": {"0": "a", "1": "b", "2": "c"}, "architectures": ["GPTNeoXForSequenceClassification"]}
    (stored / "config.json").write_text(json.dumps(raw | names))
    with pytest.raises(ModelError, match=r"weights stored in .* are not read for this model's head; use its bfloat16"):
        load(stored)


def test_a_decoders_head_is_there_and_of_the_labels(tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, "qwen3")
    edit_weights(path, score__weight=torch.ones(5, 48))
    with pytest.raises(ModelError, match=r"score\.weight is \[5, 48\], but config\.json makes it \[3, 48\]"):
        load(path)
    edit_weights(path, score__weight=None)
    with pytest.raises(ModelError, match=r"there is no score\.weight, the head for labels"):
        load(path)


def test_a_head_that_reads_something_else_is_refused(tmp_path: Path) -> None:
    """Longformer's class of labels has the first token attend to all others, which its body alone does not."""
    config = transformers.LongformerConfig(
        vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72,
        max_position_embeddings=98, pad_token_id=1, attention_window=[8, 8],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LongformerForSequenceClassification(config)
        for parameter in model.parameters():
            parameter.data.normal_()
        model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Longformer\w+ is not supported: its head reads neither"):
        load(tmp_path)


def test_a_model_without_a_head_is_no_classifier(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"architectures: BertModel, and none ends in ForSequenceClassification"):
        ClassificationConfig.from_dir(save_tiny_encoder(tmp_path, "bert"))


@pytest.mark.parametrize("variant", ["bert", "qwen3"])
def test_random_weights_need_no_checkpoint(variant: str, tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, variant)
    (path / "model.safetensors").unlink()
    first, again = (load(path, load_format="dummy")(texts()) for _ in range(2))
    assert torch.equal(first, again) and first.isfinite().all()


@pytest.mark.parametrize("padding", [3, 0])
@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "llama"])
def test_padding_at_the_end_of_a_text_is_left_out_as_transformers_leaves_it(
    variant: str, padding: int, tmp_path: Path
) -> None:
    """Where the padding is the end-of-text token, a tokenizer puts it there."""
    path = save_tiny_classifier(tmp_path, variant, pad_token_id=padding)
    given = [[3], [3, 3], [7, 8, 3], [9, 3, 11, 3, 3], [5, 6, 7, 8, 9, 10]]
    given = [[padding if token == 3 else token for token in text] for text in given]
    expected = class_logits(path, given).softmax(-1)
    torch.testing.assert_close(load(path)(given), expected, rtol=0, atol=1e-5)


def test_a_head_of_a_model_without_a_padding_token_takes_many_texts(tmp_path: Path) -> None:
    """Which transformers' code refuses: it could not tell where padded ones end."""
    path = save_tiny_classifier(tmp_path, "gpt2", pad_token_id=None)
    torch.testing.assert_close(load(path)(texts()), class_logits(path, texts()).softmax(-1), rtol=0, atol=1e-5)


def test_a_decoders_head_may_be_stored_in_half_precision(tmp_path: Path) -> None:
    path, generator = save_tiny_classifier(tmp_path, "qwen3"), torch.Generator().manual_seed(4)
    edit_weights(path, score__weight=torch.randn(3, 48, generator=generator).bfloat16())
    torch.testing.assert_close(load(path)(texts()), class_logits(path, texts()).softmax(-1), rtol=0, atol=1e-5)


def test_a_head_that_is_not_numbers_is_called_so(tmp_path: Path) -> None:
    path = save_tiny_classifier(tmp_path, "bert")
    edit_weights(path, classifier__bias=torch.full((3,), float("nan")))
    with pytest.raises(ModelError, match="what it makes of a short text is not finite"):
        load(path)


def test_logits_are_float32_whatever_the_states_are(tmp_path: Path) -> None:
    logits = load(save_tiny_classifier(tmp_path, "bert"), "none", torch.bfloat16)(texts())
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("row_by_row", [True, False])
def test_only_when_told_to_the_head_takes_one_text_on_one_thread(row_by_row: bool, tmp_path: Path) -> None:
    encoder = load(save_tiny_classifier(tmp_path, "bert")).encoder
    seen: list[tuple[int, int]] = []

    def head(states_SE: torch.Tensor) -> torch.Tensor:
        seen.append((len(states_SE), torch.get_num_threads()))
        return states_SE[:, :3]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = ClassificationModel(
            encoder, head, pooling="cls", num_labels=3, activation="none", row_by_row=row_by_row
        )(texts())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert made.shape == (len(LENS), 3)
    assert seen == ([(1, 1)] * len(LENS) if row_by_row else [(len(LENS), 2)])

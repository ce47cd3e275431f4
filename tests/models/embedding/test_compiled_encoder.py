"""Encoders of BERT's and ModernBERT's kinds in one compiled call: transformers' hidden states, or its code."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.errors import UsageError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.embedding.compiled_encoder import CompiledEncoder, compile_encoder
from bulkrun.models.embedding.compiled_modernbert import CompiledModernBert, compile_modernbert
from bulkrun.models.embedding.encoder_loader import load_encoder
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.ops.cpu.encoder_stack import can_stack_encoder
from bulkrun.ops.cpu.int8_linear import can_pack_int8
from tests.models.tiny_encoders import hidden_states, save_encoder_in_panels, save_tiny_encoder
from tests.models.tiny_models import VOCAB_SIZE
from tests.ops import int8_oracle

CPU = torch.device("cpu")
VARIANTS = [
    "bert_in_panels", "bert_tanh_in_panels", "xlm_roberta_in_panels", "distilbert_in_panels", "mpnet_in_panels",
    "modernbert_in_panels",
]  # fmt: skip
COMPILED = (CompiledEncoder, CompiledModernBert)
LENS = (1, 1, 2, 7, 16, 17, 30, 96)
pytestmark = pytest.mark.skipif(
    not can_stack_encoder(torch.float32, 64, 128, 16), reason="encoders are not compiled here"
)


def load(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> TextEncoder:
    if not can_stack_encoder(dtype, 64, 128, 16):
        pytest.skip("this processor does not multiply bf16")
    config = EmbeddingConfig.from_dir(path).model
    return load_encoder(path, config, LoadOptions(dtype=dtype, device=CPU, **settings))


def texts() -> list[list[int]]:
    """With tokens that pad a batch, id 0 of some models and 1 of others, in the middle of a text."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENS]
    made[3][2:4] = [1, 0]
    made[6][0] = made[6][-1] = 1
    return made


@torch.inference_mode()
def states(encoder: TextEncoder, given: list[list[int]], kept: torch.Tensor | None = None) -> torch.Tensor:
    return encoder(PackedTexts.of(given, CPU), kept).float().clone()


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_are_those_of_transformers_for_each_text_alone(variant: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, variant)
    encoder = load(path)
    assert isinstance(encoder, COMPILED)
    expected = torch.cat(hidden_states(path, texts()))
    torch.testing.assert_close(states(encoder, texts()), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_half_precision_they_are_as_good_as_transformers(variant: str, tmp_path: Path) -> None:
    """Rounded at the same places, each is as far from the exact ones as the other, in the mean over 10,000 numbers."""
    path = save_tiny_encoder(tmp_path, variant)
    encoder = load(path, torch.bfloat16)
    assert isinstance(encoder, COMPILED) and encoder.dtype == torch.bfloat16
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.bfloat16).eval()
    theirs = states(PaddedEncoder(model, encoder.config), texts())
    exact = torch.cat(hidden_states(path, texts()))
    assert (states(encoder, texts()) - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


@pytest.mark.skipif(not can_pack_int8(64, 64), reason="int8 is not compiled here")
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_8_bits_they_are_those_of_a_model_rounded_by_hand(variant: str, tmp_path: Path) -> None:
    """A last bit may round an input to the next number (see test_own_products.py): few tokens may be apart."""
    path = save_tiny_encoder(tmp_path, variant, num_hidden_layers=1, n_layers=1)
    encoder = load(path, quantization="int8")
    assert isinstance(encoder, COMPILED)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    by_hand = PaddedEncoder(model, EmbeddingConfig.from_dir(path).model)
    exact = states(by_hand, texts())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = int8_oracle.fake_quantized(module.weight.data)
            module.register_forward_pre_hook(lambda _, given: (int8_oracle.fake_quantized(given[0]),))
    rounded = states(by_hand, texts())
    apart_T = (states(encoder, texts()) - rounded).abs().amax(-1)
    assert (apart_T > 1e-4).sum() <= 3 < ((rounded - exact).abs() > 1e-4).any(-1).sum()


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_has_its_bits_in_any_crowd(variant: str, settings: dict[str, Any], tmp_path: Path) -> None:
    encoder = load(save_tiny_encoder(tmp_path, variant), deterministic=True, **settings)
    alone = torch.cat([states(encoder, [text]) for text in texts()])
    assert torch.equal(states(encoder, texts()), alone)
    ends = torch.tensor(LENS).cumsum(0)
    assert torch.equal(states(encoder, texts(), ends - 1), alone[ends - 1])
    encoder.free_scratch()
    assert torch.equal(states(encoder, texts()), alone)


def test_plain_weights_are_let_go(tmp_path: Path) -> None:
    """Each layer's as soon as it is in panels: a second copy of a model would be memory for nothing."""
    config = EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "bert_in_panels")).model
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    padded, layer = PaddedEncoder(model, config), weakref.ref(model.encoder.layer[0])
    del model
    assert compile_encoder(padded, None) is not None
    gc.collect()
    assert layer() is None


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("bert", {}),  # 48 numbers fill no panels
        ("bert_in_panels", {"hidden_act": "relu"}),
        ("modernbert_in_panels", {"hidden_activation": "relu"}),
        ("modernbert_in_panels", {"norm_bias": True}),
        ("modernbert_in_panels", {"num_key_value_heads": 2}),  # of which its code knows nothing
    ],
)
def test_what_is_not_compiled_runs_through_transformers(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, variant, **changes)
    encoder = load(path)
    assert isinstance(encoder, PaddedEncoder)
    torch.testing.assert_close(
        states(encoder, texts()), torch.cat(hidden_states(path, texts())), rtol=1e-5, atol=2e-5
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"engine\.deterministic: on this device .* transformers' own code"):
        load(path, deterministic=True)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LongformerModel", {"attention_window": [32] * 3}),  # a layer has weights of its global attention too
        ("BigBirdModel", {"attention_type": "original_full"}),  # whose embeddings take no more tokens than positions
        ("IBertModel", {}),  # whose activation is a module of two outputs
    ],
)
def test_layers_named_as_berts_that_do_more_run_through_transformers(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = save_encoder_in_panels(tmp_path, architecture, **changes)
    encoder = load(path)
    assert isinstance(encoder, PaddedEncoder)
    given = sorted(texts() * 2, key=len)
    expected = torch.cat(hidden_states(path, given))
    torch.testing.assert_close(states(encoder, given), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_names_over_other_code_are_not_believed(dtype: torch.dtype, tmp_path: Path) -> None:
    """And the model is what it was."""
    config = EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "bert_in_panels")).model
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=dtype).eval().requires_grad_(False)
    model.encoder.layer[1].register_forward_hook(lambda _, __, out: out + 0.05 * out.roll(1, -1))
    padded = PaddedEncoder(model, config)
    expected = states(padded, texts())
    assert compile_encoder(padded, None) is None
    assert torch.equal(states(padded, texts()), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_norms_that_round_otherwise_than_others_are_not_compiled(tmp_path: Path) -> None:
    """The call knows one epsilon, and numbers of two short texts would not tell."""
    config = EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "bert_in_panels")).model
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.encoder.layer[1].output.LayerNorm.eps = 1e-5
    assert compile_encoder(PaddedEncoder(model, config), None) is None


def test_fp8_is_for_gpus(tmp_path: Path) -> None:
    config = EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "bert_in_panels")).model
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert compile_encoder(PaddedEncoder(model, config), "fp8") is None


@pytest.mark.parametrize("local_attention", [16, 140, 1200])
def test_windows_of_modernbert_end_anywhere(local_attention: int, tmp_path: Path) -> None:
    path = save_tiny_encoder(
        tmp_path, "modernbert_in_panels", max_position_embeddings=700, local_attention=local_attention
    )
    given = [[(7 * place + length) % VOCAB_SIZE for place in range(length)] for length in (3, 64, 129, 600)]
    torch.testing.assert_close(
        states(load(path), given), torch.cat(hidden_states(path, given)), rtol=1e-5, atol=2e-5
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_modernbert_that_does_more_is_not_believed(dtype: torch.dtype, tmp_path: Path) -> None:
    config = EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "modernbert_in_panels")).model
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=dtype).eval().requires_grad_(False)
    model.layers[1].register_forward_hook(lambda _, __, out: out + 0.5 * out.roll(1, -1))
    padded = PaddedEncoder(model, config)
    expected = states(padded, texts())
    assert compile_modernbert(padded, None) is None
    assert torch.equal(states(padded, texts()), expected)

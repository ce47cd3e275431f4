"""The engine's products where transformers' code calls its own: the same numbers, or those of rounding by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bulkrun.errors import ModelError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.decoder.quantized_layers import Fp8Linear, Int8Linear
from bulkrun.models.embedding import encoder_loader
from bulkrun.models.embedding.own_products import OwnProduct, use_own_products
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.ops.cpu.int8_linear import can_pack_int8
from bulkrun.ops.cpu.panel_linear import can_pack_panels
from tests.models.tiny_encoders import save_tiny_encoder
from tests.models.tiny_models import VOCAB_SIZE
from tests.ops import fp8_oracle, int8_oracle

CPU = torch.device("cpu")
WHOLE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}  # they fill panels
VARIANTS: dict[str, dict[str, Any]] = {
    "bert": WHOLE,
    "xlm_roberta": WHOLE,
    "mpnet": WHOLE,
    "distilbert": WHOLE | {"dim": 64, "hidden_dim": 128, "n_heads": 4},
    "modernbert": WHOLE,
    "gemma3_both_ways": WHOLE,
}
ONE_LAYER = {"num_hidden_layers": 1, "n_layers": 1, "layer_types": ["sliding_attention"]}
ROUNDINGS = {"int8": int8_oracle.fake_quantized, "fp8": fp8_oracle.fake_quantized}
HAS_PANELS = can_pack_panels(torch.empty(64, 64))


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for compile_it in ("compile_encoder", "compile_modernbert"):
        monkeypatch.setattr(encoder_loader, compile_it, lambda *_: None)


def load(path: Path, quantization: Any = None) -> PaddedEncoder:
    config = EmbeddingConfig.from_dir(path).model
    options = LoadOptions(dtype=torch.float32, device=CPU, quantization=quantization)
    encoder = encoder_loader.load_encoder(path, config, options)
    assert isinstance(encoder, PaddedEncoder)
    return encoder


def plain(path: Path) -> PaddedEncoder:
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    return PaddedEncoder(model, EmbeddingConfig.from_dir(path).model)


@torch.inference_mode()
def states(encoder: PaddedEncoder) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 7, 30, 96)]
    return encoder(PackedTexts.of(texts, CPU)).float()


def own(encoder: PaddedEncoder) -> list[OwnProduct]:
    return [module for module in encoder.model.modules() if isinstance(module, OwnProduct)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """Up to the rounding of float32 sums, as in the engine's tests."""
    path = save_tiny_encoder(tmp_path, variant, **VARIANTS[variant])
    encoder = load(path)
    assert bool(own(encoder)) == HAS_PANELS
    torch.testing.assert_close(states(encoder), states(plain(path)), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("quantization", ROUNDINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_8_bits_they_are_those_of_a_model_rounded_by_hand(variant: str, quantization: str, tmp_path: Path) -> None:
    """A sum in another order is another last bit, with which a token's input may round to the next number: so few of
    134 may be apart, in one layer, behind which such a number has not spread. Rounding itself moves nearly all."""
    path = save_tiny_encoder(tmp_path, variant, **VARIANTS[variant], **ONE_LAYER)
    encoder, by_hand = load(path, quantization), plain(path)
    expected = states(by_hand)
    for module in by_hand.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = ROUNDINGS[quantization](module.weight.data)
            module.register_forward_pre_hook(lambda _, given: (ROUNDINGS[quantization](given[0]),))
    rounded, kind = states(by_hand), Int8Linear if quantization == "int8" else Fp8Linear
    assert not any(type(module) is nn.Linear for module in encoder.model.modules())
    assert all(isinstance(one.product, kind) for one in own(encoder))
    apart_T = (states(encoder) - rounded).abs().amax(-1)
    assert (apart_T > 1e-4).sum() <= 3 < (rounded - expected > 1e-4).any(-1).sum()


def test_bytes_lie_in_panels_where_they_are_multiplied_so(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert", **WHOLE)
    products = [one.product for one in own(load(path, "int8"))]
    in_panels = [one for one in products if isinstance(one, Int8Linear) and one.zeros is not None]
    assert len(in_panels) == (len(products) if can_pack_int8(64, 64) else 0)


def test_slow_bytes_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(save_tiny_encoder(tmp_path, "bert"), "int8")  # 48 numbers fill no panels
    assert sum("run in plain torch, slowly" in record.message for record in caplog.records) == 1


class _LooksAtWeights(nn.Module):
    """Calls one product, and multiplies with the weight of another by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.looked_at = nn.Linear(64, 64), nn.Linear(64, 64)
        self.config, self.dtype, self.device = None, torch.float32, CPU

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        hidden = self.called(nn.functional.one_hot(input_ids % 64, 64).float())
        return transformers.modeling_outputs.BaseModelOutput(hidden @ self.looked_at.weight)


def test_code_that_looks_at_weights_keeps_them_and_has_no_8_bits(tmp_path: Path) -> None:
    config = EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "bert")).model
    encoder: Any = PaddedEncoder(_LooksAtWeights(), config)  # type: ignore[arg-type]
    expected = states(encoder)
    use_own_products(encoder, None)
    assert not own(encoder)
    assert torch.equal(states(encoder), expected)
    with pytest.raises(AttributeError):
        use_own_products(encoder, "int8")


def test_a_model_without_such_modules_has_no_8_bits(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"GPT2Model .*engine\.quantization: none of its products is an nn\.Linear"):
        load(save_tiny_encoder(tmp_path, "gpt2"), "int8")

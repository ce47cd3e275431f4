"""What Gemma 3n does with its residual streams and its gates, beside transformers' own modules in float64."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
import transformers

from bulkrun import ops
from bulkrun.ops import cut_gates, residual_streams
from bulkrun.ops.triton import cut_gates as cut_gates_kernel
from bulkrun.ops.triton import residual_streams as kernels

gemma3n = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # C++ has ops of the first and the last
# N, T, E; of nine streams C++ has no op, and of three and nine the kernels' modes are padded
SHAPES = [(2, 0, 5), (3, 3, 5), (4, 3, 1030), (9, 2, 17), pytest.param((4, 65, 2048), marks=pytest.mark.gpu)]


def error_of(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 3e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": torch.finfo(dtype).eps}


def altup_of(shape: tuple[int, int, int]) -> torch.nn.Module:
    config = transformers.Gemma3nTextConfig(
        hidden_size=shape[2], altup_num_inputs=shape[0], num_attention_heads=1, vocab_size=9
    )
    altup = gemma3n.Gemma3nTextAltUp(config).double().eval()
    for weight in altup.parameters():
        weight.data.normal_()
        weight.data = weight.bfloat16().double()  # which every dtype here has
    return altup


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_streams_are_predicted_and_corrected_as_in_transformers(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    altup = altup_of(shape).to(device)
    streams, computed = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1:], device=device).to(dtype)
    modes = torch.rand(shape[1], shape[0], device=device).to(dtype)
    altup.compute_router_modalities = lambda x: modes.double()[None]
    predicted = altup.predict(streams.double()[:, None])[:, 0]
    corrected = altup.correct(streams.double()[:, None], computed.double()[None])[:, 0]
    coefs, gains = (layer.weight.to(dtype) for layer in (altup.prediction_coefs, altup.correction_coefs))
    for module in (residual_streams, kernels, ops):  # the last is C++ on a CPU
        ours = module.predict_streams(streams, modes, coefs)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), predicted, **error_of(dtype))
        ours = module.correct_streams(streams, computed, modes, gains)
        torch.testing.assert_close(ours.double(), corrected, **error_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_get_the_length_of_others(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, like = torch.randn(shape, device=device).to(dtype), (torch.randn(shape[1:], device=device) * 7).to(dtype)
    if x.numel():
        x[0, 0], x[1, 0] = 0.0, 1e-3  # shorter than what counts as a length
    lengths = (one.double().square().mean(-1, keepdim=True) for one in (like, x))
    wanted, found = (length.clamp(min=least).sqrt() for length, least in zip(lengths, (0.0, 1e-5), strict=True))
    for module in (residual_streams, kernels, ops):
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        ours = module.with_rms_of(strided, like, 1e-5)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), x.double() * wanted / found, **error_of(dtype))


@pytest.mark.filterwarnings("ignore:std")  # of no rows
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 5), (3, 2), (3, 1025), pytest.param((64, 16384), marks=pytest.mark.gpu)], ids=str
)
def test_gates_are_cut_as_in_transformers_and_nothing_beside_them(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
    config = transformers.Gemma3nTextConfig(**sizes, num_kv_shared_layers=0, activation_sparsity_pattern=[0.7])
    theirs = gemma3n.Gemma3nTextMLP(config).eval()
    gate, up = (torch.randn(2, *shape, device=device) * 3 + 1).to(dtype)
    if gate.numel():
        gate[-1] = 4.0  # all alike
    exact = theirs._gaussian_topk(gate.double())
    assert shape[1] < 9 or (exact > 0).double().mean() == pytest.approx(0.2, abs=0.05)  # a third row is all alike
    for cut_gates_ in (cut_gates.cut_gates_, cut_gates_kernel.cut_gates_, ops.cut_gates_):
        gate_up = torch.cat((gate, up), dim=-1)
        cut_gates_(gate_up[:, : shape[1]], NormalDist().inv_cdf(0.7))
        torch.testing.assert_close(gate_up[:, : shape[1]].double(), exact, **error_of(dtype))
        assert torch.equal(gate_up[:, shape[1] :], up)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gates_that_are_no_numbers_are_none(device: str, dtype: torch.dtype, value: float) -> None:
    """As where they are too large for float16: zeros would be taken for an answer."""
    gate = torch.randn(2, 70, device=device).to(dtype)
    gate[0, 3] = value
    for cut_gates_ in (cut_gates.cut_gates_, cut_gates_kernel.cut_gates_, ops.cut_gates_):
        assert cut_gates_(gate.clone(), 1.0).isnan().all(1).tolist() == [True, False]

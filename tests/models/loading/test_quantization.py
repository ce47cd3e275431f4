"""fp8 weights as they lie in a loaded model: which ones, what they hold, and what loading them takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.layers import Linear
from bulkrun.models.decoder.quantized_layers import Fp8Linear
from bulkrun.models.loading import quantization
from bulkrun.models.loading.quantization import store_quantized
from bulkrun.ops.matmul.fp8 import FP8
from tests.benchmarks.quantized_checkpoint import write_quantized_checkpoint
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import make_tiny_model, save_tiny_model
from tests.ops import int8_oracle
from tests.ops.fp8_oracle import fake_quantized

PEAK = """
import sys, threading, torch
from pathlib import Path
from bulkrun.models.files import read_ahead
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.loader import load_model
read_ahead.READ_AHEAD_BYTES = 2**24  # of a model for a test it would be most
def load(path, quantization):
    quantization = None if quantization == "none" else quantization
    cpu = torch.device("cpu")
    return load_model(path, LoadOptions(dtype=torch.bfloat16, device=cpu, quantization=quantization))
def own_megabytes():  # without pages of the mapped file
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 2**10
load(sys.argv[2], "fp8")  # what is imported on the way is not the model's
before, samples, done = own_megabytes(), [], threading.Event()
def watch():
    while not done.wait(0.002):
        samples.append(own_megabytes())
watcher = threading.Thread(target=watch)
watcher.start()
model = load(sys.argv[1], sys.argv[3])
done.set()
watcher.join()
print(max(samples) - before)
"""


def load(path: Path, **options: object) -> Decoder:
    return load_model(path, dtype=torch.bfloat16, device="cpu", quantization="fp8", **options)


@pytest.mark.parametrize("variant", ["qwen2", "phi3"])
def test_projections_are_fp8_and_the_rest_keeps_its_dtype(tmp_path: Path, variant: str) -> None:
    model = load(save_tiny_model(tmp_path, variant))
    theirs = make_tiny_model(variant).model.layers[1]
    for ours in (model.layers[1].attention.qkv_proj, model.layers[1].mlp.gate_up_proj, model.layers[1].mlp.down_proj):
        assert isinstance(ours, Fp8Linear)
        assert (ours.weight.dtype, ours.weight_scale.dtype) == (FP8, torch.float32)
    down = model.layers[1].mlp.down_proj
    back = down.weight.float() * down.weight_scale
    torch.testing.assert_close(back, fake_quantized(theirs.mlp.down_proj.weight.data), rtol=1e-6, atol=0)
    assert isinstance(model.lm_head, Linear)
    assert model.is_in_fp8 and not Decoder(model.config).is_in_fp8
    assert model.dtype == model.norm.weight.dtype == torch.bfloat16
    bias = model.layers[1].attention.qkv_proj.bias
    assert (bias is None) == (variant == "phi3")
    assert bias is None or bias.dtype == torch.bfloat16


def test_weights_are_quantized_from_what_the_checkpoint_holds_not_from_a_rounding_of_it(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, "llama"))
    theirs = make_tiny_model("llama").model.layers[0].self_attn
    weight = torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]).data
    ours = model.layers[0].attention.qkv_proj
    torch.testing.assert_close(ours.weight.float() * ours.weight_scale, fake_quantized(weight), rtol=1e-6, atol=0)


def test_dummy_weights_are_the_same_noise_quantized(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_tied")
    plain = load_model(path, dtype=torch.float32, device="cpu", load_format="dummy")
    quantized = load_model(path, dtype=torch.float32, device="cpu", load_format="dummy", quantization="fp8")
    assert isinstance(plain, Decoder)
    assert isinstance(quantized, Decoder)
    ours, theirs = (model.layers[2].mlp.gate_up_proj for model in (quantized, plain))
    torch.testing.assert_close(
        ours.weight.float() * ours.weight_scale, fake_quantized(theirs.weight.data), rtol=1e-6, atol=0
    )
    assert torch.equal(quantized.embed_weight, plain.embed_weight)
    (logits,) = forced_logits(quantized, [[5, 9, 30, 2, 77]], [3])
    assert logits.isfinite().all()


@given(
    outer=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    size=st.integers(2, 5),
    order=st.permutations(range(4)),
    piece=st.integers(1, 60),
    is_int8=st.booleans(),
)
def test_rows_lie_along_any_dimension_but_the_first(
    outer: list[int], size: int, order: list[int], piece: int, is_int8: bool
) -> None:
    """As experts' tensors hold them: [X, I, O], [X, O / 2, 2, I] and the like."""
    sizes = [*outer, size]
    order = [0, *(i for i in order if 0 < i < len(sizes))]
    tensor = torch.randn(sizes)
    values = torch.empty(sizes, dtype=torch.int8 if is_int8 else FP8)
    scale = torch.empty(*sizes[:-1], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "_PIECE_NUMBERS", piece)
        store_quantized(*(one.permute(order) for one in (tensor, values, scale)))
    expected = (int8_oracle.fake_quantized if is_int8 else fake_quantized)(tensor.flatten(0, -2)).view(sizes)
    torch.testing.assert_close(values.float() * scale, expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_loading_holds_the_model_and_little_more(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 8}
    big = save_tiny_model(tmp_path / "big", "llama", dtype=torch.bfloat16, num_key_value_heads=8, **sizes)
    small = save_tiny_model(tmp_path / "small", "llama", dtype=torch.bfloat16)
    stored = write_quantized_checkpoint(big, tmp_path / "stored", "int8")
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096) / 2**20  # million, so that fp8 takes so many MiB

    def peak(quantization: str, path: Path = big) -> float:
        command = [sys.executable, "-c", PEAK, str(path), str(small), quantization]
        # else glibc keeps freed buffers for itself, once it has seen some as large: up to 100 MiB of them
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return float(done.stdout)

    assert weights < peak("fp8") < 1.25 * weights
    assert weights < peak("int8") < 1.25 * weights
    assert weights < peak("int8", stored) < 1.25 * weights
    assert 1.9 * weights < peak("none") < 2.1 * weights  # a matrix is laid out anew in its own memory, or alone

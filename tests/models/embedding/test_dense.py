"""Dense modules: their weights are read from safetensors, as config.json says they are, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.sentence_modules import Activation, DenseConfig
from bulkrun.models.embedding.dense import Dense, load_dense
from bulkrun.ops.cpu.panel_linear import compiles_panels
from tests.models.tiny_encoders import save_dense

CPU = torch.device("cpu")
FUNCTIONS = {"Identity": torch.nn.Identity, "Tanh": torch.nn.Tanh, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU,
             "Sigmoid": torch.nn.Sigmoid}  # fmt: skip


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_a_linear_layer_and_its_activation(activation: Activation, bias: bool, tmp_path: Path) -> None:
    linear = torch.nn.Linear(6, 4, bias=bias).to(torch.bfloat16).float()
    save_dense(tmp_path, linear)
    dense = load_dense(DenseConfig(tmp_path, 6, 4, bias, activation), CPU, "auto")
    vectors = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(dense(vectors), FUNCTIONS[activation]()(linear(vectors)))


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_in_panels_a_vector_has_the_same_bits_in_any_crowd(activation: Activation, tmp_path: Path) -> None:
    if not compiles_panels(torch.float32):
        pytest.skip("this processor has no such products")
    linear = torch.nn.Linear(64, 96).requires_grad_(False)
    save_dense(tmp_path, linear)
    dense = load_dense(DenseConfig(tmp_path, 64, 96, True, activation), CPU, "auto")
    assert not dense.depends_on_batch
    vectors = torch.randn(33, 64)
    crowd = dense(vectors)
    torch.testing.assert_close(crowd, FUNCTIONS[activation]()(linear(vectors)))
    assert torch.equal(crowd, torch.cat([dense(vector) for vector in vectors.split(1)]))


def test_weights_that_are_others_are_refused(tmp_path: Path) -> None:
    config = DenseConfig(tmp_path, 6, 4, True, "Tanh")
    with pytest.raises(ModelError, match=r"model\.safetensors: no such file; .* never from pickle"):
        load_dense(config, CPU, "auto")
    save_dense(tmp_path, torch.nn.Linear(6, 4))
    for wrong in (replace(config, has_bias=False), replace(config, in_features=5)):
        with pytest.raises(ModelError, match=r"model\.safetensors: holds .*, but config\.json makes it"):
            load_dense(wrong, CPU, "auto")


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    config = DenseConfig(tmp_path, 6, 4, True, "Tanh")
    first, again = (load_dense(config, CPU, "dummy") for _ in range(2))
    assert torch.equal(first.weight, again.weight)


def test_its_activation_runs_on_one_thread() -> None:
    """torch has a tanh for whole registers of numbers and another one for what is left where a thread's part ends."""
    seen: list[int] = []
    dense, before = Dense(torch.eye(4), None, "Tanh"), torch.get_num_threads()
    dense._activation = lambda x: (seen.append(torch.get_num_threads()), x)[1]
    torch.set_num_threads(2)
    try:
        dense(torch.ones(3, 4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1]

"""A slice of the determinism campaign (long form: `python -m tests.campaigns.determinism`)."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.models.loading.dtypes import cpu_multiplies_bfloat16
from bulkrun.ops import dispatch
from tests.campaigns.determinism import VARIANTS, Way, count_outcomes, make_model, outcomes_in_processes

TIGHT = Way(kv_tokens=336, can_stop=True, max_num_batched_tokens=129, enable_prefix_caching=False)
WAYS = [
    Way(),
    TIGHT,
    Way(max_num_seqs=5, max_num_batched_tokens=17, order=1, repeats=2),
    Way(resume_after=7, max_num_batched_tokens=64),
]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {variant: make_model(folder, variant) for variant in ("llama", "llama_wide", "gemma2", "qwen3_moe")}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def use_products_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ops.matmul.linear", "ops.matmul.invariant_linear", "models.decoder.invariant"):
        monkeypatch.setattr(import_module(f"bulkrun.{module}"), "can_pack_panels", lambda *_: False)


@pytest.mark.parametrize("are_ours", [True, False], ids=["ours", "libraries"])
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("gemma2", "float32"),
        ("qwen3_moe", "bfloat16"),
        pytest.param("llama_wide", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_row_has_one_output_in_crowds_chunks_preemptions_and_resumes(
    model_dirs: dict[str, Path], variant: str, dtype: str, are_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not are_ours:
        use_products_of_libraries(monkeypatch)
    outcomes = count_outcomes(model_dirs[variant], WAYS, dtype=dtype, deterministic=True, num_rows=8)
    assert outcomes.num_preemptions > 0 and outcomes.num_cached_tokens > 0
    assert outcomes.most_distinct == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_mode_rows_differ_so_that_the_others_could_fail(
    model_dirs: dict[str, Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16" and not cpu_multiplies_bfloat16():
        pytest.skip("without units for bf16 torch's products of it depend on no batch, as seen on AVX2")
    use_products_of_libraries(monkeypatch)  # our own depend on no batch in either mode
    ways = [Way(max_num_batched_tokens=33), Way()]
    same, other = (
        count_outcomes(model_dirs["llama_wide"], ways, dtype=dtype, deterministic=mode, num_rows=6)
        for mode in (True, False)
    )
    assert same.most_distinct == 1
    assert other.most_distinct > 1


@settings(max_examples=4)
@given(seed=st.integers(0, 2**16), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_any_way_gives_the_same_bits(model_dirs: dict[str, Path], seed: int, dtype: str) -> None:
    rng = random.Random(seed)
    ways = [Way.random(rng), Way.random(rng)]
    assert count_outcomes(model_dirs["llama"], ways, dtype=dtype, deterministic=True, num_rows=8).most_distinct == 1


def test_the_references_have_one_output_too(model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "uses_compiled", lambda tensor: False)
    outcomes = count_outcomes(model_dirs["llama"], WAYS, dtype="bfloat16", deterministic=True, num_rows=8)
    assert outcomes.most_distinct == 1


def test_one_thread_and_two_give_the_same_bits(model_dirs: dict[str, Path]) -> None:
    """Both in this process: of processes with so many each is `test_long_form`."""
    bits: dict[str, set[str]] = defaultdict(set)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = count_outcomes(model_dirs["llama_wide"], [], dtype="float32", deterministic=True, num_rows=3)
        for row, own in found.bits.items():
            bits[row] |= own
    assert len(bits) == 3 and {len(own) for own in bits.values()} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["compiled", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_long_form(tmp_path: Path, variant: str, dtype: str, ops: str) -> None:
    args = argparse.Namespace(ways=10, seed=0, rows=16, normal=False)
    assert outcomes_in_processes(make_model(tmp_path, variant), dtype, ops, args)["distinct"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama", "llama_wide", "gemma2"])
def test_a_row_has_one_output_on_a_gpu(tmp_path: Path, variant: str, dtype: str) -> None:
    rng = random.Random(3)
    ways = [*WAYS, *(Way.random(rng) for _ in range(10))]
    outcomes = count_outcomes(make_model(tmp_path, variant), ways, dtype=dtype, deterministic=True, device="cuda")
    assert outcomes.num_preemptions > 0
    assert outcomes.most_distinct == 1

"""Ops that CUDA lacks for a dtype fail on the stand-in for a GPU, though the host has them.

So every test on the stand-in looks for such. What none of them takes there is run here: the general path, adapters,
and the references of kernels, which a GPU without Triton is left with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bulkrun.models.loading.adapter import Adapter
from bulkrun.ops import dispatch
from bulkrun.request import Request, SamplingParams, StructuredOutput
from tests.engine.conftest import EngineFactory
from tests.engine.cuda_ops import CudaOps, dtypes_by_op, missing
from tests.engine.gpu_stand_in import gpu_stand_in
from tests.engine.step.test_token_masks import STEPS, steps_factory
from tests.engine.test_gpu_stand_in import drawn_requests, greedy_requests, prompts, tokens
from tests.models.load import load_model
from tests.models.tiny_adapters import save_adapter
from tests.models.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says it itself")


def test_what_the_list_says_is_what_is_known_of_gpus() -> None:
    assert torch.bfloat16 in dtypes_by_op()["mm"], "which Hopper has and the first GPUs had not"
    assert missing("mm", torch.int32) == [torch.int32]
    assert not missing("__getitem__", torch.float32)


@pytest.mark.parametrize(
    ("op", "lacks"),
    [
        (lambda: torch.ones(2, 2, device="cuda").to(torch.int32) @ torch.ones(2, 2, device="cuda").int(), "int32"),
        (lambda: torch.zeros(2, dtype=torch.uint8, device="cuda").addmv(_bytes(2, 2), _bytes(2)), "uint8"),
        (lambda: torch.histc(torch.ones(3, device="cuda")), "bfloat16"),
    ],
)
def test_an_op_that_only_the_host_has_fails(op: Callable[[], torch.Tensor], lacks: str) -> None:
    with gpu_stand_in(), pytest.raises(AssertionError, match=f"CUDA has no .*{lacks}"):
        op()


def _bytes(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.uint8, device="cuda")


def test_fp8_may_be_made_looked_at_in_part_and_converted_and_no_more() -> None:
    with gpu_stand_in():
        numbers = torch.zeros(4, 4, dtype=torch.float8_e4m3fn, device="cuda")
        assert numbers[1:].t().float().sum() == 0
        numbers.copy_(torch.ones(4, 4, device="cuda"))
        with pytest.raises(AssertionError, match="CUDA has no index_select of"):
            numbers.index_select(0, torch.zeros(1, dtype=torch.int64, device="cuda"))


def test_an_op_made_of_others_is_looked_at_in_them() -> None:
    ints = torch.ones(1, 2, dtype=torch.int32)
    with CudaOps(), torch.inference_mode(), pytest.raises(AssertionError, match="CUDA has no"):
        F.linear(ints, ints)


def test_an_op_that_waits_within_is_found() -> None:
    with gpu_stand_in() as gpu:
        counts = torch.ones(3, device="cuda").long()
        torch.repeat_interleave(counts, counts, output_size=3)
        assert not gpu.waits
        torch.repeat_interleave(counts, counts)
        F.one_hot(counts)
        assert [name.split(",")[0] for name in gpu.waits] == ["repeat_interleave", "one_hot"]


def asked_for() -> list[Request]:
    """What a sampler may be asked for, masks, biases and log-probabilities of prompts too."""
    bound = SamplingParams(
        max_tokens=4,
        temperature=0.0,
        prompt_logprobs=2,
        logprobs=3,
        logprobs_over="allowed",
        logit_bias={STEPS[0][1]: 0.5, 7: -100.0},
        structured_outputs=StructuredOutput("grammar", json.dumps(STEPS)),
    )
    return [*greedy_requests(), *drawn_requests(), Request("bound", prompts()[1], bound)]


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("gemma2", {}),
        ("gemma3n", {}),
        ("gpt_oss", {"quantization": "fp8"}),
        ("gpt2", {}),
        ("gpt_neox", {}),
    ],
)
def test_references_run_on_a_gpu_without_triton(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, variant: str, settings: dict[str, Any]
) -> None:
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "max_model_len": 64, "constraint_factory": steps_factory}
    expected = tokens(make_engine(variant, **sizes, **settings), asked_for())
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with gpu_stand_in():
        engine = make_engine(variant, device="cuda", enforce_eager=True, **sizes, **settings)
        assert tokens(engine, asked_for()) == expected
        engine.model_runner.clear_blocks([1, 2])


def test_an_adapter_is_added_on_the_device(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    path = model_dir("qwen3")
    save_adapter(tmp_path, make_tiny_model("qwen3"), target_modules="all-linear", use_dora=True)
    options: dict[str, Any] = {"dtype": torch.float32, "adapter": Adapter.of(tmp_path)}
    on_host = load_model(path, device="cpu", **options)
    expected = dict(on_host.named_parameters())
    with gpu_stand_in():
        on_device = load_model(path, device="cuda", **options)
        for name, weight in on_device.named_parameters():
            torch.testing.assert_close(weight.data.as_subclass(torch.Tensor), expected[name])

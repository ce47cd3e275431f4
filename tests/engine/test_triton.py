"""The engine through the Triton kernels, by the interpreter: the same tokens as through the references.

On a machine with a GPU, tests/engine/test_on_gpu.py asks the same of the compiled kernels.
"""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops import dispatch
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, run

pytestmark = [
    pytest.mark.usefixtures("watched_kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # the interpreter's numpy says so where hashes wrap
]


def test_mixed_steps_samples_of_one_prompt_and_every_filter_give_the_references_tokens(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=5, temperature=0.9, top_k=30, top_p=0.9, ignore_eos=True, logprobs=2)
    requests = [Request(f"greedy{i}", list(range(3, 6 + 11 * i)), greedy) for i in range(2)]
    requests += [Request(f"drawn{i}", list(range(40, 57)), drawn, seed=i) for i in range(2)]

    def tokens() -> dict[str, tuple[int, ...]]:
        engine = make_engine("qwen3", max_num_batched_tokens=16, max_num_seqs=3)
        completions: dict[str, Completion] = run(engine, requests)
        return {request_id: tuple(completion.token_ids) for request_id, completion in completions.items()}

    expected = tokens()
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: True)
    assert tokens() == expected

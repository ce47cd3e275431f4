"""The counted steps are the work that the ceilings count, however they are cut."""

from __future__ import annotations

import pytest

from bulkrun.launch.bench.ceilings import attended
from bulkrun.launch.bench.workload import Lengths, random_work
from tests.benchmarks.schedule_share import NO_LOSS, Cost, cost_of_shape, report, steps_of

WORK = random_work(60, Lengths(5, 90), Lengths(2, 40), shared_prefix=0, vocab_size=500)


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(64, 256), (7, 31), (1, 1)])
def test_every_token_and_every_pair_is_computed_once(num_seqs: int, num_tokens: int) -> None:
    steps = steps_of(WORK, num_seqs=num_seqs, num_tokens=num_tokens, num_blocks=2000)
    lengths = [(len(prompt), output) for prompt, output in WORK]
    assert sum(step.samples for step in steps) == sum(output for _, output in lengths)
    assert sum(step.tokens for step in steps) == sum(prompt + output - 1 for prompt, output in lengths)
    pairs = sum(step.decode_keys + step.chunk_pairs for step in steps)
    assert pairs == sum(attended(prompt + output - 1, None) for prompt, output in lengths)
    assert max(step.running for step in steps) <= num_seqs and max(step.tokens for step in steps) <= num_tokens


def test_losses_cost_time_and_all_of_them_are_named() -> None:
    model = cost_of_shape("llama-20m")
    steps = steps_of(WORK, num_seqs=64, num_tokens=256, num_blocks=2000)
    assumed, nothing = report(model, WORK, steps, Cost()), report(model, WORK, steps, NO_LOSS)
    assert assumed["share_of_serial"] < nothing["share_of_serial"] == assumed["share_without_losses"]
    assert min(assumed["loss"].values()) > 0 and set(nothing["loss"].values()) == {0}

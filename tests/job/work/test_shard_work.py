"""An open shard: what is left to generate of it, and from where."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.job.store.journal import JournalWriter, PartialRecord
from bulkrun.job.work.shard_work import Generation, open_shard
from bulkrun.request import Request, SamplingParams
from tests.job.small_runs import Row, enter, job, write_plan


@pytest.mark.parametrize(
    ("max_tokens", "resumed"), [(12, (1, 2, 3, 4, 5)), (6, (1, 2, 3, 4, 5)), (5, (1, 2, 3, 4)), (1, ())]
)
def test_a_saved_output_leaves_at_least_one_token_to_generate(
    tmp_path: Path, max_tokens: int, resumed: tuple[int, ...]
) -> None:
    """The engine ends an output when it makes a token, so one that is resumed must not have all it may have."""
    run, _ = enter(tmp_path, job(tmp_path))
    write_plan(run, [Row(0, "0", (7,))], 1)
    JournalWriter(run.journal_file(0, "before")).append([PartialRecord((0,), 0, (1, 2, 3, 4, 5))])
    [generation] = open_shard(run, 0, job(tmp_path, max_tokens=max_tokens).sampling).generations
    assert generation.request.output_token_ids == resumed


def test_a_row_of_several_texts_is_asked_for_with_where_each_ends(tmp_path: Path) -> None:
    run, _ = enter(tmp_path, job(tmp_path))
    write_plan(run, [Row(0, "0", (7, 8, 9), {"parts": [1, 2]}), Row(1, "1", (7,))], 2)
    generations = open_shard(run, 0, job(tmp_path).sampling).generations
    assert {one.rows: one.request.parts for one in generations} == {(0,): (1, 2), (1,): ()}


@pytest.mark.parametrize(
    ("parts", "max_tokens", "done", "steps"),
    [((), 9, (), 5), ((), 3, (), 3), ((), 9, (1, 2), 3), ((1, 1), 1, (), 1), ((1,) * 80, 1, (), 10)],
)
def test_a_row_takes_a_step_for_each_token_and_for_as_many_texts_as_run_at_once(
    parts: tuple[int, ...], max_tokens: int, done: tuple[int, ...], steps: float
) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    request = Request("a", (1,) * max(1, len(parts)), params, output_token_ids=done, parts=parts)
    assert Generation(request, 0, (0,), 0).steps_left(mean_output=5, max_num_seqs=8) == steps

"""verify on a run that was changed after it finished: each kind of damage is found and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.parts import read_part_info, write_part
from bulkrun.data.storage.durable import write_new_json
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.staging import Update, begin_merge
from bulkrun.job.views.verify import verify_run
from tests.launch.nights import Nights


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Ten rows, then two more and an edited one."""
    nights = Nights(tmp_path)
    rows = [{"id": f"r{number}", "text": f"text {number}"} for number in range(12)]
    nights.write(rows[:10])
    nights.submit()
    rows[3]["text"] = "other"
    nights.write(rows)
    nights.submit()
    return RunDir(nights.out)


def rewrite(path: Path, table: pa.Table, **footer: object) -> None:
    info = replace(read_part_info(path), **{"rows": table.num_rows, "input_rows": table.num_rows, **footer})
    path.unlink()
    write_part(path, table, info)


def problems(run: RunDir) -> str:
    return "\n".join(verify_run(run).problems)


def test_a_whole_run_has_no_problems(run: RunDir) -> None:
    report = verify_run(run)
    assert (report.ok, report.finished, report.rows, report.parts) == (True, True, 12, len(run.parts()))


def test_a_row_that_is_there_twice_is_named(run: RunDir) -> None:
    first, last = run.part(0), run.part(max(run.parts()))
    rewrite(last, pa.concat_tables([pq.read_table(last), pq.read_table(first).slice(0, 1)]))
    assert "rows that appear twice: 1, the first is" in problems(run)


def test_an_id_that_two_rows_have_is_named(run: RunDir) -> None:
    first, last = (pq.read_table(run.part(number)) for number in (0, max(run.parts())))
    ids = pa.chunked_array([[first["id"][0].as_py(), *last["id"].to_pylist()[1:]]])
    rewrite(run.part(max(run.parts())), last.set_column(last.schema.get_field_index("id"), "id", ids))
    rows = [table["row"][0].as_py() for table in (first, last)]
    assert verify_run(run).problems == [
        f"{run.root}: ids that two rows have: 1, the first in rows {rows[0]} and {rows[1]}"
    ]


@pytest.mark.parametrize("footer", [{"cut": 9}, {"stopped": 9}, {"errors": {"timeout": 1}}, {"folder": "lang=en"}])
def test_a_footer_that_is_not_of_its_rows_is_named(run: RunDir, footer: dict[str, object]) -> None:
    rewrite(run.part(0), pq.read_table(run.part(0)), **footer)
    [name] = footer
    assert f"part-00000.parquet: wrong {name}: " in problems(run)


def test_a_row_that_is_gone_is_noticed(run: RunDir) -> None:
    path = run.part(0)
    rewrite(path, pq.read_table(path).slice(1))
    assert "_SUCCESS: rows: 12, found 11" in problems(run)


def test_a_part_under_another_number_is_named(run: RunDir) -> None:
    run.part(0).rename(run.root / "part-00077.parquet")
    assert "part-00077.parquet: wrong number" in problems(RunDir(run.root))


def test_a_part_of_another_run_is_named(run: RunDir) -> None:
    rewrite(run.part(0), pq.read_table(run.part(0)), run_id="somebody")
    assert "part-00000.parquet: wrong run: 'somebody'" in problems(run)


@pytest.mark.parametrize("place", [".", "lang=en"])
def test_a_parquet_file_beside_the_parts_is_named_as_queries_read_it_too(run: RunDir, place: str) -> None:
    (run.root / place).mkdir(exist_ok=True)
    copy = run.root / place / "copy.parquet"
    copy.write_bytes(run.part(0).read_bytes())
    assert f"{copy}: not a part of this run, and queries over *.parquet read it too" in problems(run)


def test_a_flipped_bit_is_found(run: RunDir) -> None:
    path = run.part(0)
    data = bytearray(path.read_bytes())
    data[60] ^= 4
    path.write_bytes(data)
    assert "part-00000.parquet: damaged" in problems(run)


def test_a_row_number_that_was_never_given_is_noticed(run: RunDir) -> None:
    document = json.loads(run.success.read_text())
    run.success.write_text(json.dumps({**document, "next_row": 11}))
    assert "row 11 is there, but rows end before 11" in problems(run)


def test_a_merge_under_way_is_said_and_its_totals_are_not_compared(run: RunDir) -> None:
    run.staged.state.mkdir(parents=True)
    update = Update(Retry(), generation=2, rows=0, first_row=12, next_row=12, first_part=9)
    write_new_json(run.staged.update, update.to_json())
    begin_merge(run)
    report = verify_run(run)
    assert not report.finished
    assert report.problems == [f"{run.staged.root}: rows are being put into the results; the same command finishes it"]


@pytest.mark.parametrize("generation", [0, 1])
def test_totals_that_are_older_than_a_part_are_noticed(run: RunDir, generation: int) -> None:
    rewrite(path := run.part(0), pq.read_table(path), generation=2)
    totals = json.loads(run.success.read_text())
    run.success.write_text(json.dumps({**totals, "generation": generation}))
    assert f"{path.name}: " in problems(run) and "_SUCCESS" in problems(run)


def test_each_number_of_success_is_held_against_the_parts(run: RunDir) -> None:
    told = json.loads(run.success.read_text())
    counts = ("samples", "ok", "prompt_tokens", "completion_tokens", "saved_generations", "cached_tokens", "cut")
    wrong = {"run_id": "x", "status": "completed_with_errors", "errors": {"timeout": 1}}
    for name, number in (wrong | {name: told[name] + 1 for name in counts}).items():
        run.success.write_text(json.dumps({**told, name: number}))
        assert verify_run(run).problems == [f"_SUCCESS: {name}: {number!r}, found {told[name]!r}"]

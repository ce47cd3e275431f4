from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.inputs.files import InputFile, open_stream
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import InputError, Interrupted, JobFileError, ResumeError, RunError
from bulkrun.job.plan.ids import DuplicateIds, find_duplicates
from bulkrun.job.plan.planner import dry_plan
from bulkrun.job.plan.report import PlanReport, undeclared_lines
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from tests.job.plan.planning import (
    BOS,
    CharacterCodec,
    job,
    make_plan,
    make_planner,
    plan_bytes,
    read_rows,
    read_shards,
    write_jsonl,
    write_parquet,
)
from tests.job.store.test_workers import beat


def sample_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of very different lengths, some behind a shared prefix, some repeated."""
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        text = "".join(rng.choices("abcdef ", k=1 + int(rng.expovariate(1 / 60))))
        if rng.random() < 0.3:
            text = f"Shared instructions number {rng.randrange(3)}: ".ljust(80, ".") + text
        texts.append(rng.choice(texts) if texts and rng.random() < 0.1 else "x" + text)
    return texts


@pytest.fixture
def table(tmp_path: Path) -> Path:
    texts = sample_texts(2503)
    columns = {
        "key": [f"k{row}" for row in range(len(texts))],
        "text": texts,
        "score": [row / 2 for row in range(2503)],
    }
    return write_parquet(tmp_path / "input.parquet", columns)


def test_every_row_is_planned_exactly_once_with_its_prompt_and_its_columns(table: Path, tmp_path: Path) -> None:
    report = make_plan(tmp_path / "run", job(table, input={"path": str(table), "id": "key"}))
    source = pq.read_table(table).to_pylist()
    rows = read_rows(tmp_path / "run")
    assert [row["row"] for row in rows] == list(range(len(source)))
    assert [row["passthrough"] for row in rows] == source
    assert [row["token_ids"] for row in rows] == [[BOS, *map(ord, row["text"])] for row in source]
    assert [row["row_id"] for row in rows] == [row["key"] for row in source]
    assert report.counters.rows == report.samples == len(source)


def test_totals_equal_a_count_over_the_input(table: Path, tmp_path: Path) -> None:
    report = make_plan(tmp_path / "run", job(table, sampling={"n": 3}))
    texts = pq.read_table(table).column("text").to_pylist()
    counters = report.counters
    assert report.samples == 3 * len(texts)
    assert counters.prompt_tokens == sum(len(text) + 1 for text in texts)
    assert counters.unique_prompt_tokens == sum(len(text) + 1 for text in set(texts))
    assert counters.duplicate_prompts == len(texts) - len(set(texts))
    assert counters.expected_output_tokens == len(set(texts)) * 8 * 3
    assert counters.max_prompt_tokens == max(map(len, texts)) + 1
    assert sum(counters.token_histogram) == len(texts) and not counters.errors
    for low, high, count in report.histogram():
        assert count == sum(low <= len(text) + 1 < (high or 10**9) for text in texts)


def test_shards_hold_rows_in_input_order_and_an_order_to_run_them_in(table: Path, tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(table))
    shards = read_shards(tmp_path / "run")
    assert len(shards) >= 16
    for number, (info, rows) in enumerate(shards):
        assert (info.shard, info.rows) == (number, len(rows))
        assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
        assert sorted(row["order"] for row in rows) == list(range(len(rows)))
        unique = {tuple(row["token_ids"]) for row in rows}
        assert info.prompt_tokens == sum(map(len, unique)) and info.cost == info.prompt_tokens + 8 * len(unique)


def test_identical_prompts_are_in_one_shard_and_next_to_each_other(table: Path, tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(table))
    places: dict[str, list[tuple[int, int]]] = {}
    for info, rows in read_shards(tmp_path / "run"):
        for row in rows:
            places.setdefault(row["passthrough"]["text"], []).append((info.shard, row["order"]))
    for found in places.values():
        assert len({shard for shard, _ in found}) == 1
        orders = sorted(order for _, order in found)
        assert orders == list(range(orders[0], orders[0] + len(orders)))


def test_prompts_with_noise_of_their_own_are_not_merged(table: Path, tmp_path: Path) -> None:
    report = make_plan(tmp_path / "run", job(table, sampling={"temperature": 0.5}))
    assert report.counters.duplicate_prompts == 0
    assert report.counters.unique_prompt_tokens == report.counters.prompt_tokens


def test_equal_prompts_with_unequal_overrides_are_not_merged(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "same", "m": limit} for limit in (5, 5, 6, None)])
    spec = job(path, sampling={"per_row": {"max_tokens": "m"}})
    report = make_plan(tmp_path / "run", spec)
    assert report.counters.duplicate_prompts == 1
    assert report.counters.expected_output_tokens == 5 + 6 + 8
    overrides = [row["overrides"] for row in read_rows(tmp_path / "run")]
    assert overrides == ['{"max_tokens":5}', '{"max_tokens":5}', '{"max_tokens":6}', None]


def test_bad_rows_are_rows_with_an_error_and_run_last(tmp_path: Path) -> None:
    lines = ['{"text": "fine", "m": 3}', "{broken", '{"text": null, "m": 3}', '{"text": "", "m": 3}']
    lines += ['{"text": "fine", "m": 0}', json.dumps({"text": "y" * 90, "m": 1}), '{"text": "ok", "m": 3}']
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    spec = job(path, sampling={"per_row": {"max_tokens": "m"}})
    report = make_plan(tmp_path / "run", spec, max_model_len=64)
    rows = read_rows(tmp_path / "run")
    assert [row["error_code"] for row in rows] == [
        None,
        "bad_input",
        "bad_input",
        "empty_prompt",
        "bad_input",
        "too_long",
        None,
    ]
    assert all((row["error_code"] is None) == (row["token_ids"] is not None) for row in rows)
    assert "in.jsonl:2" in rows[1]["error_message"] and "'m'" in rows[4]["error_message"]
    assert report.counters.errors == {"bad_input": 3, "empty_prompt": 1, "too_long": 1}
    assert (report.counters.too_long, report.counters.empty) == (1, 1)
    by_order = sorted(rows, key=lambda row: row["order"])
    assert [row["error_code"] is None for row in by_order] == [True, True, False, False, False, False, False]


def test_a_row_budget_cuts_outputs_and_refuses_prompts_that_leave_nothing(tmp_path: Path) -> None:
    """30 tokens a row for two outputs: prompts (with BOS) of 6, 21, 28 and 30 tokens."""
    texts = ["x" * length for length in (5, 20, 27, 29)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    report = make_plan(tmp_path / "run", job(path, sampling={"n": 2, "min_tokens": 3}, run={"max_tokens_per_row": 30}))
    rows = read_rows(tmp_path / "run")
    cuts = [None, {"max_tokens": 4}, {"max_tokens": 1, "min_tokens": 1}, None]
    assert [row["overrides"] and json.loads(row["overrides"]) for row in rows] == cuts
    assert [row["error_code"] for row in rows] == [None, None, None, "too_long"]
    assert report.counters.expected_output_tokens == 2 * (8 + 4 + 1)
    assert report.counters.truncated == 0, "no prompt was cut"


def test_too_long_rows_are_cut_inside_the_chat_template_when_asked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "0123456789" * 20}, {"text": "short"}])
    spec = job(path, run={"on_too_long": "truncate_left"})
    report = make_plan(tmp_path / "run", spec, max_model_len=64, chat=True)
    cut = "".join(map(chr, read_rows(tmp_path / "run")[0]["token_ids"]))
    assert len(cut) == 64 - 8 and cut.startswith("[user]") and cut.endswith("789\n[assistant]")
    assert report.counters.truncated == 1 and not report.counters.errors


def test_chat_text_has_no_second_bos(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "hi"}])
    make_plan(tmp_path / "run", job(path), chat=True)
    assert read_rows(tmp_path / "run")[0]["token_ids"] == list(map(ord, "[user]hi\n[assistant]"))


def test_an_empty_input_is_a_complete_plan_of_no_shards(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"text": pa.array([], pa.string())})
    report = make_plan(tmp_path / "run", job(path))
    assert (report.counters.rows, report.counters.shards, report.windows) == (0, 0, 0)
    assert RunDir(tmp_path / "run").plan_complete.exists() and report.histogram() == []


@pytest.mark.parametrize("limit", [1, 700, 1024, 2503, 9999])
def test_the_limit_is_kept_whatever_the_windows(table: Path, tmp_path: Path, limit: int) -> None:
    report = make_plan(tmp_path / "run", job(table, run={"limit": limit, "window_rows": 512}))
    assert report.counters.rows == min(limit, 2503) == len(read_rows(tmp_path / "run"))


def test_windows_add_up_to_the_whole_and_rows_keep_their_numbers(table: Path, tmp_path: Path) -> None:
    whole = make_plan(tmp_path / "whole", job(table))
    parts = make_plan(tmp_path / "parts", job(table, run={"window_rows": 601}))
    assert (whole.windows, parts.windows) == (1, 5)
    assert parts.counters.prompt_tokens == whole.counters.prompt_tokens
    without_place = [
        [{key: value for key, value in row.items() if key != "order"} for row in read_rows(tmp_path / name)]
        for name in ("whole", "parts")
    ]
    assert without_place[0] == without_place[1]
    assert [info.window for info, _ in read_shards(tmp_path / "parts")] == sorted(
        info.window for info, _ in read_shards(tmp_path / "parts")
    )


@pytest.mark.parametrize(("limit", "window_rows"), [(None, 1000), (1600, 400)])
def test_windows_are_cut_by_the_rows_of_the_whole_input_where_they_are_known(
    tmp_path: Path, limit: int | None, window_rows: int
) -> None:
    """A run has about 16 shards. If each window had, a large run would be made of small files."""
    path = write_parquet(tmp_path / "in.parquet", {"text": [f"{row:04d}" for row in range(4000)]})
    report = make_plan(tmp_path / "run", job(path, run={"window_rows": window_rows, "limit": limit}))
    assert (report.windows, report.counters.shards) == (4, 16)


def test_rows_with_many_generations_are_in_small_shards_and_what_was_planned_before_stays(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(table, sampling={"n": 128, "temperature": 0.5}, run={"window_rows": 1000})
    run, first = RunDir(tmp_path / "run"), iter([False, True])
    with monkeypatch.context() as before, pytest.raises(Interrupted):
        before.setattr("bulkrun.job.plan.cut.MAX_SHARD_ROWS", 10**6)
        make_plan(run.root, spec, should_stop=lambda: run.window(0).exists() and next(first))
    planned = plan_bytes(run.root)
    make_plan(run.root, spec)
    assert planned.keys() >= {"window-00000.json"} and planned.items() <= plan_bytes(run.root).items()
    assert max(info.rows for info, _ in read_shards(run.root) if info.window == 0) > 32
    assert max(info.rows for info, _ in read_shards(run.root) if info.window > 0) <= 32
    assert [row["row"] for row in read_rows(run.root)] == list(range(2503))


def test_planning_again_in_another_directory_gives_the_same_bytes(table: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_plan(tmp_path / name, job(table, input={"path": str(table), "id": "key"}, run={"window_rows": 999}))
    assert plan_bytes(tmp_path / "one") == plan_bytes(tmp_path / "two")


def test_a_complete_plan_is_not_planned_again(table: Path, tmp_path: Path) -> None:
    first = make_plan(tmp_path / "run", job(table))
    before = plan_bytes(tmp_path / "run")
    assert make_plan(tmp_path / "run", job(table), should_stop=lambda: True) == first
    assert plan_bytes(tmp_path / "run") == before


def test_stopped_between_any_two_batches_and_continued_equals_an_unbroken_plan(table: Path, tmp_path: Path) -> None:
    spec = job(table, input={"path": str(table), "id": "key"}, run={"window_rows": 450})
    unbroken = make_plan(tmp_path / "unbroken", spec)
    report: PlanReport | None = None
    stops = 0
    while report is None:
        allowed = iter([False, False, True])
        try:
            report = make_plan(tmp_path / "run", spec, should_stop=lambda steps=allowed: next(steps, True))
        except Interrupted:
            stops += 1
    assert report == unbroken and stops > 1
    assert plan_bytes(tmp_path / "run") == plan_bytes(tmp_path / "unbroken")
    assert list(RunDir(tmp_path / "run").spool.iterdir()) == []


def test_a_shard_of_another_plan_is_not_taken_for_ours(table: Path, tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(table, run={"limit": 100}))
    plan = RunDir(tmp_path / "run").plan
    (plan / "complete.json").unlink()
    (plan / "window-00000.json").unlink()
    with pytest.raises(RunError, match=r"shard-00000\.arrow.*--fresh"):
        make_plan(tmp_path / "run", job(table, run={"limit": 200}))


@pytest.mark.parametrize("window_rows", [400, 10_000])
def test_duplicate_ids_are_counted_over_windows_with_examples(tmp_path: Path, window_rows: int) -> None:
    ids = [*range(900), 5, 5, 17, *range(2000, 2500), None, None]
    path = write_parquet(tmp_path / "in.parquet", {"text": [f"t{k}" for k in range(len(ids))], "key": ids})
    spec = job(path, input={"path": str(path), "id": "key"}, run={"window_rows": window_rows})
    report = make_plan(tmp_path / "run", spec)
    expected = {"count": 3, "examples": [{"id": "5", "rows": [5, 900, 901]}, {"id": "17", "rows": [17, 902]}]}
    assert report.duplicate_ids == expected
    rows = read_rows(tmp_path / "run")
    assert [row["row_id"] for row in rows[-3:]] == ["2499", str(len(ids) - 2), str(len(ids) - 1)]
    with open_input(str(path)) as dataset:
        assert dry_plan(spec, dataset, CharacterCodec(), 10_000).duplicate_ids == expected


def test_the_hashes_of_ids_stay_until_the_plan_is_complete(table: Path, tmp_path: Path) -> None:
    spec = job(table, input={"path": str(table), "id": "key"}, run={"window_rows": 999})
    with pytest.raises(Interrupted):
        make_plan(tmp_path / "run", spec, should_stop=lambda: RunDir(tmp_path / "run").window(1).exists())
    assert sorted(path.name for path in RunDir(tmp_path / "run").plan.glob("ids*")) == [
        "ids-00000.u64",
        "ids-00001.u64",
    ]
    make_plan(tmp_path / "run", spec)
    assert not list(RunDir(tmp_path / "run").plan.glob("ids*"))


def test_a_planner_that_finds_the_ids_removed_returns_the_report_of_the_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"text": ["a", "b", "c"], "key": ["x", "y", "x"]})
    spec = job(path, input={"path": str(path), "id": "key"}, run={"window_rows": 2})
    faster: list[PlanReport] = []

    def find(paths: list[Path]) -> DuplicateIds:
        monkeypatch.setattr("bulkrun.job.plan.duplicates.find_duplicates", find_duplicates)
        faster.append(make_plan(tmp_path / "run", spec))
        return find_duplicates(paths)

    monkeypatch.setattr("bulkrun.job.plan.duplicates.find_duplicates", find)
    assert [make_plan(tmp_path / "run", spec)] == faster
    assert faster[0].duplicate_ids == {"count": 1, "examples": [{"id": "x", "rows": [0, 2]}]}


def test_duplicate_ids_can_be_refused_before_anything_is_published(tmp_path: Path) -> None:
    keys = [f"k{row % 700}" for row in range(1500)]
    path = write_parquet(tmp_path / "in.parquet", {"text": ["t"] * 1500, "key": keys})
    spec = job(path, input={"path": str(path), "id": "key", "on_duplicate": "fail"}, run={"window_rows": 400})
    with pytest.raises(InputError, match=r"800 rows have an id of column 'key'.*'k0' in rows 0, 700, 1400"):
        make_plan(tmp_path / "run", spec)
    assert list(RunDir(tmp_path / "run").plan.iterdir()) == []
    with open_input(str(path)) as dataset, pytest.raises(InputError, match=r"800 rows have an id of column 'key'"):
        dry_plan(spec, dataset, CharacterCodec(), 10_000)
    make_plan(tmp_path / "run", spec.model_copy(update={"run": spec.run.model_copy(update={"limit": 700})}))


def test_an_id_that_is_no_text_is_an_error_of_its_row_and_a_null_is_none(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"text": ["a", "b", "c"], "key": [b"x", b"\xff", None]})
    make_plan(tmp_path / "run", job(path, input={"path": str(path), "id": "key"}))
    rows = read_rows(tmp_path / "run")
    assert [row["row_id"] for row in rows] == ["x", "1", "2"]
    assert [row["error_message"] for row in rows] == [None, "column 'key' is not valid UTF-8", None]


def test_an_id_column_that_cannot_be_text_is_an_input_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "a", "key": {"x": 1}}])
    with pytest.raises(InputError, match=r"input\.id: column 'key' is struct"):
        make_plan(tmp_path / "run", job(path, input={"path": str(path), "id": "key"}))


@pytest.mark.parametrize("section", [{"prompt": {"column": "txet"}}, {"prompt": {"template": "{{ txet }}"}}])
def test_an_unknown_column_stops_before_anything_is_written(
    table: Path, tmp_path: Path, section: dict[str, Any]
) -> None:
    with pytest.raises(JobFileError, match="did you mean 'text'"):
        make_plan(tmp_path / "run", job(table, **section))
    assert not (tmp_path / "run").exists()


def test_a_dry_plan_reports_the_same_and_writes_nothing(table: Path, tmp_path: Path) -> None:
    spec = job(table, run={"window_rows": 800})
    before = sorted(tmp_path.iterdir())
    with open_input(str(table)) as dataset:
        dry = dry_plan(spec, dataset, CharacterCodec(), 10_000)
    assert sorted(tmp_path.iterdir()) == before
    assert dry == make_plan(tmp_path / "run", spec)
    assert PlanReport.from_json(json.loads(RunDir(tmp_path / "run").plan_complete.read_text())) == dry


def test_columns_that_do_not_pass_through_may_still_be_prompted_with(table: Path, tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(table, input={"path": str(table), "columns": []}, run={"limit": 5}))
    assert [row["passthrough"] for row in read_rows(tmp_path / "run")] == [{}] * 5


def test_nested_columns_and_dictionaries_pass_through_in_their_declared_types(tmp_path: Path) -> None:
    columns = {
        "text": [f"t{row % 7}" for row in range(3000)],
        "tags": [["a", None, "b" * (row % 3)] if row % 5 else None for row in range(3000)],
        "info": [{"n": row, "deep": [{"x": "y"}]} if row % 4 else None for row in range(3000)],
        "kind": pa.array([f"kind {row % 3}" for row in range(3000)]).dictionary_encode(),
        "when": pa.array(range(3000), pa.timestamp("ms", "UTC")),
    }
    path = write_parquet(tmp_path / "in.parquet", columns)
    make_plan(tmp_path / "run", job(path, output={"rows_per_file": 431}))
    assert [row["passthrough"] for row in read_rows(tmp_path / "run")] == pq.read_table(path).to_pylist()


def test_shard_rows_is_the_most_rows_of_a_shard(table: Path, tmp_path: Path) -> None:
    make_plan(tmp_path / "run", job(table, output={"rows_per_file": 37}))
    sizes = Counter(info.rows for info, _ in read_shards(tmp_path / "run"))
    assert max(sizes) <= 37 and sum(sizes.values()) < 2 * 2503 / 37


def _plan(root: Path, table: Path) -> None:
    make_plan(root, job(table, run={"window_rows": 300}, output={"rows_per_file": 20}))


def test_two_planners_at_once_make_one_plan(table: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    planners = [context.Process(target=_plan, args=(tmp_path / "run", table)) for _ in range(2)]
    for planner in planners:
        planner.start()
    for planner in planners:
        planner.join(60)
    assert [planner.exitcode for planner in planners] == [0, 0]
    _plan(tmp_path / "alone", table)
    assert plan_bytes(tmp_path / "run") == plan_bytes(tmp_path / "alone")


@pytest.mark.parametrize("window_rows", [1, 7, 100, 1000])
def test_windows_may_end_anywhere_in_any_of_several_files(tmp_path: Path, window_rows: int) -> None:
    sizes = [3, 0, 11, 1, 25]
    texts = [[f"file {number} row {row}" for row in range(size)] for number, size in enumerate(sizes)]
    for number, part in enumerate(texts):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": text} for text in part])
    report = make_plan(tmp_path / "run", job(tmp_path / "*.jsonl", run={"window_rows": window_rows}))
    assert report.windows == -(-40 // window_rows)
    assert [row["passthrough"]["text"] for row in read_rows(tmp_path / "run")] == [
        text for part in texts for text in part
    ]


def test_only_folders_of_planners_that_are_gone_are_removed(table: Path, tmp_path: Path) -> None:
    run, here = RunDir(tmp_path / "run"), Worker.this_process()
    with subprocess.Popen(["true"]) as process:
        process.wait()
    # A container may have this host's name and numbers of processes of its own: this one lives in another.
    elsewhere = Worker("elsewhere", here.place + "1", process.pid, "0")
    run.workers.mkdir(parents=True)
    beat(run, replace(here, id="alive"), 1)
    beat(run, replace(here, id="killed", pid=process.pid), 1)
    beat(run, elsewhere, 1)
    beat(run, replace(elsewhere, id="ended"), 1, "interrupted")
    for name in ("alive", "killed", "elsewhere", "ended", "unknown"):
        (run.spool / name).mkdir(parents=True)
    make_plan(run.root, job(table))
    assert sorted(path.name for path in run.spool.iterdir()) == ["alive", "elsewhere", "unknown"]


def test_a_row_larger_than_a_shard_may_be_is_a_shard_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulkrun.job.plan.cut.MAX_SHARD_BYTES", 50_000)
    columns = {
        "text": [f"t{row}" for row in range(400)],
        "blob": ["z" * (90_000 if row == 77 else 900) for row in range(400)],
    }
    make_plan(tmp_path / "run", job(write_parquet(tmp_path / "in.parquet", columns)))
    shards = [[row["passthrough"]["blob"] for row in rows] for _, rows in read_shards(tmp_path / "run")]
    assert all(sum(map(len, blobs)) <= 50_000 or len(blobs) == 1 for blobs in shards)
    assert sum(map(len, shards)) == 400


@pytest.mark.parametrize("left", [3, 0])
def test_nothing_of_a_window_is_published_when_the_input_changed_while_it_was_read(tmp_path: Path, left: int) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": f"row {row}"} for row in range(9)])
    looks: list[int] = []

    def check_input(files: range) -> None:
        assert files == range(0, 1) or files == range(0, 2)
        looks.append(len(list(RunDir(tmp_path / "run").plan.glob("shard-*"))))
        if len(looks) == 3:
            raise ResumeError("the input changed")
        if len(looks) == 2:
            write_jsonl(path, [{"text": "other"}] * (6 + left))

    with pytest.raises(ResumeError):
        make_plan(tmp_path / "run", job(path, run={"window_rows": 3}), check_input=check_input)
    assert looks == [0, 1, 2] and len(plan_bytes(tmp_path / "run")) == 4, "two shards and two markers"


def test_the_files_that_a_window_came_from_are_looked_at_again(tmp_path: Path) -> None:
    for number, size in enumerate([3, 0, 4, 2]):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": f"{number} {row}"} for row in range(size)])
    looked_at: list[list[int]] = []
    spec = job(tmp_path / "*.jsonl", run={"window_rows": 3})
    make_plan(tmp_path / "run", spec, check_input=lambda files: looked_at.append(list(files)))
    # A window that begins at the end of a file has looked whether that file goes on.
    assert looked_at == [[0], [0, 1, 2], [2, 3], [3]]


def test_a_column_that_nobody_reads_fails_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 16)
    rows = [{"text": f"t{row}", "key": row, "rank": 1, "own": 5, "odd": 1 if row < 16 else 0.5} for row in range(20)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    given = {"path": str(path), "columns": [], "id": "key", "priority": "rank"}
    spec = job(path, input=given, sampling={"per_row": {"max_tokens": "own"}})
    assert make_plan(tmp_path / "run", spec).counters.errors == {}
    planned = read_rows(tmp_path / "run")
    assert [row["row_id"] for row in planned] == [str(row) for row in range(20)]
    assert {(row["priority"], row["overrides"]) for row in planned} == {(1, '{"max_tokens":5}')}
    for template, errors in (("{{ text }}", 0), ("{{ odd }}", 4), ("{{ row.text }}", 0), ("{{ row | tojson }}", 4)):
        whole = job(path, input=given, prompt={"template": template})
        assert make_plan(tmp_path / f"run{errors}{len(template)}", whole).counters.errors.get("bad_input", 0) == errors


def late_columns(count: int) -> list[dict[str, Any]]:
    """Rows with keys that come after the first 16."""
    late = ({"note": "n", "deep": {"a": 1, "b": 2}} if row % 3 == 0 and row > 16 else {} for row in range(count))
    return [{"text": f"t{row}", "deep": {"a": 1}, **more} for row, more in enumerate(late)]


@pytest.mark.parametrize("window_rows", [7, 1000])
def test_columns_that_come_after_the_sample_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_rows: int
) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 16)
    path = write_jsonl(tmp_path / "in.jsonl", late_columns(60))
    spec = job(path, run={"window_rows": window_rows})
    report = make_plan(tmp_path / "run", spec)
    assert report.counters.undeclared_columns == {"deep.b": 14, "note": 14}
    assert json.loads(RunDir(tmp_path / "run").plan_complete.read_text())["undeclared_columns"]["note"] == 14
    with open_input(str(path)) as dataset:
        assert dry_plan(spec, dataset, CharacterCodec(), 10_000) == report
    chosen = job(path, input={"path": str(path), "columns": ["deep"]})
    assert make_plan(tmp_path / "chosen", chosen).counters.undeclared_columns == {"deep.b": 14}


def test_what_is_said_of_late_columns_names_them_and_is_bounded() -> None:
    lines = undeclared_lines({f"c{number}": 1000 + number for number in range(9)})
    assert "column 'c0' is neither in prompts nor in the output" in lines[0] and "1,000 times" in lines[0]
    assert len(lines) == 6 and lines[-1] == "and so with 4 more columns" and undeclared_lines({}) == []


def test_all_windows_together_open_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {row}"} for row in range(50)]) for name in "ab"]
    opened: list[Path] = []

    @contextmanager
    def counted(file: InputFile) -> Iterator[Any]:
        opened.append(Path(str(file.path)))
        with open_stream(file) as stream:
            yield stream

    with open_input(list(map(str, paths))) as dataset:
        monkeypatch.setattr("bulkrun.data.inputs.jsonl.open_stream", counted)
        spec = job(tmp_path / "*.jsonl", run={"window_rows": 7})
        make_planner(RunDir(tmp_path / "run"), spec, dataset, CharacterCodec(), 10_000).plan()
    assert opened == paths


def test_a_plan_of_text_files_that_was_stopped_and_continued_equals_an_unbroken_one(tmp_path: Path) -> None:
    rows = [{"text": f"t{row % 90}", "tags": ["x"] * (row % 4), "pay": "p" * (row % 50)} for row in range(4000)]
    path = write_jsonl(tmp_path / "in.jsonl", [row if number % 7 else {"text": 5} for number, row in enumerate(rows)])
    spec = job(path, run={"window_rows": 900})
    unbroken = make_plan(tmp_path / "unbroken", spec)
    for _ in range(9):
        allowed = iter([False, True])
        with suppress(Interrupted):
            make_plan(tmp_path / "run", spec, should_stop=lambda steps=allowed: next(steps, True))
    assert make_plan(tmp_path / "run", spec) == unbroken
    assert plan_bytes(tmp_path / "run") == plan_bytes(tmp_path / "unbroken")


def test_ids_that_repeat_over_files_are_told_with_their_files(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{n}.jsonl", [{"text": "t", "k": k} for k in keys])
        for n, keys in (("a", "12"), ("b", "31"))
    ]
    spec = job(tmp_path / "*.jsonl", input={"path": str(tmp_path / "*.jsonl"), "id": "k", "on_duplicate": "fail"})
    with pytest.raises(InputError) as caught:
        make_plan(tmp_path / "run", spec)
    assert f"'1' in rows 0 ({paths[0]}, its row 0), 3 ({paths[1]}, its row 1)" in str(caught.value)


def test_so_are_those_far_into_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in "ab"]
    for number, path in enumerate(paths):
        keys = [f"{number}-{row}" for row in range(800)]
        write_parquet(path, {"text": ["t"] * 800, "k": keys if number == 0 else [*keys[:750], "0-10", *keys[751:]]})
    spec = job(tmp_path, input={"path": str(tmp_path / "*.parquet"), "id": "k", "on_duplicate": "fail"})
    with pytest.raises(InputError) as caught:
        make_plan(tmp_path / "run", spec)
    assert f"'0-10' in rows 10 ({paths[0]}, its row 10), 1550 ({paths[1]}, its row 750)" in str(caught.value)

"""The planner: streams once over the input and publishes shards, window by window.

Everything it publishes is decided by the input and the job alone, and published only if absent, so a planner that was
killed goes on after its last whole window, and two planners on one run are harmless. Memory holds one window's index,
never its rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from bulkrun.data.inputs.reader import Dataset
from bulkrun.data.storage.durable import make_dirs, publish_new, read_json, write_file, write_new_json
from bulkrun.errors import RunError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.duplicates import DuplicateCounter, refuse_duplicate_ids, report_duplicate_ids
from bulkrun.job.plan.ids import write_ids
from bulkrun.job.plan.plan_input import PlanInput, PlanPoint
from bulkrun.job.plan.plan_view import PLAN_HASH
from bulkrun.job.plan.report import PlanCounters, PlanReport
from bulkrun.job.plan.result_columns import INPUT_COLUMNS, schema_text
from bulkrun.job.plan.shard_file import ShardInfo, shard_bytes, shard_schema
from bulkrun.job.plan.spool import Spool
from bulkrun.job.plan.window import Arrangement
from bulkrun.job.prompts.text_codec import TextCodec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker, read_worker
from bulkrun.scratch import Scratch


class Planner:
    """Plans one run into `run.plan`.

    A row passes `PlanInput` (reads it), `PromptBuilder` (its prompt, as token ids), `RowMaker` (the row of a shard),
    `Window` (takes it into the index, by which a whole window is ordered and cut) and `Spool` (holds it on disk until
    then, and deals it out to its shard), in this order.

    `worker` is this process: its heartbeat tells other planners that its files are used. `check_input` raises when
    files changed: asked after each window is read, before any of it is published, with the numbers of the files that
    the window came from. `plan_hash` is the record's: a plan outlives what it was made for.
    """

    def __init__(
        self,
        run: RunDir,
        source: PlanInput,
        *,
        worker: Worker,
        plan_hash: str,
        check_input: Callable[[range], None],
    ) -> None:
        self._run, self._input, self._worker, self._check_input = run, source, worker, check_input
        self._plan_hash = plan_hash

    def plan(self) -> PlanReport:
        """Plan what is not planned yet; the report over the whole plan.

        Raises Interrupted when told to stop, InputError when the input breaks or ids repeat that must not, RunError
        when the run directory cannot be written or holds the shards of another plan, and what `check_input` raises.
        """
        if not self._run.plan_complete.exists():
            self._plan_the_rest()
        complete = read_json(self._run.plan_complete)
        assert complete is not None, "this planner or another one has published it"
        with suppress(OSError):  # a leftover file only takes space
            for ids in self._run.id_files():
                ids.unlink(missing_ok=True)
        return PlanReport.from_json(complete)

    def _plan_the_rest(self) -> None:
        make_dirs(self._run.plan)
        markers = self._finished_windows()
        with _worker_folder(self._run, self._worker) as folder:
            if not markers:
                refuse_duplicate_ids(self._input.dataset, self._input.spec, folder)
            while (marker := self._plan_window(_next_point(markers), folder)) is not None:
                markers.append(marker)
        made_for = {INPUT_COLUMNS: schema_text(self._input.passthrough), PLAN_HASH: self._plan_hash}
        try:
            write_new_json(self._run.plan_complete, self._report(markers).to_json() | made_for)
        except FileNotFoundError:
            if not self._run.plan_complete.exists():  # else another planner was faster, and has removed the ids
                raise

    def _finished_windows(self) -> list[dict[str, Any]]:
        markers: list[dict[str, Any]] = []
        while (marker := read_json(self._run.window(len(markers)))) is not None:
            markers.append(marker)
        return markers

    def _plan_window(self, at: PlanPoint, folder: Path) -> dict[str, Any] | None:
        """Publish the shards of one window and then its marker, which is returned; None at the end of the input."""
        if self._input.rows_wanted(at) == 0:
            return None
        with Spool(folder, shard_schema(self._input.passthrough)) as spool:
            window, position = self._input.read_window(at, spool.append)
            self._check_input(range(at.position.file, position.file + 1))
            if not window.rows:
                return None
            arrangement = self._input.arrange(window)
            for shard, table in spool.shards(arrangement.shard_of_row, arrangement.num_shards):
                self._publish(at, shard, table, arrangement, folder)
        if window.ids:
            write_ids(self._run.ids(at.window), window.ids)
        place = {
            "window": at.window,
            "first_row": at.row,
            "first_shard": at.shard,
            "next": list(position),
        }
        marker = {**vars(arrangement.counters), **place}
        write_new_json(self._run.window(at.window), marker)
        return marker

    def _publish(self, at: PlanPoint, shard: int, table: pa.Table, arrangement: Arrangement, folder: Path) -> None:
        """Write shard number `shard` of the window, if nobody has yet."""
        rows = table.column("row").to_numpy() - at.row
        ranks = pa.array(arrangement.rank_in_shard[rows], pa.int32())
        tokens, cost = int(arrangement.prompt_tokens[shard]), int(arrangement.costs[shard])
        group = arrangement.folders[shard], arrangement.adapters[shard]
        info = ShardInfo(at.shard + shard, at.window, len(rows), tokens, cost, *group)
        schema = shard_schema(self._input.passthrough, info)
        table = table.set_column(table.schema.get_field_index("order"), schema.field("order"), ranks).cast(schema)
        temporary, final = folder / f"shard-{info.shard:05d}.tmp", self._run.shard(info.shard)
        write_file(temporary, shard_bytes(table))
        if not publish_new(temporary, final):
            raise RunError(
                f"{final}: another plan's shard is in the way (the input, the job or the version of bulkrun changed "
                "while it was planned); start again with --fresh"
            )

    def _report(self, markers: list[dict[str, Any]]) -> PlanReport:
        total = PlanCounters.total([PlanCounters.of(marker) for marker in markers])
        samples = total.rows * self._input.spec.sampling.n
        return PlanReport(total, len(markers), samples, report_duplicate_ids(self._run, markers), self._input.prompt)


def dry_plan(
    spec: JobSpec,
    dataset: Dataset,
    text: TextCodec,
    max_model_len: int,
    keep: Callable[[pa.RecordBatch], None] = lambda rows: None,
) -> PlanReport:
    """The report of the plan that `Planner` would make; writes no run, only ids to a temporary folder.

    `keep` is shown the rows of its shards. Raises InputError where ids repeat that must not.
    """
    source = PlanInput(spec, dataset, text, max_model_len)
    windows = list[PlanCounters]()
    with Scratch() as folder:
        refuse_duplicate_ids(source.dataset, source.spec, folder)
    with Scratch() as folder:
        duplicates = DuplicateCounter(dataset, source.spec.input.id, folder)
        for window in source.windows(keep):
            windows.append(source.arrange(window).counters)
            duplicates.add(window.ids)
        total = PlanCounters.total(windows)
        return PlanReport(total, len(windows), total.rows * spec.sampling.n, duplicates.report(), source.prompt)


def _next_point(markers: list[dict[str, Any]]) -> PlanPoint:
    return PlanPoint.after(markers[-1]) if markers else PlanPoint()


@contextmanager
def _worker_folder(run: RunDir, worker: Worker) -> Iterator[Path]:
    """A folder of this worker alone; those of planners that are surely gone are removed."""
    make_dirs(run.spool)
    for folder in run.spool.iterdir():
        if (state := read_worker(run, folder.name)) is not None and state.gone:
            shutil.rmtree(folder, ignore_errors=True)
    folder = run.spool / worker.id
    make_dirs(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

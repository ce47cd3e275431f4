"""From a staged run into the results: a changed row is replaced inside its part, new rows become new parts.

Each existing part that changes is written anew (the next generation) and swapped in by rename; a plain glob shows each
row once at every moment, old or new. Then `_SUCCESS`, then run.json, then the staged run goes. Every step can be
repeated: what carries the generation already is left alone, so the same command after a kill completes the merge.
Memory is that of a row group, of what changes in one part, and some 60 bytes for each staged row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.inputs.subset import Targets, read_targets
from bulkrun.data.results.parts import PartInfo, read_part_columns, read_part_info, read_part_schema
from bulkrun.data.storage.durable import publish_new, replace_json, swap_in
from bulkrun.errors import RunError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.plan.row_key import ROW_KEY
from bulkrun.job.plan.spool import Spool
from bulkrun.job.store.events import log_event, utc_now
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record, record_document
from bulkrun.job.store.run_totals import RunTotals, read_totals, totals_document
from bulkrun.job.update.cause import cause_document
from bulkrun.job.update.fitting import fit_table
from bulkrun.job.update.replace_rows import I64, NewAnswers, among
from bulkrun.job.update.rewrite import beside_rows, write_again
from bulkrun.job.update.staging import Update, begin_merge, read_update, remove_staged
from bulkrun.job.update.update_claim import lost_hold, refuse_lost_hold
from bulkrun.job.work.finish import sum_parts


def merge(run: RunDir) -> RunTotals:
    """Put what is staged into the results; the new totals. For the process that holds the run (`hold`).

    Raises RunError on a bad disk or a damaged part, and where another process took over.
    """
    refuse_lost_hold(run)
    update = read_update(run)
    assert update is not None, "there is something staged"
    totals = read_totals(run)
    assert totals is not None, "only a finished run is changed"
    assert totals.generation < update.generation, "what is merged already is removed when it is found"
    shards = begin_merge(run)
    fresh = _Merge(run, update, read_record(run), shards).apply()
    totals = _finish(run, update, totals, fresh)
    remove_staged(run)
    return totals


def _refuse_late(run: RunDir, update: Update) -> None:
    """Raise RunError where another process has the run by now, or has merged this update or a later one."""
    refuse_lost_hold(run)
    totals = read_totals(run)
    if totals is None or totals.generation >= update.generation:
        raise lost_hold(run)


def _finish(run: RunDir, update: Update, old: RunTotals, fresh: int) -> RunTotals:
    """The new totals and the new record. The record is replaced first: `_SUCCESS` says that all is done.

    Raises RunError where the parts do not come to the old rows and the `fresh` ones, less those that were dropped.
    """
    infos = [read_part_info(path) for path in run.parts().values()]
    _refuse_lost_rows(run, sum(info.input_rows for info in infos), old.rows + fresh - len(update.dropped))
    record, whole = read_record(run), _is_whole(run, update)
    if update.record is not None and whole:
        record = replace(RunRecord(**update.record).as_old_as(record), run_id=record.run_id)
        _refuse_late(run, update)
        if run.staged.sql_snapshot.exists():
            swap_in(run.staged.sql_snapshot, run.sql_snapshot)
        replace_json(run.run_json, record_document(record))
    history: dict[str, Any] = {"generation": update.generation, "finished": utc_now(), "whole": whole, **update.counts}
    totals = replace(
        sum_parts(record, infos),
        generation=update.generation,
        next_row=update.next_row,
        duplicate_ids=old.duplicate_ids,
        updates=[*old.updates, {**history, **cause_document(update.cause)}],
    )
    _refuse_late(run, update)
    replace_json(run.success, totals_document(totals))
    log_event(run, "-", "updated", kind=update.cause.kind, **history)
    return totals


def _is_whole(run: RunDir, update: Update) -> bool:
    """Whether the staged run came to its end: else it changes the rows that it finished, and not what the run is of."""
    return not update.rows or read_totals(run.staged) is not None


def _refuse_lost_rows(run: RunDir, found: int, expected: int) -> None:
    """Refuse to write totals that would make lost rows look like a result."""
    if found != expected:
        raise RunError(
            f"{run.root}: after the merge the parts hold {found:,} rows instead of {expected:,}: bring the "
            f"missing file back from a backup, or delete {run.success} and submit the job again"
        )


@dataclass(frozen=True)
class _Merge:
    """One merge; `shards` are the staged parts that take part."""

    run: RunDir
    update: Update
    record: RunRecord
    shards: Sequence[int]

    def apply(self) -> int:
        """Swap in the parts that change, then publish those of new rows; how many new rows there are."""
        fresh = 0
        targets = read_targets(self.run.staged.subset)
        keepers = _Keepers.of(targets)
        schema = self._schema()
        dropped = np.sort(np.array(self.update.dropped, np.int64))  # once: a night may drop millions
        parts, there = self._parts_to_change(targets.rows.to_numpy(), dropped, schema), self.run.committed_shards()
        with Spool(self.run.staged.tmp, schema) as spool:
            place_of_row = []
            for shard in self.shards:
                staged = self._staged_table(shard, targets, schema)
                fresh += self._publish_new_rows(shard, staged, there)
                place = parts.place_of(staged)
                place_of_row.append(place[place >= 0])
                for batch in staged.filter(pa.array(place >= 0)).to_batches():
                    spool.append(batch)
            places = np.concatenate(place_of_row) if place_of_row else np.empty(0, np.int64)
            for number, table in spool.shards(places, len(parts.numbers)):
                self._swap(parts.numbers[number], table, keepers.of_rows(table), dropped)
        return fresh

    def _schema(self) -> pa.Schema:
        """The columns of the results; where there are none yet, those of the staged run. What they say of themselves
        (scores their labels) is of the record that the run will have."""
        paths = sorted(self.run.parts().values()) or [self.run.staged.part(shard) for shard in self.shards[:1]]
        there = read_part_schema(paths[0]) if paths else pa.schema([])
        if self.update.record is None or not _is_whole(self.run, self.update):
            return there
        declared = result_fields(JobSpec.model_validate(self.update.record["job"]))
        said = {field.name: field.metadata for field in declared if field.metadata}
        return pa.schema([field.with_metadata(said.get(field.name, field.metadata)) for field in there])

    def _parts_to_change(self, rows: I64, dropped: I64, schema: pa.Schema) -> _Parts:
        """Which parts hold rows that are replaced or dropped, or say other things of their columns than `schema`; those
        left out that were swapped in already.

        Raises RunError for a row that is to be replaced and is nowhere: its answer would be lost in silence.
        """
        old = np.sort(rows[rows < self.update.first_row])
        touched = np.sort(np.concatenate([old, dropped]))
        numbers: list[int] = []
        found_rows, found_in = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        parts = sorted(self.run.parts().items())
        renewed = {number for number, path in parts if not read_part_schema(path).equals(schema, check_metadata=True)}
        for number, path in parts if len(touched) or renewed else ():
            if number >= self.update.first_part:
                continue
            done, here = read_part_info(path).generation >= self.update.generation, np.unique(_rows_of(path))
            found_rows.append(here[among(here, old)])
            found_in.append(np.full(len(found_rows[-1]), -1 if done else len(numbers)))
            if not done and (number in renewed or among(here, touched).any()):
                numbers.append(number)
        self._refuse_lost(old[~among(old, np.sort(np.concatenate(found_rows)))])
        return _Parts.of(numbers, found_rows, found_in)

    def _refuse_lost(self, rows: I64) -> None:
        if len(rows):
            raise RunError(
                f"{self.run.root}: row {rows[0]}, which is to be replaced, is in no part: bring the missing file back "
                f"from a backup, or delete {self.run.success} and submit the job again"
            )

    def _staged_table(self, shard: int, targets: Targets, schema: pa.Schema) -> pa.Table:
        """A staged part with the columns of the results, its rows numbered as in the results."""
        table = fit_table(pa.concat_tables(read_part_columns(self.run.staged.part(shard))), schema)
        picks = table["row"]
        given = {"row": targets.rows.take(picks), ROW_KEY: targets.keys.take(picks)}
        columns = [given.get(name, table[name]) for name in schema.names]
        return pa.Table.from_arrays(columns, schema=schema).combine_chunks()

    def _publish_new_rows(self, shard: int, staged: pa.Table, there: Collection[int]) -> int:
        """A part of the rows that the results do not have yet, unless it is `there` already; how many they are."""
        number = self.update.first_part + shard
        fresh = staged.filter(pc.greater_equal(staged["row"], self.update.first_row))
        if fresh.num_rows and number not in there:
            info = replace(_beside_rows(self.run.staged.part(shard)), shard=number, run_id=self.record.run_id)
            tmp = self._write([fresh], fresh.schema, replace(info, plan_hash=self.record.plan_hash))
            _refuse_late(self.run, self.update)
            publish_new(tmp, self.run.part(number, ""))
        return int(fresh.num_rows) // self.record.samples

    def _swap(self, number: int, fresh: pa.Table, keep_success: npt.NDArray[np.bool_], dropped: I64) -> None:
        path = self.run.part(number)
        answers = NewAnswers.of(fresh, self.record.samples, keep_success)
        groups = answers.put_into(read_part_columns(path), dropped)
        tmp = self._write(groups, fresh.schema, _beside_rows(path))
        _refuse_late(self.run, self.update)
        swap_in(tmp, path)

    def _write(self, groups: Iterable[pa.Table], schema: pa.Schema, like: PartInfo) -> Path:
        """The rows as a part of the new generation, under a temporary name beside the staged run."""
        like = replace(like, generation=self.update.generation)
        tmp, _ = write_again(self.run.staged.tmp, groups, schema, like, self.record)
        return tmp


@dataclass(frozen=True)
class _Parts:
    """The parts that change, and in which of them (`places`, indexes of `numbers`) each replaced row (sorted) lies; -1
    for one whose part is done."""

    numbers: list[int]
    rows: I64
    places: I64

    @classmethod
    def of(cls, numbers: list[int], rows: list[I64], places: list[I64]) -> _Parts:
        all_rows = np.concatenate(rows)
        order = np.argsort(all_rows, kind="stable")
        return cls(numbers, all_rows[order], np.concatenate(places)[order])

    def place_of(self, staged: pa.Table) -> I64:
        """Per staged output row: which part it goes into; -1 for new rows and for parts that are done."""
        rows = staged["row"].to_numpy()
        places = np.full(len(rows), -1, np.int64)
        found = among(rows, self.rows)
        places[found] = self.places[np.searchsorted(self.rows, rows[found])]
        return places


def _beside_rows(path: Path) -> PartInfo:
    return beside_rows(read_part_info(path), [path])


def _rows_of(path: Path) -> I64:
    tables = [table["row"].to_numpy() for table in read_part_columns(path, ["row"])]
    return np.concatenate([np.empty(0, np.int64), *tables])


@dataclass(frozen=True)
class _Keepers:
    """Whether a success that is there is kept when the new outcome is an error: per result row, sorted by row."""

    rows: I64
    keep: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, targets: Targets) -> _Keepers:
        rows = targets.rows.to_numpy()
        order = np.argsort(rows, kind="stable")
        return cls(rows[order], targets.keep_success.to_numpy()[order])

    def of_rows(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        kept: npt.NDArray[np.bool_] = self.keep[np.searchsorted(self.rows, table["row"].to_numpy())]
        return kept

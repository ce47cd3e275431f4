"""What an input has that the results of an incremental run do not: new, changed, failed and vanished rows.

The input is planned once as a stream (so that a key is made of exactly what a plan would run) and its ids and keys go
to a file; those of the results go to another; DuckDB joins the two with bounded memory. A row without an id (a broken
line) is told from others only by its place among such rows; what was said of the one that had this place is replaced.
Runs nothing, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.data.inputs.subset import PICK_SCHEMA
from bulkrun.data.results.parts import read_part_columns, read_part_schema
from bulkrun.data.tables.duck import interruptible, locked_connection, no_glob, quoted
from bulkrun.data.tables.row_groups import RowGroupWriter
from bulkrun.errors import InputError
from bulkrun.job.plan.duplicates import places_of
from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.plan.row_key import ROW_KEY, row_keys, told_by
from bulkrun.job.plan.rows import id_texts
from bulkrun.job.store.fingerprint import KeySalt
from bulkrun.scratch import Scratch

_SAID = [("id", pa.string()), ("key", pa.string()), ("code", pa.string()), ("message", pa.string())]
_TODAY = pa.schema([("position", pa.int64()), *_SAID, ("key_of_plan", pa.string())])
_RESULTS = pa.schema([("row", pa.int64()), *_SAID])
_ROWS_PER_GROUP = 131_072

# A refused row that a plan made has a key of what passes through alone (so have those of earlier versions).
_SAME = "coalesce(results.key IN (today.key, today.key_of_plan), false)"
# Who a row is: its id, or its place among the rows that have none.
_WHO = (
    "CASE WHEN id IS NULL THEN 'n' || row_number() OVER (PARTITION BY id IS NULL ORDER BY {order}) ELSE 'i' || id END"
)


@dataclass(frozen=True)
class Reasons:
    """What counts as a reason to run a row again.

    `everything`: each row of the input runs. `failed_only`: only rows that hold an error (one of `codes`, if given),
    whatever else changed. `drop_vanished`: results whose row is gone are removed. `renewed`: the results are of other
    settings, which the keys of refused rows do not tell: what a retry made of such a row is not kept.
    """

    everything: bool = False
    renewed: bool = False
    failed_only: bool = False
    codes: tuple[str, ...] = ()
    drop_vanished: bool = False


@dataclass(frozen=True)
class Changes:
    """How an input differs from the results. `picks` is a Parquet file of `PICK_SCHEMA`; `dropped` are result rows.

    `beyond_limit` are results that no row of the input was found for while `run.limit` kept some of it unread: what
    became of them is not known, so they are not `vanished` and none of them is dropped.
    """

    new: int
    changed: int
    failed: int
    unchanged: int
    vanished: int
    beyond_limit: int
    dropped: list[int]
    picks: Path

    @property
    def rows(self) -> int:
        """How many rows are to run."""
        return self.new + self.changed + self.failed

    @property
    def rows_today(self) -> int:
        """How many rows the input holds."""
        return self.rows + self.unchanged

    @property
    def counts(self) -> dict[str, int]:
        """The numbers that users are shown, by name."""
        names = ("new", "changed", "failed", "unchanged", "vanished")
        beyond = {"beyond_limit": self.beyond_limit} if self.beyond_limit else {}
        return {name: getattr(self, name) for name in names} | beyond

    def read_picks(self) -> Iterator[pa.RecordBatch]:
        """The rows that are to run, in input order: batches of `PICK_SCHEMA`."""
        with pq.ParquetFile(self.picks) as file:
            yield from file.iter_batches()


def find_changes(
    source: PlanInput, parts: Sequence[Path], salt: KeySalt, first_row: int, reasons: Reasons, folder: Path
) -> Changes:
    """Compare the input with the results in `parts`. New rows get numbers from `first_row` on.

    `folder` is for temporary files, and for the picks. Raises InputError where two rows have one id, OSError where the
    folder takes no more.
    """
    id_column = source.spec.input.id
    assert id_column is not None, "the job file was checked"
    today, results = folder / "today.tmp", folder / "results.tmp"
    _write_today(source, id_column, _id_type(parts, id_column), salt, today)
    _write_results(parts, id_column, results)
    with Scratch(folder) as spill:
        connection = locked_connection(files=[today, results], spill=spill)

        def compare() -> Changes:
            _load(connection, today, results)
            _refuse_duplicates(connection, id_column, source)
            return _compare(connection, reasons, source.spec.run.limit, first_row, folder / "picks.tmp")

        try:
            return interruptible(connection, compare)
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:  # of the files it spills to
            raise OSError(str(error)) from error
        finally:
            connection.close()


def _id_type(parts: Sequence[Path], id_column: str) -> pa.DataType | None:
    return read_part_schema(parts[0]).field(id_column).type if parts else None


def _write_today(source: PlanInput, id_column: str, like: pa.DataType | None, salt: KeySalt, path: Path) -> None:
    """Ids as texts of the results' type (`like`), which may be a wider one: as a double 10^10 reads 1e+10."""

    def keep(rows: pa.RecordBatch) -> None:
        values = rows["passthrough"].field(id_column)
        ids = id_texts(values if like is None else values.cast(like), id_column)
        keys = row_keys(rows, salt)
        columns = [rows["row"], pa.array(ids, pa.string()), pa.array(keys, pa.string())]
        columns += [rows["error_code"], rows["error_message"]]
        columns += [pa.array(_keys_of_plan(rows, keys, source.passthrough.names, salt), pa.string())]
        writer.write(pa.RecordBatch.from_arrays(columns, schema=_TODAY))

    with RowGroupWriter(path, _TODAY, _ROWS_PER_GROUP) as writer:
        for _ in source.windows(keep):
            pass  # `keep` has written its rows


def _keys_of_plan(rows: pa.RecordBatch, keys: list[str], carried: list[str], salt: KeySalt) -> list[str]:
    """The keys that a part has of these rows which the plan made."""
    refused = rows["error_code"].is_valid()
    if len(carried) == rows["passthrough"].type.num_fields or not refused.true_count:
        return keys
    others = iter(row_keys(told_by(rows.filter(refused), carried), salt))
    return [next(others) if is_refused else key for is_refused, key in zip(refused.to_pylist(), keys, strict=True)]


def _write_results(parts: Sequence[Path], id_column: str, path: Path) -> None:
    told = [ROW_KEY, "error_code", "error_message"]
    tables = (table for part in parts for table in read_part_columns(part, ["row", id_column, *told]))
    with RowGroupWriter(path, _RESULTS, _ROWS_PER_GROUP) as writer:
        for batch in (batch for table in tables for batch in table.combine_chunks().to_batches()):
            ids = pa.array(id_texts(batch[id_column], id_column), pa.string())
            columns = [batch["row"], ids, *(batch[name] for name in told)]
            writer.write(pa.RecordBatch.from_arrays(columns, schema=_RESULTS))


def _load(connection: duckdb.DuckDBPyConnection, today: Path, results: Path) -> None:
    """The tables `today` and `results`, one row for each input row, with `who` it is."""
    given = f"read_parquet({quoted(no_glob(str(today)))})"
    connection.execute(f"CREATE TEMP TABLE today AS SELECT *, {_WHO.format(order='position')} AS who FROM {given}")
    connection.execute(
        "CREATE TEMP TABLE samples AS SELECT row, any_value(id) AS id, any_value(key) AS key, "
        "bool_or(code IS NOT NULL) AS failed, min(code) AS code, min(message) AS message, list(DISTINCT code) AS codes "
        f"FROM read_parquet({quoted(no_glob(str(results)))}) GROUP BY row"
    )
    connection.execute(f"CREATE TEMP TABLE results AS SELECT *, {_WHO.format(order='row')} AS who FROM samples")


def _refuse_duplicates(connection: duckdb.DuckDBPyConnection, id_column: str, source: PlanInput) -> None:
    twice = connection.execute(
        "SELECT id, list_sort(list(position))[1:3] FROM today WHERE id IS NOT NULL "
        "GROUP BY id HAVING count(*) > 1 ORDER BY id LIMIT 3"
    ).fetchall()
    if twice:
        shown = "; ".join(f"{name!r} in {places_of(source.dataset, rows)}" for name, rows in twice)
        raise InputError(
            f"input.id: column {id_column!r} names two rows alike: {shown}; run.incremental needs unique ids"
        )


def _compare(
    connection: duckdb.DuckDBPyConnection, reasons: Reasons, limit: int | None, first_row: int, picks: Path
) -> Changes:
    connection.execute(
        f"CREATE TEMP TABLE found AS SELECT position, row, today.key AS key, {_kind(reasons)} AS kind, "
        f"{_SAME} AS same FROM today LEFT JOIN results USING (who)",
        [list(reasons.codes)] if reasons.failed_only else [],
    )
    counts = dict(connection.execute("SELECT kind, count(*) FROM found GROUP BY kind").fetchall())
    gone = connection.execute("SELECT row, id IS NULL FROM results ANTI JOIN today USING (who) ORDER BY row").fetchall()
    unread = limit is not None and sum(counts.values()) >= limit
    gone, beyond_limit = ([], len(gone)) if unread else (gone, 0)
    # What vanished and has no id is a broken line of an earlier night: no result is lost with it.
    dropped = [row for row, nameless in gone if not reasons.failed_only and (nameless or reasons.drop_vanished)]
    _write_picks(connection, first_row, picks)
    new, changed, failed, same = (counts.get(name, 0) for name in ("new", "changed", "failed", "unchanged"))
    return Changes(new, changed, failed, same, len(gone), beyond_limit, dropped, picks)


def _kind(reasons: Reasons) -> str:
    """SQL for why a row runs. A row that would be refused as before, with the same message, does not run."""
    if reasons.failed_only:
        asked = "(len($1::VARCHAR[]) = 0 OR list_has_any(codes, $1::VARCHAR[]))"
        return f"CASE WHEN failed AND {asked} THEN 'failed' ELSE 'unchanged' END"
    changed = "true" if reasons.everything else f"NOT {_SAME}"
    if reasons.renewed:
        changed += " OR today.code IS NOT NULL"
    refused_alike = f"today.code = results.code AND today.message = results.message AND {_SAME}"
    return (
        "CASE WHEN row IS NULL THEN 'new' "
        f"WHEN failed AND {refused_alike} THEN 'unchanged' "
        f"WHEN {changed} THEN 'changed' WHEN failed THEN 'failed' ELSE 'unchanged' END"
    )


def _write_picks(connection: duckdb.DuckDBPyConnection, first_row: int, path: Path) -> None:
    """The rows to run by position; an old success stays only where nothing but luck can have changed."""
    query = (
        "SELECT position, coalesce(row, $1 - 1 + row_number() OVER (PARTITION BY kind ORDER BY position)) AS row, "
        "key AS row_key, same AND kind = 'failed' AS keep_success "
        "FROM found WHERE kind <> 'unchanged' ORDER BY position"
    )
    with RowGroupWriter(path, PICK_SCHEMA, _ROWS_PER_GROUP) as writer:
        for batch in connection.sql(query, params=[first_row]).to_arrow_reader(_ROWS_PER_GROUP):
            writer.write(pa.Table.from_batches([batch]).cast(PICK_SCHEMA))

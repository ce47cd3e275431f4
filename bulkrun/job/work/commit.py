"""From journals to a part: the commit of one shard, safe to repeat and safe with several workers on one shard.

All outcomes journaled (over every attempt) -> one table in input order, then sample -> temporary file, fsync ->
published only if absent -> the footer read back -> the shard's journals and claims go. The part is the commit
record: there is nothing to keep in step with it. Knows no engine and no threads.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bulkrun.data.results.parts import PartInfo, count_ends, read_part_info, write_part
from bulkrun.data.results.schema import EMBEDDING, EMBEDDINGS, RESULT_FIELDS, SCORES, output_schema
from bulkrun.data.storage.durable import disk_errors, make_dirs, publish_new
from bulkrun.data.storage.partitions import folder_values
from bulkrun.errors import RunError
from bulkrun.job.outputs.tool_calls import with_ids
from bulkrun.job.plan.result_columns import TOOL_CALLS, result_fields
from bulkrun.job.plan.row_key import ROW_KEY, row_keys
from bulkrun.job.plan.shard_file import ShardInfo, read_shard, read_shard_info
from bulkrun.job.store.fingerprint import KeySalt
from bulkrun.job.store.journal import JournalRecord, read_outcomes
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.work.samples import Outcomes, Spent, keep_samples, spent
from bulkrun.job.work.vectors import vector_column, vectors_column

if TYPE_CHECKING:
    from bulkrun.job.jobfile.spec import JobSpec

CheckOurs = Callable[[], None]

_OF_RECORD = frozenset({field.name for field in fields(JournalRecord)} - {"rows", "sample", "extra"})
_COPIED_BYTES = 64 * 2**20  # of a column's values, repeated for the samples


@dataclass(frozen=True)
class RunIdentity:
    """What every part of a run carries in its footer, how many samples a row has, and the columns that the job adds."""

    run_id: str
    plan_hash: str
    samples: int
    versions: dict[str, str] = field(default_factory=dict)
    results: tuple[pa.Field, ...] = RESULT_FIELDS
    best_of: int | None = None
    key_salt: KeySalt | None = None  # where rows have a column with their keys
    compression: str = "zstd"

    @classmethod
    def of(cls, record: RunRecord, spec: JobSpec) -> RunIdentity:
        """The identity of a run whose resolved job is `spec`."""
        return cls(
            record.run_id,
            record.plan_hash,
            record.samples,
            record.versions,
            result_fields(spec),
            spec.sampling.best_of,
            record.key_salt,
            spec.output.compression,
        )

    @property
    def generations(self) -> int:
        """Outputs generated per row, of which `samples` are kept."""
        return self.best_of or self.samples


def commit_shard(run: RunDir, shard: int, identity: RunIdentity, check_ours: CheckOurs) -> PartInfo:
    """Publish the part of a shard whose every row is journaled, or return the one that is there.

    `check_ours` raises when the directory no longer holds this run (`OwnRun.check`); asked before the part appears.
    Raises RunError when an outcome is missing (a journal was damaged after it was written) or the disk fails;
    the same command then redoes what is missing.
    """
    planned = read_shard_info(run.shard(shard))
    final = run.part(shard, planned.folder)
    if not final.exists():
        _, rows = read_shard(run.shard(shard))
        outcomes = _outcomes(run, planned, rows, identity)
        if outcomes is not None:
            table = _part_table(rows, identity, outcomes)
            _publish(run, planned, identity, table, spent(outcomes), check_ours)
    info = _committed(final, identity)
    clear_shard_state(run, shard)
    return info


def commit_answered(
    run: RunDir, shard: int, identity: RunIdentity, journals: Sequence[Path], check_ours: CheckOurs
) -> None:
    """Publish a part of those rows of a shard that are journaled, for a run whose plan is given up.

    `journals` are those of the shard: nobody else is at work in such a run. `check_ours` is that of `commit_shard`.
    """
    planned, rows = read_shard(run.shard(shard))
    answered = read_outcomes(journals).answered
    keys = [[(row, sample) for sample in range(identity.generations)] for row in rows["row"].to_pylist()]
    whole = [all(key in answered for key in of_row) for of_row in keys]
    if any(whole) and not run.part(shard, planned.folder).exists():
        outcomes = {key: answered[key] for of_row, done in zip(keys, whole, strict=True) if done for key in of_row}
        table = _part_table(rows.filter(pa.array(whole)), identity, outcomes)
        _publish(run, planned, identity, table, spent(outcomes), check_ours)
    clear_shard_state(run, shard)


def _outcomes(run: RunDir, planned: ShardInfo, rows: pa.Table, identity: RunIdentity) -> Outcomes | None:
    """The outcome of every generation, None when another worker published the part (and removed its journals)."""
    outcomes = read_outcomes(run.journals_of(planned.shard)).answered
    wanted = [(row, sample) for row in rows["row"].to_pylist() for sample in range(identity.generations)]
    missing = sum(key not in outcomes for key in wanted)
    if missing and run.part(planned.shard, planned.folder).exists():
        return None
    if missing:
        raise RunError(
            f"{run.journal}: {missing} of {len(wanted)} outcomes of shard {planned.shard} do not read back: a journal "
            "was damaged on disk; run the same command again to redo those rows"
        )
    return {key: outcomes[key] for key in wanted}


def _part_table(rows: pa.Table, identity: RunIdentity, outcomes: Outcomes) -> pa.Table:
    """The rows of a part."""
    kept = keep_samples(rows["row"].to_pylist(), outcomes, identity.samples, identity.best_of)
    table = build_table(rows, kept, identity.samples, identity.results)
    if identity.key_salt is not None:
        keys = [key for key in row_keys(rows, identity.key_salt) for _ in range(identity.samples)]
        table = table.set_column(table.schema.get_field_index(ROW_KEY), ROW_KEY, pa.array(keys, pa.string()))
    return table


def build_table(
    rows: pa.Table,
    outcomes: list[tuple[int, int, JournalRecord]],
    samples: int,
    results: Sequence[pa.Field] = RESULT_FIELDS,
) -> pa.Table:
    """Passed-through columns beside those of `results`, in the declared output schema.

    `rows` is a shard's table; `outcomes` has `samples` entries for each of its rows, in the same order.
    """
    passthrough = rows["passthrough"].combine_chunks()
    carried = list(rows.schema.field("passthrough").type)
    columns = [_repeated(column, samples) for column in passthrough.flatten()] if carried else []
    columns += [
        _calls_column(added, rows, outcomes, samples) if added.name == TOOL_CALLS else _result_column(added, outcomes)
        for added in results
    ]
    return pa.Table.from_arrays(columns, schema=output_schema(pa.schema(carried), results))


def _result_column(added: pa.Field, outcomes: list[tuple[int, int, JournalRecord]]) -> pa.Array:
    """One of the columns that a job adds: of the outcomes' names, their values, or what is in `extra`."""
    name, records = added.name, [record for _, _, record in outcomes]
    if name == "row":
        values: list[Any] = [row for row, _, _ in outcomes]
    elif name == "sample":
        values = [sample for _, sample, _ in outcomes]
    elif name in (EMBEDDING, SCORES):
        return vector_column([record.extra.get(name) for record in records])
    elif name == EMBEDDINGS:
        return vectors_column([record.extra.get(name) for record in records])
    elif name in _OF_RECORD:
        values = [getattr(record, name) for record in records]
    else:
        values = [record.extra.get(name) for record in records]
    return pa.array(values, added.type)


def _calls_column(
    added: pa.Field, rows: pa.Table, outcomes: list[tuple[int, int, JournalRecord]], samples: int
) -> pa.Array:
    """The calls of each outcome, whose ids are of its own row: rows that share a generation have equal calls."""
    row_ids = [row_id for row_id in rows["row_id"].to_pylist() for _ in range(samples)]
    made = zip(row_ids, outcomes, strict=True)
    calls = [
        None if (found := record.extra.get(added.name)) is None else with_ids(found, row_id, sample)
        for row_id, (_, sample, record) in made
    ]
    return pa.array(calls, added.type)


def _repeated(column: pa.Array, samples: int) -> pa.Array | pa.ChunkedArray:
    """Each value `samples` times. Large ones by reference: copies may be more than memory, or than an array, holds."""
    if samples == 1:
        return column
    if samples * column.nbytes <= _COPIED_BYTES:
        return column.take(pa.array(np.repeat(np.arange(len(column)), samples)))
    return pa.chunked_array([column.slice(row, 1) for row in range(len(column)) for _ in range(samples)], column.type)


def _publish(
    run: RunDir, planned: ShardInfo, identity: RunIdentity, table: pa.Table, cost: Spent, check_ours: CheckOurs
) -> None:
    """Write the part and give it its name, in its partition's folder; partition columns are not in the file."""
    attempt = secrets.token_hex(8)
    tmp = run.tmp / f"part-{planned.shard:05d}.{attempt}.tmp"
    types = {column: str(table.schema.field(column).type) for column in folder_values(planned.folder)}
    info = PartInfo(
        run_id=identity.run_id,
        plan_hash=identity.plan_hash,
        shard=planned.shard,
        attempt=attempt,
        input_rows=table.num_rows // identity.samples,
        rows=table.num_rows,
        errors=dict(Counter(code for code in table["error_code"].to_pylist() if code is not None)),
        **count_ends(table),
        versions=identity.versions,
        folder=planned.folder,
        partition_types=types,
        **asdict(cost),
    )
    with disk_errors("writing a part", tmp):
        write_part(tmp, table.drop_columns(list(types)), info, compression=identity.compression)
    check_ours()  # if replaced after this, tmp moved with the old run: publishing fails
    final = run.part(planned.shard, planned.folder)
    make_dirs(final.parent)
    publish_new(tmp, final)


def _committed(final: Path, identity: RunIdentity) -> PartInfo:
    info = read_part_info(final)
    if info.run_id != identity.run_id:
        raise RunError(f"{final}: belongs to another run ({info.run_id}, this is {identity.run_id}); move it away")
    return info


def clear_shard_state(run: RunDir, shard: int) -> None:
    """Remove the journals and claims of a committed shard; also what a kill left of them."""
    with disk_errors("removing the journals of a committed shard", run.journal):
        for path in [*run.journals_of(shard), *run.claims_of(run.shard_claim(shard))]:
            path.unlink(missing_ok=True)

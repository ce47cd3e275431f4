"""Is a run whole and undamaged? Reads every page of every part and compares parts, plan and `_SUCCESS`.

Finds what DuckDB and a plain read do not: a flipped bit (page checksums), a row twice or never, a foreign part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from bulkrun.data.results.parts import PartInfo, count_ends, read_part_columns, read_part_info, read_part_schema
from bulkrun.data.results.schema import output_schema
from bulkrun.data.storage.partitions import find_strangers, folder_values
from bulkrun.errors import RunError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.plan.shard_file import ShardInfo, read_shard
from bulkrun.job.store.journal import read_journal
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.update.staging import is_merging
from bulkrun.job.views.bucket_check import bucket_problems
from bulkrun.job.views.totals_found import differences
from bulkrun.job.views.verify_updated import UpdatedParts


@dataclass
class VerifyReport:
    """What was checked and what is wrong; each problem names its file. `rows` counts output rows read."""

    parts: int = 0
    rows: int = 0
    finished: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_run(run: RunDir) -> VerifyReport:
    """Check a run, finished or not, and its bucket. Raises RunError only when the directory is not a run at all."""
    record, updated = read_record(run), _updated(run)
    report = _verify_planned(run, record) if updated is None else _verify_updated(run, record, updated)
    report.problems += [
        f"{path}: not a part of this run, and queries over *.parquet read it too; move it away"
        for path in sorted(find_strangers(run.root))
    ]
    if report.finished:
        report.problems += bucket_problems(run, record)
    return report


def _verify_planned(run: RunDir, record: RunRecord) -> VerifyReport:
    report, plan = VerifyReport(), PlanView(run)
    try:
        plan.refresh()
    except RunError as error:
        report.problems.append(str(error))
    parts: list[PartInfo] = []
    for shard in sorted(plan.committed):
        try:
            parts.append(_verify_part(run, record, shard, report))
        except RunError as error:
            report.problems.append(str(error))
    _verify_journals(run, report)
    try:
        _verify_totals(run, record, plan, parts, report)
    except RunError as error:
        report.problems.append(str(error))
    return report


def _updated(run: RunDir) -> RunTotals | None:
    """The totals of a run that was changed after it finished, or is being changed."""
    try:
        totals = read_totals(run)
    except RunError:  # said with the rest
        return None
    return totals if totals is not None and (totals.generation > 0 or is_merging(run)) else None


def _verify_updated(run: RunDir, record: RunRecord, totals: RunTotals) -> VerifyReport:
    parts = UpdatedParts(run, record, totals)
    parts.check()
    report = VerifyReport(parts.parts, parts.rows, not is_merging(run), parts.problems)
    if is_merging(run):
        report.problems.append(f"{run.staged.root}: rows are being put into the results; the same command finishes it")
    return report


def _verify_part(run: RunDir, record: RunRecord, shard: int, report: VerifyReport) -> PartInfo:
    path, info = run.part(shard), read_part_info(run.part(shard))
    planned, rows = _planned(run, shard)
    if path != (home := run.part(shard, planned.folder)):
        raise RunError(f"{path}: lies in another partition's folder; move it back to {home.parent}")
    want = [(row, sample) for row in rows["row"].to_pylist() for sample in range(record.samples)]
    in_folder = folder_values(planned.folder)
    passthrough = pa.schema([field for field in rows.schema.field("passthrough").type if field.name not in in_folder])
    if read_part_schema(path) != output_schema(passthrough, result_fields(JobSpec.model_validate(record.job))):
        raise RunError(f"{path}: its columns are not those of the plan ({run.shard(shard).name})")
    got: list[tuple[int, int]] = []
    codes, ends = Counter[str](), Counter[str]()
    for table in read_part_columns(path):
        got += zip(table["row"].to_pylist(), table["sample"].to_pylist(), strict=True)
        codes.update(code for code in table["error_code"].to_pylist() if code is not None)
        ends.update(count_ends(table))
    report.parts += 1
    report.rows += len(got)
    if info.generation and run.success.exists():
        report.problems.append(f"{path.name}: was changed after the run ended, and _SUCCESS does not record it")
    counts = {"errors": (dict(codes), info.errors), "cut": (ends["cut"], info.cut)}
    counts["stopped"] = (ends["stopped"], info.stopped)
    _compare(path.name, info, record, shard, {"rows": (want, got), **counts}, report)
    return info


def _planned(run: RunDir, shard: int) -> tuple[ShardInfo, pa.Table]:
    if not run.shard(shard).exists():
        raise RunError(f"{run.part(shard)}: no shard {shard} is in the plan; the file does not belong here")
    return read_shard(run.shard(shard))


def _compare(
    name: str,
    info: PartInfo,
    record: RunRecord,
    shard: int,
    content: dict[str, tuple[object, object]],
    report: VerifyReport,
) -> None:
    """Footer against run and plan, content against plan and footer."""
    pairs = {"run": (record.run_id, info.run_id), "shard": (shard, info.shard)}
    for what, (want, got) in {**pairs, **content}.items():
        if want != got:
            shown = "" if isinstance(want, list) else f": {got!r} instead of {want!r}"
            report.problems.append(f"{name}: wrong {what}{shown}")


def _verify_journals(run: RunDir, report: VerifyReport) -> None:
    for path in sorted(run.journal.glob("shard-*.jsonl")):
        if damaged := read_journal(path).damaged:
            report.problems.append(f"{path.name}: bad checksum in line {', '.join(map(str, damaged))} (will be redone)")


def _verify_totals(
    run: RunDir, record: RunRecord, plan: PlanView, parts: Sequence[PartInfo], report: VerifyReport
) -> None:
    totals = read_totals(run)
    if totals is None:
        return
    report.finished = True
    lost = (run.part(shard, plan.shards[shard].folder) for shard in plan.open_shards)
    report.problems += [f"{path.relative_to(run.root)}: is not there" for path in lost]
    report.problems += differences(totals, record, parts)
    if (planned := plan.complete["rows"] if plan.complete else None) != totals.rows:
        report.problems.append(f"_SUCCESS: rows: {totals.rows}, the plan has {planned}")

"""The columns of a run's results, also where it finished without one row and has no part that tells.

Then the end of its plan does, which says what the input's columns were; that of an earlier version does not.
"""

from __future__ import annotations

import pyarrow as pa

from bulkrun.data.results.parts import read_part_info, read_part_schema
from bulkrun.data.results.schema import output_schema
from bulkrun.data.storage.durable import read_json
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals


def declared_schema(run: RunDir) -> pa.Schema:
    """The columns of the parts; those that are in folders' names come first."""
    for path in run.parts().values():
        types = read_part_info(path).partition_types
        folders = [pa.field(name, pa.type_for_alias(kind)) for name, kind in types.items()]
        return pa.schema([*folders, *read_part_schema(path)])
    return _planned_schema(run)


def _planned_schema(run: RunDir) -> pa.Schema:
    from bulkrun.job.jobfile.spec import JobSpec  # a quarter of the start of a query, and asked of few runs
    from bulkrun.job.plan.result_columns import INPUT_COLUMNS, result_fields, schema_of_text

    planned = (read_json(run.plan_complete) or {}).get(INPUT_COLUMNS)
    given = pa.schema([]) if planned is None else schema_of_text(planned)
    return output_schema(given, result_fields(JobSpec.model_validate(read_record(run).job)))


def schema_without_rows(run: RunDir) -> pa.Schema | None:
    """The columns of a finished run, for which no rows means none; None while it is not finished."""
    return None if read_totals(run) is None else declared_schema(run)

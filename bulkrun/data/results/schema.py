"""The columns of a result: the input's that pass through, then what the job adds. Knows no files.

Declared from the plan, before row one, so that every part has the same schema whatever its values are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set

import pyarrow as pa

from bulkrun.data.types.sql_names import sql_name, twins
from bulkrun.errors import InputError, did_you_mean

_ROW_FIELDS = (
    pa.field("row", pa.int64(), nullable=False),  # position in the whole input, from 0
    pa.field("sample", pa.int32(), nullable=False),  # 0 to sampling.n - 1
)
_ERROR_FIELDS = (
    pa.field("error_code", pa.string()),  # null if and only if the row did not fail
    pa.field("error_message", pa.string()),
)
RESULT_FIELDS: tuple[pa.Field, ...] = (
    *_ROW_FIELDS,
    pa.field("response", pa.string()),  # null where a row failed before any text came
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    *_ERROR_FIELDS,
)
EMBEDDING, EMBEDDINGS = "embedding", "embeddings"
# Of a job that embeds. `sample` is 0: a row and a sample name an output row in every run.
VECTOR_FIELDS: tuple[pa.Field, ...] = (
    *_ROW_FIELDS,
    pa.field(EMBEDDING, pa.list_(pa.float32())),  # null where a row failed
    pa.field("prompt_tokens", pa.int32()),
    *_ERROR_FIELDS,
)
# Of one whose rows may have several texts.
VECTORS_FIELDS: tuple[pa.Field, ...] = tuple(
    pa.field(EMBEDDINGS, pa.list_(pa.list_(pa.float32()))) if field.name == EMBEDDING else field
    for field in VECTOR_FIELDS
)
SCORES = "scores"
# Of one whose rows are pairs of texts: the cosines of their vectors.
COSINE_FIELDS: tuple[pa.Field, ...] = (
    *_ROW_FIELDS,
    pa.field("score", pa.float32()),  # the highest; null where a row failed
    pa.field(SCORES, pa.list_(pa.float32())),
    pa.field("prompt_tokens", pa.int32()),
    *_ERROR_FIELDS,
)
_LABELS = b"labels"  # in the metadata of the column of scores


def score_fields(labels: Sequence[str]) -> tuple[pa.Field, ...]:
    """Of a job that classifies; the column of scores says which label each is of."""
    return (
        *_ROW_FIELDS,
        pa.field("label", pa.string()),  # the likeliest; null where a row failed, and of a model with one output
        pa.field("score", pa.float32()),  # that label's, or the one there is
        pa.field(SCORES, pa.list_(pa.float32()), metadata={_LABELS: json.dumps(list(labels))}),
        pa.field("prompt_tokens", pa.int32()),
        *_ERROR_FIELDS,
    )


def labels_of(scores: pa.Field) -> list[str]:
    """The labels of a column of `score_fields`, in the order of the scores."""
    labels: list[str] = json.loads(scores.metadata[_LABELS])
    return labels


RESULT_NAMES = frozenset(field.name for field in RESULT_FIELDS)


def output_schema(passthrough: pa.Schema, results: Sequence[pa.Field] = RESULT_FIELDS) -> pa.Schema:
    """The schema of every part: the columns that pass through, then those that the job adds."""
    assert not {field.name for field in results} & set(passthrough.names), "passthrough_schema refuses these names"
    return pa.schema([*passthrough, *results])


def passthrough_schema(
    input_schema: pa.Schema,
    columns: Sequence[str] | None,
    results: Sequence[pa.Field] = RESULT_FIELDS,
    id_column: str | None = None,
) -> pa.Schema:
    """The input columns that go to the output: those named in `input.columns` and the id's, or all.

    `results` are the columns that the job adds. An id that is left out and is named like a result column stays out.

    Raises InputError for an unknown name, for a column that is named like a result column, and for two whose names
    differ only in case: to SQL they are one, and it would find the first where the second is meant.
    """
    names = list(input_schema.names) if columns is None else list(dict.fromkeys(columns))
    check_columns(input_schema, names, "input.columns")
    added = {field.name for field in results}
    if id_column is not None and id_column not in names and sql_name(id_column) not in map(sql_name, added):
        names.insert(0, id_column)
    _refuse_result_names(names, added)
    _refuse_twins(names)
    # Nullable all: a row that could not be read is null in every column.
    return pa.schema([input_schema.field(name).with_nullable(True).remove_metadata() for name in names])


def passable(names: Iterable[str], added: Iterable[str] = RESULT_NAMES) -> list[str]:
    """The input columns among `names` that the output can hold beside those that the job adds.

    Of two that SQL takes for one, the first.
    """
    firsts: dict[str, str] = {}
    for name in names:
        firsts.setdefault(sql_name(name), name)
    results = {sql_name(name) for name in added}
    return [name for folded, name in firsts.items() if folded not in results]


def _refuse_result_names(names: Sequence[str], results: Set[str]) -> None:
    folded = {sql_name(name): name for name in results}
    taken = [name for name in names if sql_name(name) in folded]
    if taken:
        others = [name for name in names if name not in taken]
        raise InputError(
            f"input.columns: the input's column {', '.join(map(repr, taken))} is named like "
            f"{_result_column(taken[0], folded)}; choose the columns to pass through (input.columns: "
            f"[{', '.join(others)}]) or rename it in input.sql "
            f'(SELECT * RENAME ("{taken[0]}" AS "input_{taken[0]}") FROM input)'
        )


def _result_column(name: str, folded: Mapping[str, str]) -> str:
    result = folded[sql_name(name)]
    return "a result column" if result == name else f"the result column {result!r} (SQL knows no case in names)"


def _refuse_twins(names: Sequence[str]) -> None:
    for twin, name in twins(names):
        others = [other for other in names if other != name]
        raise InputError(
            f"input.columns: the input's {twin!r} and {name!r} differ only in case, and SQL over the results "
            f"would take the first for both; choose the columns to pass through (input.columns: "
            f"[{', '.join(others)}]) or rename one of them in the files"
        )


def check_columns(input_schema: pa.Schema, names: Iterable[str], key: str) -> None:
    """Raise InputError, naming the job file's `key` and the nearest column, for a name that the input lacks."""
    there = dict.fromkeys(input_schema.names)
    for name in names:
        if name not in there:
            hint = did_you_mean(name, there) or f"it has {', '.join(there) or 'none at all'}"
            raise InputError(f"{key}: the input has no column {name!r}; {hint}")

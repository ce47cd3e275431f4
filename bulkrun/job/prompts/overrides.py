"""A row's own sampling values: columns of the input that override the job's `sampling`.

Values are checked like the job's own and kept as compact JSON; the same values always give the same text, so that
rows can be compared by it. Knows nothing of prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.data.results.schema_check import check_schema
from bulkrun.data.types.json_types import is_unicode, list_in
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.sampling import Flag, SamplingSpec
from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.body_structure import KINDS, Structure, structure_of
from bulkrun.job.prompts.own_values import own_values
from bulkrun.job.prompts.templates import unknown_column
from bulkrun.request import BOUNDS, RowError

_CACHED_COMBINATIONS = 4096
_NO_PLACES = re.compile(r"(?<=[0-9])\.0*\s*\Z", re.ASCII)  # as pandas writes a column of integers and nulls to CSV
_NONE: Mapping[str, Any] = MappingProxyType({})


class RowSampling(NamedTuple):
    """What one row's sampling comes to. `overrides` is its own values as JSON, None when it has none; `adapter`, which
    is one of them, that of its model."""

    overrides: str | None
    max_tokens: int
    greedy: bool
    adapter: str = ""


# Of a text that is embedded or classified: nothing is generated, and equal texts have equal results.
NO_OUTPUT = RowSampling(None, max_tokens=0, greedy=True)


class Overrides:
    """Reads the columns of `sampling.per_row`. Raises JobFileError for a column that the input does not have."""

    def __init__(self, sampling: SamplingSpec, columns: Sequence[str]) -> None:
        unknown = [(key, name) for key, name in sampling.per_row.items() if name not in columns]
        if unknown:
            raise JobFileError([f"sampling.per_row.{key}: {unknown_column(name, columns)}" for key, name in unknown])
        self._sampling = sampling
        self._column_of: dict[str, str] = dict(sorted(sampling.per_row.items()))
        # Rows repeat their values: a job has few combinations, and each is checked once.
        self._check: Callable[[str, frozenset[str]], RowSampling | RowError] = lru_cache(_CACHED_COMBINATIONS)(
            self._checked
        )
        job = sampling.to_params()
        self._job = RowSampling(None, job.max_tokens, job.greedy)

    @property
    def reads(self) -> list[str]:
        """The columns that are read."""
        return list(dict.fromkeys(self._column_of.values()))

    def of_row(self, row: Mapping[str, Any], own: Mapping[str, Any] = _NONE) -> RowSampling | RowError:
        """The sampling of one row (column -> Python value), or a `bad_input` that names the column and the value.

        `own` are values that the row brings by other ways than a column, typed already; they win.
        """
        values: dict[str, Any] = {}
        for key, column in self._column_of.items():
            if row[column] is None or row[column] == "":  # CSV's cells are never null
                continue
            try:
                values[key] = sampling_value(key, row[column])
            except ValueError as problem:
                return RowError("bad_input", f"column {column!r} (sampling.{key}): {problem}")
        values |= own
        if not values:
            return self._job
        from_columns = frozenset(self._column_of.keys() - own.keys())
        return self._check(json.dumps(values, separators=(",", ":"), ensure_ascii=False), from_columns)

    def _checked(self, overrides: str, from_columns: frozenset[str]) -> RowSampling | RowError:
        """`from_columns`: the keys whose value would be a column's."""
        values, adapter, _ = own_values(overrides)
        try:
            if isinstance(schema := values.get("structured_outputs"), str):
                _check_schema(schema)
            if isinstance(calls := values.get("tool_calls"), dict):
                _check_parameters(calls.get("functions", ()))
            params = self._sampling.to_params(values)
        except ValueError as problem:
            key = str(problem).split(":")[0]
            column = self._column_of[key] if key in from_columns else None
            where = f"column {column!r} (sampling.{key})" if column else "this row's sampling values"
            return RowError("bad_input", f"{where}: {problem}")
        return RowSampling(overrides, params.max_tokens, params.greedy, adapter)


def sampling_value(key: str, value: Any) -> int | float | str | list[str] | list[int] | dict[str, float] | Structure:
    """The value as the type that `key` has; text is read as a number (CSV columns are text). Raises ValueError."""
    if key in ("stop", "bad_words"):
        return _texts(value)
    if key in ("stop_token_ids", "allowed_token_ids"):
        return token_ids_in(value)
    if key == "logit_bias":
        return _biases(value)
    if key in get_args(Flag):
        return _flag(value)
    if key == "structured_outputs":
        return _structure(value)
    return _number(int if key == "seed" else BOUNDS[key].kind, value)


def _flag(value: Any) -> bool:
    """CSV's columns are text, and so is what programs write into them: true, True, TRUE."""
    flag = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError(f"{value!r} is not true or false")
    return flag


def _number(kind: type[int] | type[float], value: Any) -> int | float:
    if isinstance(value, Decimal):
        value = _plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = kind(_NO_PLACES.sub("", value) if kind is int and isinstance(value, str) else value)
    except (ValueError, OverflowError):
        number = None
    if number is None or (not isinstance(value, str) and number != value):
        raise ValueError(f"{value!r} is not {'a whole number' if kind is int else 'a number'}")
    return number


def _plain_number(value: Decimal) -> int | float:
    """To DuckDB a literal 0.7 is a decimal, and a sum of integers is one with no places."""
    return int(value) if value == value.to_integral_value() else float(value)


def _structure(value: Any) -> Structure:
    """A JSON schema, as an object or as text, or what the key itself takes: {choice: ...} and the like."""
    given = _parsed(value) if isinstance(value, str) else without_nulls(value)
    if isinstance(given, dict) and given and given.keys() <= KINDS.keys():  # as a schema it would say nothing
        try:
            structure = structure_of({"structured_outputs": given})
        except BadBody as problem:
            raise ValueError(str(problem).removeprefix("body.structured_outputs").lstrip(".: ")) from None
        assert structure is not None, "any text will do of none of the kinds"
        return structure
    return value if isinstance(value, str) else _schema_text(given)


def _parsed(text: str) -> Any:
    """What the text says in JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _schema_text(schema: Any) -> str:
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False, default=str)


def _check_schema(text: str) -> None:
    """Raise ValueError, in the words of a sampling value, unless the text is a JSON schema."""
    try:
        check_schema(json.loads(text))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"structured_outputs: {problem}") from None


def _check_parameters(functions: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the parameters of functions that have to be called are JSON schemas."""
    for function in functions:
        try:
            check_schema(function["parameters"])
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"tools: the parameters of {function['name']!r}: {problem}") from None


def _texts(value: Any) -> str | list[str]:
    listed = list_in(value) if isinstance(value, str) else value
    strings = [value] if listed is None else listed
    if not isinstance(strings, list) or not all(
        isinstance(text, str) and text and is_unicode(text) for text in strings
    ):
        fix = "" if listed is value else f"; if this very text is meant, put it in a list: {json.dumps([value])}"
        raise ValueError(f"{value!r} is not a non-empty string or a list of them{fix}")
    return value if listed is None else strings


def token_ids_in(value: Any) -> list[int]:
    """A list of token ids, which may be JSON in a column of text. Raises ValueError."""
    listed = list_in(value) if isinstance(value, str) else value
    if not isinstance(listed, list):
        raise ValueError(f"{value!r} is not a list of token ids, as [5, 17]")
    if all(type(token_id) is int for token_id in listed):  # a prompt has thousands
        return listed
    return [int(_number(int, token_id)) for token_id in listed]


def _biases(value: Any) -> dict[str, float]:
    """Sorted by token id. A column of maps holds pairs, one of objects null for each key that a row has not."""
    given = _parsed(value) if isinstance(value, str) else without_nulls(value)
    if isinstance(given, list) and all(isinstance(pair, tuple) for pair in given):
        given = dict(given)
    if not isinstance(given, dict) or not all(str(token_id).isdecimal() for token_id in given):
        raise ValueError(f'{value!r} is not a mapping of token ids to numbers, as {{"5": -100}}')
    return {str(token_id): _number(float, given[token_id]) for token_id in sorted(given, key=int)}

"""One batch of prompts as rows of a shard file, and what the index needs of them.

This is where a row gets its number, its id as text, and its final token ids (fitted to the model's length). Knows the
columns of a shard; knows nothing of windows, order or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.inputs.batch import InputBatch
from bulkrun.errors import InputError, JobFileError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.index import I64, MAX_LEVELS, U64
from bulkrun.job.plan.priorities import Priorities
from bulkrun.job.plan.shard_file import shard_schema
from bulkrun.job.plan.sizes import RowSizes
from bulkrun.job.prompts.encoder import Prompt, joined
from bulkrun.job.prompts.fit import PromptFitter, fitter_of
from bulkrun.job.prompts.templates import unknown_column
from bulkrun.request import RowError


@dataclass(frozen=True)
class PlannedRows:
    """Rows of one batch: `table` has the shard columns (`order` not known yet), the arrays are per row.

    `tokens` are all prompts one after the other. `ids` is None where rows have no id column, the adapter where a row
    cannot run.
    """

    table: pa.RecordBatch
    tokens: npt.NDArray[np.int32]
    lengths: I64
    outputs: I64
    nbytes: I64
    variants: U64
    mergeable: npt.NDArray[np.bool_]
    error_codes: list[str]
    truncated: int
    ids: list[str | None] | None
    priorities: I64
    adapters: list[str | None]


@dataclass(frozen=True)
class _Fitted:
    """The prompts of one batch as they will run, or why they cannot; the rest as in `PlannedRows`."""

    prompts: list[Prompt | RowError]
    tokens: npt.NDArray[np.int32]
    lengths: I64
    ids: list[str | None] | None
    priorities: I64


class RowMaker:
    """Makes the shard rows of one job, with the columns `passthrough` of its input's `columns`.

    A row is named by `input.id`, or by its number. One whose id is not text is an error row; with `run.incremental` so
    is one whose id is null. `prefix_levels` is how deep the shared prefixes of its prompts are looked for.
    """

    def __init__(self, spec: JobSpec, columns: Sequence[str], passthrough: pa.Schema, max_model_len: int) -> None:
        self.schema = shard_schema(passthrough)
        self._passthrough = passthrough
        self._fitter = fitter_of(spec, max_model_len)
        self._max_model_len = max_model_len
        self.prefix_levels = MAX_LEVELS if spec.generates else 0
        self._sizes = RowSizes.of(spec.sampling, _numbers_per_text(spec))
        self._id_column = spec.input.id
        self._priorities = Priorities(spec.input.priority, columns)
        self._needs_ids = spec.run.incremental

    def make(self, batch: InputBatch, prompts: Sequence[Prompt | RowError], first_row: int) -> PlannedRows:
        """The rows of `batch`, the first of which is row `first_row` of the input."""
        fitted = self._fit(batch, prompts)
        outputs = np.array([self._expected_output(prompt) for prompt in fitted.prompts], np.int64)
        texts = np.array([len(p.parts) or 1 if isinstance(p, Prompt) else 0 for p in fitted.prompts], np.int64)
        payload = _struct(batch.rows, self._passthrough)
        return PlannedRows(
            table=self._table(fitted, _numbers(batch, first_row), payload, first_row),
            tokens=fitted.tokens,
            lengths=fitted.lengths,
            outputs=outputs,
            nbytes=self._sizes.of_rows(payload, fitted.lengths, outputs, texts),
            variants=np.array([_variant(prompt) for prompt in fitted.prompts], np.uint64),
            mergeable=np.array([isinstance(p, Prompt) and p.sampling.greedy for p in fitted.prompts], np.bool_),
            error_codes=[prompt.code for prompt in fitted.prompts if isinstance(prompt, RowError)],
            truncated=sum(_is_cut(old, new) for old, new in zip(prompts, fitted.prompts, strict=True)),
            ids=fitted.ids,
            priorities=fitted.priorities,
            adapters=[p.sampling.adapter if isinstance(p, Prompt) else None for p in fitted.prompts],
        )

    def _fit(self, batch: InputBatch, prompts: Sequence[Prompt | RowError]) -> _Fitted:
        """Each prompt as it will run, or why it cannot: its length first, then its id, then its priority."""
        fitted = [fit_prompt(self._fitter, prompt) for prompt in prompts]
        ids = None if self._id_column is None else id_texts(batch.rows.column(self._id_column), self._id_column)
        if ids is not None and None in ids:
            given = batch.rows.column(self._id_column).is_valid().to_pylist()
            fitted = [self._named(*row) for row in zip(fitted, ids, given, strict=True)]
        ranked = self._priorities.of(batch.rows)
        fitted = [p if isinstance(p, RowError) else ranked.errors.get(row, p) for row, p in enumerate(fitted)]
        tokens, lengths = _flat([prompt.token_ids if isinstance(prompt, Prompt) else [] for prompt in fitted])
        return _Fitted(fitted, tokens, lengths, ids, ranked.values)

    def _named(self, prompt: Prompt | RowError, name: str | None, given: bool) -> Prompt | RowError:
        """The prompt of the row with id `name`, or why the row has no usable id; `given`: its id is not null."""
        if isinstance(prompt, RowError) or name is not None or not (given or self._needs_ids):
            return prompt
        what = "is not valid UTF-8" if given else "is null; run.incremental needs an id in every row"
        return RowError("bad_input", f"column {self._id_column!r} {what}")

    def _expected_output(self, prompt: Prompt | RowError) -> int:
        if isinstance(prompt, RowError):
            return 0
        room = max(0, self._max_model_len - len(prompt.token_ids))  # several texts may be longer together
        return self._sizes.generations * min(prompt.sampling.max_tokens, room)

    def _table(
        self, fitted: _Fitted, numbers: Sequence[str], payload: pa.StructArray, first_row: int
    ) -> pa.RecordBatch:
        prompts, ids = fitted.prompts, fitted.ids
        rows = np.arange(first_row, first_row + len(prompts))
        names = numbers if ids is None else [text if text is not None else numbers[k] for k, text in enumerate(ids)]
        failed = [isinstance(prompt, RowError) for prompt in prompts]
        offsets = pa.array(np.concatenate([[0], np.cumsum(fitted.lengths)]).astype(np.int32))
        columns = [
            pa.array(rows),
            pa.array(np.zeros(len(rows), np.int32)),
            pa.array(names, pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(fitted.tokens), mask=pa.array(failed, pa.bool_())),
            pa.array([p.sampling.overrides if isinstance(p, Prompt) else None for p in prompts], pa.string()),
            pa.array([p.code if isinstance(p, RowError) else None for p in prompts], pa.string()),
            pa.array([p.message if isinstance(p, RowError) else None for p in prompts], pa.string()),
            pa.array(fitted.priorities.astype(np.int32)),
            payload,
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def fit_prompt(fitter: PromptFitter, prompt: Prompt | RowError) -> Prompt | RowError:
    """The prompt as it will run: cut to fit, its outputs cut to the row's budget; or why it cannot run."""
    if isinstance(prompt, RowError):
        return prompt
    if prompt.parts:
        return joined([fit_prompt(fitter, part) for part in prompt.parts], prompt.several)
    token_ids = fitter.fit(prompt.token_ids, prompt.sampling.max_tokens, prompt.frame, prompt.cut)
    if isinstance(token_ids, RowError):
        return token_ids
    sampling = fitter.budget.limit(len(token_ids), prompt.sampling)
    return sampling if isinstance(sampling, RowError) else Prompt(token_ids, sampling)


def _is_cut(prompt: Prompt | RowError, fitted: Prompt | RowError) -> bool:
    if isinstance(prompt, RowError) or isinstance(fitted, RowError):
        return False
    return len(fitted.token_ids) < len(prompt.token_ids)


def _numbers(batch: InputBatch, first_row: int) -> list[str]:
    """What rows without an id are called: their numbers, those of the input that they were picked from if any."""
    rows = range(first_row, first_row + batch.rows.num_rows) if batch.numbers is None else batch.numbers.to_pylist()
    return [str(row) for row in rows]


def check_id_column(name: str | None, schema: pa.Schema) -> None:
    """Raise JobFileError for an id column that the input does not have, InputError for one that cannot name rows."""
    if name is None:
        return
    if name not in schema.names:
        raise JobFileError([f"input.id: {unknown_column(name, schema.names)}"])
    id_texts(pa.nulls(0, schema.field(name).type), name)


def id_texts(column: pa.Array, name: str) -> list[str | None]:
    """The ids of a batch as text, None where null or not valid UTF-8.

    Raises InputError for a column whose values have no plain text.
    """
    try:
        texts: list[str | None] = pc.cast(column, pa.string()).to_pylist()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        if any(is_bytes(column.type) for is_bytes in _BYTES):
            return [_utf8(value) for value in column.to_pylist()]
        raise InputError(
            f"input.id: column {name!r} is {column.type}, which cannot name a row; use text or numbers"
        ) from None
    return texts


# Text that its writer did not declare as such; arrow casts all values of an array or none.
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


def _utf8(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _struct(rows: pa.RecordBatch, passthrough: pa.Schema) -> pa.StructArray:
    if not len(passthrough):
        return pa.array([{}] * rows.num_rows, pa.struct([]))
    return pa.StructArray.from_arrays([rows.column(name) for name in passthrough.names], fields=list(passthrough))


def _flat(prompts: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], I64]:
    lengths = np.array([len(ids) for ids in prompts], np.int64)
    return np.fromiter(chain.from_iterable(prompts), np.int32, int(lengths.sum())), lengths


@lru_cache(4096)
def _text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _variant(prompt: Prompt | RowError) -> int:
    """A number for the row's own sampling values: 0 when it has none."""
    return _text_hash(prompt.sampling.overrides) if isinstance(prompt, Prompt) and prompt.sampling.overrides else 0


def _numbers_per_text(spec: JobSpec) -> int:
    """What a model makes of a text that it does not continue: numbers of a vector, or scores."""
    return spec.embedding.dimensions or len(spec.classification.labels or ())

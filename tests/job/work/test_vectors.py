"""Vectors keep their bits from the engine to the column, and no text is decoded for them."""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from bulkrun.data.results.schema import COSINE_FIELDS, RESULT_FIELDS, VECTOR_FIELDS, VECTORS_FIELDS
from bulkrun.job.store.journal import JournalRecord, encode_record
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.job.work.shard_work import Generation
from bulkrun.job.work.vectors import (
    VectorReader,
    cosines,
    reader_of,
    vector_column,
    vector_of,
    vectors_column,
    vectors_of,
)
from bulkrun.request import Completion, Request, RowError

ODD = [0.0, -0.0, 1e-45, -1.17549435e-38, 3.4028235e38, 0.1, float("inf")]
BYTES = struct.pack(f"<{len(ODD)}f", *ODD)


def no_text(*_: Any, **__: Any) -> list[str]:
    raise AssertionError("a vector is not decoded")


def record(done: Completion, fields: Any = VECTOR_FIELDS, parts: tuple[int, ...] = ()) -> JournalRecord:
    answer = Answer(Generation(Request("a", (1, 2, 3), parts=parts), 0, (4, 5), 0), done)
    [made] = reader_of(no_text, fields).records([answer])
    return made


def test_a_vector_keeps_every_bit_through_journal_and_column() -> None:
    made = record(Completion("a", (), "stop", num_prompt_tokens=3, embedding=BYTES))
    assert (made.rows, made.response, made.prompt_tokens, made.completion_tokens) == ((4, 5), None, 3, 0)
    text = json.loads(encode_record(made)[9:])["extra"]["embedding"]
    assert vector_of(text).tobytes() == BYTES
    column = vector_column([None, text, text, None])
    assert column.type == pa.list_(pa.float32()) and column.is_null().to_pylist() == [True, False, False, True]
    assert np.asarray(column.values).tobytes() == 2 * BYTES
    assert column.take(pa.array([2])).to_pylist() == [np.float32(ODD).tolist()]


def test_a_column_of_errors_alone_and_one_of_nothing_have_the_type_of_vectors() -> None:
    for texts in ([], [None, None]):
        column = vector_column(texts)
        assert column.type == pa.list_(pa.float32()) and column.to_pylist() == texts


@pytest.mark.parametrize(("parts", "shape"), [((), (1, 6)), ((1, 2), (2, 3)), ((1, 1, 1), (3, 2))])
def test_a_row_of_several_texts_has_a_vector_of_each(parts: tuple[int, ...], shape: tuple[int, int]) -> None:
    made = record(Completion("a", (), "stop", num_prompt_tokens=3, embedding=BYTES[:24]), VECTORS_FIELDS, parts)
    text = json.loads(encode_record(made)[9:])["extra"]["embeddings"]
    assert vectors_of(text).shape == shape and vectors_of(text).tobytes() == BYTES[:24]
    column = vectors_column([text, None, text])
    assert column.type == VECTORS_FIELDS[2].type
    assert column.to_pylist() == [vectors_of(text).tolist(), None, vectors_of(text).tolist()]


def test_a_column_of_lists_of_vectors_may_have_rows_of_other_sizes_and_none() -> None:
    assert vectors_column([]).type == vectors_column([None]).type == VECTORS_FIELDS[2].type
    assert vectors_column([None, None]).to_pylist() == [None, None]
    texts = [f"{count}:{base64.b64encode(BYTES[: 4 * count]).decode()}" for count in (2, 1, 3)]
    assert [list(map(len, row)) for row in vectors_column(texts).to_pylist()] == [[1, 1], [1], [1, 1, 1]]


def test_vectors_of_other_lengths_stand_side_by_side() -> None:
    texts = [base64.b64encode(BYTES[: 4 * length]).decode() for length in (2, 1, 3)]
    assert list(map(len, vector_column(texts).to_pylist())) == [2, 1, 3]


def test_a_failed_row_has_no_vector() -> None:
    made = record(Completion("a", (), "error", error=RowError("too_long", "why"), embedding=BYTES))
    assert (made.error_code, made.error_message, made.extra, made.prompt_tokens) == ("too_long", "why", {}, 3)


def test_a_row_of_which_no_vector_was_made_is_no_answer() -> None:
    made = record(Completion("a", (), "stop", num_prompt_tokens=3))
    assert made.error_code == "engine_error" and made.extra == {}


@pytest.mark.parametrize(("fields", "kind"), [(VECTOR_FIELDS, VectorReader), (RESULT_FIELDS, AnswerReader)])
def test_the_columns_of_a_job_tell_who_reads_its_answers(fields: Any, kind: type) -> None:
    assert type(reader_of(no_text, fields)) is kind


def test_scores_of_vectors_are_the_cosines_of_each_two() -> None:
    """Oracle: torch's. Huge numbers and tiny ones have one too, and a vector of zeros has 0."""
    near = torch.tensor([[3.0, 4.0], [4.0, 3.0]])
    vectors = torch.cat((near, torch.tensor([[1e30, 0.0], [-1e30, 0.0], [0.0, 0.0], [1.0, 2.0]]), 1e-5 * near))
    made = record(
        Completion("a", (), "stop", num_prompt_tokens=3, embedding=vectors.numpy().tobytes()), COSINE_FIELDS, (1,) * 8
    )
    wanted = torch.nn.CosineSimilarity(dim=1)(*vectors.double().view(4, 2, 2).unbind(1))
    assert vector_of(made.extra["scores"]).tolist() == pytest.approx(wanted.tolist(), abs=1e-7)
    assert made.extra["score"] == pytest.approx(0.96) and "label" not in made.extra


def test_the_cosines_of_a_line_with_many_pairs_take_little_memory_beside_the_vectors() -> None:
    vectors = torch.randn(2 * 2001, 128, generator=torch.Generator().manual_seed(0))
    held = vectors.numpy().tobytes()
    tracemalloc.start()
    made = cosines(held, len(vectors))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    wanted = torch.nn.CosineSimilarity(dim=1)(*vectors.view(2001, 2, 128).unbind(1))
    assert vector_of(made["scores"]).tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    assert made["score"] == pytest.approx(float(wanted.max()), abs=1e-6) and peak < len(held)

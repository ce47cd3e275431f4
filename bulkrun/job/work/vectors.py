"""Vectors and scores on their way from an engine into a part: bytes, text in a journal, a column of lists.

The numbers are never numbers of Python's: a million vectors are a billion of them. The text is base64 of the engine's
bytes, so that a vector comes out of a journal with the bits that went in. Knows no files, threads or engine.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkrun.data.results.schema import EMBEDDING, EMBEDDINGS, SCORES, labels_of
from bulkrun.job.outputs.output_text import Decode
from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.request import Completion, RowError

_FLOAT = np.dtype("<f4")
_LEAST_LENGTH = 1e-8  # of each vector, as in torch's CosineSimilarity, which vLLM takes
_OF = ":"  # between how many vectors there are and their numbers
_PAIRS_AT_ONCE = 256  # a line may have thousands, and the numbers of each are taken several times over in float64
F32 = npt.NDArray[np.float32]


class VectorReader:
    """Reads what an engine made of texts: none is decoded. As `AnswerReader`, for a job of vectors or of scores."""

    def __init__(self, extra: Callable[[bytes, int], dict[str, Any]]) -> None:
        """`extra`: the columns of a row's numbers, which are of so many texts."""
        self._extra = extra

    def records(self, answers: Sequence[Answer]) -> list[JournalRecord]:
        """One record per answer, in their order."""
        return [_record(answer, self._extra) for answer in answers]


def reader_of(decode: Decode, fields: Sequence[pa.Field]) -> AnswerReader | VectorReader:
    """What reads the answers of a job whose results have these columns."""
    by_name = {field.name: field for field in fields}
    if EMBEDDING in by_name:
        return VectorReader(lambda made, _: {EMBEDDING: _text_of(made)})
    if EMBEDDINGS in by_name:
        return VectorReader(lambda made, num_texts: {EMBEDDINGS: f"{num_texts}{_OF}{_text_of(made)}"})
    if SCORES in by_name and "label" not in by_name:
        return VectorReader(cosines)
    if SCORES in by_name:
        labels = labels_of(by_name[SCORES])
        return VectorReader(lambda made, _: scored(made, labels))
    return AnswerReader(decode, fields)


def scored(made: bytes, labels: Sequence[str]) -> dict[str, Any]:
    """The likeliest label, its score and all scores; of a model with one output the score alone.

    A row of several pairs, which such a model alone is given, has a score of each, and `score` is the highest.
    """
    scores = np.frombuffer(made, _FLOAT)
    best = int(scores.argmax())
    return {"label": labels[best] if len(labels) > 1 else None, "score": float(scores[best]), SCORES: _text_of(made)}


def cosines(made: bytes, num_texts: int) -> dict[str, Any]:
    """The cosine of each two vectors, which stand side by side, and the highest. That of a vector of zeros is 0.

    `made`: float32 [num_texts, D] as bytes, `num_texts` even.
    """
    pairs = np.frombuffer(made, _FLOAT).reshape(num_texts // 2, 2, -1)
    scores = np.concatenate([_cosines(pairs[at : at + _PAIRS_AT_ONCE]) for at in range(0, len(pairs), _PAIRS_AT_ONCE)])
    return {"score": float(scores.max()), SCORES: _text_of(scores.tobytes())}


def _cosines(pairs: F32) -> F32:
    """Of some pairs, float32 [P, 2, D]: float32 [P]."""
    exact = pairs.astype(np.float64)
    lengths = np.maximum(np.linalg.norm(exact, axis=-1), _LEAST_LENGTH).prod(axis=-1)
    scores: F32 = (exact.prod(axis=1).sum(axis=-1) / lengths).astype(_FLOAT)
    return scores


def vector_or_error(done: Completion) -> bytes | RowError:
    """The numbers that an engine made of a text, or why there are none."""
    if done.error is not None:
        return done.error
    return done.embedding or RowError("engine_error", "the engine made nothing of this row")


def _record(answer: Answer, extra: Callable[[bytes, int], dict[str, Any]]) -> JournalRecord:
    done, generation, made = answer.completion, answer.generation, vector_or_error(answer.completion)
    error = made if isinstance(made, RowError) else None
    return JournalRecord(
        rows=generation.rows,
        sample=generation.sample,
        finish_reason=done.finish_reason,
        prompt_tokens=done.num_prompt_tokens or len(generation.request.prompt_token_ids),
        error_code=error.code if error else None,
        error_message=error.message if error else None,
        extra=extra(made, generation.num_texts) if isinstance(made, bytes) else {},
        cached_tokens=done.num_cached_tokens,
    )


def _text_of(made: bytes) -> str:
    return base64.b64encode(made).decode()


def vector_of(text: str) -> F32:
    """The numbers of one vector, from its text in a journal."""
    return np.frombuffer(base64.b64decode(text), _FLOAT).astype(np.float32)


def vectors_of(text: str) -> F32:
    """The vectors of a row of several texts, [texts, dimensions], from their text in a journal."""
    count, _, numbers = text.partition(_OF)
    return vector_of(numbers).reshape(int(count), -1)


def vectors_column(texts: Sequence[str | None]) -> pa.ListArray:
    """Lists of vectors, from their texts, as a column of lists of lists; null where there is none."""
    rows = [None if text is None else vectors_of(text) for text in texts]
    there = [row for row in rows if row is not None]
    lengths = [length for row in there for length in [row.shape[1]] * len(row)]
    numbers = np.concatenate([row.reshape(-1) for row in there]) if there else np.zeros(0, np.float32)
    vectors = pa.ListArray.from_arrays(pa.array(_ends(lengths)), pa.array(numbers))
    ends = _ends([0 if row is None else len(row) for row in rows])
    return pa.ListArray.from_arrays(pa.array(ends), vectors, mask=pa.array([row is None for row in rows], pa.bool_()))


def _ends(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lengths]).astype(np.int32)


def vector_column(texts: Sequence[str | None]) -> pa.ListArray:
    """Vectors, from their texts, as a column of lists; null where there is none."""
    vectors = [b"" if text is None else base64.b64decode(text) for text in texts]
    numbers = np.frombuffer(b"".join(vectors), _FLOAT).astype(np.float32, copy=False)
    ends = _ends([len(vector) // _FLOAT.itemsize for vector in vectors])
    missing = pa.array([text is None for text in texts], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(numbers), mask=missing)

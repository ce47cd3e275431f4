"""What the runs of a campaign compute: text, vectors, lists of vectors, labels, or calls of tools behind thoughts; each
with its oracle.

The rows and their plan are those of `small_runs`; what an answer must hold comes from the fake model's rule alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bulkrun.engine.parts_engine import PartsEngine
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.own_values import PARTS
from bulkrun.request import Engine, Request
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder, FakeEngine, decode, expected_tokens, expected_vector
from tests.job.small_runs import Row

LABELS = [f"label {number}" for number in range(VECTOR_NUMBERS)]
Values = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """`columns` are those of an answer; `answer` is what the request of a row must give in them. `divides`: a row of
    several tokens is two texts."""

    sections: Mapping[str, Any]
    engine: Callable[..., Engine]
    columns: tuple[str, ...]
    answer: Callable[[Request], Values]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine
    divides: bool = False

    def job(self, out: Path, **run: Any) -> JobSpec:
        given = {"checkpoint_every": 0.05, "max_error_rate": 1.0, **run}
        return job_of(
            {
                "name": "campaign",
                "model": "fake",
                "input": {"path": "rows.jsonl"},
                "prompt": {"column": "doc"},
                "output": {"path": str(out)},
                "run": given,
                **self.sections,
            }
        )

    def rows(self, rows: list[Row]) -> list[Row]:
        """The rows as the plan of such a job has them."""
        if not self.divides:
            return rows
        lengths = [[1, len(row.token_ids or ()) - 1] for row in rows]
        return [
            replace(row, overrides={PARTS: parts}) if parts[1] > 0 else row
            for row, parts in zip(rows, lengths, strict=True)
        ]

    def make_engine(self, max_num_seqs: int = 4, *, step_s: float = 0.0) -> Engine:
        return self.engine(max_num_seqs, step_s=step_s, **self.options)

    def oracle(self, rows: list[Row], spec: JobSpec) -> list[Values]:
        """The output rows of an unbroken run, in order."""
        return [self._wanted(row, spec) for row in self.rows(rows)]

    def _wanted(self, row: Row, spec: JobSpec) -> Values:
        head = {"doc": f"text {row.row}", "row": row.row, "sample": 0, "error_code": row.error_code}
        if row.token_ids is None:
            return head | dict.fromkeys(self.columns)
        parts = tuple((row.overrides or {}).get(PARTS, ()))
        return head | self.answer(Request("", row.token_ids, spec.sampling.to_params({}), 0, parts=parts))

    def results(self, out: Path) -> list[Values]:
        """The same of the parts, by a plain read."""
        names = ["doc", "row", "sample", "error_code", *self.columns]
        parts = (pq.read_table(part, page_checksum_verification=True) for part in sorted(out.glob("*.parquet")))
        return [{name: _plain(row[name]) for name in names} for part in parts for row in part.to_pylist()]


def _plain(value: Any) -> Any:
    """Vectors as their bytes, calls without their ids, which are of rows."""
    if not isinstance(value, list):
        return value
    if any(isinstance(one, dict) for one in value):
        return [(call["name"], call["arguments"]) for call in value]
    if any(isinstance(one, list) for one in value):
        return list(map(_plain, value))
    return np.float32(value).tobytes()


def _text(request: Request) -> Values:
    return {"response": decode([expected_tokens(request)])[0]}


def _vector(request: Request) -> Values:
    return {"embedding": expected_vector(request.prompt_token_ids)}


def _vectors(request: Request) -> Values:
    ids, texts = request.prompt_token_ids, [request.prompt_token_ids]
    if request.parts:
        texts = [ids[: request.parts[0]], ids[request.parts[0] :]]
    return {"embeddings": list(map(expected_vector, texts))}


def _label(request: Request) -> Values:
    scores = np.frombuffer(expected_vector(request.prompt_token_ids), "<f4")
    best = int(scores.argmax())
    return {"label": LABELS[best], "score": float(scores[best]), "scores": scores.tobytes()}


def _said(request: Request) -> str:
    return decode([expected_tokens(request)])[0][:9]


def _arguments(request: Request) -> str:
    return json.dumps({"of": _said(request)})


def _calling(request: Request) -> tuple[int, ...]:
    """Thoughts, an answer and a call of a tool."""
    said, call = _said(request), f'{{"name": "look", "arguments": {_arguments(request)}}}'
    return tuple(map(ord, f"<think>{said}!</think>{said}?<tool_call>{call}</tool_call>"))


def _called(request: Request) -> Values:
    said = _said(request)
    calls = [("look", _arguments(request))]
    return {"reasoning": f"{said}!", "response": f"{said}?", "tool_calls": calls}


_GREEDY = {"temperature": 0.0, "max_tokens": 8, "seed": 5}
_OF_VECTORS = {"pooling": "mean", "normalize": True, "dimensions": VECTOR_NUMBERS, "prompt": ""}
KINDS: Mapping[str, Kind] = {
    "text": Kind({"sampling": _GREEDY}, FakeEngine, ("response",), _text),
    "vectors": Kind({"task": "embed", "embedding": _OF_VECTORS}, FakeEmbedder, ("embedding",), _vector),
    "lists": Kind(
        {"task": "embed", "embedding": _OF_VECTORS, "prompt": {"column": "doc", "text_lists": True}},
        lambda *given, **options: PartsEngine(FakeEmbedder(*given, **options), "text"),
        ("embeddings",),
        _vectors,
        divides=True,
    ),
    "labels": Kind(
        {"task": "classify", "classification": {"activation": "none", "labels": LABELS}},
        FakeEmbedder,
        ("label", "score", "scores"),
        _label,
    ),
    "calls": Kind(
        {"sampling": _GREEDY | {"max_tokens": 200, "thinking": {}, "tool_calls": {"format": "hermes"}}},
        FakeEngine,
        ("reasoning", "response", "tool_calls"),
        _called,
        {"answer": _calling},
    ),
}

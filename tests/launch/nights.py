"""Nights for tests: the real `submit` and `retry` on real files, with a planner and a fake engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from bulkrun.job.update.update_claim import hold
from bulkrun.job.views.verify import verify_run
from bulkrun.job.work.shard_work import row_seed
from bulkrun.launch.preparation.prepare import PreparedJob, prepare
from bulkrun.launch.runs import retry as retry_module
from bulkrun.launch.runs import submit as submit_module
from bulkrun.launch.runs.run import Submitted
from bulkrun.launch.runs.submission import Submission
from bulkrun.request import Request
from tests.job.fake_engine import FakeEngine, decode, expected_tokens
from tests.launch.one_process import Decode, one_process


class Silent:
    """A view that shows nothing."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def update(self, snapshot: object) -> None: ...


@dataclass
class Nights:
    """One job in a folder: rows.jsonl in, ./out out. `ran` counts generations of the last command."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    refuse: Callable[[Request], bool] = lambda request: False
    make_engine: Callable[[], Any] | None = None  # in place of the fake one, which counts what ran
    ran: int = 0
    _prepared: dict[str, PreparedJob] = field(default_factory=dict)  # by its job: preparing one takes its time

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def spec(self, **changed: Any) -> JobSpec:
        values: dict[str, Any] = {
            "name": "night",
            "model": "bundled:tiny",
            "input": {"path": str(self.folder / "rows.jsonl"), "id": "id"},
            "prompt": {"template": "Say {{ text }}"},
            "sampling": {"max_tokens": 6, "temperature": 0},
            "output": {"path": str(self.out), "rows_per_file": 8},
            "run": {"incremental": True, "checkpoint_every": 0.02, "max_error_rate": 1.0},
        }
        for dotted, value in {**self.settings, **changed}.items():
            section, _, key = dotted.partition("__")
            values[section] = {**values.get(section, {}), key: value} if key else value
        return JobSpec.model_validate(values)

    def write(self, rows: Sequence[dict[str, Any] | str]) -> None:
        """Rows, or lines as they are."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def submit(self, *, flags: dict[str, bool] | None = None, **changed: Any) -> Submitted:
        with self.one_process():
            return submit_module.submit(Submission(spec=self.spec(**changed), **(flags or {})), Silent())

    def retry(self, *overrides: str, codes: Sequence[str] = (), begin_anew: bool = False) -> Submitted:
        with self.one_process():
            return retry_module.retry(self.out, Silent(), overrides=overrides, codes=codes, begin_anew=begin_anew)

    @contextmanager
    def one_process(self) -> Iterator[None]:
        """No child processes and no model."""
        engines: list[Any] = []

        def load(prepared: PreparedJob) -> tuple[Any, Decode]:
            engines.append(self.make_engine() if self.make_engine else FakeEngine(4, refuse=self.refuse))
            return engines[-1], decode

        self.ran = 0
        with one_process(load):
            yield
        self.ran = sum(len(engine.seen) for engine in engines)

    def results(self) -> dict[Any, dict[str, Any]]:
        """id -> its row, by a plain glob; fails where an id is there twice. For jobs with one sample."""
        rows = duckdb.connect().sql(f"SELECT * FROM '{self.out}/**/*.parquet'").to_arrow_table().to_pylist()
        by_id = {row["id"]: row for row in rows}
        assert len(by_id) == len(rows), "an id is there twice"
        return by_id

    def expected(self, id_: str, text: str, sample: int = 0, **changed: Any) -> str:
        """What the fake model answers to a row."""
        spec = self.spec(**changed)
        as_json = spec.model_dump_json()
        if as_json not in self._prepared:
            self._prepared[as_json] = prepare(spec)
        prepared = self._prepared[as_json]
        chat = prepared.tokenizer.chat_renderer() if prepared.tokenizer.has_chat_template else None
        prompt = f"Say {text}"
        if chat is not None:
            prompt = chat.render([{"role": "user", "content": prompt}])
        ids = prepared.tokenizer.encode_batch([prompt], add_special_tokens=chat is None)[0]
        seed = row_seed(prepared.spec.sampling.seed, id_, sample)
        return decode([expected_tokens(Request("", ids, prepared.spec.sampling.to_params(), seed))])[0]


def after(other: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Callable[[RunDir], Any]:
    """`hold` for one that has to wait until another has done its work."""

    @contextmanager
    def wait(run: RunDir) -> Iterator[Worker]:
        monkeypatch.undo()
        other()
        with hold(run) as worker:
            yield worker

    return wait


def rows_of(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "text": f"text {number}"} for number in range(start, start + count)]


def whole(nights: Nights) -> None:
    report = verify_run(RunDir(nights.out))
    assert report.ok, report.problems


def stop_at(nights: Nights, generations: int) -> None:
    """Interrupt the fake engine after so many requests have ended."""
    seen: list[str] = []

    def refuse(request: Request) -> bool:
        if request.request_id not in seen:
            seen.append(request.request_id)
        if len(seen) > generations:
            raise KeyboardInterrupt
        return False

    nights.refuse = refuse

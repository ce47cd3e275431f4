"""Commands of a run, in the process that calls, with the fake engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update.compact import compact
from bulkrun.job.work import error_rate
from bulkrun.launch.runs import nightly
from bulkrun.launch.runs import retry as retry_module
from bulkrun.launch.runs import submit as submit_module
from bulkrun.launch.runs.run import join
from bulkrun.launch.runs.submission import Submission
from bulkrun.request import Request
from tests.campaigns.long_life.bucket import Bucket
from tests.campaigns.long_life.oracle import answer, tokens_of
from tests.job.fake_engine import FakeEngine, decode
from tests.launch.nights import Silent
from tests.launch.one_process import one_process

_FEW_ROWS = 3  # that say something about a job, to run.max_error_rate


@dataclass(frozen=True)
class Command:
    """`failing`: the texts of prompts that end with a code in the engine."""

    out: Path
    failing: Mapping[str, str] = field(default_factory=dict)
    bucket: Bucket | None = None

    def submit(self, spec: JobSpec, **flags: bool) -> dict[str, Any]:
        return self._counted(lambda: submit_module.submit(Submission(spec=spec, **flags), Silent()))

    def retry(self, **options: Any) -> dict[str, Any]:
        return self._counted(lambda: retry_module.retry(self.out, Silent(), **options))

    def bring(self) -> dict[str, Any]:
        """`worker` on a finished run."""
        return self._counted(lambda: join(self.out, None, Silent()))

    def compact(self, rows_per_file: int) -> Any:
        with self._small():
            return compact(RunDir(self.out), rows_per_file, grace_s=0)

    def _counted(self, work: Callable[[], Any]) -> dict[str, Any]:
        engines: list[FakeEngine] = []

        def load(_: object) -> tuple[FakeEngine, Any]:
            engines.append(_engine_of({tokens_of(text): code for text, code in self.failing.items()}))
            return engines[-1], decode

        with self._small(), one_process(load):
            done = work()
        ran = sum(len(engine.seen) for engine in engines)
        return {"changes": done.changes, "ran": ran, "worked": done.worked, "exit": done.exit_code}

    @contextmanager
    def _small(self) -> Iterator[None]:
        """What is for large runs takes effect in these."""
        with (
            mock.patch.object(error_rate, "MIN_ROWS", _FEW_ROWS),
            mock.patch.object(nightly, "MIN_ROWS", _FEW_ROWS),
            self.bucket.used() if self.bucket else nullcontext(),
        ):
            yield


def _engine_of(failing: Mapping[tuple[int, ...], str]) -> FakeEngine:
    """An engine in which some prompts fail; those with `engine_error` take it down."""

    def code(request: Request) -> str | None:
        return failing.get(tuple(request.prompt_token_ids))

    return FakeEngine(
        4,
        poison=lambda request: code(request) == "engine_error",
        refuse=lambda request: code(request) == "nan_logits",
        answer=answer,
    )

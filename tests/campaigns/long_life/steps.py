"""What a user does next in a run's life, and what the documents say of it: `Step`s for nightly and for plain runs."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update.compact import compact
from bulkrun.launch.runs import retry as retry_module
from bulkrun.launch.runs import submit as submit_module
from bulkrun.launch.runs.submission import Submission
from tests.campaigns.long_life.input import Row, Table
from tests.campaigns.long_life.oracle import (
    LENIENT,
    TEMPLATES,
    Asker,
    Retry,
    Settings,
    Truth,
    Values,
    either,
    tokens_of,
)
from tests.campaigns.long_life.run import Death, engine_of
from tests.job.fake_engine import FakeEngine, decode
from tests.launch.nights import Silent
from tests.launch.one_process import one_process

if TYPE_CHECKING:
    from tests.campaigns.long_life.life import Life

Change = Callable[[Truth], Truth]
_OVERRIDES: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("sampling.max_tokens=4",), {"max_tokens": 4}),
    (("sampling.seed=9",), {"seed": 9}),
    (("engine.max_model_len=400",), {"max_model_len": 400}),
    (("run.on_too_long=truncate_right",), {"truncate": True}),
    ((f"prompt.template={LENIENT}",), {"template": LENIENT}),
    ((f"prompt.template={LENIENT}", "engine.max_model_len=400"), {"template": LENIENT, "max_model_len": 400}),
)


@dataclass
class Step:
    """A command, and what it means: `errors` are the classes that it may end with (None: it is done)."""

    kind: str
    said: str
    work: Callable[[], Any]
    change: Change = lambda truth: truth
    errors: tuple[str | None, ...] = (None,)
    death: Death | None = None
    begins: bool = False  # a run of its own: the old rows may be gone before the new ones come
    cleans: bool = False
    beside: Callable[[], Any] | None = None  # runs at the same time
    same_beside: bool = False
    idle: bool = False  # it finds nothing to do, and leaves a retry that is under way to its own command
    accepted: Callable[[Any], None] = lambda value: None
    counts: Mapping[str, int] | None = None

    def __str__(self) -> str:
        died = f" {signal.Signals(self.death.signal).name} at {self.death.at}" if self.death else ""
        return f"{self.kind} {self.said}{died}{' twice at once' if self.same_beside else ''}"

    def in_between(self, truth: Truth) -> Truth:
        """What may be there when it was cut short."""
        return either(either(truth, {}) if self.begins else truth, self.change(truth))


@dataclass(frozen=True)
class Command:
    """Commands of a run, in the process that calls, with the fake engine."""

    out: Path
    failing: Mapping[str, str]

    def submit(self, spec: JobSpec, **flags: bool) -> dict[str, Any]:
        return self._counted(lambda: submit_module.submit(Submission(spec=spec, **flags), Silent()))

    def retry(self, **options: Any) -> dict[str, Any]:
        return self._counted(lambda: retry_module.retry(self.out, Silent(), **options))

    def _counted(self, work: Callable[[], Any]) -> dict[str, Any]:
        engines: list[FakeEngine] = []

        def load(_: object) -> tuple[FakeEngine, Any]:
            engines.append(engine_of({tokens_of(text): code for text, code in self.failing.items()}))
            return engines[-1], decode

        with one_process(load):
            done = work()
        ran = sum(len(engine.seen) for engine in engines)
        return {"changes": done.changes, "ran": ran, "worked": done.worked, "exit": done.exit_code}


class Steps:
    """The user of one life: chooses what comes next. What both kinds of runs have."""

    incremental = False

    def __init__(self, life: Life) -> None:
        self.life, self.rng = life, life.rng
        rng: random.Random = life.rng
        self.window_rows, self.rows_per_file = rng.choice([1000, 1000, 5, 2]), rng.choice([1, 3, 4, 100])
        self.logprobs = rng.choice([None, None, None, 1])
        hidden = rng.choice([None, None, "de"])
        self.sql = rng.choice([None, None, None, "SELECT * FROM input"])
        if self.sql is not None and hidden is not None:
            self.sql += f" WHERE tag IS DISTINCT FROM '{hidden}'"
        self.columns = rng.choice([None, None, ["tag"]])
        self.settings = Settings(
            samples=rng.choice([1, 1, 2]), temperature=rng.choice([0.0, 0.0, 0.9]), per_row=rng.random() < 0.3
        )
        self.table = Table(life.folder / "in", rng, typed=rng.random() < 0.5, with_broken=self.sql is None)
        self.table.hidden = hidden if self.sql is not None else None

    def __str__(self) -> str:
        facts = {
            "window": self.window_rows,
            "per_file": self.rows_per_file,
            "logprobs": self.logprobs,
            "sql": self.sql,
            "columns": self.columns,
            "typed": self.table.typed,
            **vars(self.settings),
        }
        return f"{type(self).__name__} {facts}"

    @property
    def exists(self) -> bool:
        return (self.life.out / ".bulkrun" / "run.json").exists()

    def spec(self, settings: Settings, **sections: Mapping[str, Any]) -> JobSpec:
        values: dict[str, dict[str, Any]] = {
            "input": {"path": str(self.table.folder), "id": "id", "columns": self.columns, "sql": self.sql},
            "prompt": {"template": settings.template},
            "sampling": {
                "max_tokens": settings.max_tokens,
                "temperature": settings.temperature,
                "seed": settings.seed,
                "n": settings.samples,
                "logprobs": self.logprobs,
                "per_row": {"max_tokens": "most"} if settings.per_row else {},
            },
            "output": {"path": str(self.life.out), "rows_per_file": self.rows_per_file},
            "engine": {"max_model_len": settings.max_model_len},
            "run": {
                "window_rows": self.window_rows,
                "incremental": self.incremental,
                "checkpoint_every": 0.02,
                "max_error_rate": 1.0,
            },
        }
        merged = {name: {**section, **sections.get(name, {})} for name, section in values.items()}
        return JobSpec.model_validate({"name": "life", "model": "bundled:tiny", **merged})

    def asker(self, settings: Settings, rows: list[Row | None]) -> Asker:
        """Which columns pass through, and which prompts fail in the engine this time."""
        extra = ("extra",) if self.table.extra else ()
        columns = ("id", "text", "tag", "score", "most", *extra) if self.columns is None else ("id", *self.columns)
        plain = Asker(settings, columns)
        texts = sorted({text for row in rows if (text := plain.prompt(row)[0]) is not None and len(text) < 60})
        some = self.rng.sample(texts, min(len(texts), self.rng.choice([0, 0, 1, 3])))
        failing = dict.fromkeys(some, "nan_logits")
        if settings.temperature == 0 and settings.samples == 1 and len(failing) > 1:
            failing[some[0]] = "engine_error"
        return replace(plain, failing=failing)

    def death(self, chance: float = 0.3) -> Death | None:
        if self.rng.random() > chance:
            return None
        at = 1 + int(self.rng.expovariate(1 / 60)) if self.rng.random() < 0.7 else self.rng.randint(1, 250)
        number = signal.SIGKILL if self.rng.random() < 0.65 else signal.SIGTERM
        return Death(at, self.rng.random() < 0.5, number)

    def values_of(self, row: Mapping[str, Any]) -> Values:
        names = ("id", "text", "tag", "score", "most", "extra")
        return tuple((name, row[name]) for name in names if name in row)  # in the order of `asker`

    def next(self) -> Step:
        """The unfinished command again, or another one."""
        if (again := self.life.unfinished) is not None and (self.must_go_on(again) or self.rng.random() < 0.55):
            errors = (*again.errors, "ResumeError") if again.kind == "retry" else again.errors
            return self.crowded(replace(again, death=self.death(0.4), counts=None, errors=errors))
        if not self.exists:
            return self.submit()
        if self.rng.random() < 0.05:
            self.life.move()
        return self.crowded(self.other())

    def crowded(self, step: Step) -> Step:
        """Now and then somebody else is at it at the same moment."""
        if step.begins or self.rng.random() < 0.85:
            return replace(step, beside=None, same_beside=False)
        if self.rng.random() < 0.6:
            return replace(step, beside=step.work, same_beside=True)
        return replace(step, beside=partial(compact, RunDir(self.life.out), 4, grace_s=0))

    def learn(self, job: Mapping[str, Any]) -> None:
        """A refresh that was cut short may have come to its end all the same."""
        kept = {name: job["sampling"][name] for name in ("max_tokens", "seed")}
        self.settings = replace(self.settings, template=job["prompt"]["template"], **kept)

    def must_go_on(self, step: Step) -> bool:
        return step.kind == "refresh" or (step.begins and not self.life.seen.finished)

    def other(self) -> Step:
        raise NotImplementedError

    def submit(self) -> Step:
        raise NotImplementedError

    def compact(self) -> Step:
        """Many parts become few."""
        per_file, out = self.rng.choice([3, 5, 1000]), self.life.out
        work = partial(compact, RunDir(out), per_file, grace_s=0)
        step = Step("compact", str(per_file), work, cleans=True, death=self.death())
        return step if self.life.settled else replace(step, errors=("RunError",))

    def fresh(self) -> Step:
        """From the beginning, maybe with other settings; the old results are kept elsewhere."""
        settings = replace(self.settings, template=self.rng.choice(TEMPLATES), seed=self.rng.choice([0, 5]))
        step = self.from_scratch(settings)
        return replace(step, kind="fresh", death=self.death(0.2), accepted=partial(self._moved_aside, settings))

    def from_scratch(self, settings: Settings) -> Step:
        raise NotImplementedError

    def _moved_aside(self, settings: Settings, _: Any) -> None:
        self.settings = settings
        self.begun()

    def begun(self) -> None:
        """A new run has the place of the old one."""

    def overrides(self) -> tuple[tuple[str, ...], Settings]:
        said, changed = self.rng.choice(_OVERRIDES)
        return said, replace(self.settings, **changed)

    def codes(self) -> list[str]:
        codes = {row["error_code"] for row in self.life.seen.rows} - {None}
        return self.rng.choice([[], [], [], sorted(codes)[:1], ["bad_input", "too_long"], ["timeout"]])

    def retry_step(self, today: Mapping[Any, Row | None], errors: tuple[str | None, ...]) -> Step:
        (said, again), codes = self.overrides(), self.codes()
        rows = list(today.values())
        asker = self.asker(again, rows)
        usual = replace(asker, settings=self.settings)
        begin_anew = self.rng.random() < 0.5
        options = {"overrides": said, "codes": codes, "begin_anew": begin_anew}
        work = partial(Command(self.life.out, asker.failing).retry, **options)
        change = Retry(usual, asker, today, codes).change
        text = f"{' '.join(said)} codes={codes} anew={begin_anew} fail={dict(asker.failing)}"
        step = Step("retry", text, work, change, errors, self.death())
        if not self.life.seen.finished:
            return replace(step, errors=("UsageError",))
        return step if self.life.settled or begin_anew else replace(step, errors=(*errors, "UsageError"))

    def name_of(self, row: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def wrong(self, step: Step, value: Any) -> str | None:
        """What is wrong with what a command said of itself."""
        raise NotImplementedError

"""What a user does next in a run's life, and what the documents say of it: `Step`s for nightly and for plain runs."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bulkrun.job.jobfile.spec import JobSpec
from tests.campaigns.long_life.commands import Command
from tests.campaigns.long_life.input import Row, Table
from tests.campaigns.long_life.oracle import (
    LENIENT,
    STRUCTURES,
    TEMPLATES,
    Asker,
    Retry,
    Settings,
    Truth,
    Values,
    either,
    hashable,
)
from tests.campaigns.long_life.run import Death

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
    stages: bool = True  # it removes what a kill left of the staging of another
    beside: Callable[[], Any] | None = None  # runs at the same time
    same_beside: bool = False
    idle: bool = False  # it finds nothing to do, and leaves a retry that is under way to its own command
    uploads: bool = False  # also what was deleted from the bucket
    clears: bool = False  # the user empties the bucket before
    generous: Callable[[], Any] | None = None  # the same with a higher run.max_error_rate
    accepted: Callable[[Any], None] = lambda value: None
    counts: Mapping[str, int] | None = None

    def __str__(self) -> str:
        died = f" {signal.Signals(self.death.signal).name} at {self.death.at}" if self.death else ""
        return f"{self.kind} {self.said}{died}{' twice at once' if self.same_beside else ''}"

    def in_between(self, truth: Truth) -> Truth:
        """What may be there when it was cut short."""
        return either(either(truth, {}) if self.begins else truth, self.change(truth))


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
        self.strict = rng.random() < 0.3  # about rows that fail
        samples = rng.choice([1, 1, 2])
        self.settings = Settings(
            samples=samples,
            best_of=rng.choice([None, None, samples + 2]),
            structure=rng.choice([None, None, None, *STRUCTURES]),
            temperature=rng.choice([0.0, 0.0, 0.9]),
            per_row=rng.random() < 0.3,
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
            "nested": self.table.nested,
            **vars(self.settings),
        }
        return f"{type(self).__name__} {facts}"

    @property
    def exists(self) -> bool:
        return (self.life.out / ".bulkrun" / "run.json").exists()

    def spec(self, settings: Settings, **sections: Mapping[str, Any]) -> JobSpec:
        structure = settings.structure
        values: dict[str, dict[str, Any]] = {
            "input": {"path": str(self.table.folder), "id": "id", "columns": self.columns, "sql": self.sql},
            "prompt": {"template": settings.template},
            "sampling": {
                "max_tokens": settings.max_tokens,
                "temperature": settings.temperature,
                "seed": settings.seed,
                "n": settings.samples,
                "best_of": settings.best_of,
                "structured_outputs": {structure: STRUCTURES[structure]} if structure else None,
                "logprobs": self.logprobs,
                "per_row": {"max_tokens": "most"} if settings.per_row else {},
            },
            "output": {**self.life.output, "rows_per_file": self.rows_per_file},
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
        more = [name for name, is_there in (("meta", self.table.nested), ("extra", self.table.extra)) if is_there]
        columns = ("id", "text", "tag", "score", "most", *more) if self.columns is None else ("id", *self.columns)
        plain = Asker(settings, columns)
        texts = sorted({text for row in rows if (text := plain.prompt(row)[0]) is not None and len(text) < 60})
        some = self.rng.sample(texts, min(len(texts), self.rng.choice([0, 0, 1, 3])))
        failing = dict.fromkeys(some, "nan_logits")
        if settings.temperature == 0 and settings.samples == 1 and not settings.best_of and len(failing) > 1:
            failing[some[0]] = "engine_error"
        return replace(plain, failing=failing)

    def death(self, chance: float = 0.3) -> Death | None:
        if self.rng.random() > chance:
            return None
        at = 1 + int(self.rng.expovariate(1 / 60)) if self.rng.random() < 0.7 else self.rng.randint(1, 250)
        number = signal.SIGKILL if self.rng.random() < 0.65 else signal.SIGTERM
        if self.life.delivered is None:
            return Death(at, self.rng.random() < 0.5, number)
        counted = self.rng.choice(["files", "all", "requests"])
        at = 1 + int(self.rng.expovariate(1 / 8)) if counted == "requests" else at
        return Death(at, self.rng.random() < 0.5, number, counted)

    def values_of(self, row: Mapping[str, Any]) -> Values:
        names = ("id", "text", "tag", "score", "most", "meta", "extra")
        return tuple((name, hashable(row[name])) for name in names if name in row)  # in the order of `asker`

    def next(self) -> Step:
        """The unfinished command again, or another one."""
        if (again := self.life.unfinished) is not None and (self.must_go_on(again) or self.rng.random() < 0.55):
            errors = (*again.errors, "ResumeError") if again.kind == "retry" else again.errors
            again = replace(again, death=self.death(0.4), counts=None, errors=errors)
            return self.crowded(self.raised(again) if self.rng.random() < 0.6 else again)
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
        return replace(step, beside=partial(self.command().compact, 4))

    def command(self, failing: Mapping[str, str] | None = None) -> Command:
        delivered = self.life.delivered
        return Command(self.life.out, failing or {}, delivered and delivered.bucket)

    def limited(self, step: Step, work: Callable[..., Any], spec: Callable[[float], JobSpec]) -> Step:
        """Maybe with a `run.max_error_rate` that stops it; `work` takes the job."""
        limit = self.rng.choice([1.0, 0.5, 0.1]) if self.strict else 1.0
        step.work = partial(work, spec(limit))
        if limit < 1 and None in step.errors:
            step.errors = (*step.errors, "ErrorRateExceeded")
            step.generous = partial(work, spec(1.0))
        return step

    @staticmethod
    def raised(step: Step) -> Step:
        """With a limit that nothing exceeds."""
        if step.generous is None:
            return step
        errors = tuple(error for error in step.errors if error != "ErrorRateExceeded")
        return replace(step, work=step.generous, generous=None, errors=errors)

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

    def left_alone(self, step: Step) -> Step:
        """A command on a finished run, which does nothing; a change that was killed while merging may be in its way."""
        step = replace(step, stages=False)
        return step if self.life.settled else replace(step, idle=True, errors=(None, "RunError"))

    def compact(self) -> Step:
        """Many parts become few."""
        per_file = self.rng.choice([3, 5, 1000])
        work = partial(self.command().compact, per_file)
        step = Step("compact", str(per_file), work, cleans=True, death=self.death())
        return step if self.life.settled else replace(step, errors=("RunError",))

    def fresh(self) -> Step:
        """From the beginning, maybe with other settings; the old results are kept elsewhere."""
        settings = replace(self.settings, template=self.rng.choice(TEMPLATES), seed=self.rng.choice([0, 5]))
        step = self.from_scratch(settings)
        step = replace(step, kind="fresh", death=self.death(0.2), accepted=partial(self._moved_aside, settings))
        if (delivered := self.life.delivered) is None:
            return step
        if self.rng.random() < 0.7 or not delivered.bucket.objects():
            return replace(step, clears=True)
        return replace(step, errors=("ResumeError", *step.errors[: step.errors != (None,)]), begins=False)

    def from_scratch(self, settings: Settings) -> Step:
        raise NotImplementedError

    def _moved_aside(self, settings: Settings, _: Any) -> None:
        self.settings = settings
        self.begun()

    def begun(self) -> None:
        """A new run has the place of the old one."""

    def overrides(self) -> tuple[tuple[str, ...], Settings]:
        usable = [
            (said, changed) for said, changed in _OVERRIDES if not (self.settings.structure and "truncate" in changed)
        ]
        said, changed = self.rng.choice(usable)
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
        work = partial(self.command(asker.failing).retry, **options)
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

"""The steps of a job without nights: one input, one run, which other settings or another input may not continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.campaigns.long_life.bucket_steps import bring, objects_lost
from tests.campaigns.long_life.input import Row
from tests.campaigns.long_life.oracle import Asker, Settings, Truth
from tests.campaigns.long_life.steps import Step, Steps

if TYPE_CHECKING:
    from tests.campaigns.long_life.life import Life


class PlainSteps(Steps):
    """A job whose rows are told by their positions; maybe in folders."""

    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self.folders = self.rng.random() < 0.5
        self.named = self.rng.random() < 0.7
        self.base: dict[int, Row | None] = {}
        self.facts: list[tuple[int, int]] = []
        self.extra = False

    def spec(self, settings: Settings, **sections: Mapping[str, Any]) -> Any:
        output = {"partition_by": ["tag"] if self.folders else [], **sections.pop("output", {})}
        named = {"id": "id" if self.named else None, "columns": self.columns and ["id", *self.columns]}
        return super().spec(settings, output=output, input={**named, **sections.pop("input", {})}, **sections)

    def name_of(self, row: Mapping[str, Any]) -> Any:
        return row["row"]

    def other(self) -> Step:
        changes = []
        if self.life.settled and self.rng.random() < 0.4:
            changes = [self.table.mutate() for _ in range(self.rng.choice([1, 2]))]
        kinds = [self.submit, self.retry, self.compact, self.fresh, self.harmless, self.other_settings]
        in_bucket = 0 if self.life.delivered is None else 3
        kinds += [partial(bring, self), partial(objects_lost, self)]
        step = self.rng.choices(kinds, [4, 6, 3, 4, 2, 1, in_bucket, in_bucket])[0]()
        step.said = f"[{', '.join(changes)}] {step.said}"
        return step

    @property
    def today(self) -> dict[int, Row | None]:
        return dict(enumerate(self.table.read()))

    @property
    def same_input(self) -> bool:
        return self.table.facts == self.facts

    def _ran(self, asker: Asker) -> Truth:
        return {row: frozenset([asker.result(values, row)]) for row, values in self.base.items()}

    def _begin(self) -> None:
        """What a run that begins now is of."""
        self.base, self.facts, self.extra = self.today, self.table.facts, self.table.extra

    def submit(self) -> Step:
        """The same command again, or the first one."""
        if not self.exists:
            self._begin()
        asker = replace(self.asker(self.settings, list(self.base.values())), named=self.named)
        work = self.command(asker.failing).submit
        step = Step("submit", f"fail={dict(asker.failing)}", work, death=self.death())
        self.limited(step, work, lambda rate: self.spec(self.settings, run={"max_error_rate": rate}))
        if not self.same_input:
            return replace(step, errors=("ResumeError",))
        finished = self.life.seen.finished
        if finished:
            return self.left_alone(step)
        return replace(step, change=lambda truth: self._ran_on(asker, truth))

    def _ran_on(self, asker: Asker, truth: Truth) -> Truth:
        """Rows that are answered stay; of the others an earlier attempt may have noted the outcome."""
        ran = self._ran(asker)
        gone = frozenset([None])
        return {row: (truth.get(row, gone) - gone) | ran[row] for row in ran}

    def harmless(self) -> Step:
        """Another name of the input, other files of the output: results do not depend on them."""
        anyway = self.rng.random() < 0.6
        section = self.rng.choice([{"input": {"path": f"{self.table.folder}/*"}}, {"output": {"rows_per_file": 6}}])
        asker = replace(self.asker(self.settings, list(self.base.values())), named=self.named)
        work = partial(self.command(asker.failing).submit, self.spec(self.settings, **section))
        step = Step("harmless", f"{section} anyway={anyway}", partial(work, resume_anyway=anyway), death=self.death())
        if not self.same_input or not anyway:
            return replace(step, errors=("ResumeError",) if self.life.seen.finished else ("ResumeError", None))
        if self.life.seen.finished:
            return self.left_alone(step)
        return replace(step, change=lambda truth: self._ran_on(asker, truth))

    def other_settings(self) -> Step:
        spec = self.spec(replace(self.settings, max_tokens=9))
        work = partial(self.command().submit, spec, resume_anyway=self.rng.random() < 0.5)
        return Step("other settings", "", work, errors=("ResumeError",))

    def retry(self) -> Step:
        errors = (None,) if self.same_input or self.sql is not None else ("ResumeError",)
        step = self.retry_step(self.base, errors)
        return step

    def asker(self, settings: Settings, rows: list[Row | None]) -> Asker:
        asker = super().asker(settings, rows)
        columns = tuple(name for name in asker.columns if name != "extra")
        return replace(
            asker, named=self.named, columns=(*columns, "extra") if self.extra and not self.columns else columns
        )

    def from_scratch(self, settings: Settings) -> Step:
        base, facts, extra = self.today, self.table.facts, self.table.extra
        self.extra, was = extra, self.extra
        asker = self.asker(settings, list(base.values()))
        self.extra = was
        work = partial(self.command(asker.failing).submit, self.spec(settings), fresh=True)
        ran = {row: frozenset([asker.result(values, row)]) for row, values in base.items()}
        self._next = base, facts, extra
        return Step("fresh", f"{settings}", work, lambda _: ran, begins=True)

    def begun(self) -> None:
        super().begun()
        self.base, self.facts, self.extra = self._next

    def wrong(self, step: Step, value: Any) -> str | None:
        if step.kind == "submit" and value["worked"] and not step.death and step.change({}) == {}:
            return "it worked on a finished run"
        twice = sum(1 for _ in self._repeated())
        status = self.life.seen.status["duplicate_ids"]
        return None if status == twice else f"{status} duplicate ids, the input has {twice}"

    def _repeated(self) -> list[Any]:
        names = [row["id"] for row in self.base.values() if row is not None] if self.named else []
        return [name for number, name in enumerate(names) if name in names[:number]]

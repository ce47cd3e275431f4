"""The steps of an incremental job: nights over an input that changes, refreshes, retries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow.parquet as pq

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.runs.preview import plan_job
from tests.campaigns.long_life.bucket_steps import bring, objects_lost
from tests.campaigns.long_life.commands import Command
from tests.campaigns.long_life.input import Row
from tests.campaigns.long_life.oracle import TEMPLATES, Night, Settings
from tests.campaigns.long_life.steps import Step, Steps


class NightSteps(Steps):
    """An incremental job."""

    incremental = True

    def name_of(self, row: Mapping[str, Any]) -> Any:
        return row["id"]  # null in a line that could not be read: these are counted

    def other(self) -> Step:
        if self.table.doubled and self.rng.random() < 0.7:
            self.table.undouble()
        changes = [self.table.mutate() for _ in range(self.rng.choice([0, 1, 1, 2, 3]))]
        if changes:
            self.life.unfinished = None
        kinds = [self.submit, self.retry, self.compact, self.fresh, self.refresh, self.other_settings, self.lost]
        in_bucket = 0 if self.life.delivered is None else 2
        kinds += [partial(bring, self), partial(objects_lost, self)]
        step = self.rng.choices(kinds, [10, 4, 2, 1, 2, 1, 1, in_bucket, in_bucket])[0]()
        step.said = f"[{', '.join(changes)}] {step.said}"
        return step

    def today(self, limit: int | None = None) -> tuple[dict[str, Row], int]:
        """Rows by id and the number of lines that cannot be read, of what is read of the input beside the results."""
        return _by_id(self.table.read(self.life.seen.columns.get("score"))[:limit])

    def submit(self, settings: Settings | None = None, *, refresh: bool = False) -> Step:
        settings = settings or self.settings
        limit = self.rng.choice([None, None, None, None, 3, 8])
        drop = self.rng.random() < 0.5
        today, broken = self.today(limit)
        asker = self.asker(settings, list(today.values()))
        unread = limit is not None and len(self.table.read()[:limit]) >= limit
        same = settings == self.settings
        night = Night(asker, today, unread, drop, refresh and same, refresh and not same)
        run = {"limit": limit, "on_vanished": "drop" if drop else "keep"}
        work = partial(_night, self.command(asker.failing), self._may_plan(refresh), refresh)
        text = f"limit={limit} drop={drop} refresh={refresh} {self.table.format} fail={dict(asker.failing)}"
        step = Step("night", text, work, night.change, self.refusals(settings, limit, refresh=refresh), self.death())
        self.limited(step, work, lambda rate: self.spec(settings, run={**run, "max_error_rate": rate}))
        step.counts = self._counts(night, broken)
        step.accepted = partial(self._took, settings)
        return step

    def _may_plan(self, refresh: bool) -> bool:
        return self.life.settled and not refresh and self.rng.random() < 0.3

    def _took(self, settings: Settings, _: Any) -> None:
        self.settings = settings

    def refusals(
        self, settings: Settings, limit: int | None = None, *, refresh: bool = False
    ) -> tuple[str | None, ...]:
        rows = self.table.read()[:limit]
        names = [row["id"] for row in rows if row is not None]
        found: list[str | None] = ["InputError"] if len(set(names)) < len(names) else []
        if self.exists and settings != self.settings and not refresh:
            found.append("ResumeError")
        if self.exists and self._columns_differ():
            found.append("ResumeError")
        return tuple(found) or (None,)

    def _columns_differ(self) -> bool:
        there = self.life.seen.columns
        if not there or self.columns is not None:
            return False
        return ("extra" in there) != self.table.extra or (there["score"], self.table.score_type) == ("int64", "double")

    def _counts(self, night: Night, broken: int) -> dict[str, int] | None:
        """The counts of the summary, where it is certain what is there."""
        truth = self.life.truth
        if not self.life.settled or any(len(results) > 1 for results in truth.values()):
            return None
        if any(night.is_vague(name, *results) for name, results in truth.items()):
            return None
        kinds = Counter(night.kind(name, *truth.get(name, [None])) for name in {*truth, *night.today})
        nameless = sum(row["id"] is None for row in self.life.seen.rows) // self.settings.samples
        kinds["new"] += max(0, broken - nameless)
        kinds["vanished"] += max(0, nameless - broken)
        kinds["refused"] += min(broken, nameless)
        if night.unread:
            kinds["beyond_limit"], kinds["vanished"] = kinds["vanished"], 0
        left = nameless if night.unread else 0
        if "engine_error" in night.asker.failing.values():  # which runs its neighbours again
            kinds["spare"] = 1000
        return {**kinds, "nameless": max(broken, left), "everything": night.everything}

    def refresh(self) -> Step:
        changed = [{}, {"max_tokens": 5}, {"max_tokens": 7}, {"template": TEMPLATES[1]}, {"seed": 4}]
        settings = replace(self.settings, **self.rng.choice(changed))
        step = self.submit(settings, refresh=True)
        if not self.life.seen.finished:  # which is refused with other settings
            step.errors = (*step.errors, "ResumeError")
        return replace(step, kind="refresh", said=f"{settings} {step.said}")

    def other_settings(self) -> Step:
        """Which are refused."""
        step = self.submit(replace(self.settings, max_tokens=9))
        return replace(step, kind="other settings")

    def lost(self) -> Step:
        """`_SUCCESS` is deleted, maybe with a part, as messages say; the same command mends that."""
        parts = sorted(self.life.out.glob("*.parquet"))
        if not self.life.settled or not parts:
            return self.submit()
        self.life.used.clear()
        gone = self.rng.choice([None, self.rng.choice(parts)])
        if gone is not None:
            for row in pq.read_table(gone, columns=["id"]).to_pylist():
                self.life.forget(row["id"])
            gone.unlink()
        if gone is not None and len(parts) == 1:
            self.life.seen.columns = {}  # nothing tells them any more
        (self.life.out / "_SUCCESS").unlink()
        step = self.submit()
        return replace(step, kind="lost", said=f"{gone and gone.name} {step.said}", counts=None)

    def retry(self) -> Step:
        today, _ = self.today()
        return self.retry_step(today, self.refusals(self.settings))

    def from_scratch(self, settings: Settings) -> Step:
        today, broken = _by_id(self.table.read())
        asker = self.asker(settings, list(today.values()))
        night = Night(asker, today)
        work = partial(self.command(asker.failing).submit, self.spec(settings), fresh=True)
        names = [row["id"] for row in self.table.read() if row is not None]
        errors = ("InputError",) if len(set(names)) < len(names) else (None,)
        counts = {"nameless": broken}
        return Step("fresh", f"{settings}", work, lambda _: night.change({}), errors, begins=True, counts=counts)

    def wrong(self, step: Step, value: Any) -> str | None:
        if step.counts is None:
            return None
        want = Counter(step.counts)
        nameless = sum(row["id"] is None for row in self.life.seen.rows) // self.settings.samples
        if nameless != want.pop("nameless"):
            return f"{nameless} rows without an id, not {step.counts}"
        if step.kind == "fresh" or value["changes"] is None:
            return None
        return _wrong_counts(want, Counter(value["changes"]), value, self.settings.best_of or self.settings.samples)


def _by_id(rows: list[Row | None]) -> tuple[dict[str, Row], int]:
    return {row["id"]: row for row in rows if row is not None}, rows.count(None)


def _wrong_counts(want: Counter[str], got: Counter[str], value: Any, generations: int) -> str | None:
    """The summary against the kinds of rows; refused ones count as failed where their line moved."""
    left = want["refused"]
    exact = ("new", "vanished", "beyond_limit") + (() if want["everything"] else ("changed",))
    if any(want[name] != got[name] for name in exact) or got["failed"] < want["failed"]:
        return f"changes {dict(got)}, not {dict(want)}"
    if sum(got[name] for name in ("changed", "failed", "unchanged")) != left + sum(
        want[name] for name in ("changed", "failed", "unchanged")
    ):
        return f"changes {dict(got)} are not as many as {dict(want)}"
    if value["ran"] > want["spare"] + generations * (want["new"] + want["changed"] + want["failed"]):
        return f"ran {value['ran']} generations for {dict(want)}"
    if value["planned"] not in (None, value["changes"]):
        return f"plan said {value['planned']}, submit {value['changes']}"
    return None


def _night(command: Command, plan: bool, refresh: bool, spec: JobSpec) -> dict[str, Any]:
    planned = plan_job(spec)[1] if plan else None
    return {**command.submit(spec, full_refresh=refresh), "planned": planned}

"""One life: a step of the walk, then all that can be seen is held against what must be there."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from bulkrun.job.store.bucket_owner import OWNER
from tests.campaigns.long_life.bucket import Bucket
from tests.campaigns.long_life.delivered import Delivered
from tests.campaigns.long_life.nights import NightSteps
from tests.campaigns.long_life.oracle import Sample, Truth, parsed, shown_among
from tests.campaigns.long_life.plain import PlainSteps
from tests.campaigns.long_life.run import Ended, Seen, in_child, in_children, look, read_glob
from tests.campaigns.long_life.steps import Step, Steps

_TEMPORARY = re.compile(r"/\.[^/]*\.[0-9a-f]{16}\.tmp$|/?\.bulkrun-[^/]*$|/claims/update\.[0-9]+$")


class Divergence(AssertionError):
    """What is there is not what should be there."""


class Life:
    """One run from its first submit on, with what it must hold (`truth`)."""

    def __init__(self, folder: Path, seed: int, bucket: Bucket | None = None) -> None:
        self.rng, self.folder, self.name = random.Random(seed), folder, "out"
        self.delivered = None if bucket is None else Delivered(bucket)
        self.tally: Counter[str] = Counter()
        self.trace: list[str] = []
        self.truth: Truth = {}
        self.seen = Seen()
        self.numbers: dict[Any, int] = {}
        self.used: set[int] = set()
        self.run_id: str | None = None
        self.unfinished: Step | None = None
        self.place()
        self.steps: Steps = (NightSteps if self.rng.random() < 0.7 else PlainSteps)(self)

    @property
    def out(self) -> Path:
        """Where the user sees the run; maybe a link to where it lies."""
        return self.folder / self.name

    @property
    def output(self) -> dict[str, Any]:
        """The keys of the job that say where the results go."""
        place = str(self.out)
        return {"path": place} if self.delivered is None else {"path": self.delivered.bucket.url, "state": place}

    def place(self) -> None:
        """The run's directory is a link in some lives."""
        if self.rng.random() < 0.15:
            (self.folder / "disk" / "out").mkdir(parents=True)
            self.out.symlink_to("disk/out")

    def move(self) -> None:
        """The user moves the run, and says so in the job file."""
        if self.out.is_symlink() or not self.out.exists():
            return
        name = "results" if self.name == "out" else "out"
        self.out.rename(self.folder / name)
        shutil.rmtree(self.folder / f".{self.name}.compact", ignore_errors=True)  # of a killed one, under the old name
        self.name = name
        self.trace.append(f"moved to {name}")
        self.unfinished = None

    @property
    def settled(self) -> bool:
        """Whether the results are those of whole commands."""
        return self.seen.finished and not self.seen.status["update"]

    def forget(self, name: Any) -> None:
        """The user deleted the part with this row; which numbers were given is known by `_SUCCESS` alone."""
        self.truth.pop(name, None)
        self.numbers.pop(name, None)
        self.used.clear()

    def step(self) -> None:
        step = self.steps.next()
        self.trace.append(str(step))
        self.tally[step.kind] += 1
        before = self.seen
        if step.clears and self.delivered is not None:
            self.delivered.clear()
        ended = self._run(step)
        self.trace[-1] += f" -> {'killed' if ended.killed else ended.error or 'done'} {ended.message[:90]}"
        done = self._take(step, ended)
        self._look()
        self._check(step, ended, done)
        self._check_aside(step, before.rows)
        self._check_bucket(step, done, before)

    def _run(self, step: Step) -> Ended:
        """The end of a command; where another one ran beside it, of that of the two which came to an end."""
        if step.beside is None:
            return in_child(step.work, step.death)
        self.tally["beside"] += 1
        ended, other = in_children(step.work, step.death, step.beside)
        self.trace[-1] += f" (beside: {other.error or 'done'} {other.message[:90]})"
        self._require(other.error in (None, "RunError", "UsageError", *step.errors), f"beside: {other}")
        if not step.same_beside or other.error is not None:
            return ended
        self.tally["cut short"] += ended.killed  # which may have left something, though the command came to its end
        return other

    def _take(self, step: Step, ended: Ended) -> bool:
        """What the end of a command means for what must be there; whether it came to its end."""
        if ended.killed or ended.error in ("Interrupted", "ErrorRateExceeded"):
            self.tally[ended.error or "killed"] += 1
            self.tally["cut short"] += 1
            self.truth = step.in_between(self.truth)
            self._require(self._may_end_early(step, ended), f"{step} was cut short by nobody: {ended}")
            self.unfinished = step
            return False
        if ended.error is not None:
            self.tally["refused"] += 1
            if step.beside is not None and ended.error == "RunError":
                return False
            self._require(ended.error in step.errors, f"{step}: {ended.error}, {ended.message}")
            return False
        self._require(None in step.errors, f"{step}: was not refused with {step.errors}")
        step.accepted(ended.value)
        self.truth = step.change(self.truth)
        self.unfinished = self.unfinished if step.idle else None
        return True

    def _may_end_early(self, step: Step, ended: Ended) -> bool:
        if ended.error != "ErrorRateExceeded":
            return step.death is not None
        may_fail = any(result and result.codes for results in self.truth.values() for result in results)
        return ended.error in step.errors and (may_fail or None in self.steps.table.rows)

    def _look(self) -> None:
        if not (self.out / ".bulkrun" / "run.json").exists():
            self.seen = Seen()
            return
        out, exports = self.out, self.rng.random() < 0.3
        found = in_child(lambda: look(out, exports))
        self._require(found.error is None and not found.killed, f"cannot be looked at: {found}")
        self.seen = found.value

    def _check(self, step: Step, ended: Ended, done: bool) -> None:
        seen = self.seen
        self._require(not seen.problems, f"views disagree: {seen.problems}")
        self._check_rows()
        if self.settled:
            self.unfinished = None
            self.steps.learn(seen.job)
            self._check_settled()
        if done and not step.idle:
            killed_late = step.beside is not None and step.death is not None  # after the other one was done
            self._require(self.settled or killed_late, f"{step} is done, the run is not: {seen.status}")
            if step.beside is None or step.death is None:
                self._check_leftovers(step)
            if step.beside is None and (wrong := self.steps.wrong(step, ended.value)) is not None:
                raise Divergence(wrong)

    def _check_rows(self) -> None:
        """Each row once, with one of the results that it may have."""
        shown: dict[Any, dict[int, Sample]] = {}
        for row in self.seen.rows:
            name = self.steps.name_of(row)
            samples = shown.setdefault(name, {})
            number = row["sample"] if name is not None else len(samples)
            self._require(number not in samples, f"row {name!r} is there twice")
            right = parsed(self.steps.settings.structure, row["response"] or "", row["error_code"])
            self._require(row.get("parsed") == right, f"row {name!r} has the value {row.get('parsed')}, not {right}")
            samples[number] = Sample(row["response"] or "", row["error_code"], self.steps.values_of(row))
        shown.pop(None, None)
        self._check_numbers(shown)
        for name in {*self.truth, *shown}:
            self._check_row(name, shown.get(name))

    def _check_row(self, name: Any, samples: dict[int, Sample] | None) -> None:
        seen = None if samples is None else tuple(samples[number] for number in sorted(samples))
        may = self.truth.get(name, frozenset([None]))
        found = shown_among(may, seen)
        self._require(bool(found), f"row {name!r}: is {seen}, may be {sorted(map(str, may))}")
        if self.settled:
            self.truth[name] = found
            if found == {None}:
                del self.truth[name]

    def _check_numbers(self, shown: dict[Any, Any]) -> None:
        """A row keeps the number that it got first, and no other row gets it."""
        if (run_id := self.seen.status.get("run_id")) != self.run_id:
            self.run_id, self.numbers, self.used = run_id, {}, set()
        now = {self.steps.name_of(row): row["row"] for row in self.seen.rows if row["id"] is not None}
        for name, number in now.items():
            before = self.numbers.get(name)
            self._require(before in (None, number), f"row {name!r} had the number {before}, now {number}")
            self._require(before is not None or number not in self.used, f"number {number} is given again, to {name!r}")
        self.numbers = {name: number for name, number in now.items() if name in shown}
        self.used |= set(now.values())

    def _check_settled(self) -> None:
        """The totals of a run that is whole."""
        rows, errors = self.seen.rows, Counter(row["error_code"] for row in self.seen.rows if row["error_code"])
        elsewhere = self.delivered.bucket.url if self.delivered else None
        problems = [problem for problem in self.seen.verify if not elsewhere or not problem.startswith(elsewhere)]
        self._require(not problems, f"verify: {problems}")
        totals, status = self.seen.totals, self.seen.status
        want = {"ok": len(rows) - errors.total(), "errors": dict(errors), "rows": len(rows) // totals["samples"]}
        self._require({name: totals[name] for name in want} == want, f"_SUCCESS says {totals}, there is {want}")
        state = "completed_with_errors" if errors else "completed"
        if self.delivered and status["state"] == "undelivered":  # `_check_bucket` sees whether that is so
            status = {**status, "state": state, "message": None}
        told = (status["state"], status["rows_total"], status["rows_done"], status["error_rows"], status["message"])
        self._require(told == (state, len(rows), len(rows), errors.total(), None), f"status: {status}, rows {want}")
        self._require(status["completion_tokens"] == totals["completion_tokens"], f"tokens: {status}, {totals}")

    def _check_aside(self, step: Step, before: list[dict[str, Any]]) -> None:
        """What `--fresh` moved aside is as it was."""
        for aside in self.out.resolve().parent.glob(f"{self.name}.*"):
            rows = in_child(lambda aside=aside: read_glob(aside)).value
            self._require(rows == before, f"{step}: {aside.name} holds {rows}, not {before}")
            shutil.rmtree(aside)

    def _check_bucket(self, step: Step, done: bool, before: Seen) -> None:
        if self.delivered is None:
            return
        is_certain = done and self.settled and not step.idle and (step.beside is None or step.death is None)
        changed = self.seen.totals != before.totals
        must = is_certain and (changed or step.uploads or not self.delivered.lost - {OWNER})
        problems = self.delivered.problems(self.out, self.seen, must_be_whole=must, read=self.rng.random() < 0.2)
        self._require(not problems, f"{step}: {problems}")

    def _check_leftovers(self, step: Step) -> None:
        left = [path for path in self.seen.leftovers if step.cleans or ".compact" not in path]
        left = [path for path in left if step.stages or "/.bulkrun/next/" not in path]
        dead = [path for path in left if _TEMPORARY.search(path)]  # a day later the next change removes them
        left = [path for path in left if path not in dead or len(dead) > self.tally["cut short"]]
        self._require(not left, f"{step} left {left}")

    def _require(self, fact: bool, said: str) -> None:
        if not fact:
            raise Divergence(said)

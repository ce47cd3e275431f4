"""What the bucket of a life must hold, and what may be said of it: the run's directory is the oracle."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from bulkrun.data.storage.partitions import find_parts
from bulkrun.job.store.bucket_owner import OWNER, SUCCESS
from tests.campaigns.long_life.bucket import Bucket, rows_of
from tests.campaigns.long_life.run import Seen, in_child

Objects = dict[str, bytes]


class Delivered:
    """Knows the last whole state that was seen in the bucket, and what somebody deleted there since."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.lost: set[str] = set()
        self._whole: Objects = {}

    def lose(self, names: Iterable[str]) -> None:
        """Somebody deletes objects."""
        names = list(names)
        self.bucket.remove(*names)
        self.lost.update(names)

    def clear(self) -> None:
        """The user empties the prefix."""
        self.lose(self.bucket.objects())

    def problems(self, out: Path, seen: Seen, *, must_be_whole: bool, read: bool) -> list[str]:
        """What is wrong in the bucket, or in what is said of it."""
        objects = self.bucket.objects()
        owner = objects.pop(OWNER, None)
        here = _files(out)
        is_whole = objects == here and SUCCESS in here
        found = self._wrong_objects(objects, here) + self._wrong_words(seen, is_whole)
        if owner is None and seen.finished and OWNER not in self.lost:
            found.append(f"{OWNER} is not there")
        if must_be_whole and not is_whole:
            found.append(f"the bucket is not whole: {_shown(objects)}, here are {_shown(here)}, lost {self.lost}")
        if must_be_whole and (left := self.bucket.uploads()):
            found.append(f"pieces of uploads are left: {left}")
        if is_whole:
            self._whole, self.lost = objects, self.lost & {OWNER}
            found += self._read(seen) if read else []
        return found

    def _wrong_objects(self, objects: Objects, here: Objects) -> list[str]:
        try:
            rows = Counter((row["row"], row["sample"]) for row in rows_of(objects))
        except pa.ArrowException as error:
            return [f"a torn object: {error}"]
        twice = [key for key, count in rows.items() if count > 1]
        if SUCCESS not in objects:  # in a later generation rows may be there twice for a while
            return [f"rows are twice in the bucket: {twice}"] if twice and not self._whole else []
        if not self._fits(objects, here) and not self._fits(objects, self._whole):
            return [f"beside {SUCCESS} lie {_shown(objects)}, here are {_shown(here)}, lost {self.lost}"]
        totals, lost = json.loads(objects[SUCCESS]), self.lost & {*here, *self._whole}
        wants = totals["ok"] + sum(totals["errors"].values())
        if twice or (rows.total() != wants and not lost):
            return [f"{SUCCESS} in the bucket says {wants} rows, there are {rows.total()}, twice: {twice}"]
        return []

    def _fits(self, objects: Objects, state: Objects) -> bool:
        """Whether these are all objects of the state but for those that are lost."""
        return {**state, **objects} == state and state.keys() - objects.keys() <= self.lost

    def _wrong_words(self, seen: Seen, is_whole: bool) -> list[str]:
        found = []
        if seen.finished and not seen.verify and not is_whole:
            found.append("`verify` is content with a bucket that is not whole")
        if not seen.finished or seen.status["update"]:
            return found
        is_told = seen.status["state"] != "undelivered"
        if is_told and not is_whole and not self.lost:
            found.append(f"`status` says {seen.status['state']} of a bucket that is not whole")
        if is_told and is_whole and seen.verify:
            found.append(f"`verify` of a whole bucket: {seen.verify}")
        return found

    def _read(self, seen: Seen) -> list[str]:
        """As another program reads it."""
        ended = in_child(self.bucket.read)
        names = ("row", "sample", "response", "error_code")
        want, got = (
            Counter(tuple(row[name] for name in names) for row in rows) for rows in (seen.rows, ended.value or [])
        )
        return [] if want == got else [f"pyarrow reads other rows from the bucket: {ended.message} {got - want}"]


def _files(out: Path) -> Objects:
    """The parts and the totals of the run's directory."""
    paths = [*find_parts(out), *out.glob(SUCCESS)]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def _shown(objects: Objects) -> dict[str, str]:
    return {name: f"{len(data)} bytes, {hash(data) % 10**6}" for name, data in sorted(objects.items())}

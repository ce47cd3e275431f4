"""Power cuts and failing operations while a finished run is changed: by a night, or by a retry of what failed.

    python -m tests.campaigns.updates cuts|faults [--change night|retry] [--kind text|vectors] [--every K]

After each cut (the variants of `powercut_fs`) or fault (those of `fault`) a plain glob shows each row once, as it was
or as it is to be; the same command again ends with the results of one run over the last input; and what a command
that came to its end has promised is there without another one. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.verify import verify_run
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.request import Request
from tests.campaigns.fault import FAULTS, count
from tests.campaigns.long_life.run import Ended, in_child
from tests.campaigns.mounts import mounted
from tests.job.fake_engine import FakeEmbedder, expected_vector
from tests.launch.nights import Nights

CHANGES, KINDS = ("night", "retry"), ("text", "vectors")
Answers = dict[str, Any]
_VECTORS: Mapping[str, Any] = {
    "task": "embed",
    "sampling": {},
    "prompt": {"column": "text"},
    "embedding": {"pooling": "mean", "prompt": ""},
    "engine": {"max_model_len": 64},
}
_FIRST = {f"r{number}": f"v{number}" for number in range(20)}
_FAILED = ("r2", "r9", "r15")


@dataclass
class Found:
    """States that were looked at, and what was wrong, in words."""

    operations: int = 0
    states: int = 0
    clean_errors: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scene:
    """A run with results, and a command that changes them. The input lies in `folder`, the runs wherever they are."""

    folder: Path
    change: str
    kind: str

    @property
    def texts(self) -> dict[str, str]:
        """The last input: some rows edited, some new, one gone."""
        if self.change == "retry":
            return dict(_FIRST)
        return {name: text for name, text in _FIRST.items() if name != "r5"} | {"r3": "new", "r11": "new", "n": "other"}

    def nights(self, place: Path) -> Nights:
        """The run in `place`/out."""
        settings = {"input__path": str(self.folder / "rows.jsonl"), "run__on_vanished": "drop"}
        nights = Nights(place, settings | (_VECTORS if self.kind == "vectors" else {}))
        if self.kind == "vectors":
            nights.make_engine = lambda: FakeEmbedder(4, refuse=nights.refuse)
        return nights

    def begin(self, place: Path) -> None:
        """The first night in `place`, and then the input that the command is about."""
        Nights(self.folder).write(_rows(_FIRST))
        nights = self.nights(place)
        refused = [self._token_ids(nights, _FIRST[name]) for name in _FAILED] if self.change == "retry" else []
        nights.refuse = lambda request: list(request.prompt_token_ids) in refused
        assert in_child(nights.submit).error is None
        Nights(self.folder).write(_rows(self.texts))

    def command(self, place: Path) -> Ended:
        nights = self.nights(place)
        work = nights.retry if self.change == "retry" else nights.submit
        return in_child(lambda: work().exit_code)

    def _token_ids(self, nights: Nights, text: str) -> list[int]:
        tokenizer = prepare(nights.spec()).tokenizer
        if self.kind == "vectors":
            return list(tokenizer.encode_batch([text], add_special_tokens=True)[0])
        prompt = tokenizer.chat_renderer().render([{"role": "user", "content": f"Say {text}"}])
        return list(tokenizer.encode_batch([prompt], add_special_tokens=False)[0])

    def wanted(self, texts: Mapping[str, str]) -> Answers:
        """id -> its answer, of one run over these rows."""
        nights = self.nights(self.folder)
        if self.kind == "text":
            return {name: nights.expected(name, text) for name, text in texts.items()}
        return {name: expected_vector(self._token_ids(nights, text)) for name, text in texts.items()}

    def wrong_glob(self, place: Path, old: Answers, new: Answers) -> str | None:
        """What a plain glob shows that it may not."""
        column = "response" if self.kind == "text" else "embedding"
        parts = sorted((place / "out").glob("*.parquet"))
        rows = [row for part in parts for row in pq.read_table(part, page_checksum_verification=True).to_pylist()]
        found = {row["id"]: _bits(row[column]) for row in rows}
        may_fail = set(_FAILED) if self.change == "retry" else set()
        odd = [
            name
            for name, answer in found.items()
            if answer not in (old.get(name), new.get(name)) and not (answer is None and name in may_fail)
        ]
        if len(found) < len(rows) or odd or (old.keys() & new.keys()) - found.keys():
            return f"{len(rows)} rows of {len(found)} ids, {odd[:3]} with another answer"
        return None

    def wrong_end(self, place: Path, new: Answers) -> str | None:
        """What is not as after one run over the last input."""
        if wrong := self.wrong_glob(place, new, new):
            return wrong
        column = "response" if self.kind == "text" else "embedding"
        found = {name: _bits(row[column]) for name, row in self.nights(place).results().items()}
        if found != new:
            return f"other results: {[name for name in found | new if found.get(name) != new.get(name)]}"
        return "; ".join(verify_run(RunDir(place / "out")).problems) or None


def _bits(value: Any) -> Any:
    return np.float32(value).tobytes() if isinstance(value, list) else value


def _rows(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"id": name, "text": text} for name, text in texts.items()]


def never(request: Request) -> bool:
    return False


def cuts(scene: Scene, scratch: Path, *, every: int = 1) -> Found:
    """Run the command once with a snapshot after each operation, then go on from each `every`-th."""
    snapshots, found = scratch / "snapshots", Found()
    with mounted("tests.campaigns.powercut_fs", scratch / "mnt", str(scratch / "mnt"), str(snapshots)) as mount:
        scene.begin(mount)
        (mount / "ack").mkdir()
        assert scene.command(mount).error is None
        (mount / "ack" / "done").touch()
    [acknowledged] = (snapshots / "acks").read_text().splitlines()
    found.operations = int(acknowledged.split()[0])
    old, new = scene.wanted(_FIRST), scene.wanted(scene.texts)
    for cut in sorted(path for path in snapshots.iterdir() if path.is_dir()):
        number = int(cut.name[:5])
        if number % every == 0 or number == found.operations:
            look_at(scene, cut, f"cut {cut.name}", old, new, found, is_done=number >= found.operations)
        shutil.rmtree(cut)
    return found


def faults(scene: Scene, scratch: Path, *, every: int = 1) -> Found:
    """The command with each `every`-th operation failing, then once more without."""
    disk, rule, found = scratch / "disk", scratch / "disk.rule", Found()
    disk.mkdir()
    scene.begin(disk)
    old, new = scene.wanted(_FIRST), scene.wanted(scene.texts)
    with mounted("tests.campaigns.fault_fs", scratch / "mnt", str(disk), str(scratch / "mnt")) as mount:
        shutil.copytree(disk / "out", disk / "clean" / "out")
        before = count(scratch)
        assert scene.command(mount / "clean").error is None
        found.operations = count(scratch) - before
        for number in range(1, found.operations + 1, every):
            for error, when in FAULTS:
                shutil.copytree(disk / "out", disk / "run" / "out")
                rule.write_text(f"{count(scratch) + number} {error} {when}")
                ended = scene.command(mount / "run")
                rule.unlink()
                name = f"operation {number} {error} {when}"
                if (ended.error or "").startswith("crash"):
                    found.violations.append(f"{name}: {ended.error}: {ended.message}")
                found.clean_errors += ended.error is not None
                look_at(scene, mount / "run", name, old, new, found, is_done=ended.error is None)
                shutil.rmtree(disk / "run")
    return found


def look_at(scene: Scene, place: Path, name: str, old: Answers, new: Answers, found: Found, *, is_done: bool) -> None:
    """What is there now, and what the same command makes of it."""
    found.states += 1
    try:
        wrong = scene.wrong_glob(place, old, new) or (scene.wrong_end(place, new) if is_done else None)
        if wrong is None and (ended := scene.command(place)).error is not None:
            wrong = f"the same command again: {ended.error}: {ended.message}"
        wrong = wrong or scene.wrong_end(place, new)
    except (OSError, AssertionError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        found.violations.append(f"{name}: {wrong}")


def campaign(what: str, change: str, kind: str, scratch: Path, *, every: int = 1) -> Found:
    scene = Scene(scratch / "scene", change, kind)
    scene.folder.mkdir()
    return {"cuts": cuts, "faults": faults}[what](scene, scratch, every=every)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cuts", "faults"))
    parser.add_argument("--change", choices=CHANGES, default="night")
    parser.add_argument("--kind", choices=KINDS, default="vectors")
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asdict(campaign(given.what, given.change, given.kind, Path(folder), every=given.every))))

"""What has been measured: one JSON line per item, appended as soon as it is there. Knows no measuring."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.gpu.items import Item, Prediction

Line = dict[str, Any]
UNENDED = "it began and has not ended"  # what stands there until it has: whatever is killed then, this is known


@dataclass(frozen=True, slots=True)
class Results:
    """A file that grows, and files of earlier calls whose items need not be measured again.

    `hardware` stands in every line: what it was measured on.
    """

    path: Path
    earlier: tuple[Path, ...] = ()
    hardware: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[Line]:
        """All there are, the earliest first; of two of one item the later one counts."""
        found: dict[tuple[str, str], Line] = {}
        for path in (*self.earlier, self.path):
            for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
                line = json.loads(text)
                found[line["stage"], line["name"]] = line
        return list(found.values())

    def has(self, stage: str, name: str) -> bool:
        """Whether an item has been measured."""
        return any((line["stage"], line["name"]) == (stage, name) and "facts" in line for line in self.lines())

    def size(self) -> int:
        """Bytes of this call's file."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def lines_since(self, size: int) -> list[Line]:
        """What was added after the file had this size."""
        text = self.path.read_bytes()[size:].decode() if self.path.is_file() else ""
        return [json.loads(line) for line in text.splitlines()]

    def pace(self, shape: str) -> float:
        """How many times as long as guessed the runs of this shape took."""
        facts = [line["facts"] for line in self.lines() if line.get("facts", {}).get("guessed_s")]
        return median([one["wall_s"] / one["guessed_s"] for one in facts if one["shape"] == shape] or [1.0])

    def add(self, stage: str, name: str, predictions: Iterable[Prediction] = (), **outcome: Any) -> None:
        """`outcome`: facts, or error or skipped with the reason."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        told = {"hardware": self.hardware, "predictions": [asdict(one) for one in predictions]}
        line = {"stage": stage, "name": name, "at": at, **told, **outcome}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def add_item(self, stage: str, item: Item, **outcome: Any) -> None:
        """The same with the item's predictions."""
        self.add(stage, item.name, item.predictions, **outcome)

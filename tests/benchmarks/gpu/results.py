"""What has been measured: one JSON line per item, appended as soon as it is there. Knows no measuring."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.items import Item, Prediction

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Results:
    """A file that grows, and files of earlier calls whose items need not be measured again."""

    path: Path
    earlier: tuple[Path, ...] = ()

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

    def add(self, stage: str, name: str, predictions: Iterable[Prediction] = (), **outcome: Any) -> None:
        """`outcome`: facts, or error or skipped with the reason."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"stage": stage, "name": name, "at": at, "predictions": [asdict(one) for one in predictions], **outcome}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def add_item(self, stage: str, item: Item, **outcome: Any) -> None:
        """The same with the item's predictions."""
        self.add(stage, item.name, item.predictions, **outcome)

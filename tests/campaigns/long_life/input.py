"""The input of a long life: rows that come, change and go, in files that are renamed, split and written anew."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
BROKEN = {".jsonl": '{"id": "torn', ".csv": "too,many,fields,for,any,header,of,ours"}
LONG = "long " * 130  # more tokens than the jobs' engine.max_model_len, fewer than that of a generous retry
FORMATS = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz")


class Table:
    """Rows in order (None: a line that cannot be read) and the files that they lie in.

    A `typed` table has numbers, and no CSV files, where all is text.
    """

    def __init__(self, folder: Path, rng: random.Random, *, typed: bool, with_broken: bool) -> None:
        self.folder, self.rng, self.typed = folder, rng, typed
        self.with_broken = with_broken
        self.rows: list[Row | None] = []
        self.format, self.pieces, self.prefix = ".jsonl", 1, "rows"
        self.extra = False  # a column that comes and goes
        self._made = 0
        self.whole_ids = typed and rng.random() < 0.5
        self.nested = typed and rng.random() < 0.4  # a column of structs
        self.hidden: str | None = None  # rows with this tag are none of `input.sql`
        folder.mkdir()
        self.add(rng.randint(4, 14))
        self.write()

    def add(self, count: int) -> None:
        for _ in range(count):
            self._made += 1
            name = 7 * self._made if self.whole_ids else f"r{self._made}{self.rng.choice(['', ' é', ',:%'])}"
            row = {"id": name, "text": self._text(), "tag": self._tag(), "score": self._score()}
            row["most"] = self._most()
            row |= {"meta": self._meta()} if self.nested else {}
            self.rows.insert(self.rng.randint(0, len(self.rows)), row)

    def _text(self) -> str | None:
        kind = self.rng.random()
        if kind < 0.12:
            return self.rng.choice([None, LONG, "zero"])
        return f"text {self.rng.randrange(80)}{self.rng.choice(['', '', '', ' é', chr(10) + '|'])}"  # some are the same

    def _tag(self) -> str | None:
        return self.rng.choice(["en", "de", "a b/c=d", "2024-01-01", "07", 'é"q", ~', "NULL", None])

    def _score(self) -> Any:
        score = self.rng.randint(0, 9) + (0.5 if self.rng.random() < 0.1 else 0)
        return score if self.typed else str(score)

    def _most(self) -> Any:
        """The row's own sampling.max_tokens, in jobs that read it."""
        most = self.rng.choice([1, 2, 5, 8, 8, None])
        return most if self.typed or most is None else str(most)

    def _meta(self) -> Any:
        """Always of one type."""
        if self.rng.random() < 0.1:
            return None
        tags = [self.rng.choice(["x", "é y", None, 'q"'])] * self.rng.randint(0, 2)
        return {"a": self.rng.randint(0, 3), "tags": [*tags, "z"], "in": {"b": [{"c": self._score() * 1.0}]}}

    def mutate(self) -> str:
        """One thing that happens to an input between two nights; its name."""
        changes: list[Callable[[], object]] = [self._add, self._change, self._delete, self._reorder, self._rename]
        changes += [self._split, self._rewrite, self._break_line, self._widen, self._toggle_extra, self._double]
        change = self.rng.choices(changes, [5, 6, 3, 2, 2, 2, 2, 2, 1, 1, 1])[0]
        change()
        if change != self._rename:
            self.write()
        return change.__name__.strip("_")

    def _add(self) -> None:
        self.add(self.rng.randint(1, 5))

    def _change(self) -> None:
        for row in self.some(4):
            made = {"text": self._text, "tag": self._tag, "score": self._score, "most": self._most}
            made |= {"meta": self._meta} if self.nested else {}
            name = self.rng.choice(["text", *made])
            row[name] = made[name]()

    def some(self, most: int) -> list[Row]:
        whole = [row for row in self.rows if row is not None]
        return self.rng.sample(whole, min(len(whole), self.rng.randint(1, most)))

    def _delete(self) -> None:
        gone = [row["id"] for row in self.some(3)]
        if len(self.rows) > 6:
            self.rows = [row for row in self.rows if row is None or row["id"] not in gone]

    def _reorder(self) -> None:
        self.rng.shuffle(self.rows)

    def _rename(self) -> None:
        """Files of the same content, and as old, under other names in the same order."""
        self.prefix = f"f{self.rng.randrange(1000)}"
        for number, path in enumerate(sorted(self.folder.iterdir())):
            path.rename(self.folder / f"new-{number:03}{self.format}")
        for number, path in enumerate(sorted(self.folder.iterdir())):
            path.rename(self.folder / f"{self.prefix}-{number:03}{self.format}")

    def _split(self) -> None:
        self.pieces = self.rng.randint(1, 3)

    def _rewrite(self) -> None:
        self.format = self.rng.choice([name for name in FORMATS if not (self.typed and ".csv" in name)])
        if self.format == ".parquet":
            self.rows = [row for row in self.rows if row is not None]

    def _break_line(self) -> None:
        if None in self.rows and self.rng.random() < 0.6:
            self.rows = [row for row in self.rows if row is not None]
        elif self.with_broken and self.format != ".parquet":
            self.rows.insert(self.rng.randint(0, len(self.rows)), None)

    def _widen(self) -> None:
        """Numbers that were whole have fractions from now on, or the other way round."""
        for row in self.rows:
            if row is not None and self.typed:
                row["score"] = row["score"] + 0.5 if row["score"] % 1 == 0 else int(row["score"])

    def _toggle_extra(self) -> None:
        self.extra = not self.extra

    def _double(self) -> None:
        """Some id names two rows."""
        if not self.doubled:
            self.rows += [{**row, "text": self._text()} for row in self.some(1)]

    @property
    def doubled(self) -> bool:
        names = [row["id"] for row in self.rows if row is not None]
        return len(set(names)) < len(names)

    def undouble(self) -> None:
        names: set[str] = set()
        self.rows = [row for row in self.rows if row is None or not (row["id"] in names or names.add(row["id"]))]
        self.write()

    def write(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        cuts = sorted(self.rng.sample(range(1, len(self.rows)), min(self.pieces, len(self.rows)) - 1))
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(self.rows)], strict=True)):
            _write(self.folder / f"{self.prefix}-{number:03}{self.format}", self._shown(self.rows[start:end]))

    def _shown(self, rows: Sequence[Row | None]) -> list[Row | None]:
        return [row if row is None or not self.extra else {**row, "extra": "more"} for row in rows]

    def read(self, carried: str | None = None) -> list[Row | None]:
        """The rows as a reader of these files has them: numbers of one type, no nulls in CSV.

        JSON tells no types of numbers: they take the one that the results have, `carried`, where it holds them all.
        """
        rows = [row for row in self.rows if row is None or self.hidden is None or row["tag"] != self.hidden]
        in_doubles = self.score_type == "double" or (self.typed and carried == "double" and ".jsonl" in self.format)
        return [None if row is None else self._typed(row, in_doubles) for row in self._shown(rows)]

    def _typed(self, row: Row, in_doubles: bool) -> Row:
        if ".csv" in self.format:
            return {name: "" if value is None else value for name, value in row.items()}
        return {**row, "score": float(row["score"])} if in_doubles else dict(row)

    @property
    def score_type(self) -> str:
        if not self.typed:
            return "text"
        whole = all(row is None or isinstance(row["score"], int) for row in self.rows)
        return "int" if whole else "double"

    @property
    def facts(self) -> list[tuple[int, int]]:
        """What tells these files from others, in order, whatever they are called."""
        stats = [path.stat() for path in sorted(self.folder.iterdir())]
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _write(path: Path, rows: Sequence[Row | None]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row for row in rows if row is not None]), path)
        return
    kind = path.suffixes[0]
    lines = [BROKEN[kind] if row is None else _line(kind, row) for row in rows]
    if kind == ".csv":
        whole = next((row for row in rows if row is not None), {"id": 0, "text": 0, "tag": 0, "score": 0, "most": 0})
        lines.insert(0, ",".join(whole))
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _line(kind: str, row: Row) -> str:
    if kind == ".jsonl":
        return json.dumps(row)
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(row.values())
    return line.getvalue().removesuffix("\n")

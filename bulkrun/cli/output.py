"""How commands print: data on stdout (a table, or JSON for programs), everything else on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text

_WIDTH_WITHOUT_TERMINAL = 160

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs.")


def note(message: str) -> None:
    """A line for the person, on stderr."""
    click.echo(message, err=True)


def print_json(value: Any) -> None:
    """One JSON object; dates, paths and the like as text."""
    indent = 2 if sys.stdout.isatty() else None
    echo_json(json.dumps(value, ensure_ascii=not takes_unicode(), default=str, indent=indent))


def echo_json(text: str) -> None:
    """JSON on stdout. A terminal obeys more characters than JSON escapes: there they are escaped as well."""
    if sys.stdout.isatty():
        text = "".join(ch if ch.isprintable() or ch == "\n" else json.dumps(ch)[1:-1] for ch in text)
    click.echo(text)


def takes_unicode() -> bool:
    """Whether stdout is UTF-8; if not, JSON escapes what is not ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    whole_names: bool = False,
    max_lines: int | None = None,
) -> None:
    """Rows as a table as wide as the terminal; numbers to the right, long text folded, no markup read from data.

    With `whole_names` the first column, of short names, is never folded: what is to be copied stands on one line. A
    cell that is longer than `max_lines` when folded ends there with an ellipsis.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(Text(cell_text(name)), justify=justify, overflow="fold", no_wrap=whole_names and index == 0)
    for row in rows:
        table.add_row(*(_Clipped(Text(cell_text(cell)), max_lines) for cell in row))
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 50)).columns if sys.stdout.isatty() else None
    console = Console(width=width or _WIDTH_WITHOUT_TERMINAL, highlight=False)
    with console.capture() as shown:  # where nobody reads it any more, rich ends the process in its own way
        console.print(table)
    sys.stdout.write(shown.get())


class _Clipped(NamedTuple):
    """A cell of at most `max_lines` lines (None: of all), which only its column's width tells."""

    text: Text
    max_lines: int | None

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return self.text.__rich_measure__(console, options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        lines = self.text.wrap(console, width, justify=options.justify, overflow=options.overflow)
        shown = lines[: self.max_lines]
        if len(shown) < len(lines):
            shown[-1].rstrip()
            shown[-1].truncate(width - 1)
            shown[-1].append("…")
        yield from shown


def cell_text(cell: Any) -> str:
    """A value as a cell shows it; control characters (a model may emit escapes) are made visible."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    text = str(cell)
    return "".join(ch if ch.isprintable() or ch == "\n" else ascii(ch)[1:-1] for ch in text)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Names and values, one a line, aligned."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {cell_text(value)}")


def count(number: float) -> str:
    """1234567 -> 1,234,567."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def in_bytes(number: float) -> str:
    """Decimal units, three digits: 640 B, 16.1 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def duration(seconds: float | None) -> str:
    """Seconds as people say it: 5 s, 3 min 20 s, 2 h 5 min; unknown is a question mark."""
    if seconds is None:
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"

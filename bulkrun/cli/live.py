"""How a running job shows itself: one live view on a terminal, one plain line a minute without.

Everything goes to stderr. A view is given snapshots and prints them when it likes; it never asks the run for anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from bulkrun.cli.output import count, duration

if TYPE_CHECKING:
    from rich.columns import Columns

    from bulkrun.job.work.progress import ProgressSnapshot

LINE_EVERY_S = 60.0


class QuietView:
    """Says nothing (`--quiet`: cron mails every line)."""

    def phase(self, text: str) -> None: ...

    def update(self, snapshot: ProgressSnapshot) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class LineView(QuietView):
    """For logs: what happens now, then the numbers once a minute, always as whole lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_line = clock() + LINE_EVERY_S

    def phase(self, text: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)

    def update(self, snapshot: ProgressSnapshot) -> None:
        if self._clock() >= self._next_line:
            self._next_line = self._clock() + LINE_EVERY_S
            self.phase(progress_line(snapshot))

    def note(self, text: str) -> None:
        self.phase(text)


class LiveView(QuietView):
    """For people: a bar and the numbers, redrawn in place by rich's own thread."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._phase = "starting"
        self._snapshot: ProgressSnapshot | None = None
        console = Console(stderr=True, highlight=False)
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, text: str) -> None:
        self._phase = text

    def update(self, snapshot: ProgressSnapshot) -> None:
        self._snapshot = snapshot

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.spinner import Spinner

        if self._snapshot is None:
            return Spinner("dots", text=self._phase)
        return Group(_bar(self._snapshot), _numbers(self._snapshot, self._phase))


def make_view(quiet: bool) -> QuietView:
    """The view for this stderr."""
    if quiet:
        return QuietView()
    return LiveView() if sys.stderr.isatty() else LineView()


def progress_line(snapshot: ProgressSnapshot) -> str:
    """The numbers in one line."""
    total = count(snapshot.rows_total) + ("" if snapshot.plan_complete else "+")
    share = snapshot.rows_done / snapshot.rows_total if snapshot.rows_total else 0.0
    out = f"{count(snapshot.completion_tokens_per_s)} tok/s out, " if snapshot.generates else ""
    cache = f"KV {snapshot.kv_cache_usage:.0%}, " if snapshot.generates else ""
    return (
        f"{count(snapshot.rows_done)}/{total} rows ({share:.0%}), {count(snapshot.prompt_tokens_per_s)} tok/s in, {out}"
        f"{snapshot.num_running} running, {snapshot.num_waiting} waiting, {cache}"
        f"{count(snapshot.error_rows)} errors, {duration(snapshot.eta_s)} left"
    )


def _bar(snapshot: ProgressSnapshot) -> Columns:
    from rich.columns import Columns
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = count(snapshot.rows_total) + ("" if snapshot.plan_complete else "+ (still planning)")
    share = snapshot.rows_done / snapshot.rows_total if snapshot.rows_total else 0.0
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=max(1, snapshot.rows_total), completed=snapshot.rows_done, width=30),
        Text(f"{share:.0%}", no_wrap=True),
    )
    texts = (f"{count(snapshot.rows_done)} of {total} rows", f"{duration(snapshot.eta_s)} left")
    return Columns([bar, *(Text(text, no_wrap=True) for text in texts)], padding=(0, 1))


def _numbers(snapshot: ProgressSnapshot, phase: str) -> Columns:
    """The facts, side by side, as many as fit without being cut."""
    from rich.columns import Columns
    from rich.text import Text

    facts = {
        "in": f"{count(snapshot.prompt_tokens_per_s)} tok/s",
        "out": f"{count(snapshot.completion_tokens_per_s)} tok/s",
        "running": count(snapshot.num_running),
        "waiting": count(snapshot.num_waiting),
        "KV cache": f"{snapshot.kv_cache_usage:.0%}",
        "errors": count(snapshot.error_rows),
        "time": duration(snapshot.elapsed_s),
        "now": phase,
    }
    if not snapshot.generates:
        del facts["out"], facts["KV cache"]
    whole = [Text.assemble((name, "dim"), f" {value}", no_wrap=True) for name, value in facts.items()]
    return Columns(whole, padding=(0, 3))

"""Where an export goes: the options, what may not be written to, and files that appear whole or not at all.

Knows names and streams; knows no rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import IO, Literal

from bulkrun.data.storage.durable import discard, new_file, swap_in, temporary
from bulkrun.data.storage.leftovers import remove_old
from bulkrun.errors import UsageError
from bulkrun.job.store.run_dir import RunDir

Format = Literal["openai", "jsonl", "csv", "parquet"]
Only = Literal["all", "ok", "errors"]
STDOUT = Path("-")


@dataclass(frozen=True)
class ExportOptions:
    """What to export and where to. `errors_path` (openai) takes the error lines; None: a name beside `path`."""

    format: Format
    path: Path = STDOUT
    errors_path: Path | None = None
    only: Only = "all"
    partial: bool = False
    force: bool = False

    @property
    def error_file(self) -> Path:
        """Where error lines go: with the other lines when only one kind is wanted, and on stdout."""
        if self.format != "openai" or self.only != "all":
            return self.path
        if self.errors_path is not None or self.path == STDOUT:
            return self.errors_path or STDOUT
        return self.path.with_name(f"{self.path.stem}.errors{self.path.suffix}")

    @property
    def targets(self) -> list[Path]:
        """The files to write, the error file first."""
        return [path for path in dict.fromkeys((self.error_file, self.path)) if path != STDOUT]


def check_targets(run: RunDir, options: ExportOptions) -> None:
    """Raise UsageError for a file that is in the way, would lie among the results, or has no directory."""
    if options.errors_path is not None and (options.format != "openai" or options.only != "all"):
        raise UsageError("--errors is for --format openai with --only all, where error lines have a file of their own")
    if options.errors_path is not None and options.errors_path == options.path:
        raise UsageError("--errors: the same file as -o; leave it out, or name another")
    for path in options.targets:
        if path.resolve().is_relative_to(run.root.resolve()):
            raise UsageError(f"{path}: lies in the result directory, among what queries read; choose another place")
        if not path.parent.is_dir():
            if path.parts[0].endswith(":"):  # what a Path makes of s3://
                raise UsageError(f"{path}: exports go to local files; copy one there, or pipe it there (-o -)")
            raise UsageError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise UsageError(f"{path}: is a directory; name a file")
        if path.exists() and not options.force:
            raise UsageError(f"{path}: already exists; --force replaces it")


@contextmanager
def open_targets(options: ExportOptions, stdout: IO[bytes]) -> Iterator[dict[Path, IO[bytes]]]:
    """The stream of each target. When the body is done the files get their names; when it fails there are none."""
    named = {path: temporary(path) for path in options.targets}
    for path in named:
        remove_old(path.parent, f".{escape(path.name)}.{'[0-9a-f]' * 16}.tmp")  # of exports that were killed
    with ExitStack() as temporaries:
        for tmp in named.values():
            temporaries.callback(discard, tmp)
        with ExitStack() as stack:
            streams = {path: stack.enter_context(new_file(tmp, path)) for path, tmp in named.items()}
            yield {STDOUT: stdout, **streams}
        _give_names(named, options.force)


def _give_names(named: dict[Path, Path], force: bool) -> None:
    """Where one fails, the others lose theirs again: without --force they would be in the way of the next try."""
    with ExitStack() as given:
        for path, tmp in named.items():
            if not force:
                given.callback(_take_back, path, tmp)
            swap_in(tmp, path)
        given.pop_all()


def _take_back(path: Path, tmp: Path) -> None:
    if not tmp.exists():  # else the file at `path`, if any, is another's
        discard(path)

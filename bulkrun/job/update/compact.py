"""Many small parts into few large ones, their rows in input order: a new directory that takes the run's place at once.

Two renames cannot swap two sets of files in one directory, so a complete sibling directory is built: new parts under
numbers that were never used, the run's state by hard links, `_SUCCESS` of the next generation. Then the two directories
exchange their names in one step and the old one goes. A reader that had listed the old directory finds no file where
the old parts were, and says so; it never sees a row twice, or fewer rows. A kill leaves the run whole, before or after,
and a hidden sibling that the next `compact` removes. Knows no plan and no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import pyarrow as pa

from bulkrun.data.results.parts import PartInfo, read_part_columns, read_part_info, row_bounds
from bulkrun.data.storage.durable import (
    disk_errors,
    encode_json,
    fsync_dir,
    make_dirs,
    publish_new,
    remove_tree,
    write_file,
)
from bulkrun.data.storage.exchange import can_exchange, exchange_dirs, link_tree
from bulkrun.data.storage.leftovers import remove_old
from bulkrun.data.tables.in_order import in_row_order
from bulkrun.errors import RunError
from bulkrun.job.store.events import log_event, utc_now
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals, totals_document
from bulkrun.job.update.replace_rows import keys_of
from bulkrun.job.update.rewrite import beside_rows, write_again
from bulkrun.job.update.staging import removed_on_failure, update_under_way
from bulkrun.job.update.update_claim import hold, refuse_lost_hold
from bulkrun.job.work.delivery import deliver
from bulkrun.job.work.finish import sum_parts

DEFAULT_ROWS_PER_FILE = 1_000_000
MAX_FILE_BYTES = 256 * 2**20  # of rows in memory, before compression; a file is made in memory
_READERS_GRACE_S = 1.0  # a reader that is listing the old directory right now finishes before its files are removed


@dataclass(frozen=True)
class Compacted:
    """What `compact` did: nothing when `parts_after` is what was there. `rows` are output rows."""

    parts_before: int
    parts_after: int
    rows: int
    worked: bool


def compact(run: RunDir, rows_per_file: int = DEFAULT_ROWS_PER_FILE, *, grace_s: float = _READERS_GRACE_S) -> Compacted:
    """Rewrite the parts of a finished run, each with at most `rows_per_file` input rows (and `MAX_FILE_BYTES`).

    Raises RunError when the run is not finished, is worked on or has an update under way, when the file system cannot
    exchange directories (before any work), and when a part is damaged.
    """
    shown, run = run.root, RunDir(run.root.resolve())
    _refuse_unfit(run, shown)
    with hold(run) as worker:
        totals = _refuse_unfit(run, shown)
        remove_tree(run.staged.root)  # what is left of a retry that died before it was staged
        sibling = run.root.with_name(f".{run.root.name}.compact")
        _remove_leftover(sibling)
        remove_old(run.root.parent, ".bulkrun-probe.*")  # of `can_exchange`
        before = len(run.parts())
        if _is_compact(totals, rows_per_file):
            deliver(run, read_record(run))  # a kill may have prevented the delivery
            return Compacted(before, before, totals.ok + sum(totals.errors.values()), worked=False)
        with removed_on_failure(run, lambda _: _remove(sibling)), disk_errors("writing the new directory", sibling):
            done = _Rewrite(run, RunDir(sibling), read_record(run), totals, rows_per_file).build()
            refuse_lost_hold(run)
            exchange_dirs(run.root, sibling)
        log_event(run, worker.id, "compacted", parts_before=before, parts_after=done.parts)
        time.sleep(grace_s)
        refuse_lost_hold(run)
        _remove(sibling)
        deliver(run, read_record(run))
    return Compacted(before, done.parts, done.ok + sum(done.errors.values()), worked=True)


def _refuse_unfit(run: RunDir, shown: Path) -> RunTotals:
    """The totals of a run that can be compacted; messages name it as the user did."""
    read_record(RunDir(shown))
    totals = read_totals(run)
    if totals is None:
        raise RunError(f"{shown}: not finished; submit its job again first: only a finished run can be compacted")
    if update_under_way(run) is not None:
        raise RunError(
            f"{shown}: a retry or an incremental update is under way (.bulkrun/next); finish it with its own command"
        )
    if run.root.stat().st_dev != run.root.parent.stat().st_dev or not can_exchange(run.root.parent):
        raise RunError(
            f"{shown}: compact needs a file system that can exchange two directories in one step and has hard links "
            f"(ext4, XFS, Btrfs, tmpfs; not NFS), and the run must not be a mount point; nothing was changed. "
            f"`bulkrun export {shown} --format parquet` writes one file instead"
        )
    return totals


def _remove_leftover(sibling: Path) -> None:
    """Remove what a killed `compact` left: half of a new directory, or the old one after the exchange."""
    if sibling.exists() and any(sibling.iterdir()) and not RunDir(sibling).state.is_dir():
        raise RunError(f"{sibling}: in the way, and not made by bulkrun; move it away")
    _remove(sibling)


def _remove(sibling: Path) -> None:
    """Remove a sibling, its state last: after a kill that tells a later `compact` whose directory it is."""
    with disk_errors("removing the old directory", sibling):
        for entry in sorted(sibling.iterdir() if sibling.exists() else ()):
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
            elif entry != RunDir(sibling).state:
                remove_tree(entry)
    remove_tree(sibling)


def _is_compact(totals: RunTotals, rows_per_file: int) -> bool:
    """Whether nothing happened since a `compact` to the same size."""
    last = totals.updates[-1] if totals.updates else {}
    return (last.get("kind"), last.get("rows_per_file")) == ("compact", rows_per_file)


@dataclass(frozen=True)
class _Rewrite:
    """The making of `target`, the directory that takes the place of `run`."""

    run: RunDir
    target: RunDir
    record: RunRecord
    totals: RunTotals
    rows_per_file: int

    def build(self) -> RunTotals:
        """Make the whole directory, durably; its totals."""
        make_dirs(self.target.root)
        self.target.root.chmod(self.run.root.stat().st_mode)
        make_dirs(self.target.state, 0o700)
        make_dirs(self.target.tmp)
        written = list(self._parts())
        totals = self._checked([info for _, info in written])
        link_tree(self.run.root, self.target.root, self._is_carried_over(self.run.parts().values()))
        for tmp, info in written:
            self._give_name(tmp, info)  # late: a glob over the parent directory sees both until the exchange is done
        write_file(self.target.success, encode_json(totals_document(totals)))
        fsync_dir(self.target.root)
        return totals

    def _is_carried_over(self, parts: Iterable[Path]) -> Callable[[Path], bool]:
        """All but what is made anew, and files of the state that are not whole (a heartbeat is just being written)."""
        left = {self.run.success, self.run.tmp, self.run.staged.root, *parts}
        return lambda path: (
            path not in left and not (path.name.endswith(".tmp") and path.is_relative_to(self.run.state))
        )

    def _parts(self) -> Iterator[tuple[Path, PartInfo]]:
        """Write the new parts under temporary names, folder after folder; file and footer of each."""
        first = max([*self.run.parts(), *self.run.planned_shards()], default=-1) + 1
        numbers = count(first)
        folders: dict[Path, list[Path]] = {}
        for _, path in sorted(self.run.parts().items()):
            folders.setdefault(path.parent, []).append(path)
        for _, paths in sorted(folders.items()):
            yield from self._folder_parts(paths, numbers)

    def _folder_parts(self, paths: Sequence[Path], numbers: Iterator[int]) -> Iterator[tuple[Path, PartInfo]]:
        """The new parts of one folder. What was spent on its rows besides tokens is counted in the first of them."""
        old = [read_part_info(path) for path in paths]
        first, last = row_bounds(paths)
        tables = chain.from_iterable(read_part_columns(path) for path in paths)
        spent = sum_parts(self.record, old)
        like = replace(
            old[0],
            generation=self.totals.generation + 1,
            saved_generations=spent.saved_generations,
            cached_tokens=spent.cached_tokens,
            prompt_tokens=spent.prompt_tokens,
            completion_tokens=spent.completion_tokens,
        )
        like, newest = beside_rows(like, paths), -1
        for table in self._files(in_row_order(tables, range(first, last + 1), self.target.tmp)):
            newest = _check_order(paths, table, self.record.samples, newest)
            named = replace(like, shard=next(numbers))
            yield write_again(self.target.tmp, [table], table.schema, named, self.record)
            like = replace(like, saved_generations=0, cached_tokens=0, prompt_tokens=0, completion_tokens=0)

    def _files(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Cut a stream of tables into files; a row's samples stay together."""
        samples = self.record.samples
        held, num_rows, nbytes = list[pa.Table](), 0, 0
        for table in tables:
            held.append(table)
            num_rows, nbytes = num_rows + table.num_rows, nbytes + table.nbytes
            while num_rows >= self.rows_per_file * samples or (nbytes >= MAX_FILE_BYTES and num_rows >= samples):
                whole = pa.concat_tables(held)
                end = min(self.rows_per_file, num_rows // samples) * samples
                yield whole.slice(0, end)
                rest = whole.slice(end)
                held, num_rows, nbytes = [rest], rest.num_rows, rest.nbytes
        if num_rows:
            yield pa.concat_tables(held)

    def _give_name(self, tmp: Path, info: PartInfo) -> None:
        final = self.target.part(info.shard, info.folder)
        make_dirs(final.parent)
        publish_new(tmp, final)

    def _checked(self, parts: Sequence[PartInfo]) -> RunTotals:
        """The new totals: those of the run, after a look whether the new parts come to the same."""
        old, new = self.totals, sum_parts(self.record, parts)
        for what in ("rows", "ok", "errors"):
            if (want := getattr(old, what)) != (got := getattr(new, what)):
                raise RunError(
                    f"{self.run.root}: _SUCCESS counts {what} {want}, the parts hold {got}; nothing was changed: "
                    f"`bulkrun verify {self.run.root}` says what is wrong"
                )
        generation = old.generation + 1
        change = {"kind": "compact", "generation": generation, "finished": utc_now(), "parts": len(parts)}
        return replace(
            old,
            parts=len(parts),
            generation=generation,
            next_row=old.rows if old.next_row is None else old.next_row,
            updates=[*old.updates, {**change, "rows_per_file": self.rows_per_file}],
            cut=new.cut,
            stopped=new.stopped,
        )


def _check_order(paths: Sequence[Path], table: pa.Table, samples: int, newest: int) -> int:
    """Raise RunError when a (row, sample) appears twice; the last one of the table as one number."""
    keys = keys_of(table, samples)
    steps = np.diff(keys, prepend=newest)
    if (steps <= 0).any():
        row = int(keys[int(np.argmax(steps <= 0))]) // samples
        raise RunError(f"{paths[0].parent}: row {row} appears twice; nothing was changed: `bulkrun verify` says more")
    return int(keys[-1])

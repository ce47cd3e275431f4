"""One window of the input: rows go in as they are read, the order and the shards come out.

Holds the index and the counters, and hands the rows themselves on as they come. Knows no files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bulkrun.data.inputs.batch import InputBatch
from bulkrun.errors import InputError
from bulkrun.job.plan.cut import Limits, cut
from bulkrun.job.plan.ids import IdArray, hash_ids
from bulkrun.job.plan.index import I64, IndexBuilder, WindowIndex
from bulkrun.job.plan.order import RunOrder, in_shards, run_order, shared_prefix_tokens
from bulkrun.job.plan.partitions import MAX_PARTITIONS, Partitions
from bulkrun.job.plan.report import PlanCounters
from bulkrun.job.plan.rows import RowMaker
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.request import RowError


class Arrangement(NamedTuple):
    """Where each row of a window goes, per row in input order; the rest but for `counters` is per shard."""

    shard_of_row: I64
    rank_in_shard: I64
    prompt_tokens: I64
    costs: I64
    folders: list[str]
    adapters: list[str]
    counters: PlanCounters

    @property
    def num_shards(self) -> int:
        """Shards that the window is cut into."""
        return len(self.costs)


class Window:
    """Collects rows from row `first_row` on; `keep` is given each batch of them in the shard columns."""

    def __init__(
        self, first_row: int, maker: RowMaker, partitions: Partitions, keep: Callable[[pa.RecordBatch], None]
    ) -> None:
        self.rows = 0
        self.ids: list[IdArray] = []
        self._first_row = first_row
        self._maker = maker
        self._partitions = partitions
        self._folders: dict[str, int] = {}
        self._folder_of_row: list[I64] = []
        self._adapters: dict[str, int] = {}
        self._adapter_of_row: list[I64] = []
        self._priorities: list[I64] = []
        self._keep = keep
        self._index = IndexBuilder(first_row, maker.prefix_levels)
        self._counters = PlanCounters()

    def add(self, batch: InputBatch, prompts: Sequence[Prompt | RowError]) -> None:
        """The next rows of the input with their prompts. Raises InputError when they lie in too many partitions."""
        first = self._first_row + self.rows
        rows = self._maker.make(batch, self._placed(batch, prompts), first)
        self._index.add(rows.tokens, rows.lengths, rows.outputs, rows.nbytes, rows.variants, rows.mergeable)
        self._counters.add_lengths(rows.lengths[rows.lengths > 0])
        self._counters.add_errors(rows.error_codes)
        self._counters.truncated += rows.truncated
        if rows.ids is not None:
            self.ids.append(hash_ids(rows.ids, first))
        self._priorities.append(rows.priorities)
        self._note_adapters(rows.adapters)
        self._keep(rows.table)
        self.rows += len(prompts)

    def note_undeclared(self, columns: dict[str, int]) -> None:
        """Keys that the sample of the input did not show -> how often they come in this window."""
        self._counters.undeclared_columns = columns

    def _placed(self, batch: InputBatch, prompts: Sequence[Prompt | RowError]) -> Sequence[Prompt | RowError]:
        """Note each row's folder; rows whose value cannot name a folder become error rows."""
        placed = self._partitions.of(batch.rows)
        numbers = np.array([self._folders.setdefault(name, len(self._folders)) for name in placed.folders], np.int64)
        if len(self._folders) > MAX_PARTITIONS:
            raise InputError(
                f"output.partition_by: more than {MAX_PARTITIONS:,} partitions within {self.rows + len(prompts):,} "
                f"rows (from row {self._first_row:,} on: {_values_of(self._folders)}), each a folder with files of "
                "its own; choose a coarser column (a day, not a second), or make one in input.sql"
            )
        self._folder_of_row.append(numbers[placed.of_row])
        if not placed.errors:
            return prompts
        return [p if isinstance(p, RowError) else placed.errors.get(row, p) for row, p in enumerate(prompts)]

    def _note_adapters(self, names: Sequence[str | None]) -> None:
        """Note each row's adapter; rows that cannot run go with those of the first one."""
        numbers = self._adapters
        of_row = [0 if name is None else numbers.setdefault(name, len(numbers)) for name in names]
        self._adapter_of_row.append(np.array(of_row, np.int64))

    def arrange(self, total_rows: int | None, shard_rows: int | None, generations: int = 1) -> Arrangement:
        """Order and cut the window; `total_rows` of the whole input where that is known, `generations` of a row."""
        index = self._index.finish()
        folders, adapters = list(self._folders), list(self._adapters) or [""]
        group_of_row = _joined(self._adapter_of_row) * len(folders) + _joined(self._folder_of_row)
        order = run_order(index, group_of_row, _joined(self._priorities))
        limits = Limits.of(total_rows or self.rows, self.rows, shard_rows, generations)
        borders = cut(order, index.costs, index.nbytes, limits)
        order = in_shards(index, order, borders)
        place = np.empty(self.rows, np.int64)
        place[order.rows] = np.arange(self.rows)
        shard_of_row = np.searchsorted(borders, place, "right") - 1
        unique, num_shards = order.rows[order.first], len(borders) - 1

        def per_shard(values: I64) -> I64:
            return np.bincount(shard_of_row[unique], values[unique], minlength=num_shards).astype(np.int64)

        rank = place - borders[shard_of_row]
        groups = [divmod(group, len(folders)) for group in group_of_row[order.rows[borders[:-1]]].tolist()]
        return Arrangement(
            shard_of_row,
            rank,
            per_shard(index.lengths),
            per_shard(index.costs),
            [folders[folder] for _, folder in groups],
            [adapters[adapter] for adapter, _ in groups],
            self._counted(index, order, num_shards),
        )

    def _counted(self, index: WindowIndex, order: RunOrder, num_shards: int) -> PlanCounters:
        """The counters, with what is only known of a whole window."""
        counters, unique = self._counters, order.rows[order.first]
        counters.rows, counters.shards = self.rows, num_shards
        counters.unique_prompt_tokens = int(index.lengths[unique].sum())
        counters.expected_output_tokens = int(index.outputs[unique].sum())
        counters.duplicate_prompts = self.rows - len(unique)
        counters.shared_prefix_tokens = shared_prefix_tokens(index, order)
        return counters


def _joined(batches: Sequence[I64]) -> I64:
    return np.concatenate(batches or [np.empty(0, np.int64)])


def _values_of(folders: Iterable[str]) -> str:
    """How many values each partition column has, the one with the most first."""
    names = {name for folder in folders for name in folder.split("/")}
    counts = Counter(name.partition("=")[0] for name in names)
    return ", ".join(f"{column} has {count:,} values" for column, count in counts.most_common())

"""The input as planning reads it: window by window, from record batches to the rows of shards.

The same for a run's plan, a dry one and the comparison of a night. Publishes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import Dataset
from bulkrun.data.results.schema import passthrough_schema
from bulkrun.errors import Interrupted, JobFileError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.input_stream import InputStream
from bulkrun.job.plan.partitions import Partitions
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.plan.rows import RowMaker, check_id_column
from bulkrun.job.plan.window import Arrangement, Window
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.detect import describe_prompt, detected_job
from bulkrun.job.prompts.text_codec import TextCodec


class PlanPoint(NamedTuple):
    """Where planning goes on: the numbers of the next window, row and shard, and the next row's address."""

    window: int = 0
    row: int = 0
    shard: int = 0
    position: Position = Position(0, 0)

    @classmethod
    def after(cls, marker: dict[str, Any]) -> PlanPoint:
        """The point after a finished window, from its marker."""
        row, shard = marker["first_row"] + marker["rows"], marker["first_shard"] + marker["shards"]
        return cls(marker["window"] + 1, row, shard, Position(*marker["next"]))


class PlanInput:
    """What planning needs of the input, ready to stream: the same for a real plan and a dry one.

    `dataset` has the columns alone that prompts, results, ids and priorities are made of. `max_model_len` is in tokens;
    `should_stop` is asked between batches. `whole`: rows carry what prompts are made of, too, as a comparison needs it.

    Raises JobFileError or InputError for what is wrong before the first row (unknown columns, templates).
    """

    def __init__(
        self,
        spec: JobSpec,
        dataset: Dataset,
        text: TextCodec,
        max_model_len: int,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        whole: bool = False,
    ) -> None:
        self.input_schema = dataset.schema
        self.prompt = describe_prompt(spec, dataset.schema.names)
        spec = detected_job(spec, dataset.schema.names)
        check_id_column(spec.input.id, dataset.schema)
        self.spec = spec
        self.passthrough = passthrough_schema(dataset.schema, spec.input.columns, result_fields(spec), spec.input.id)
        if spec.run.incremental and spec.input.id not in self.passthrough.names:
            raise JobFileError([f"input.id: {spec.input.id!r} is a result column's name; rename it in input.sql"])
        self._prompts = PromptBuilder(spec, dataset.schema.names, text)
        # Unread columns are not parsed, so they cannot fail a row.
        used = {*self._prompts.reads, *self.passthrough.names, spec.input.id, spec.input.priority}
        self.dataset = dataset.select([name for name in dataset.schema.names if name in used])
        self._stream = InputStream(self.dataset, all_columns=spec.input.columns is None)
        more = [name for name in self._prompts.reads if whole and name not in self.passthrough.names]
        carried = pa.schema([*self.passthrough, *(dataset.schema.field(name) for name in more)])
        self._maker = RowMaker(spec, dataset.schema.names, carried, max_model_len)
        self._partitions = Partitions(spec.output.partition_by, self.passthrough)
        self._should_stop = should_stop

    def rows_wanted(self, at: PlanPoint) -> int:
        """Most rows of the window that begins at `at`; 0 when `run.limit` is reached."""
        window, limit = self.spec.run.window_rows, self.spec.run.limit
        return window if limit is None else min(window, limit - at.row)

    def read_window(self, at: PlanPoint, keep: Callable[[pa.RecordBatch], None]) -> tuple[Window, Position]:
        """Read the window that begins at `at`; where the next one begins. Raises Interrupted when told to stop."""
        window, position = Window(at.row, self._maker, self._partitions, keep), at.position
        for batch, prompts in self._prompts.stream(self._stream.take(at.position, self.rows_wanted(at))):
            if self._should_stop():
                raise Interrupted("planning was stopped; run the same command again and it goes on")
            window.add(batch, prompts)
            position = batch.next
        window.note_undeclared(self._stream.take_undeclared())
        return window, position

    def windows(self, keep: Callable[[pa.RecordBatch], None]) -> Iterator[Window]:
        """All windows of the input, each as soon as it is read."""
        at = PlanPoint()
        while self.rows_wanted(at):
            window, position = self.read_window(at, keep)
            if not window.rows:
                return
            yield window
            at = PlanPoint(at.window + 1, at.row + window.rows, position=position)

    def arrange(self, window: Window) -> Arrangement:
        """Order and cut a window that was read."""
        total, limit = self.dataset.num_rows, self.spec.run.limit
        known = total if limit is None or total is None else min(total, limit)
        return window.arrange(known, self.spec.output.rows_per_file, self.spec.sampling.generations)

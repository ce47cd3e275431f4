"""The engine and what is in it: which generations run, what became of them, what to do when the engine breaks.

After a failure there is a new engine, and what was in the old one runs again in ever smaller groups until the row that
breaks it is alone (`isolation`). The flight log says the same to a process that comes after this one. Knows no shards'
files, no journal and no plan.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Literal

from bulkrun.errors import BulkrunError, Interrupted
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.deadline import Deadline
from bulkrun.job.work.flight import FlightLog
from bulkrun.job.work.isolation import Isolation, reason_of
from bulkrun.job.work.shard_work import Generation
from bulkrun.request import Completion, Engine, EngineStats, RowError


class EngineLost(Exception):
    """The process must end as if it had been killed: its successor reads the flight log and isolates what was in it.

    A GPU whose driver has seen an illegal access fails every call of the process from then on.
    """


Failed = Callable[[str, int], None]  # told the kind of error and how many generations were in the engine


class EngineRunner:
    """One engine at a time, its model with one `adapter` ("": without).

    `rebuild` makes the next one, with the adapter that it is told; `failed` is told of each that broke.
    """

    def __init__(
        self,
        engine: Engine,
        rebuild: Callable[[str], Engine],
        flight: FlightLog,
        deadline: Deadline,
        failed: Failed,
        adapter: str = "",
    ) -> None:
        self._engine, self._rebuild, self._flight, self.adapter = engine, rebuild, flight, adapter
        self._deadline, self._failed, self._is_lost, self._is_loaded = deadline, failed, False, True
        self._failure = ""  # of the engine before
        self._before = EngineStats()  # what engines that went have counted
        self.isolation = Isolation()
        self.in_flight: dict[str, Generation] = {}

    @property
    def max_num_seqs(self) -> int:
        """Most generations that run at once."""
        return self._engine.max_num_seqs

    @property
    def places(self) -> int:
        """Texts that may come beside those that are here, so that as many wait as can run at once.

        Of a request of several texts, of which some hundred thousand may be one row, each that has not ended counts.
        """
        stats = self.stats
        return 2 * self.max_num_seqs - max(len(self.in_flight), stats.num_running + stats.num_waiting)

    @property
    def stats(self) -> EngineStats:
        """Levels of the engine at hand, and what it and those before it have counted."""
        return self._engine.stats().counted_after(self._before) if self._is_loaded else self._before

    @property
    def tokens_in_flight(self) -> int:
        """Output tokens so far of what is in the engine, whichever engine or attempt made them."""
        return sum(len(token_ids) for _, token_ids in self.partials(at_least=1))

    def change_adapter(self, adapter: str) -> None:
        """An engine with another adapter in the place of the one at hand, in which nothing runs.

        Raises BulkrunError that says what is wrong with the model, Interrupted when a signal came meanwhile, and
        EngineLost where it is none of that.
        """
        assert not self.in_flight, "their model is still needed"
        try:
            self._load(adapter)
        except BulkrunError:
            raise
        except Exception as error:
            self._is_lost = True
            raise EngineLost(f"adapter {adapter!r} cannot be loaded in this process ({reason_of(error)})") from error

    def admit(self, generations: Sequence[Generation]) -> None:
        """Queue them, and say so in the flight log first."""
        if not generations:
            return
        assert all(generation.adapter == self.adapter for generation in generations), "they want another model"
        self.in_flight |= {generation.request.request_id: generation for generation in generations}
        self._flight.admit(generations, self.in_flight.values())
        for generation in generations:
            self._engine.add_request(generation.request)

    def step(self) -> list[Answer]:
        """One step of the engine: what ended in it, and the rows that are now known to break it.

        When it fails, a new engine takes its place and nothing ended. Raises BulkrunError where the engine says that no
        row is to blame, and EngineLost where there cannot be a new one in this process.
        """
        began = time.monotonic()
        completions = self._completions()
        if completions is None:
            self._replace_engine()
            return []
        self._deadline.observe(time.monotonic() - began)
        if any(done.error is None for done in completions):
            self._flight.finished()
        answers = [Answer(self.in_flight.pop(done.request_id), done) for done in completions]
        return (answers + self.convicted()) if answers else []

    def convicted(self) -> list[Answer]:
        """Rows that broke the engine alone, while others run well."""
        convicted = self.isolation.convicted()
        return [engine_error(generation, "failed", reason) for generation, reason in convicted]

    def drop(self, shard: int) -> None:
        """Abort what still runs of this shard: another worker was faster."""
        wasted = [request_id for request_id, generation in self.in_flight.items() if generation.shard == shard]
        if wasted:
            self._engine.abort(wasted)
            for request_id in wasted:
                del self.in_flight[request_id]

    def partials(self, at_least: int) -> list[tuple[Generation, tuple[int, ...]]]:
        """The output tokens so far of generations that have at least so many."""
        outputs = self._engine.partial_outputs() if self.in_flight else []
        known = [output for output in outputs if output.request_id in self.in_flight]
        return [(self.in_flight[out.request_id], out.token_ids) for out in known if len(out.token_ids) >= at_least]

    def close(self) -> None:
        """Remove the flight log, so that no later process suspects these rows, unless the engine was lost."""
        if not self._is_lost:
            self._flight.close()

    def _completions(self) -> Sequence[Completion] | None:
        """The completions of a step, None if the engine broke; the error is dropped then, with the tensors it held."""
        try:
            return self._engine.step()
        except BulkrunError:
            raise
        except Exception as error:  # whatever it is: the rows that were in it are the suspects
            text = "".join(traceback.format_exception(error))  # a log record would keep what the error holds
            logging.getLogger(__name__).warning("the engine failed; what was in it runs again, apart\n%s", text)
            self._failure = reason_of(error)
            in_flight = list(self.in_flight.values())
            self.in_flight.clear()
            self._failed(type(error).__name__, len(in_flight))
            self.isolation.crashed(in_flight, error)
            return None

    def _replace_engine(self) -> None:
        try:
            self._load(self.adapter)
        except Interrupted:
            self._is_lost = True  # what was in it is as suspect to the next process
            raise
        except Exception as error:
            self._is_lost = True
            raise EngineLost(
                f"the engine failed ({self._failure}) and cannot be loaded again in this process ({reason_of(error)})"
            ) from error

    def _load(self, adapter: str) -> None:
        self._before, self._is_loaded = EngineStats().counted_after(self.stats), False
        del self._engine  # a GPU has no room for two
        self._engine = self._rebuild(adapter)
        self._is_loaded, self.adapter = True, adapter


def engine_error(generation: Generation, fate: Literal["failed", "died"], how: str) -> Answer:
    """The answer of rows that ran alone when the engine `failed`, or its process `died`."""
    what = f"the engine fail: {how}" if fate == "failed" else f"the engine process die ({how})"
    error = RowError("engine_error", f"this row alone makes {what}")
    return Answer(generation, Completion(generation.request.request_id, (), "error", error=error))

"""Some rows of a job run for a while, against a clock: what tells how long all of them take. Writes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.forecast import Forecast, OutputLength, Slice, forecast
from bulkrun.job.plan.report import PlanCounters
from bulkrun.job.plan.row_sample import RowSample
from bulkrun.job.prompts.own_values import own_values
from bulkrun.job.work.shard_work import row_sampling, row_seed
from bulkrun.launch.engine import engine_factory
from bulkrun.launch.preparation.prepare import PreparedJob
from bulkrun.request import Completion, Engine, EngineStats, Request

SAMPLE_ROWS = 2048
_NUM_SLICES = 20
_WARM_UP_S = 1.0  # of the first steps, which touch memory and compile


@dataclass(frozen=True)
class Probe:
    """What a probe of `rows` rows in `seconds` says of the whole job; `load_s` is what the engine took to load.

    Rows name `num_adapters`, none counted as one: so often one worker loads the model. All of them ran with `adapter`.
    """

    rows: int
    seconds: float
    load_s: float
    forecast: Forecast
    num_adapters: int
    adapter: str


def probe_job(prepared: PreparedJob, counters: PlanCounters, sample: RowSample, seconds: float) -> Probe | None:
    """Run the sample of a plan that has these counters for about so long; None where no row can run."""
    spec = prepared.spec
    rows = sample.rows()
    if not rows:
        return None
    requests, adapters = list(_requests(rows, spec)), Counter(own_values(row["overrides"]).adapter for row in rows)
    # Rows are as fast with any adapter, but each has outputs of its own lengths.
    [(adapter, _)] = adapters.most_common(1)
    began = time.perf_counter()
    engine = engine_factory(prepared)(adapter)
    loaded = time.perf_counter()
    tried = _Trial(engine, requests, seconds)
    generations = (
        counters.rows - sum(counters.errors.values()) - counters.duplicate_prompts
    ) * spec.sampled.generations
    found = forecast(
        tried.slices,
        tried.outputs if spec.generates else [],
        prompt_tokens=counters.unique_prompt_tokens - counters.shared_prefix_tokens,
        generations=generations,
    )
    num_rows, seconds = len(tried.outputs) // spec.sampled.generations, time.perf_counter() - loaded
    return Probe(num_rows, seconds, loaded - began, found, len(adapters), adapter)


def _requests(rows: Sequence[dict[str, Any]], spec: JobSpec) -> Iterator[Request]:
    """All samples of each row, as the job runs them."""
    for row in rows:
        sampling, seed = row_sampling(spec.sampled, spec.run.row_timeout, row["overrides"])
        parts = own_values(row["overrides"]).parts
        for sample in range(spec.sampled.generations):
            noise = row_seed(seed, row["row_id"], sample)
            yield Request(f"{row['row']}/{sample}", row["token_ids"], sampling, noise, parts=parts)


class _Trial:
    """Requests in an engine until the time is over or all have ended.

    `slices` are of the time in which requests waited, the first steps left out, unless there was none; `outputs` are
    those of requests that began.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._limits = {request.request_id: request.sampling.max_tokens for request in requests}
        self._ended: list[Completion] = []
        for request in requests:
            engine.add_request(request)
        full, rest = self._run(seconds)
        self.slices = full or rest
        self.outputs = list(self._outputs())

    def _run(self, seconds: float) -> tuple[list[Slice], list[Slice]]:
        """Slices of the time in which the engine was full, and of all of it."""
        full, every = list[Slice](), list[Slice]()
        began, before = self._clock(), self._engine.stats()
        begun, length_s = began, seconds / _NUM_SLICES
        while self._engine.has_unfinished() and self._clock() - began < seconds:
            self._ended += self._engine.step()
            now, stats = self._clock(), self._engine.stats()
            if now - begun < length_s and self._engine.has_unfinished():
                continue
            every.append(_between(before, stats, now - begun))
            if stats.num_waiting and now - began > min(_WARM_UP_S, seconds / 4):
                full.append(every[-1])
            before, begun = stats, now
        return full, every

    def _outputs(self) -> Iterator[OutputLength]:
        for done in self._ended:
            yield OutputLength(done.num_output_tokens, True, self._limits[done.request_id])
        for part in self._engine.partial_outputs():
            yield OutputLength(len(part.token_ids), False, self._limits[part.request_id])


def _between(before: EngineStats, after: EngineStats, seconds: float) -> Slice:
    prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
    return Slice(seconds, prompt_tokens, after.num_output_tokens - before.num_output_tokens)

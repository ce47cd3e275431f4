"""One claimed shard as work: the generations it still needs, after all that earlier attempts journaled.

Rows with an error in the plan need none. Greedy rows with equal prompts and settings share one generation; its
result fans out to all of them. Knows the shard file and the journal; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import pyarrow as pa

from bulkrun.job.plan.row_key import prompt_bytes
from bulkrun.job.plan.shard_file import ShardInfo, read_shard
from bulkrun.job.prompts.own_values import own_values
from bulkrun.job.store.journal import JournalRecord, ShardOutcomes, read_outcomes
from bulkrun.job.store.run_dir import RunDir
from bulkrun.request import Request, SamplingParams

if TYPE_CHECKING:
    from bulkrun.job.jobfile.sampling import SamplingSpec


@dataclass(frozen=True, slots=True)
class Generation:
    """A request and the rows of its shard that its completion answers."""

    request: Request
    shard: int
    rows: tuple[int, ...]
    sample: int
    adapter: str = ""  # of the model that it is for

    @property
    def num_texts(self) -> int:
        """Places that it takes in an engine: a request of several texts has one for each."""
        return len(self.request.parts) or 1

    def steps_left(self, mean_output: float, max_num_seqs: int) -> float:
        """Of an engine, until it ends: one for each token of an output of that length, or those that its texts take."""
        tokens = min(self.request.sampling.max_tokens, mean_output) - len(self.request.output_token_ids)
        return max(tokens, self.num_texts / max_num_seqs) if self.request.parts else tokens


@dataclass(frozen=True)
class ShardWork:
    """A shard that is open in this worker.

    `outstanding` counts the outcomes (row, sample) that are not journaled yet, those that `best_of` will drop and
    `refused` included: records of the rows that the plan found unable to run. `damaged` names journals with bad lines.
    """

    shard: int
    outstanding: int
    refused: list[JournalRecord]
    generations: Iterator[Generation]
    damaged: dict[str, list[int]]


def row_seed(job_seed: int, row_id: str, sample: int) -> int:
    """63 bits of noise for one sample of one row, the same in every attempt, order and batch."""
    digest = blake2b(f"{job_seed}|{row_id}|{sample}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") & (2**63 - 1)


def open_shard(run: RunDir, shard: int, sampling: SamplingSpec, row_timeout: float | None = None) -> ShardWork:
    """Read a shard and its journals. Token ids become Python lists only as the generations are asked for.

    `row_timeout` is in seconds, for each generation.
    """
    info, table = read_shard(run.shard(shard))
    outcomes = read_outcomes(run.journals_of(shard))
    table = table.drop_columns(["passthrough"]).sort_by("order").combine_chunks()
    keys = [(row, sample) for row in table["row"].to_pylist() for sample in range(sampling.generations)]
    return ShardWork(
        shard=shard,
        outstanding=sum(key not in outcomes.answered for key in keys),
        refused=list(_refusals(table, sampling.generations, outcomes)),
        generations=_generations(info, table, sampling, row_timeout, outcomes),
        damaged=outcomes.damaged,
    )


def _refusals(table: pa.Table, samples: int, outcomes: ShardOutcomes) -> Iterator[JournalRecord]:
    columns = (table[name].to_pylist() for name in ("row", "error_code", "error_message"))
    for row, code, message in zip(*columns, strict=True):
        for sample in range(samples) if code is not None else ():
            if (row, sample) not in outcomes.answered:
                yield JournalRecord((row,), sample, None, "error", 0, 0, code, message)


def _generations(
    info: ShardInfo, table: pa.Table, sampling: SamplingSpec, row_timeout: float | None, outcomes: ShardOutcomes
) -> Iterator[Generation]:
    rows, row_ids = table["row"].to_pylist(), table["row_id"].to_pylist()
    priorities = table["priority"].to_pylist()
    token_ids, overrides = table["token_ids"].combine_chunks(), table["overrides"].to_pylist()
    params = cache(partial(row_sampling, sampling, row_timeout))
    for indexes in _groups(table, params):
        first = indexes[0]
        given, job_seed = params(overrides[first])
        for sample in range(sampling.generations):
            left = tuple(rows[index] for index in indexes if (rows[index], sample) not in outcomes.answered)
            if left:
                request = Request(
                    request_id=f"{left[0]}:{sample}",
                    prompt_token_ids=token_ids[first].as_py(),
                    sampling=given,
                    seed=row_seed(job_seed, row_ids[first], sample),
                    output_token_ids=outcomes.partials.get((left[0], sample), ())[: given.max_tokens - 1],
                    priority=priorities[first] or 0,
                    parts=own_values(overrides[first]).parts,
                )
                yield Generation(request, info.shard, left, sample, info.adapter)


def row_sampling(
    sampling: SamplingSpec, row_timeout: float | None, overrides: str | None
) -> tuple[SamplingParams, int]:
    """How a row with these values of its own is sampled, and the seed that stands for its job's."""
    values = own_values(overrides).sampling
    params = replace(sampling.to_params(values), timeout_s=row_timeout)
    return params, int(values.get("seed", sampling.seed))


def _groups(table: pa.Table, params: Callable[[str | None], tuple[SamplingParams, int]]) -> list[list[int]]:
    """Indexes of the rows that can run, in run order; rows whose greedy result must be the same are together."""
    prompts = list(prompt_bytes(table["token_ids"]))
    overrides, errors = table["overrides"].to_pylist(), table["error_code"].to_pylist()
    groups: dict[tuple[bytes, str | None] | int, list[int]] = {}
    for index in range(table.num_rows):
        if errors[index] is None:
            key: tuple[bytes, str | None] | int = index
            if params(overrides[index])[0].greedy:
                key = (blake2b(prompts[index], digest_size=16).digest(), overrides[index])
            groups.setdefault(key, []).append(index)
    return list(groups.values())

"""What a job asks of a device's memory, as far as its model's files and its plan tell. Runs nothing, loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bulkrun.errors import ModelError
from bulkrun.job.plan.report import PlanCounters
from bulkrun.launch.preparation.pool import ITEMSIZE
from bulkrun.launch.preparation.prepare import PreparedJob
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.files.weight_files import weight_files


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes. A row is one generation, of the mean length, with an output as long as it may get.

    `weight_bytes`: the files; None where weights are made at random, or are elsewhere: a plan needs none.
    `kv_bytes_per_token`: keys and values over all layers, and `kv_bytes_per_row`, with the row's state in a model that
    keeps some: `state_bytes_per_row` of it. None and 0 for jobs that generate nothing, whose rows keep none.
    """

    weight_bytes: int | None
    kv_cache_dtype: str
    kv_bytes_per_token: int | None
    kv_bytes_per_row: int | None
    state_bytes_per_row: int = 0

    @classmethod
    def of(cls, prepared: PreparedJob, counters: PlanCounters) -> MemoryNeeds:
        """From what the model's folder has."""
        engine, model = prepared.spec.engine, prepared.model
        dtype = model.dtype if engine.dtype == "auto" else engine.dtype
        kv_dtype = dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
        weight_bytes = None if engine.load_format == "dummy" else _weight_bytes(prepared.model_dir)
        if not prepared.spec.generates:
            return cls(weight_bytes, kv_dtype, None, None)
        token = model.kv_size * ITEMSIZE[kv_dtype]
        kind = model.recurrence if isinstance(model, DecoderConfig) else None
        state = 0 if kind is None else kind.bytes_per_sequence(ITEMSIZE[dtype])
        row = state + token * _mean_row(counters, prepared.spec.sampled.generations)
        return cls(weight_bytes, kv_dtype, token, row, state)


def _weight_bytes(folder: Path) -> int | None:
    try:
        return sum(file.stat().st_size for file in weight_files(folder))
    except (ModelError, OSError):
        return None


def _mean_row(counters: PlanCounters, generations: int) -> int:
    """Tokens of prompt and output; 1 where no row can run."""
    rows = counters.rows - sum(counters.errors.values())
    runs = (rows - counters.duplicate_prompts) * generations
    return max(1, round(counters.prompt_tokens / max(rows, 1) + counters.expected_output_tokens / max(runs, 1)))

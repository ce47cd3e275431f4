"""What an engine has done so far, in tokens and steps, and how full it is. Decides nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.request import EngineStats


@dataclass(slots=True)
class EngineCounters:
    """Totals of one engine. `num_prompt_tokens`: those computed, once more after a preemption, without cached ones."""

    num_steps: int = 0
    num_scheduled_seqs: int = 0
    num_scheduled_tokens: int = 0
    num_admitted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_forced_tokens: int = 0

    def count(self, batch: ScheduledBatch) -> None:
        """A step was launched."""
        self.num_steps += 1
        self.num_scheduled_seqs += len(batch.seqs)
        self.num_scheduled_tokens += batch.num_tokens
        self.num_admitted += len(batch.new_seqs)
        self.num_cached_tokens += sum(seq.num_cached_tokens for seq in batch.new_seqs if not seq.num_preemptions)
        chunks = zip(batch.seqs, batch.starts, batch.num_scheduled_tokens, strict=True)
        left = [(count, seq.num_prompt_tokens - start) for seq, start, count in chunks if start < seq.num_prompt_tokens]
        self.num_prompt_tokens += sum(map(min, left))

    def count_texts(self, num_texts: int, num_tokens: int) -> None:
        """A step over whole texts was launched."""
        self.num_steps += 1
        self.num_scheduled_seqs += num_texts
        self.num_admitted += num_texts
        self.num_scheduled_tokens += num_tokens
        self.num_prompt_tokens += num_tokens

    def count_forced(self, num_tokens: int) -> None:
        """A sequence got so many output tokens without a step."""
        self.num_output_tokens += num_tokens
        self.num_forced_tokens += num_tokens

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """The counters, and the levels of the engine whose scheduler this is."""
        manager = scheduler.block_manager
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=manager.num_used_blocks / (manager.num_blocks - 1),
            num_preemptions=scheduler.num_preemptions,
            **asdict(self),
        )

"""Sequences after something went wrong: KV that holds no numbers, and steps that were broken off.

Knows queues, blocks and rows; when to recover, and what a completion says, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Collection

from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.model_runner import ModelRunner


def discard(broken: list[Sequence], scheduler: Scheduler, model_runner: ModelRunner) -> None:
    """Remove sequences whose KV is not finite, and make sure that nobody reads it."""
    manager = scheduler.block_manager
    blocks = {block_id for seq in broken for block_id in seq.block_table}
    manager.forget(list(blocks))
    scheduler.drop(broken)
    scheduler.forget_states()
    model_runner.clear_blocks([block_id for block_id in blocks if manager.ref_count(block_id) == 0])


def start_over(scheduler: Scheduler, model_runner: ModelRunner, ended: Collection[str]) -> None:
    """After a step that an error or Ctrl-C interrupted: all sequences wait again but those of requests that `ended`.

    Scheduling counts tokens as computed, and lets others share them, before they are: nothing in the pool is trusted.
    """
    model_runner.forget_step()
    manager = scheduler.block_manager
    scheduler.restart(BlockManager(manager.num_blocks, manager.block_size), scheduler.max_num_batched_tokens)
    waiting = list(scheduler.waiting)
    for seq in waiting:
        seq.num_pending = 0  # what the step under way computed is lost
    scheduler.drop([seq for seq in waiting if seq.request.request_id in ended])

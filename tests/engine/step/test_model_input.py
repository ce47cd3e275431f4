"""The step's tensors against what one would write down by hand, sequence by sequence."""

from __future__ import annotations

import random

import torch

from bulkrun.blocks import NULL_BLOCK
from bulkrun.engine.config import EngineConfig
from bulkrun.engine.scheduling.batching import ContinuousBatching
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.model_input import build_model_input
from bulkrun.engine.step.sequence_rows import SequenceRows
from bulkrun.request import Request, SamplingParams

BLOCK_SIZE = 4


def _config() -> EngineConfig:
    return EngineConfig(
        max_num_seqs=5,
        max_num_batched_tokens=19,
        max_model_len=60,
        block_size=BLOCK_SIZE,
        num_blocks=40,
        enable_prefix_caching=True,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        device=torch.device("cpu"),
        batching="continuous",
        batching_window_s=0.0,
        async_scheduling=False,
        enforce_eager=False,
        is_pool_given=True,
    )


def test_every_step_of_a_mixed_run_matches_the_host_lists() -> None:
    config, rng = _config(), random.Random(0)
    scheduler = Scheduler(
        BlockManager(config.num_blocks, BLOCK_SIZE),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=True,
        policy=ContinuousBatching(config.max_num_seqs),
    )
    rows = SequenceRows(config)
    for number in range(11):
        prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 31))]
        params = SamplingParams(max_tokens=rng.randrange(1, 12), temperature=0.5)
        scheduler.add(Sequence(Request(str(number), prompt, params, seed=number), arrival=number, max_model_len=60))
    mixed_steps = 0
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        mixed_steps += 0 < batch.num_decode_seqs < len(batch.seqs)
        rows.apply(batch)
        got = build_model_input(rows, batch)
        tokens, positions, slots, last = [], [], [], []
        for seq, start, count in zip(batch.seqs, batch.starts, batch.num_scheduled_tokens, strict=True):
            span = range(start, start + count)
            tokens += [seq.token_ids[p] for p in span]
            positions += span
            slots += [seq.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
            last.append(len(tokens) - 1)
        sampling = [i for i in range(len(batch.seqs)) if batch.samples(i)]
        assert got.input_ids_T.tolist() == tokens
        assert got.positions_T.tolist() == positions
        assert got.meta.slot_mapping_T.tolist() == slots
        assert got.meta.cu_seqlens_q.tolist() == [0, *(index + 1 for index in last)]
        assert got.meta.rows_S.tolist() == [seq.row for seq in batch.seqs]
        assert got.meta.context_lens_S.tolist() == [seq.num_computed_tokens for seq in batch.seqs]
        assert got.meta.max_context_len == max(seq.num_computed_tokens for seq in batch.seqs)
        assert got.sampling_seqs == [batch.seqs[i] for i in sampling]
        assert got.logits_indices.tolist() == [last[i] for i in sampling]
        assert got.num_tokens.tolist() == [batch.seqs[i].num_tokens for i in sampling]
        assert rows.seed[got.sampling_rows].tolist() == [batch.seqs[i].arrival for i in sampling]
        for table, seq in zip(got.meta.block_tables_SM.tolist(), batch.seqs, strict=True):
            padded = seq.block_table + [NULL_BLOCK] * len(table)
            assert table == padded[: len(table)]
        sampled = torch.tensor([rng.randrange(9) for _ in sampling], dtype=torch.int64)
        rows.append(got.sampling_rows, got.num_tokens, sampled)
        ended = []
        for i, token_id in zip(sampling, sampled.tolist(), strict=True):
            batch.seqs[i].token_ids.append(token_id)
            if batch.seqs[i].num_tokens >= batch.seqs[i].max_num_tokens:
                ended.append(batch.seqs[i])
        scheduler.finish(ended)
    assert mixed_steps > 3


def test_a_prompt_that_goes_on_may_stand_before_one_that_ends() -> None:
    """As where a state is kept within it: the longest context is not that of a sequence that decodes."""
    seqs = [
        Sequence(Request(str(number), [5] * length, SamplingParams()), arrival=number, max_model_len=60)
        for number, length in enumerate((2, 30, 4))
    ]
    for row, seq in enumerate(seqs):
        seq.row = row
    updates = [(1, index, 10 + index) for index in range(3)]
    batch = ScheduledBatch(
        seqs=seqs,
        new_seqs=seqs,
        starts=[1, 0, 0],
        num_scheduled_tokens=[1, 9, 4],
        num_decode_seqs=1,
        block_table_updates=updates,
    )
    rows = SequenceRows(_config())
    rows.apply(batch)
    got = build_model_input(rows, batch)
    assert got.sampling_seqs == [seqs[0], seqs[2]]
    assert got.logits_indices.tolist() == [0, 13]
    assert (got.meta.max_context_len, got.meta.max_decode_keys) == (9, 2)
    assert got.meta.block_tables_SM[1].tolist() == [10, 11, 12]

"""Runs the widest steps an engine may ever take, so that its memory can be measured instead of guessed.

Two steps: one that fills `max_num_batched_tokens` with prompts, and one in which everybody generates behind a context
as long as it may be, for whose attention the kernels keep partial results. They write to the null block of a pool that
has nothing else. Sampling does what jobs usually ask for; what only some ask for (penalties, log-probabilities over a
long context) is left to the answer to running out of memory. On a GPU this compiles the kernels, which the first step
would have to do anyway: the first step asks for every filter, the second for a temperature alone.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from bulkrun.engine.config import MIN_BLOCKS, EngineConfig
from bulkrun.engine.memory import DeviceMemory
from bulkrun.engine.memory_errors import MEMORY_ERRORS, is_out_of_memory
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.model_runner import ModelRunner
from bulkrun.engine.step.step_shape import CapturedShapes, max_captured_tokens
from bulkrun.errors import UsageError, first_line
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.recurrent_state import bytes_per_row
from bulkrun.request import Request, SamplingParams

GRAPH_RECORD_BYTES = 8 * 2**20  # the driver's, of some hundred launches; not measured yet
_FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, ignore_eos=True)
_UNFILTERED = SamplingParams(temperature=1.0, ignore_eos=True)


def measure_cuda(model: LanguageModel, config: EngineConfig) -> DeviceMemory:
    """What the device has, and what the widest steps of `config` take of it beyond the weights.

    Reserved memory counts, not allocated memory: what the allocator cannot use for its gaps is gone as well.
    """
    device = config.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_reserved(device)
    run_widest_steps(model, config)
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_reserved(device) - before_bytes
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # minus what compiled kernels and libraries have taken
    return DeviceMemory(total_bytes, free_bytes, step_bytes, graph_bytes(model, config, step_bytes))


def graph_bytes(model: LanguageModel, config: EngineConfig, step_bytes: int) -> int:
    """What captured steps will keep for themselves: activations and partial results of the largest, a record of each.

    Activations are estimated from the widest step, since capturing twice would double what it takes to start: without
    the states of its sequences, which graphs only read and write. Partial results are not in it: they are sized for
    contexts that are all long.
    """
    if config.enforce_eager or not model.is_capturable:
        return 0
    step_bytes = max(0, step_bytes - config.num_state_rows * bytes_per_row(model.config, model.dtype))
    from bulkrun.ops.triton.partial_results import bytes_of_parts  # triton takes time to import, and a CPU needs none

    heads, value_dim = model.config.num_heads, max((kv.value_dim for kv in model.config.layers_kv), default=0)
    max_tokens = max_captured_tokens(model.config, config.max_num_batched_tokens, is_in_fp8=model.is_in_fp8)
    shapes = [*CapturedShapes(config.max_num_seqs, max_tokens, config.max_model_len)]
    parts = max(bytes_of_parts(one.max_decode_keys, one.num_decode_seqs, heads, value_dim) for one in shapes)
    return step_bytes * max_tokens // config.max_num_batched_tokens + parts + len(shapes) * GRAPH_RECORD_BYTES


def run_widest_steps(model: LanguageModel, config: EngineConfig) -> None:
    """Both steps, on a runner of their own; nothing is left of it afterwards.

    Raises UsageError, naming keys, where not even they fit beside the weights.
    """
    try:
        runner = ModelRunner(model, replace(config, num_blocks=MIN_BLOCKS, enforce_eager=True))
        prompts = widest_prompts(config)
        runner.sample(runner.compute(prompts)).result()
        runner.sample(runner.compute(widest_decode(config, prompts.seqs))).result()
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"engine.max_num_batched_tokens: out of memory in a step of {config.max_num_batched_tokens} tokens and "
            f"{config.max_num_seqs} sequences of up to {config.max_model_len}, before there is a KV cache; lower it, "
            f"engine.max_num_seqs or engine.max_model_len ({first_line(error)})"
        ) from None


def widest_prompts(config: EngineConfig) -> ScheduledBatch:
    """As many tokens as a step may have, over as many sequences as may run, and all of them sample."""
    num_seqs = config.max_num_seqs
    share, rest = divmod(config.max_num_batched_tokens, num_seqs)
    counts = [min(share + (row >= num_seqs - rest), config.max_model_len - 1) for row in range(num_seqs)]
    seqs = [_sequence(row, [0] * count, config, _FILTERED) for row, count in enumerate(counts)]
    return ScheduledBatch(
        seqs=seqs,
        new_seqs=list(seqs),
        starts=[0] * num_seqs,
        num_scheduled_tokens=counts,
        num_decode_seqs=counts.count(1),
    )


def widest_decode(config: EngineConfig, prompts: list[Sequence]) -> ScheduledBatch:
    """One token for each of these sequences: for the first at the end of `max_model_len`."""
    seqs = [_sequence(seq.running_row, seq.token_ids, config, _UNFILTERED) for seq in prompts]
    batch = ScheduledBatch(seqs=seqs, num_decode_seqs=len(seqs))
    for number, seq in enumerate(seqs):
        num_tokens = config.max_model_len - 1 if number == 0 else seq.num_tokens
        seq.num_pending = num_tokens - len(seq.token_ids)
        batch.starts.append(num_tokens - 1)
        batch.num_scheduled_tokens.append(1)
    return batch


def _sequence(row: int, prompt: SequenceOf[int], config: EngineConfig, sampling: SamplingParams) -> Sequence:
    request = Request(f"probe-{row}", tuple(prompt), sampling, seed=row)
    seq = Sequence(request, arrival=row, max_model_len=config.max_model_len)
    seq.row = row
    return seq

"""What `gpu_ops` measures of latent attention: one row of a token for all heads, and the products of single heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bulkrun import ops
from bulkrun.ops.matmul.fp8 import FP8
from tests.benchmarks.gpu_case import BLOCK_SIZE, BYTES, Case, Sizes, make_step

HEADS = (16, 20, 128)  # DeepSeek V2-Lite's, GLM-4.7-Flash's, DeepSeek V3's
TURNING, LATENT = 64, 512  # dimensions of a key that RoPE turns, and those behind them, which are the value too
KEY_DIM = 192  # of a head's query that meets a latent, of GLM-4.7-Flash


def latent_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Decoding reads each row once for all heads; prompts multiply."""
    for num_heads in HEADS:
        for context in sizes.contexts:
            for kv in (torch.bfloat16, FP8):
                yield _decode_case(sizes, num_heads, context, kv, device)
        length = max(sizes.prompts) // 4
        pairs = 4 * length * (length + 1) // 2
        lens = [length] * 4
        yield _case(f"latent prefill 4x{length} heads={num_heads}", num_heads, lens, lens, pairs, device)
    for tokens in sizes.rows:
        q_HTN = torch.randn(HEADS[1], tokens, KEY_DIM, device=device, dtype=torch.bfloat16)
        keys_HNR = torch.randn(HEADS[1], KEY_DIM, LATENT, device=device, dtype=torch.bfloat16)
        num_bytes = BYTES * (q_HTN.numel() + keys_HNR.numel() + HEADS[1] * tokens * LATENT)
        flops = 2.0 * q_HTN.numel() * LATENT
        yield Case(f"queries of latents T={tokens}", partial(torch.bmm, q_HTN, keys_HNR), num_bytes, flops)


def _decode_case(sizes: Sizes, num_heads: int, context: int, kv: torch.dtype, device: str) -> Case:
    count = sizes.decode_seqs
    name = f"latent decode {str(kv).removeprefix('torch.')} context={context} heads={num_heads}"
    return _case(name, num_heads, [1] * count, [context] * count, count * context, device, kv)


def _case(
    name: str,
    num_heads: int,
    query_lens: list[int],
    context_lens: list[int],
    pairs: int,
    device: str,
    kv: torch.dtype = torch.bfloat16,
) -> Case:
    step = make_step(query_lens, context_lens, device)
    num_blocks = int(step.block_tables_SM.max()) + 1
    k_cache = torch.randn(num_blocks, BLOCK_SIZE, 1, TURNING + LATENT, device=device, dtype=torch.bfloat16).to(kv)
    q = torch.randn(sum(query_lens), num_heads, TURNING + LATENT, device=device, dtype=torch.bfloat16)
    attend = partial(
        ops.paged_attention, q, k_cache, k_cache[..., TURNING:], step, scale=0.07, sliding_window=None
    )  # fmt: skip
    found = sum(query_lens) * num_heads * LATENT
    num_bytes = kv.itemsize * sum(context_lens) * (TURNING + LATENT) + BYTES * (q.numel() + found)
    return Case(name, attend, num_bytes, flops=2.0 * pairs * num_heads * (TURNING + 2 * LATENT))

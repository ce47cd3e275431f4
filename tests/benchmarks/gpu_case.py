"""What `gpu_ops` measures: an op over one shape, and the steps that attention is measured over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bulkrun.ops import AttentionMetadata

BYTES = 2  # of a bf16 number
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's and a step's; the defaults are Llama-3.1-8B's, but for experts."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden_size: int = 4096
    intermediate_size: int = 14336
    vocab_size: int = 128_256
    num_tokens: int = 4096
    decode_seqs: int = 512
    rows: tuple[int, ...] = (64, 512, 1024, 4096)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    prefix_len: int = 1024
    experts: tuple[int, int, int] = (32, 4, 2880)  # how many, how many of them a token's, their width: gpt-oss-20b's
    encoder_heads: int = 12  # BERT-base's, of 64 dimensions each
    encoder_layers: int = 12
    encoder_texts: int = 256
    encoder_len: int = 128


@dataclass(frozen=True, slots=True)
class Case:
    """One op over one shape."""

    name: str
    run: Callable[[], object]
    num_bytes: float
    flops: float = 0.0
    rival: Callable[[], object] | None = None


TINY = Sizes(
    num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256, intermediate_size=512, vocab_size=512,
    num_tokens=64, decode_seqs=4, rows=(4,), contexts=(64,), prompts=(32, 64), prefix_len=128,
    experts=(4, 2, 64), encoder_heads=2, encoder_layers=2, encoder_texts=5, encoder_len=12,
)  # fmt: skip


def make_step(query_lens: list[int], context_lens: list[int], device: str, shared_blocks: int = 0) -> AttentionMetadata:
    """Sequences whose blocks are scattered over the pool; the first `shared_blocks` are everybody's."""
    own = [-(-length // BLOCK_SIZE) - shared_blocks for length in context_lens]
    pool = torch.randperm(sum(own)) + 1 + shared_blocks
    tables = torch.zeros(len(own), max(own) + shared_blocks, dtype=torch.int32)
    tables[:, :shared_blocks] = torch.arange(1, shared_blocks + 1)
    for row, blocks in zip(tables, pool.split(own), strict=True):
        row[shared_blocks : shared_blocks + len(blocks)] = blocks
    is_decode = max(query_lens) == 1
    return AttentionMetadata(
        slot_mapping_T=torch.zeros(sum(query_lens), dtype=torch.int64, device=device),
        block_tables_SM=tables.to(device),
        context_lens_S=torch.tensor(context_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        num_decode_seqs=len(query_lens) if is_decode else 0,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )

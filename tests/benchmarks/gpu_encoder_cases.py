"""Encoders for `gpu_ops`: attention over packed texts, the norm of a sum, and a whole BERT beside padded batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from bulkrun import ops
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.embedding.encoder_modules import find_layers
from bulkrun.models.embedding.packed_encoder import PackedEncoder
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from tests.benchmarks.gpu_case import BYTES, Case, Sizes

HEAD_DIM = 64


def encoder_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """BERT-base's sizes, over texts of one length and of many."""
    width = sizes.encoder_heads * HEAD_DIM
    num_tokens = sizes.encoder_texts * sizes.encoder_len
    x, residual = torch.randn(2, num_tokens, width, device=device, dtype=torch.bfloat16)
    norm = (*torch.randn(2, width, device=device, dtype=torch.bfloat16), 1e-12)
    reference = ops.add_layer_norm.__wrapped__  # type: ignore[attr-defined]
    yield Case(
        "add_layer_norm",
        partial(ops.add_layer_norm, x, residual, *norm),
        3 * BYTES * x.numel(),
        rival=partial(reference, x, residual, *norm),
    )
    yield _equal_lengths(sizes, device)
    yield from _whole_model(sizes, device)


def _equal_lengths(sizes: Sizes, device: str) -> Case:
    """The rival is torch's own attention, which takes texts of one length without a mask."""
    count, length, heads = sizes.encoder_texts, sizes.encoder_len, sizes.encoder_heads
    joined = torch.randn(count * length, 3, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
    texts, batch = ops.TextLens.of([length] * count, device), (count, length, heads, HEAD_DIM)
    q, k, v = (x.reshape(batch).transpose(1, 2).contiguous() for x in joined.unbind(1))
    return Case(
        f"packed_attention {count}x{length}",
        partial(ops.packed_attention, *joined.unbind(1), texts, scale=HEAD_DIM**-0.5),
        4 * BYTES * q.numel(),
        flops=4.0 * count * length**2 * heads * HEAD_DIM,
        rival=partial(F.scaled_dot_product_attention, q, k, v),
    )


def _whole_model(sizes: Sizes, device: str) -> Iterator[Case]:
    """Heavy-tailed lengths, packed; the rival pads them in batches of similar ones. FLOPs are those of products."""
    width = sizes.encoder_heads * HEAD_DIM
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=width, num_attention_heads=sizes.encoder_heads, intermediate_size=4 * width,
        num_hidden_layers=sizes.encoder_layers, max_position_embeddings=2 * sizes.encoder_len,
    )  # fmt: skip
    model = transformers.BertModel(config).to(device, torch.bfloat16).eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = ["BertModel"]
        config.save_pretrained(folder)
        padded = PaddedEncoder(model, EmbeddingConfig.from_dir(Path(folder)).model)
    found = find_layers(model, padded.config)
    assert found is not None, "a BERT is found"
    packed = PackedEncoder(padded, model.get_submodule("embeddings"), found.layers, found.sizes)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(sizes.encoder_texts).log_normal_(0, 0.8, generator=generator) * sizes.encoder_len / 2
    lens = drawn.long().clamp(2, 2 * sizes.encoder_len).sort().values.tolist()
    texts = PackedTexts.of([[5] * length for length in lens], torch.device(device))
    flops = 24.0 * width**2 * sum(lens) * sizes.encoder_layers
    yield Case(f"BERT of {sum(lens)} tokens", partial(packed, texts), 0.0, flops, rival=partial(padded, texts))

"""The compiled layers of an encoder equal their reference, and a text's bits are its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bulkrun.ops import TextLens
from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu.encoder_stack import EncoderStack, can_stack_encoder
from bulkrun.ops.cpu.panel_linear import pack_panels
from bulkrun.ops.cpu.stack_memory import Matrix
from bulkrun.ops.encoder_layers import EncoderLayer, EncoderSizes, Norm, PlainMatrix, encode
from tests.models.paged_driver import make_metadata

BLOCK_SIZE = 16
# heads, head dim, intermediate size
SHAPES = [(4, 16, 128), (3, 32, 160), (2, 80, 32), (6, 64, 96), (12, 8, 224), (1, 32, 32)]
LENS = [1, 1, 2, 15, 16, 17, 40, 129, 300]
# sums in another order, through two layers; of bf16 their inputs round to other numbers too
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06}


def layers(shape: tuple[int, int, int], dtype: torch.dtype, count: int = 2) -> list[EncoderLayer[PlainMatrix]]:
    heads, dim, inner = shape
    width, generator = heads * dim, torch.Generator().manual_seed(3)

    def matrix(out: int, size: int) -> PlainMatrix:
        weight = torch.randn(out, size, generator=generator) * size**-0.5
        return PlainMatrix(weight.to(dtype), (torch.randn(out, generator=generator) / 4).to(dtype))

    def norm() -> Norm:
        weight = 0.5 + torch.rand(width, generator=generator)
        return Norm(weight.to(dtype), torch.randn(width, generator=generator).to(dtype))

    return [
        EncoderLayer(
            matrix(3 * width, width), matrix(width, width), matrix(inner, width), matrix(width, inner), norm(), norm()
        )
        for _ in range(count)
    ]


def sizes(shape: tuple[int, int, int], activation: str = "gelu", max_len: int | None = None) -> EncoderSizes:
    """Attention that looks sharply at a few tokens shows a wrong one; biases are as large as scores."""
    heads, dim, _ = shape
    bias = None if max_len is None else torch.randn(heads, 2 * max_len - 1, generator=torch.Generator().manual_seed(7))
    return EncoderSizes(heads, dim, 1e-12, activation, bias)  # type: ignore[arg-type]


def stack(plain: Sequence[EncoderLayer[PlainMatrix]], shared: EncoderSizes, dtype: torch.dtype) -> EncoderStack:
    packed = [layer.map(lambda matrix: Matrix(pack_panels(matrix.weight), matrix.bias)) for layer in plain]
    return EncoderStack(packed, shared, dtype)


def embeddings(lens: Sequence[int], width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each text, whatever else is there."""
    return [
        torch.randn(length, width, generator=torch.Generator().manual_seed(10 * length + number)).to(dtype)
        for number, length in enumerate(lens)
    ]


def step(lens: Sequence[int]) -> tuple[AttentionMetadata, int]:
    """Metadata, and how many blocks it names; blocks lie in no order."""
    tables: list[list[int]] = []
    free = list(range(1 + sum(-(-length // BLOCK_SIZE) for length in lens)))[:0:-1]
    for length in lens:
        tables.append([free.pop(0) for _ in range(-(-length // BLOCK_SIZE))])
    num_blocks = 1 + sum(map(len, tables))
    return make_metadata([(0, length) for length in lens], tables, BLOCK_SIZE, num_decode_seqs=0), num_blocks


def run(
    compiled: EncoderStack,
    texts: Sequence[torch.Tensor],
    shared: EncoderSizes,
    kept: torch.Tensor | None = None,
    poison: float = math.nan,
) -> torch.Tensor:
    """What no token of a text was written to is poisoned, as a row of zeros would hide that it is read."""
    meta, num_blocks = step([len(text) for text in texts])
    cache = torch.full((2, num_blocks, BLOCK_SIZE, shared.num_heads, shared.head_dim), poison, dtype=texts[0].dtype)
    x_TE = compiled.room(sum(map(len, texts)))
    x_TE.copy_(torch.cat(list(texts)))
    return compiled(x_TE, cache[0], cache[1], meta, kept).clone()


def skip_unless_compiled(dtype: torch.dtype) -> None:
    if not can_stack_encoder(dtype, 32, 32, 32):
        pytest.skip("this processor has no such compiled layers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, int, int], has_bias: bool, activation: str, dtype: torch.dtype) -> None:
    skip_unless_compiled(dtype)
    plain, shared = layers(shape, dtype), sizes(shape, activation, 300 if has_bias else None)
    texts = embeddings(LENS, shape[0] * shape[1], dtype)
    expected = encode(torch.cat(texts), TextLens.of(LENS), plain, shared)
    ours = run(stack(plain, shared, dtype), texts, shared, poison=0.0)
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
def test_nothing_but_the_texts_is_read(has_bias: bool, dtype: torch.dtype) -> None:
    """Behind a text's last token the tile unit may read along up to the end of sixteen: `StepCache` clears that."""
    skip_unless_compiled(dtype)
    lens = [1, 16, 32, 144] if dtype == torch.bfloat16 else LENS
    shape = SHAPES[1]
    plain, shared = layers(shape, dtype), sizes(shape, max_len=300 if has_bias else None)
    compiled, texts = stack(plain, shared, dtype), embeddings(lens, 96, dtype)
    assert torch.equal(run(compiled, texts, shared), run(compiled, texts, shared, poison=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
def test_a_text_has_its_bits_in_any_crowd(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    skip_unless_compiled(dtype)
    plain, shared = layers(shape, dtype), sizes(shape, max_len=300)
    compiled, texts = stack(plain, shared, dtype), embeddings(LENS, shape[0] * shape[1], dtype)
    crowd = run(compiled, texts, shared, poison=0.0).split(LENS)
    assert all(
        torch.equal(run(compiled, [text], shared, poison=0.0), beside)
        for text, beside in zip(texts, crowd, strict=True)
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_and_with_any_number_of_threads(threads: int) -> None:
    skip_unless_compiled(torch.float32)
    plain, shared = layers(SHAPES[0], torch.float32), sizes(SHAPES[0])
    compiled, texts = stack(plain, shared, torch.float32), embeddings(LENS, 64, torch.float32)
    expected, before = run(compiled, texts, shared), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(run(compiled, texts, shared), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("places", ["first", "last", "some"])
def test_only_some_tokens_go_on_after_the_last_attention(places: str) -> None:
    skip_unless_compiled(torch.float32)
    ends = torch.tensor(LENS).cumsum(0)
    kept = {"first": ends - torch.tensor(LENS), "last": ends - 1, "some": torch.tensor([0, 3, 4, 5, 520])}[places]
    plain, shared = layers(SHAPES[1], torch.float32, 3), sizes(SHAPES[1], max_len=300)
    compiled, texts = stack(plain, shared, torch.float32), embeddings(LENS, 96, torch.float32)
    assert torch.equal(run(compiled, texts, shared, kept), run(compiled, texts, shared)[kept])


def test_one_layer_and_steps_that_grow_and_shrink() -> None:
    skip_unless_compiled(torch.float32)
    plain, shared = layers(SHAPES[0], torch.float32, 1), sizes(SHAPES[0])
    compiled = stack(plain, shared, torch.float32)
    for lens in ([3], [700], [2, 5], [300, 300, 301]):
        texts = embeddings(lens, 64, torch.float32)
        expected = encode(torch.cat(texts), TextLens.of(lens), plain, shared)
        torch.testing.assert_close(run(compiled, texts, shared), expected, rtol=1e-5, atol=1e-5)


def test_gelu_is_exact_to_float32_over_its_range() -> None:
    """An identity on the way up and down shows it: what is added to the residual stream is gelu of what came in."""
    skip_unless_compiled(torch.float32)
    width, x = 64, torch.linspace(-12, 12, 64 * 40).view(40, 64)
    eye, nothing = torch.eye(width), torch.zeros(width)
    still = Norm(torch.ones(width), nothing)
    layer = EncoderLayer(
        PlainMatrix(torch.zeros(3 * width, width), torch.zeros(3 * width)),
        PlainMatrix(torch.zeros(width, width), nothing),
        PlainMatrix(eye, nothing),
        PlainMatrix(eye, nothing),
        still,
        still,
    )
    shared = sizes((4, 16, 64))
    ours = run(stack([layer], shared, torch.float32), [x], shared)
    exact = encode(x.double(), TextLens.of([40]), [as_double(layer)], shared)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-6)


def as_double(layer: EncoderLayer[PlainMatrix]) -> EncoderLayer[PlainMatrix]:
    def widened(norm: Norm) -> Norm:
        return Norm(norm.weight.double(), norm.bias.double())

    wide = layer.map(lambda plain: PlainMatrix(plain.weight.double(), plain.bias.double()))
    return replace(wide, attention_norm=widened(layer.attention_norm), mlp_norm=widened(layer.mlp_norm))


def test_sizes_that_fill_no_panels_are_not_compiled() -> None:
    assert not can_stack_encoder(torch.float32, 48, 128, 16)
    assert not can_stack_encoder(torch.float32, 64, 72, 16)
    assert not can_stack_encoder(torch.float16, 64, 128, 16)

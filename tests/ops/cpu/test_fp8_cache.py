"""fp8 caches in compiled ops: every byte is read as its number, every number is written as the format rounds it."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops.attention.norm_rotary_store import norm_rotary_store as reference
from bulkrun.ops.attention.rotary import rotary_cos_sin
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.cpu.norm_rotary_store import norm_rotary_store
from bulkrun.ops.cpu.paged_attention import can_attend, paged_attention
from bulkrun.ops.matmul.fp8 import FP8, to_fp8
from tests.ops.attention.test_paged_attention import make_step
from tests.ops.fp8_oracle import all_numbers, rounded

pytestmark = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE = 16
HEADS = [
    (4, 4, 64),
    (6, 3, 80),
    (6, 2, 96),
    (4, 1, 128),
    (5, 1, 256),
    (6, 1, 48),
    (14, 2, 64),
    (8, 1, 20),
    (40, 2, 128),
]


def number_of_each_byte() -> torch.Tensor:
    """Float64 [256]."""
    positive = torch.cat((all_numbers(), torch.tensor([math.nan], dtype=torch.float64)))
    return torch.cat((positive, -positive))


def assert_same_bytes(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Except for the sign of what is not a number: torch's own depends on where in a tensor it stands."""
    ours, expected = ours.view(torch.uint8), expected.view(torch.uint8)
    is_nan = (expected & 0x7F) == 0x7F
    assert torch.equal(ours.where(~is_nan, ours & 0x7F), expected.where(~is_nan, expected & 0x7F))


@pytest.mark.parametrize("num_queries", [1, 3, 40])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_is_read_as_its_number(dtype: torch.dtype, group: int, num_queries: int) -> None:
    """A query whose window is its own key gets that key's value, whatever the score."""
    numbers = number_of_each_byte()
    meta, slots = make_step([num_queries], [40], BLOCK_SIZE, seed=0)
    k_cache, v_cache = torch.zeros(2, 4 * BLOCK_SIZE, 256, dtype=torch.uint8)
    for position, slot in enumerate(slots[0]):
        v_cache[slot] = torch.arange(256).roll(position).where(numbers.roll(position).isfinite(), 0)
    caches = [cache.view(4, BLOCK_SIZE, 1, 256).view(FP8) for cache in (k_cache, v_cache)]
    q_THD = torch.randn(num_queries, group, 256).to(dtype)
    out = paged_attention(q_THD, *caches, meta, scale=1.0, sliding_window=1)
    expected = numbers[v_cache[slots[0][-num_queries:]].long()][:, None].expand(-1, group, -1)
    torch.testing.assert_close(out.double(), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"), [(None, None, False), (50, None, True), (None, 5.0, False)]
)
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_an_fp8_cache_gives_the_bits_of_one_that_holds_the_same_numbers(
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    meta, slots = make_step([1, 1, 1, 2, 70, 130], [1, 90, 300, 64, 70, 200], block_size, seed=0)
    generator = torch.Generator().manual_seed(0)
    shape = (2, int(meta.block_tables_SM.max()) + 1, block_size, num_kv_heads, head_dim)
    caches = torch.full(shape, 0x7F, dtype=torch.uint8)  # what nobody owns stays NaN
    for own in slots:
        drawn = torch.randint(0, 0x7F, (2, len(own), *shape[3:]), generator=generator, dtype=torch.uint8)
        signs = 128 * torch.randint(0, 2, drawn.shape, generator=generator, dtype=torch.uint8)
        caches.flatten(1, 2)[:, own] = drawn | signs
    wide = number_of_each_byte()[caches.long()].to(dtype)
    q_THD = 0.05 * torch.randn(205, num_heads, head_dim, generator=generator)
    options = {
        "scale": head_dim**-0.5, "sliding_window": window, "soft_cap": soft_cap,
        "sinks_H": torch.linspace(-3, 6, num_heads) if has_sinks else None,
    }  # fmt: skip
    ours = paged_attention(q_THD.to(dtype), *caches.view(FP8), meta, **options)  # type: ignore[arg-type]
    expected = paged_attention(q_THD.to(dtype), *wide, meta, **options)  # type: ignore[arg-type]
    assert torch.equal(ours, expected) and not ours.isnan().any()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("is_key", [True, False], ids=["key", "value"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_stays_so_and_in_its_sequence(dtype: torch.dtype, is_key: bool, byte: int) -> None:
    meta, slots = make_step([1, 1], [20, 20], BLOCK_SIZE, seed=0)
    caches = torch.randn(2, int(meta.block_tables_SM.max()) + 1, BLOCK_SIZE, 1, 32).to(FP8)
    caches.view(torch.uint8)[int(not is_key)].flatten(0, 1)[slots[0][3]] = byte
    out = paged_attention(torch.randn(2, 2, 32).to(dtype), *caches, meta, scale=0.2, sliding_window=None)
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("seen", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_written_as_the_format_rounds_it(dtype: torch.dtype, seen: str) -> None:
    """All numbers of 16 bits; of 32 bits those around each number of the format and each tie."""
    if seen == "float32":
        numbers = number_of_each_byte().float()
        ties = (numbers[:-1] + numbers[1:]) / 2
        near = torch.cat((numbers, ties))
        x = torch.cat(
            (near, near.nextafter(near - 1), near.nextafter(near + 1), torch.tensor([math.inf, 464.0, 465.0]))
        )
        x = torch.nn.functional.pad(x, (0, -len(x) % 64))
    else:
        x = torch.arange(-(2**15), 2**15).short().view(getattr(torch, seen))
    x = x.to(dtype)
    caches = torch.zeros(2, len(x) // 64 + 1, 1, 1, 64).to(FP8)
    qkv_TND = x.view(-1, 1, 64).expand(-1, 3, -1).contiguous()
    norm_rotary_store(qkv_TND, None, 1e-6, None, None, *caches, torch.arange(1, len(caches[0])))
    for cache in caches:
        written = cache[1:].flatten()
        assert_same_bytes(written, to_fp8(x))
        torch.testing.assert_close(written.double(), rounded(x), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_numbers_stay_where_denormals_are_flushed(dtype: torch.dtype) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes none")
    try:
        test_every_byte_is_read_as_its_number(dtype, 2, 1)
        test_every_byte_is_read_as_its_number(dtype, 8, 40)
        test_every_number_is_written_as_the_format_rounds_it(dtype, "float16")
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (20, 12), (256, 256), (96, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_what_a_cache_of_the_models_dtype_gets_rounded(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, weight_dtype: torch.dtype | None
) -> None:
    """First to the model's dtype, as the reference and the kernel do it. Queries are the same bits."""
    if dtype == torch.float32 and weight_dtype == torch.bfloat16:
        pytest.skip("no model has weights narrower than its activations")
    generator = torch.Generator().manual_seed(0)
    qkv_TND = (90 * torch.randn(7, 7, head_dim, generator=generator)).to(dtype)
    weight = None if weight_dtype is None else (torch.rand(5, head_dim, generator=generator) + 0.5).to(weight_dtype)
    turns = (None, None)
    if rotary_dim:
        frequencies = torch.rand(rotary_dim // 2, generator=generator)
        turns = rotary_cos_sin(torch.tensor([0, 7, 3, 900, 12, 1, 2]), frequencies, 1.0, dtype)
    slots = torch.tensor([9, -1, 4, 13, 5, 6, 15])
    own, ours, theirs = (torch.zeros(2, 4, 4, 2, head_dim).to(kind) for kind in (dtype, FP8, FP8))
    queries = [norm_rotary_store(qkv_TND, weight, 1e-6, *turns, *caches, slots) for caches in (own, ours)]
    reference(qkv_TND, weight, 1e-6, *turns, *theirs, slots)
    assert torch.equal(*queries)
    assert_same_bytes(ours[:, 1:], to_fp8(own)[:, 1:])  # padding may write to the null block
    assert_same_bytes(ours[1, 1:], theirs[1, 1:])


def test_slots_beyond_two_to_the_31_bytes() -> None:
    """Only the pages that are written take memory."""
    num_blocks = 2**31 // (BLOCK_SIZE * 128) + 8
    k_cache, v_cache = (torch.empty(num_blocks, BLOCK_SIZE, 1, 128, dtype=torch.uint8).view(FP8) for _ in range(2))
    qkv_TND, last = torch.randn(1, 4, 128), (num_blocks - 1) * BLOCK_SIZE
    q_THD = norm_rotary_store(qkv_TND, None, 1e-6, None, None, k_cache, v_cache, torch.tensor([last]))
    meta, _ = make_step([1], [1], BLOCK_SIZE, seed=0)
    meta.block_tables_SM[0, 0] = num_blocks - 1
    assert can_attend(q_THD, k_cache)
    out = paged_attention(q_THD, k_cache, v_cache, meta, scale=0.1, sliding_window=None)
    # one key: its weight and what weights are divided by are rounded, each to float32
    torch.testing.assert_close(out.double(), rounded(qkv_TND[:, 3:]).expand(-1, 2, -1), atol=0, rtol=1e-6)

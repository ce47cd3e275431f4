"""Paged attention beside a naive oracle: one sequence, one head, one query at a time, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.ops import AttentionMetadata, copy_kv, dispatch, paged_attention, store_kv
from bulkrun.ops.attention import sequence_groups
from bulkrun.windows import Chunks, Window

pytestmark = pytest.mark.usefixtures("cpu_ops")


def make_step(
    query_lens: list[int], context_lens: list[int], block_size: int, seed: int
) -> tuple[AttentionMetadata, list[list[int]]]:
    """A step's metadata and, for each sequence, the slots of all its tokens, over a shuffled pool."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    pool = (torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    tables = [[pool.pop() for _ in range(n)] for n in num_blocks]
    slots = [
        [table[p // block_size] * block_size + p % block_size for p in range(length)]
        for table, length in zip(tables, context_lens, strict=True)
    ]
    new_slots = [slot for own, q in zip(slots, query_lens, strict=True) for slot in own[len(own) - q :]]
    num_decode = next((i for i, q in enumerate(query_lens) if q > 1), len(query_lens))
    width = max(num_blocks) + 2  # padding columns
    meta = AttentionMetadata(
        slot_mapping_T=torch.tensor(new_slots),
        block_tables_SM=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        context_lens_S=torch.tensor(context_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        num_decode_seqs=num_decode,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    return meta, slots


def naive_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_lens: list[int],
    slots: list[list[int]],
    scale: float,
    window: Window | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    num_kv_heads = k_cache.shape[2]
    k_slots, v_slots = k_cache.double().flatten(0, 1), v_cache.double().flatten(0, 1)
    q_TKGD = q_THD.double().unflatten(1, (num_kv_heads, -1))
    sinks_H = torch.full(q_THD.shape[1:2], -math.inf) if sinks_H is None else sinks_H
    sinks_KG1 = sinks_H.double().view(num_kv_heads, -1, 1)
    out, token = [], 0
    for query_len, own in zip(query_lens, slots, strict=True):
        for position in range(len(own) - query_len, len(own)):
            seen = own[_first_seen(position, window) : position + 1]
            scores_KGN = torch.einsum("kgd,nkd->kgn", q_TKGD[token], k_slots[seen]) * scale
            if soft_cap is not None:
                scores_KGN = soft_cap * torch.tanh(scores_KGN / soft_cap)
            weights_KGN = torch.cat((scores_KGN, sinks_KG1), -1).softmax(-1)[..., :-1]
            out.append(torch.einsum("kgn,nkd->kgd", weights_KGN, v_slots[seen]))
            token += 1
    return torch.stack(out).view(*q_THD.shape[:2], -1)


def _first_seen(position: int, window: Window | None) -> int:
    if isinstance(window, Chunks):
        return position // window.size * window.size
    return 0 if window is None else max(0, position - window + 1)


def check_against_oracle(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: tuple[int, int, int] = (6, 2, 16),
    value_dim: int | None = None,
    block_size: int = 4,
    window: Window | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
    seed: int = 0,
) -> None:
    """value_dim: values are so many of the last dimensions of their keys."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    meta, slots = make_step(query_lens, context_lens, block_size, seed)
    num_blocks = int(meta.block_tables_SM.max()) + 1
    k_cache, v_cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), math.nan, dtype=dtype)
    for own in slots:  # every slot that no sequence owns stays NaN: reading one would show
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[own] = torch.randn(len(own), num_kv_heads, head_dim, generator=generator).to(dtype)
    if value_dim is not None:
        v_cache = k_cache[..., -value_dim:]
    q_THD = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    scale = head_dim**-0.5
    sinks_H = torch.linspace(-3, 6, num_heads) if has_sinks else None
    ours = paged_attention(
        q_THD, k_cache, v_cache, meta, scale=scale, sliding_window=window, soft_cap=soft_cap, sinks_H=sinks_H
    )
    oracle = naive_attention(q_THD, k_cache, v_cache, query_lens, slots, scale, window, soft_cap, sinks_H)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), oracle, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 5, 64, Chunks(1), Chunks(9), Chunks(32)])
@pytest.mark.parametrize("heads", [(4, 4, 16), (11, 11, 8), (6, 2, 80), (5, 1, 16), (8, 2, 128)], ids=str)
def test_mixed_steps_equal_the_oracle(heads: tuple[int, int, int], window: Window | None) -> None:
    check_against_oracle([1, 1, 1, 9, 3, 17], [1, 30, 7, 9, 20, 33], heads=heads, window=window)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 80), (5, 1, 16)], ids=str)
def test_soft_capped_scores_equal_the_oracle(heads: tuple[int, int, int], window: Window | None) -> None:
    check_against_oracle([1, 1, 1, 9, 3, 17], [1, 30, 7, 9, 20, 33], heads=heads, window=window, soft_cap=0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (Chunks(8), None), (None, 0.7)])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 80), (5, 1, 16), (64, 8, 64)], ids=str)
def test_sinks_equal_the_oracle(
    heads: tuple[int, int, int], window: Window | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    lens = ([1, 1, 1, 9, 3, 17], [1, 30, 7, 9, 20, 33])
    check_against_oracle(
        *lens, heads=heads, window=window, soft_cap=soft_cap, has_sinks=True, dtype=dtype, tolerance=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"), [(None, None, False), (5, None, True), (Chunks(13), 0.7, False)]
)
@pytest.mark.parametrize(
    ("heads", "value_dim"),
    [((6, 1, 24), 16), ((4, 2, 20), 18), ((5, 1, 80), 64), ((16, 1, 192), 128), ((20, 1, 576), 512)],
    ids=str,
)
def test_values_within_keys(
    heads: tuple[int, int, int],
    value_dim: int,
    window: Window | None,
    soft_cap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    """Latent attention: a token's key is all that is kept of it."""
    check_against_oracle(
        [1, 1, 1, 9, 3, 17],
        [1, 30, 7, 9, 20, 80],
        heads=heads,
        value_dim=value_dim,
        window=window,
        soft_cap=soft_cap,
        has_sinks=has_sinks,
        dtype=dtype,
        tolerance=5e-6 if dtype == torch.float32 else 3e-2,  # sums of 576 products: up to 1.8e-6 here
    )


@pytest.mark.parametrize("sink", [-1000.0, -90.0, 90.0, 1000.0])
def test_a_sink_may_leave_everything_or_nothing(sink: float) -> None:
    meta, slots = make_step([1, 3], [20, 3], 4, 0)
    k_cache, v_cache = torch.randn(2, int(meta.block_tables_SM.max()) + 1, 4, 2, 16)
    q_THD, sinks_H = torch.randn(4, 4, 16), torch.full((4,), sink)
    ours = paged_attention(q_THD, k_cache, v_cache, meta, scale=1.0, sliding_window=None, sinks_H=sinks_H)
    oracle = naive_attention(q_THD, k_cache, v_cache, [1, 3], slots, 1.0, None, None, sinks_H)
    torch.testing.assert_close(ours.double(), oracle, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_late_keys_may_count_for_far_more_than_all_before_them(dtype: torch.dtype) -> None:
    """Beside them the first ones' weights are nothing in float32: e^-400 and less."""
    meta, slots = make_step([1, 3, 20], [300, 150, 200], 16, 0)
    k_cache, v_cache = torch.randn(2, int(meta.block_tables_SM.max()) + 1, 16, 2, 32).to(dtype)
    for own in slots:
        k_cache.flatten(0, 1)[own[100:]] *= 100
    q_THD = torch.randn(24, 4, 32).to(dtype)
    ours = paged_attention(q_THD, k_cache, v_cache, meta, scale=1.0, sliding_window=None)
    oracle = naive_attention(q_THD, k_cache, v_cache, [1, 3, 20], slots, 1.0, None, None)
    error = 1e-3 if dtype == torch.float32 else 2e-2  # scores of up to 3000, with 24 bits: off by 2e-4
    torch.testing.assert_close(ours.double(), oracle, atol=error, rtol=error)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(block_size: int) -> None:
    check_against_oracle([1, 1, 5, 12], [17, 16, 5, 31], block_size=block_size)


def test_decode_only_and_prefill_only() -> None:
    check_against_oracle([1] * 7, [1, 2, 3, 50, 4, 16, 17])
    check_against_oracle([3, 20, 2], [3, 20, 41])


def test_one_token_chunk_in_the_prefill_part() -> None:
    check_against_oracle([1, 5, 1, 1], [8, 5, 1, 12])


def test_heavy_tailed_lengths_fall_into_several_groups() -> None:
    lens = [100 + 37 * i**2 % 1400 for i in range(24)]
    check_against_oracle([1] * 24 + [64, 5], [*lens, 300, 900], heads=(4, 2, 64), block_size=16)


@pytest.mark.parametrize("window", [None, 7, Chunks(10)])
def test_one_group_per_phase_where_the_host_knows_no_lengths(
    window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, played on the CPU: no splitting by length, padding to more keys than any sequence has."""
    made = []

    def pad_more(sequences, lens, *rest):  # type: ignore[no-untyped-def]
        made.append(lens)
        return make_group(sequences, (lens[0], lens[1] + 9), *rest)

    make_group = sequence_groups._make_group
    monkeypatch.setattr(dispatch, "uses_compiled", lambda tensor: False)
    monkeypatch.setattr(sequence_groups, "_split_by_length", lambda phase, _: [phase])
    monkeypatch.setattr(sequence_groups, "_make_group", pad_more)
    check_against_oracle([1, 1, 1, 9, 3, 17], [1, 30, 7, 9, 20, 33], window=window)
    assert [queries for queries, _ in made] == [1, 17]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    for heads in ((6, 2, 16), (8, 2, 64)):  # below and above the row count from which heads are folded
        check_against_oracle([1, 1, 40], [90, 13, 70], heads=heads, dtype=dtype, tolerance=2e-2)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    decode=st.lists(st.integers(1, 40), max_size=6),
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), max_size=4),
    block_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 45) | st.builds(Chunks, st.integers(1, 45)),
    seed=st.integers(0, 2**20),
)
def test_any_step_equals_the_oracle(
    decode: list[int], chunks: list[tuple[int, int]], block_size: int, window: Window | None, seed: int
) -> None:
    if not decode and not chunks:
        return
    query_lens = [1] * len(decode) + [q for q, _ in chunks]
    context_lens = decode + [q + before for q, before in chunks]
    check_against_oracle(query_lens, context_lens, block_size=block_size, window=window, seed=seed)


def test_padding_is_harmless() -> None:
    """Rows past the last sequence, and sequences without context, give finite numbers and change nothing."""
    generator = torch.Generator().manual_seed(0)
    meta, _ = make_step([1, 4], [9, 4], block_size=4, seed=0)
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16, generator=generator)
    q_THD = torch.randn(5, 6, 16, generator=generator)
    plain = paged_attention(q_THD, k_cache, v_cache, meta, scale=0.25, sliding_window=None)
    padded_meta = AttentionMetadata(
        slot_mapping_T=torch.cat((meta.slot_mapping_T, torch.tensor([-1, -1, 0]))),
        block_tables_SM=torch.cat((meta.block_tables_SM, torch.zeros(2, meta.block_tables_SM.shape[1]).int())),
        context_lens_S=torch.cat((meta.context_lens_S, torch.zeros(2).int())),
        cu_seqlens_q=torch.cat((meta.cu_seqlens_q, torch.tensor([5, 5]).int())),
        num_decode_seqs=1,
        max_query_len=4,
        max_context_len=9,
        is_padded=True,
    )
    q_padded = torch.cat((q_THD, torch.randn(3, 6, 16, generator=generator)))
    padded = paged_attention(q_padded, k_cache, v_cache, padded_meta, scale=0.25, sliding_window=None)
    torch.testing.assert_close(padded[:5], plain, atol=1e-6, rtol=1e-6)
    assert torch.equal(padded[5:], torch.zeros(3, 6, 16))


def test_store_kv_writes_each_slot_once_and_padding_to_the_null_block() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 3, 2, 8)
    k_TKD, v_TKD = torch.randn(2, 5, 2, 8)
    slots = torch.tensor([10, -1, 3, 7, -1])
    store_kv(k_TKD, v_TKD, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k_TKD), (v_cache, v_TKD)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[10, 3, 7]], new[[0, 2, 3]])
        untouched = [slot for slot in range(3, 12) if slot not in (10, 3, 7)]
        assert not flat[untouched].any()


def test_store_kv_takes_strided_views() -> None:
    qkv_TND = torch.randn(4, 5, 8)
    k_cache, v_cache = torch.zeros(2, 2, 4, 1, 8)
    store_kv(qkv_TND[:, 3:4], qkv_TND[:, 4:5], k_cache, v_cache, torch.arange(4, 8))
    assert torch.equal(k_cache[1, :, 0], qkv_TND[:, 3])
    assert torch.equal(v_cache[1, :, 0], qkv_TND[:, 4])


def test_copied_slots_hold_what_their_sources_hold_and_all_others_stay() -> None:
    k_cache, v_cache = torch.randn(2, 5, 4, 2, 3, generator=torch.Generator().manual_seed(0)).unbind(0)
    pairs = [(4, 12), (5, 13), (6, 14), (17, 1)]
    expected_k, expected_v = k_cache.flatten(0, 1).clone(), v_cache.flatten(0, 1).clone()
    for source, target in pairs:
        expected_k[target], expected_v[target] = expected_k[source], expected_v[source]
    copy_kv(k_cache, v_cache, torch.tensor(pairs).T.contiguous())
    assert torch.equal(k_cache.flatten(0, 1), expected_k)
    assert torch.equal(v_cache.flatten(0, 1), expected_v)

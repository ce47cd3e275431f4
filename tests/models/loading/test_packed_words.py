"""Numbers out of words of 32 bits: what the formats' writers put in, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.models.loading.packed_words import numbers_of_rows, zero_points
from tests.models.tiny_packed import AWQ_ORDER, words

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([2, 3, 4, 8]), st.integers(0, 2**32))


def numbers(high: int, wide: int, num_bits: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**num_bits, (high, wide))


@settings(max_examples=60)
@given(SIZES, st.integers(0, 39), st.integers(0, 40))
def test_rows_packed_along_inputs(size: tuple[int, int, int, int], first: int, last: int) -> None:
    high, wide, num_bits, _ = size
    expected, rows = numbers(*size), slice(min(first, high), min(last, high))
    stored = torch.from_numpy(words(expected, num_bits))
    for layout, tensor in (("compressed", stored), ("gptq", stored.T.contiguous())):
        ours = numbers_of_rows(tensor, rows, layout, num_bits)[:, :wide]
        assert ours.tolist() == expected[rows].tolist()


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 5), st.integers(0, 6), st.integers(0, 2**32))
def test_rows_packed_along_outputs(num_words: int, wide: int, first: int, last: int, seed: int) -> None:
    expected, rows = numbers(8 * num_words, wide, 4, seed), slice(8 * min(first, num_words), 8 * min(last, num_words))
    stored = torch.from_numpy(words(expected.T, 4, AWQ_ORDER))
    assert numbers_of_rows(stored, rows, "awq", 4).tolist() == expected[rows].tolist()


@settings(max_examples=60)
@given(SIZES)
def test_zero_points(size: tuple[int, int, int, int]) -> None:
    high, _, num_bits, _ = size
    expected = numbers(*size)
    stored = torch.from_numpy(words(expected.T, num_bits))
    for layout, tensor in (("gptq", stored), ("compressed", stored.T.contiguous())):
        assert zero_points(tensor, layout, num_bits)[:high].tolist() == expected.tolist()
    if num_bits == 4:
        in_awq = torch.from_numpy(words(expected.T, 4, AWQ_ORDER))
        assert zero_points(in_awq, "awq", 4)[:high].tolist() == expected.tolist()


def test_a_word_of_each_order() -> None:
    """By hand: the lowest four bits hold the first number, with AWQ the second holds the third."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert numbers_of_rows(word, slice(0, 1), "compressed", 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert numbers_of_rows(word, slice(0, 8), "awq", 4).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    negative = torch.tensor([[-1]], dtype=torch.int32)
    assert numbers_of_rows(negative, slice(0, 1), "gptq", 8).tolist() == [[255] * 4]


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
def test_no_rows_are_no_numbers(num_bits: int) -> None:
    empty = numbers_of_rows(torch.zeros(3, 5, dtype=torch.int32), slice(2, 2), "gptq", num_bits)
    assert empty.shape == (0, 3 * 32 // num_bits)

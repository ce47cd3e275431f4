"""Where codes of four bits lie for a kernel that unpacks them, one by one."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops.matmul import four_bit_order
from bulkrun.ops.matmul.four_bit_order import in_line, in_words


def code_of(codes: torch.Tensor, number: int) -> int:
    byte = int(codes[number // 2])
    return byte >> 4 if number % 2 else byte & 15


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (2, 3, 64)])
def test_a_thread_of_four_finds_its_inputs_in_two_words(shape: tuple[int, ...]) -> None:
    codes = torch.randint(256, shape, dtype=torch.uint8)
    for line, words in zip(codes.flatten(0, -2), in_words(codes).flatten(0, -2).view(torch.int32), strict=True):
        for number in range(2 * shape[-1]):
            block, place = divmod(number, 64)
            upper_16, upper_8, thread, neighbor = place % 32 // 16, place % 16 // 8, place % 8 // 2, place % 2
            word = int(words[8 * block + 2 * thread + place // 32])
            assert word >> 4 * (4 * neighbor + 2 * upper_16 + upper_8) & 15 == code_of(line, number)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (7, 64), (2, 3, 128)])
@pytest.mark.parametrize("piece_bytes", [1, 128, 2**24])
def test_the_way_back_is_the_way_back(
    shape: tuple[int, ...], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(four_bit_order, "_PIECE_BYTES", piece_bytes)
    codes = torch.randint(256, shape, dtype=torch.uint8)
    before, ordered = codes.clone(), in_words(codes)
    assert torch.equal(in_line(ordered), codes) and torch.equal(codes, before)
    assert ordered.is_contiguous() and ordered.shape == codes.shape

"""A table of cosines and sines gives what the op computes, whatever it held before."""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops
from bulkrun.models.decoder.rotary_table import RotaryTable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_op(dtype: torch.dtype) -> None:
    inv_freq = torch.rand(20)
    table = RotaryTable(inv_freq, 1.3, dtype)
    positions = torch.tensor([0, 7, 7, 1023, 5])
    for rows, expected in zip(
        table.rows(positions, 1024), ops.rotary_cos_sin(positions, inv_freq, 1.3, dtype), strict=True
    ):
        assert rows.shape == (5, 1, 40) and rows.dtype == dtype
        torch.testing.assert_close(rows, expected)


def test_a_row_has_the_same_bits_before_and_after_growing() -> None:
    inv_freq = torch.rand(13)  # no multiple of a vector
    grown, large = (RotaryTable(inv_freq, 1.0, torch.float32) for _ in range(2))
    before = grown.rows(torch.arange(1024), 1024)
    positions = torch.tensor([1024, 4999])
    expected = large.rows(positions, 9000)
    for rows, same in zip(grown.rows(positions, 5000), expected, strict=True):
        assert torch.equal(rows, same)
    for rows, same in zip(grown.rows(torch.arange(1024), 1024), before, strict=True):
        assert torch.equal(rows, same)

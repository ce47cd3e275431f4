"""Numbers of four bits unpacked in Triton, beside the reference, which other tests hold against numbers one by one."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops.matmul.four_bit_order import in_words
from bulkrun.ops.matmul.unpack_codes import unpack_codes as reference
from bulkrun.ops.triton.unpack_codes import unpack_codes

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize(
    ("outputs", "size", "num_groups"),
    [
        ((3,), 2, 1),
        ((2,), 1030, 5),
        ((2,), 1536, 12),
        ((3,), 2880, 90),
        ((2,), 2050, 1),
        ((2, 3), 96, 4),
        ((0,), 8, 1),
        ((4, 0), 8, 2),
    ],
)
def test_numbers_are_those_of_the_reference(
    device: str,
    outputs: tuple[int, ...],
    size: int,
    num_groups: int,
    has_zeros: bool,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
) -> None:
    codes = torch.randint(256, (*outputs, size // 2), dtype=torch.uint8, device=device)
    scale = torch.randn(*outputs, num_groups, device=device).to(scale_dtype)
    zero = torch.randint(16, scale.shape, dtype=torch.uint8, device=device) if has_zeros else None
    codebook = torch.randn(16, device=device)
    ours = unpack_codes(codes, scale, zero, codebook, dtype)
    assert ours.dtype == dtype and ours.shape == (*outputs, size)
    assert torch.equal(ours, reference(codes, scale, zero, codebook, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_groups", [1, 3, 45])
@pytest.mark.parametrize("outputs", [(3,), (2, 3), (0,)])
@pytest.mark.parametrize("num_inputs", [192, 2880])
def test_codes_may_lie_in_words(
    device: str, outputs: tuple[int, ...], num_inputs: int, num_groups: int, dtype: torch.dtype
) -> None:
    num_groups = num_groups if num_inputs % num_groups == 0 else 3
    codes = torch.randint(256, (*outputs, num_inputs // 2), dtype=torch.uint8, device=device)
    scale = torch.randn(*outputs, num_groups, device=device)
    zero = torch.randint(16, scale.shape, dtype=torch.uint8, device=device)
    codebook = torch.randn(16, device=device)
    exact = reference(codes, scale, zero, codebook, dtype)
    for unpack in (unpack_codes, reference):
        assert torch.equal(unpack(in_words(codes), scale, zero, codebook, dtype, are_in_words=True), exact)

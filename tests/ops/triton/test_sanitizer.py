"""The sanitizer finds each fault that the interpreter does not show, and none in a kernel that has none."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.ops.triton.sanitizer import watched_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is interpreted")

_HALF = tl.constexpr(0.5)


@triton.jit
def _double(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + index, 2 * tl.load(x_ptr + index, mask=index < size), mask=index < size)


@triton.jit
def _shift(x_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + index, tl.load(x_ptr + index + 1, mask=index + 1 < size), mask=index < size)


@triton.jit
def _count(x_ptr, counts_ptr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + index)
    if ATOMIC:
        tl.atomic_add(counts_ptr + value, 1, sem="relaxed")
    else:
        tl.store(counts_ptr + value, index)


@triton.jit
def _reverse_twice(x_ptr, scratch_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(scratch_ptr + index, tl.load(x_ptr + index))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + index, tl.load(scratch_ptr + BLOCK - 1 - index))


@triton.jit
def _halve(x_ptr, OF_CONSTEXPR: tl.constexpr):
    x = tl.load(x_ptr)
    if OF_CONSTEXPR:
        tl.store(x_ptr, tl.minimum(_HALF * x, 1e30))
    else:
        tl.store(x_ptr, tl.full([], _HALF, x.dtype))


def test_a_kernel_without_faults_is_left_alone() -> None:
    x, y = torch.arange(40), torch.zeros(40, dtype=torch.int64)
    with watched_kernels() as seen:
        _double[(3,)](x, y, 40, BLOCK=16)
        _double[(3,)](x, x, 40, BLOCK=16)
        _double[(1,)](x, y, 0, BLOCK=16)
    assert seen == ["_double"] * 3
    assert torch.equal(y, x)


@pytest.mark.parametrize("which", ["read", "written"])
def test_an_address_outside_of_every_argument(which: str) -> None:
    memory = torch.zeros(100, dtype=torch.int64)  # so that the stray access harms nobody
    short, long = memory[:39], memory[50:90]
    x, y = (short, long) if which == "read" else (long, short)
    with watched_kernels(), pytest.raises(Exception, match=r"_double: .* in no argument"):
        _double[(3,)](x, y, 40, BLOCK=16)


def test_a_program_that_reads_what_another_one_writes() -> None:
    with watched_kernels(), pytest.raises(AssertionError, match=r"_shift: programs race for x_ptr \+ 128 bytes"):
        _shift[(2,)](torch.arange(32), 32, BLOCK=16)


def test_programs_that_write_the_same_address() -> None:
    counts = torch.zeros(32, dtype=torch.int32)
    with watched_kernels():
        _count[(2,)](torch.arange(32) % 16, counts, BLOCK=16, ATOMIC=True)
        _count[(2,)](torch.arange(32), counts, BLOCK=16, ATOMIC=False)
        with pytest.raises(AssertionError, match="_count: programs race for counts_ptr"):
            _count[(2,)](torch.arange(32) % 16, counts, BLOCK=16, ATOMIC=False)


def test_lanes_that_write_different_values_to_one_address() -> None:
    with watched_kernels(), pytest.raises(Exception, match="_count: lanes of one store differ at counts_ptr"):
        _count[(1,)](torch.arange(16) % 8, torch.zeros(8, dtype=torch.int32), BLOCK=16, ATOMIC=False)


def test_threads_that_read_or_write_what_others_do_need_a_barrier() -> None:
    x, scratch = torch.arange(16), torch.zeros(16, dtype=torch.int64)
    with watched_kernels():
        with pytest.raises(AssertionError, match=r"_shift: no barrier between accesses to x_ptr \+ 8 bytes"):
            _shift[(1,)](x, 16, BLOCK=16)
        _reverse_twice[(1,)](x, scratch, BLOCK=16, BARRIER=True)
        with pytest.raises(AssertionError, match="_reverse_twice: no barrier between accesses to scratch_ptr"):
            _reverse_twice[(1,)](x, scratch, BLOCK=16, BARRIER=False)


def test_what_older_interpreters_lack() -> None:
    with watched_kernels():
        with pytest.raises(Exception, match="constexpr <operator> tensor"):
            _halve[(1,)](torch.ones(1), OF_CONSTEXPR=True)
        with pytest.raises(Exception, match="a constant in bfloat16"):
            _halve[(1,)](torch.ones(1, dtype=torch.bfloat16), OF_CONSTEXPR=False)
        _halve[(1,)](torch.ones(1), OF_CONSTEXPR=False)

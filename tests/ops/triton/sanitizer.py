"""Watches every kernel that Triton's interpreter runs for what the interpreter hides and a GPU does not forgive.

The interpreter runs the programs of a launch one after the other, each instruction for all threads at once, and reads
wherever a pointer points. On a GPU programs run side by side in no order, so do the threads of one, and a stray address
is a fault or, worse, somebody's memory. So each access is checked, as NVIDIA's compute-sanitizer does it there:

- it lies within one of the tensors that the launch was given;
- no program writes what another one of the same launch reads or writes, but for atomics among themselves;
- no two lanes of a store write different values to one address;
- in a program, nothing is read after it was written without a barrier between, nor accessed through two lanes of which
  one writes.

Nor does a kernel ask for what only newer interpreters can do: torch 2.13 brings Triton 3.7, whatever runs here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_LOAD, _STORE, _ATOMIC = 0, 1, 2
_OWN_BLOCK_TYPE = tl.block_type.__init__
_NULL_BLOCKS = {"_norm_rotary_store_kernel": ("k_ptr", "v_ptr")}  # where padding is stored, for nobody


class Access(NamedTuple):
    """One instruction of one program: the addresses of its lanes, -1 where masked; after how many barriers it ran."""

    kind: int
    program: int
    barriers: int
    addresses: np.ndarray[Any, np.dtype[np.int64]]


class Launch:
    """The accesses of one kernel launch."""

    def __init__(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        self.extents = {name: _extent(value) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        self.unread = [_extent(arguments[cache][0]) for cache in _NULL_BLOCKS.get(kernel, ())]
        self.accesses: list[Access] = []
        self.barriers = 0
        self._programs: dict[tuple[int, ...], int] = {}

    def access(self, kind: int, program: tuple[int, ...], pointers: Any, mask: Any, values: Any = None) -> None:
        addresses = np.where(mask, pointers.astype(np.int64), -1).ravel()
        self._check_bounds(addresses)
        if kind == _STORE:
            self._check_lanes(addresses, np.broadcast_to(values, pointers.shape).ravel())
        number = self._programs.setdefault(program, len(self._programs))
        self.accesses.append(Access(kind, number, self.barriers, addresses))

    def _check_bounds(self, addresses: np.ndarray[Any, Any]) -> None:
        there = addresses[addresses >= 0]
        inside = np.zeros(there.shape, dtype=bool)
        for first, end in self.extents.values():
            inside |= (there >= first) & (there < end)
        assert inside.all(), f"{self.kernel}: {there[~inside][:4]} lie in no argument of {self.extents}"

    def _check_lanes(self, addresses: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        order = np.argsort(addresses, kind="stable")
        addresses, values = addresses[order], values[order]
        bits = values.view(f"u{values.dtype.itemsize}")
        differ = (addresses[1:] == addresses[:-1]) & (addresses[1:] >= 0) & (bits[1:] != bits[:-1])
        assert not differ.any(), f"{self.kernel}: lanes of one store differ at {self._name(addresses[1:][differ][0])}"

    def check(self) -> None:
        """After the last program: who else came to each address, in no order that anybody promises?"""
        if all(access.kind == _LOAD for access in self.accesses):
            return
        sizes = [access.addresses.size for access in self.accesses]
        kind, program, barriers = (
            np.repeat([getattr(access, field) for access in self.accesses], sizes)
            for field in ("kind", "program", "barriers")
        )
        address = np.concatenate([access.addresses for access in self.accesses])
        for first, end in self.unread:
            address[(address >= first) & (address < end)] = -1
        lane = np.concatenate([(size << 32) + np.arange(size) for size in sizes])
        between = program * (1 + self.barriers) + barriers
        order = np.lexsort((between, address))[np.count_nonzero(address < 0) :]
        if not order.size:
            return
        address, between, lane, kind, program = (x[order] for x in (address, between, lane, kind, program))
        starts = np.r_[True, address[1:] != address[:-1]]
        self._check_races(address, starts, program, kind, "programs race for")
        starts[1:] |= between[1:] != between[:-1]
        self._check_races(address, starts, lane, kind, "no barrier between accesses to")
        self._check_reads(address, starts, kind)

    def _check_races(self, address: Any, starts: Any, who: Any, kind: Any, fault: str) -> None:
        """No two may come to one place of whom one writes. `starts`: where the accesses of a next place begin."""
        places = np.flatnonzero(starts)
        several = np.minimum.reduceat(who, places) != np.maximum.reduceat(who, places)
        kinds = np.bitwise_or.reduceat(1 << kind, places)
        races = several & (kinds != 1 << _LOAD) & (kinds != 1 << _ATOMIC)
        assert not races.any(), f"{self.kernel}: {fault} {self._name(address[places][races][0])}"

    def _check_reads(self, address: Any, starts: Any, kind: Any) -> None:
        """What was written: the compiler may give the lanes of a load to other threads than those of a store."""
        written = np.cumsum(kind != _LOAD)
        before = (written - (kind != _LOAD))[np.flatnonzero(starts)][np.cumsum(starts) - 1]
        stale = (kind == _LOAD) & (written > before)
        assert not stale.any(), f"{self.kernel}: no barrier between store and load of {self._name(address[stale][0])}"

    def _name(self, address: int) -> str:
        for name, (first, end) in self.extents.items():
            if first <= address < end:
                return f"{name} + {address - first} bytes"
        return hex(address)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one after the last."""
    if not tensor.numel():
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


@contextmanager
def _older_interpreter() -> Iterator[None]:
    constant = tl.constexpr.__init__

    def wrap(own: tl.constexpr, value: Any) -> None:
        assert not isinstance(value, tl.tensor), "constexpr <operator> tensor: Triton 3.7 takes it for no tensor"
        constant(own, value)

    def bfloat16(value: Any) -> Any:
        raise AssertionError("a constant in bfloat16: Triton 3.7 interprets none, store one in float32")

    with (
        mock.patch.object(tl.constexpr, "__init__", wrap),
        mock.patch.object(interpreter.interpreter_builder, "get_bf16", bfloat16, create=True),
    ):
        yield


@functools.cache
def _shape_of_tensor(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
    """And how many numbers."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


@functools.cache
def _shape_of_type(*sizes: int) -> tuple[tl.tuple, int, str]:
    """And how many numbers, and how it is written."""
    block = object.__new__(tl.block_type)
    _OWN_BLOCK_TYPE(block, tl.int32, list(sizes))
    return block.shape, block.numel, str(block.shape)


def _make_tensor(own: Any, handle: Any, type: Any) -> None:
    own.handle, own.type, own.dtype = handle, type, type.scalar
    own.shape, own.numel = _shape_of_tensor(*(type.shape.values if type.is_block() else ()))


def _make_block_type(own: Any, element_ty: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    own.element_ty = element_ty
    own.shape, own.numel, written = _shape_of_type(*sizes)
    own.name = f"<{written}, {element_ty}>"


@contextmanager
def quicker_interpreter() -> Iterator[None]:
    """With what takes most of its time done once: it exchanges the builtins of its packages at each launch, and at each
    call of a function by a kernel; makes shapes anew for each tensor and each type, and a table of dtypes for each that
    it looks up. And after each sum and product of integers it computes whether they overflow, and then says nothing of
    it, as it would only when debugging."""
    builder, core, find = interpreter.interpreter_builder, tl.core, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype.scalar)
        return known[name]

    silent = dataclasses.replace(builder.options, sanitize_overflow=False)
    languages = SimpleNamespace(__globals__={"tl": tl, "core": core})
    patched, nothing = interpreter._patch_lang(languages), interpreter._LangPatchScope()
    try:
        with (
            mock.patch.object(interpreter, "_patch_lang", lambda function: nothing),
            mock.patch.object(interpreter, "_get_np_dtype", numpy_dtype),
            mock.patch.object(core.tensor, "__init__", _make_tensor),
            mock.patch.object(core.block_type, "__init__", _make_block_type),
            mock.patch.object(builder, "options", silent),
        ):
            yield
    finally:
        patched.restore()


@contextmanager
def watched_kernels() -> Iterator[list[str]]:
    """Check every launch inside the block; gives the names of the kernels. Raises AssertionError at the first fault."""
    seen: list[str] = []
    builder, current = interpreter.interpreter_builder, list[Launch]()

    def load(own: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        current[-1].access(_LOAD, builder.grid_idx, ptrs.data, mask.data)
        return own(ptrs, mask, *rest)

    def store(own: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[-1].access(_STORE, builder.grid_idx, ptrs.data, mask.data, value.data)
        return own(ptrs, value, mask, *rest)

    def atomic(own: Any, operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[-1].access(_ATOMIC, builder.grid_idx, ptr.data, mask.data)
        return own(operation, ptr, value, mask, *rest)

    def barrier(own: Any) -> Any:
        current[-1].barriers += 1
        return own()

    run = interpreter.GridExecutor.__call__

    def launch(executor: Any, *arguments: Any, **options: Any) -> None:
        named = dict(zip(executor.arg_names, arguments, strict=False)) | options
        current.append(Launch(executor.fn.__name__, named))
        seen.append(executor.fn.__name__)
        try:
            run(executor, *arguments, **options)
        finally:
            watched = current.pop()
        watched.check()

    around = {"masked_load": load, "masked_store": store, "atomic_rmw": atomic, "barrier": barrier}
    with ExitStack() as patches:
        for name, replacement in around.items():
            own = getattr(builder, f"create_{name}")
            patches.enter_context(mock.patch.object(builder, f"create_{name}", functools.partial(replacement, own)))
        patches.enter_context(_older_interpreter())
        patches.enter_context(quicker_interpreter())
        patches.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launch))
        yield seen

"""Structs that Python mirrors by hand are laid out as in C++, and one that is not is never handed over."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bulkrun.ops.cpu import (
    encoder_stack,
    fused_experts,
    layer_stack,
    library,
    norm_rotary_store,
    paged_attention,
    step_inputs,
)
from bulkrun.ops.cpu.stack_memory import set_kept
from bulkrun.ops.cpu.structs import check_layout, struct_function

pytestmark = pytest.mark.skipif(library.compiled_ops().library is None, reason="no compiled ops on this machine")
MODULES = (encoder_stack, fused_experts, layer_stack, norm_rotary_store, paged_attention, step_inputs)


def mirrors_in(module: ModuleType) -> list[type[ctypes.Structure]]:
    return [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, ctypes.Structure)]


def what_must_hold(mirror: type[ctypes.Structure]) -> Iterator[str]:
    """C++ that compiles only where the struct has each of the mirror's fields, in its place, as wide, and no more."""
    name = mirror.__name__.removeprefix("_")
    yield f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});"
    for field, _ in mirror._fields_:
        at = getattr(mirror, field)
        yield f"static_assert(offsetof({name}, {field}) == {at.offset} && sizeof({name}::{field}) == {at.size});"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rsplit(".")[-1])
def test_every_field_of_a_mirror_is_where_cpp_has_it(module: ModuleType) -> None:
    source = Path(module.__file__ or "").with_suffix(".cpp")
    asserts = [line for mirror in mirrors_in(module) for line in what_must_hold(mirror)]
    command = ["g++", *library._FLAGS, "-fsyntax-only", "-x", "c++", "-"]
    program = "\n".join([f'#include "{source}"', *asserts])
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    assert asserts and done.returncode == 0, done.stderr


@pytest.mark.parametrize("mirror", [one for module in MODULES for one in mirrors_in(module)], ids=lambda m: m.__name__)
def test_a_mirror_passes_the_check_before_its_first_call(mirror: type[ctypes.Structure]) -> None:
    check_layout(mirror)


@pytest.mark.parametrize("fields", [("panels",), ("panels", "bias", "scale")], ids=["a field less", "a field more"])
def test_a_mirror_that_differs_is_not_handed_over(fields: tuple[str, ...]) -> None:
    mirror = type("_Matrix", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_void_p) for name in fields]})
    with pytest.raises(AssertionError, match=r"_Matrix: \(size, offset of"):
        struct_function("layer_stack_float32_float32", mirror)


def test_no_token_that_goes_on_is_told_from_all_tokens() -> None:
    stack = SimpleNamespace(slots=4096)
    set_kept(stack, None, 7)
    assert stack.kept is None and stack.num_kept == 7
    set_kept(stack, torch.empty(0, dtype=torch.int64), 7)  # torch has no address of it
    assert stack.kept and stack.num_kept == 0, "null stands for all: their attention would be computed for nothing"

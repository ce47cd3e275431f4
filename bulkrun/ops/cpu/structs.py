"""Functions of the library that take a pointer to a struct, each mirrored by hand in Python. Knows no op."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from bulkrun.ops.cpu.library import c_function, c_number


@cache
def struct_function(name: str, *structs: type[ctypes.Structure], more: tuple[type, ...] = ()) -> Callable[..., None]:
    """A function of the library, which must be there; its argument is a pointer to the first of these structs.

    The others are those it points to or holds; `more` are arguments behind it. Asserts that all are laid out as in
    C++: a field that one side alone has would be memory read and written in the wrong place.
    """
    for struct in structs:
        check_layout(struct)
    return c_function(name, ctypes.POINTER(structs[0]), *more)


def check_layout(struct: type[ctypes.Structure]) -> None:
    """Asserts that a mirror `_X` has the size of `struct X` in C++ and its last field where that has it."""
    cpp_name, last_field = struct.__name__.removeprefix("_"), struct._fields_[-1][0]
    mirrored = (ctypes.sizeof(struct), getattr(struct, last_field).offset)
    compiled = (c_number(f"sizeof_{cpp_name}"), c_number(f"offset_of_last_in_{cpp_name}"))
    assert mirrored == compiled, f"{struct.__name__}: (size, offset of {last_field}) {mirrored}, in C++ {compiled}"

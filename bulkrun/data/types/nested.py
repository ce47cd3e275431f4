"""Types inside of types: one function that changes what is inside lists, structs and maps, and which is text. Knows no
values."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


def with_leaves(
    type_: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType], *, large_lists: bool = True
) -> pa.DataType:
    """`type_` with `leaf` of each type in it that is not nested itself; all that is inside may be null.

    Views of lists become lists, and so do large ones without `large_lists`.
    """
    make_large = pa.large_list if large_lists else pa.list_

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(with_leaves(field.type, leaf, large_lists=large_lists)).with_nullable(True)

    if pa.types.is_struct(type_):
        return pa.struct([inside(field) for field in type_])
    if pa.types.is_map(type_):
        key = with_leaves(type_.key_type, leaf, large_lists=large_lists)
        return pa.map_(key, inside(type_.item_field), type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(inside(type_.value_field), type_.list_size)
    if pa.types.is_large_list(type_) or pa.types.is_large_list_view(type_):
        return make_large(inside(type_.value_field))
    if pa.types.is_list(type_) or pa.types.is_list_view(type_):
        return pa.list_(inside(type_.value_field))
    return leaf(type_)


def is_text(type_: pa.DataType) -> bool:
    """Whether values are texts, short or long."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))

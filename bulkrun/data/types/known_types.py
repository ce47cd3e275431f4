"""Types of columns that an input of nulls alone does not tell, taken from what is known of the same columns elsewhere.

Without them such a column is a column of strings. Knows no formats.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

KnownTypes = Mapping[str, pa.DataType]  # by the column's name


def with_known(type_: pa.DataType, known: pa.DataType | None) -> pa.DataType:
    """`type_` with the types of `known` in the places where it has nulls alone."""
    if known is None:
        return type_
    if pa.types.is_null(type_):
        return known
    if pa.types.is_list(type_) and pa.types.is_list(known):
        return pa.list_(with_known(type_.value_type, known.value_type))
    if pa.types.is_struct(type_) and pa.types.is_struct(known):
        inside = {field.name: field.type for field in known}
        return pa.struct([field.with_type(with_known(field.type, inside.get(field.name))) for field in type_])
    return type_

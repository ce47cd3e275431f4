"""Whether Arrow casts one type to another, asked before there are values, and casts value by value. Knows no files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def can_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether some value of type `given` can be cast to `wanted`; single values may still not fit.

    Asked with a null, as arrow looks at the precision of decimals only where there is a value to cast.
    """
    try:
        pa.array([_null_inside(given)], given).cast(wanted).validate()  # Arrow breaks views of lists in silence
    except (pa.ArrowTypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def rounds(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether decimals, maybe inside, would go into floats: Arrow takes the next float and does not say so."""
    if pa.types.is_decimal(given):
        return bool(pa.types.is_floating(wanted))
    if pa.types.is_struct(given):
        return any(rounds(field.type, wanted.field(field.name).type) for field in given)
    return any(rounds(given.field(number).type, wanted.field(number).type) for number in range(given.num_fields))


def cast_each(column: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """The column in another type; a value that does not fit is null, and its place is returned with Arrow's reason."""
    if column.type == wanted:
        return column, {}
    try:
        return column.cast(wanted), {}
    except pa.ArrowInvalid:
        pieces, misfits = [], dict[int, str]()
        for row in range(len(column)):
            try:
                pieces.append(column.take(pa.array([row])).cast(wanted))  # a slice of lists is cast with all of them
            except pa.ArrowInvalid as error:
                pieces.append(pa.nulls(1, wanted))
                misfits[row] = str(error)
        return pa.concat_arrays(pieces), misfits


def _null_inside(type_: pa.DataType) -> Any:
    """A null, inside of lists and objects one in each place."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return [_null_inside(type_.value_type)]
    if pa.types.is_struct(type_):
        return {field.name: _null_inside(field.type) for field in type_}
    return None

"""Whether Arrow casts one type to another, asked before there are values. Knows no files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def can_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether some value of type `given` can be cast to `wanted`; single values may still not fit.

    Asked with a null, as arrow looks at the precision of decimals only where there is a value to cast.
    """
    try:
        pa.array([_null_inside(given)], given).cast(wanted)
    except (pa.ArrowTypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _null_inside(type_: pa.DataType) -> Any:
    """A null, inside of lists and objects one in each place."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return [_null_inside(type_.value_type)]
    if pa.types.is_struct(type_):
        return {field.name: _null_inside(field.type) for field in type_}
    return None

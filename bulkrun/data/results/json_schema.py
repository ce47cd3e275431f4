"""JSON schemas as Arrow types, so that a column of parsed outputs is declared before row one. Knows no files.

An object with properties is a struct in their order, an array a list, a string, integer, number or boolean its Arrow
equal; `null` beside a type, and an optional property, are that type with nulls. What has no single type (a free
object, a map, alternatives of several kinds, a schema that contains itself), or no names that SQL tells apart, is a
string that holds JSON text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from bulkrun.data.results.schema_check import Schema, referenced
from bulkrun.data.types.json_types import as_unicode
from bulkrun.data.types.sql_names import sql_name

_TEXT = pa.string()
_SCALARS = {"string": _TEXT, "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_ALTERNATIVES = ("anyOf", "oneOf")
_INT64 = range(-(2**63), 2**63)


def arrow_type(schema: Schema) -> pa.DataType:
    """The Arrow type of a schema's values. `$ref` is followed inside the schema only."""
    return _type(schema, schema, ()) or _TEXT


def _type(schema: Schema, root: Schema, open_refs: tuple[str, ...]) -> pa.DataType | None:
    """The type, None where only null is possible. `open_refs` are the references that are being followed."""
    if isinstance(schema, bool):
        return _TEXT
    if "$ref" in schema:
        return _referenced(schema, root, open_refs)
    if "allOf" in schema:
        parts = [part for part in schema["allOf"] if part is not True]
        return _type(parts[0], root, open_refs) if len(parts) == 1 and "properties" not in schema else _TEXT
    for keyword in _ALTERNATIVES:
        if keyword in schema:
            return _TEXT if "properties" in schema else _common([_type(s, root, open_refs) for s in schema[keyword]])
    if "const" in schema:
        return _type_of(schema["const"])
    if "enum" in schema:
        return _common([_type_of(value) for value in schema["enum"]])
    kinds = schema.get("type", "object" if "properties" in schema else "any")
    names = [kinds] if isinstance(kinds, str) else kinds
    return _common([_of_kind(name, schema, root, open_refs) for name in names])


def _referenced(schema: Mapping[str, Any], root: Schema, open_refs: tuple[str, ...]) -> pa.DataType | None:
    reference = schema["$ref"]
    target = referenced(reference, root)
    if target is None or reference in open_refs or "properties" in schema:
        return _TEXT
    return _type(target, root, (*open_refs, reference))


def _of_kind(kind: str, schema: Mapping[str, Any], root: Schema, open_refs: tuple[str, ...]) -> pa.DataType | None:
    if kind == "null":
        return None
    if kind == "array":
        items = schema.get("items", True)
        is_list = isinstance(items, Mapping) and "prefixItems" not in schema
        return pa.list_(_type(items, root, open_refs) or _TEXT) if is_list else _TEXT
    if kind == "object":
        return _object_type(schema, root, open_refs)
    return _SCALARS.get(kind, _TEXT)


def _object_type(schema: Mapping[str, Any], root: Schema, open_refs: tuple[str, ...]) -> pa.DataType:
    properties = schema.get("properties")
    # Values of properties that are not declared would have no place in a struct.
    if not properties or schema.get("additionalProperties") or schema.get("patternProperties"):
        return _TEXT
    # To SQL twins are one field, the first; and a field needs a name.
    if "" in properties or len({sql_name(name) for name in properties}) < len(properties):
        return _TEXT
    return pa.struct([(name, _type(inner, root, open_refs) or _TEXT) for name, inner in properties.items()])


def _common(types: list[pa.DataType | None]) -> pa.DataType | None:
    """The one type of several alternatives, nulls aside; text where they differ."""
    distinct = [kind for kind in dict.fromkeys(types) if kind is not None]
    if not distinct:
        return None
    if set(distinct) == {pa.int64(), pa.float64()}:
        return pa.float64()
    return distinct[0] if len(distinct) == 1 else _TEXT


def _type_of(value: Any) -> pa.DataType | None:
    if value is None:
        return None
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    return kinds.get(type(value), _TEXT)


def to_arrow_value(value: Any, kind: pa.DataType) -> Any:
    """A parsed JSON value as Python data for a column of `kind`, which `arrow_type` declared for its schema.

    Text columns keep a string as it is and anything else as compact JSON. Raises ValueError for a value that the
    column cannot hold.
    """
    if value is None:
        return None
    if pa.types.is_struct(kind):
        members = _instance(value, dict, "an object")
        return {field.name: to_arrow_value(members.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [to_arrow_value(item, kind.value_type) for item in _instance(value, list, "an array")]
    if pa.types.is_string(kind):
        return as_unicode(value if isinstance(value, str) else compact_json(value))
    if pa.types.is_integer(kind):
        return _whole_number(value)
    if pa.types.is_floating(kind):
        return _number(value)
    return value


def compact_json(value: Any) -> str:
    """Compact JSON, the same text for the same value. Raises ValueError for a number that was too large to be read."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise ValueError("a number, as 1e999, does not fit into 64 bits") from None


def _instance(value: Any, kind: type, words: str) -> Any:
    """Schemas without a `type` allow other values than they describe."""
    if not isinstance(value, kind):
        raise ValueError(f"{compact_json(value)[:40]} is not {words}, which the schema describes")
    return value


def _whole_number(value: int | float) -> int:
    if int(value) not in _INT64:
        raise ValueError(f"{value} does not fit into a 64-bit integer")
    return int(value)


def _number(value: int | float) -> float:
    if abs(value) > sys.float_info.max:
        raise ValueError(f"{str(value)[:40]} does not fit into a 64-bit number")
    return float(value)

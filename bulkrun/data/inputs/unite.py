"""One schema for Parquet files whose columns or types differ, without the encodings that only some readers know.

Knows the schemas of files; reads no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from bulkrun.data.inputs.files import InputFile
from bulkrun.data.types.casts import can_cast, rounds
from bulkrun.data.types.known_types import KnownTypes, with_known
from bulkrun.data.types.nested import is_text, with_leaves
from bulkrun.errors import InputError


def plain_type(type_: pa.DataType) -> pa.DataType:
    """The type without its encoding (dictionary, run-end, view, extension): what every Parquet reader understands.

    What is inside may be null whatever the file says: rows that cannot be read are null, and what a file lacks is.
    Nulls alone are text, and so is a column of UUIDs.
    """
    return with_leaves(_decoded(type_), lambda leaf: pa.string() if pa.types.is_null(leaf) else leaf)


def _decoded(type_: pa.DataType) -> pa.DataType:
    """The type without its encoding; nulls alone stay what they are."""
    if isinstance(type_, pa.UuidType):
        return pa.string()
    return with_leaves(type_, _decoded_leaf)


def _decoded_leaf(type_: pa.DataType) -> pa.DataType:
    if isinstance(type_, pa.BaseExtensionType):
        return _decoded(type_.storage_type)
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return _decoded(type_.value_type)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(type_, type_)


def unite(files: Sequence[InputFile], schemas: Sequence[pa.Schema], known: KnownTypes) -> pa.Schema:
    """Every column that any file has, in a type that holds those of all; nulls alone have the type in `known`.

    Raises InputError, naming column and files, where there is no such type.
    """
    united: dict[str, pa.Field] = {}
    origin: dict[str, InputFile] = {}
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            if field.name not in united:
                origin[field.name] = file
            seen = united.get(field.name, field)
            united[field.name] = _wider(seen, field, origin[field.name], file)
    types = {name: with_known(field.type, known.get(name)) for name, field in united.items()}
    fields = [pa.field(name, plain_type(type_)) for name, type_ in types.items()]
    for file, schema in zip(files, schemas, strict=True):
        _check_casts(file, schema, fields)
    return pa.schema(fields)


def differ(schemas: Sequence[pa.Schema]) -> bool:
    """Whether a column has more than one type, encodings and nulls alone aside."""
    types: dict[str, pa.DataType] = {}
    told = (field for schema in schemas if not schema.equals(schemas[0]) for field in schema)
    return any(
        plain_type(field.type) != types.setdefault(field.name, plain_type(field.type))
        for field in [*schemas[0], *told]
        if not pa.types.is_null(field.type)
    )


def _wider(one: pa.Field, other: pa.Field, one_file: InputFile, other_file: InputFile) -> pa.Field:
    if one.type == other.type:
        return one
    # Nulls stay nulls until another file knows better; encodings do not matter.
    types = [_decoded(type_) for type_ in (one.type, other.type)]
    if is_text(types[0]) != is_text(types[1]) and all(is_text(type_) or _is_bytes(type_) for type_ in types):
        return one.with_type(pa.string())  # some writers mark no text as text
    try:
        schemas = [pa.schema([pa.field(one.name, type_)]) for type_ in types]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0)
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        raise InputError(
            f"column {one.name!r} is {one.type} in {one_file.path} but {other.type} in {other_file.path}; "
            f"read them as separate jobs, or cast the column so that both agree"
        ) from None


def _is_bytes(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_))


def _check_casts(file: InputFile, schema: pa.Schema, fields: Sequence[pa.Field]) -> None:
    there = set(schema.names)  # which makes a list of them each time it is asked
    for field in fields:
        if field.name in there:
            here = schema.field(field.name).type
            if not can_cast(here, field.type) or rounds(plain_type(here), field.type):
                raise InputError(
                    f"{file.path}: column {field.name!r} has the type {here}, which cannot be read as {field.type}, "
                    "the type of all files together; give the column one type in all files"
                )

"""The Jinja of a job's templates: what they look up is the data of a row, and no piece of Python becomes a prompt.

A struct's fields come before the methods of its Python value, and a method is nothing unless it is called: printed,
it is an address that is another one each night. Knows no job files and no errors of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2.runtime import Context

from bulkrun.sandbox import Sandbox, TemplateFailed


class NullPrinted(Exception):
    """A template put out a null, which would read "None" in the prompt."""


class _Method(jinja2.StrictUndefined):
    """A method that a template looked up in a value: undefined, until it is called."""

    __slots__ = ("method",)
    method: Callable[..., Any]


class RowSandbox(Sandbox):
    """A strict sandbox over the values of rows; a null that is printed is NullPrinted, the cause of TemplateFailed."""

    def __init__(self) -> None:
        super().__init__(strict=True, finalize=_refuse_unprintable)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return _as_data(super().getattr(obj, attribute), obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _as_data(super().getitem(obj, argument), obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        return super().call(context, obj.method if isinstance(obj, _Method) else obj, *args, **kwargs)


def _as_data(value: Any, obj: Any, name: str) -> Any:
    if not callable(value) or isinstance(value, jinja2.Undefined):
        return value
    undefined = _Method(obj=obj, name=name)
    undefined.method = value
    return undefined


def _refuse_unprintable(value: Any) -> Any:
    if value is None:
        raise NullPrinted
    if callable(value) and not isinstance(value, jinja2.Undefined):
        raise TemplateFailed("prints a function, not what it returns")
    return value

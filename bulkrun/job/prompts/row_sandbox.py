"""The Jinja of a job's templates: what they look up is the data of a row, and no piece of Python becomes a prompt.

A struct's fields come before the methods of its Python value, and a method is nothing unless it is called: printed,
it is an address that is another one each night. A null may be looked at, but nothing makes the word "None" of it: in
whatever makes text of values, a mark stands in its place that has no text. Knows no job files and no errors of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import jinja2
from jinja2.runtime import Context

from bulkrun.sandbox import Sandbox, TemplateFailed

_TEXT_FILTERS = (
    *("capitalize", "center", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "title"),
    *("trim", "upper", "urlencode", "wordcount"),
)
_TEXT_OF_OPTIONS_FILTERS = ("format", "replace")  # their options become text too


class NullPrinted(Exception):
    """A template put out a null, which would read "None" in the prompt."""


class _NullMark:
    """Stands for a null where text is made of it."""

    def __str__(self) -> str:
        raise NullPrinted

    __repr__ = __str__


_NULL = _NullMark()


class _Method(jinja2.StrictUndefined):
    """A method that a template looked up in a value: undefined, until it is called."""

    __slots__ = ("method",)
    method: Callable[..., Any]


class RowSandbox(Sandbox):
    """A strict sandbox over the values of rows; a null that is printed is NullPrinted, the cause of TemplateFailed."""

    def __init__(self) -> None:
        super().__init__(strict=True, finalize=_refuse_unprintable)
        for name in _TEXT_FILTERS + _TEXT_OF_OPTIONS_FILTERS:
            self.filters[name] = _seeing_nulls(self.filters[name], in_options=name in _TEXT_OF_OPTIONS_FILTERS)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return _as_data(super().getattr(obj, attribute), obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _as_data(super().getitem(obj, argument), obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        function = obj.method if isinstance(obj, _Method) else obj
        name = getattr(function, "__name__", None)
        if name == "format":
            args, kwargs = _marked(args), _marked(kwargs)
        elif name == "format_map":
            args = tuple(map(_marked, args))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        shown = _marked(right) if operator == "%" and isinstance(left, str) else right
        return super().call_binop(context, operator, left, shown)

    def text(self, value: Any) -> str:
        return super().text(_NULL if value is None else value)


def _seeing_nulls(function: Callable[..., Any], *, in_options: bool) -> Callable[..., Any]:
    """A filter that makes text of its value (and options) with its nulls marked."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # behind what Jinja passes

    @wraps(function)  # keeps the mark that tells Jinja what to pass first
    def seeing(*args: Any, **kwargs: Any) -> Any:
        value, options = _marked(args[first : first + 1]), args[first + 1 :]
        if in_options:
            options, kwargs = _marked(options), _marked(kwargs)
        return function(*args[:first], *value, *options, **kwargs)

    return seeing


def _marked(value: Any) -> Any:
    """The value with a mark for null: itself, or those in a tuple or dict, as formats take them."""
    if isinstance(value, tuple):
        return tuple(_NULL if item is None else item for item in value)
    if isinstance(value, dict):
        return {key: _NULL if item is None else item for key, item in value.items()}
    return _NULL if value is None else value


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
    if isinstance(value, Iterator):
        raise TemplateFailed("prints what a filter has not made yet; write | list or | join behind it")
    return value

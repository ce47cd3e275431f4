"""Jinja that a hostile template cannot turn against the process: sandboxed, with a time and a size cap.

Used for the job's prompt templates and for models' chat templates (which come from the internet). Jinja's own
sandbox keeps templates away from Python's internals but lets them run for hours or fill the memory; here every
loop turn, call and filter checks the clock, and every operation that can multiply a string is measured first.
Knows nothing of rows, messages or tokens.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_SECONDS = 1.0  # CPU time of the rendering thread: a loaded machine changes no result
MAX_RENDER_CHARS = 32 * 2**20  # of any string a template makes, the output included
MAX_ITEMS = 2**20  # of any list, tuple or dict a template makes
_TICKS_PER_LOOK = 32  # the thread's clock is a system call
_CHARS_PER_TICK = 4096
_WIDE_FORMAT = re.compile(r"\d{6}|\*")


class TemplateFailed(Exception):
    """A template could not be rendered for these values; the message is for the row's `error_message`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment whose templates end: see the module's caps.

    `strict` makes an unknown name an error instead of an empty string. Other keywords are Jinja's; `finalize` sees
    every value that is put out.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *, strict: bool, finalize: Callable[[Any], Any] | None = None, **options: Any) -> None:
        undefined = jinja2.StrictUndefined if strict else jinja2.Undefined
        super().__init__(undefined=undefined, extensions=[loopcontrols], finalize=self._printed, **options)
        self.code_generator_class = _TickingCodeGenerator
        self._finalize_value = finalize
        del self.globals["lipsum"], self.filters["urlize"]
        self.filters |= {"join": self._join, "tojson": _tojson}
        for functions in (self.filters, self.tests):
            functions.update({name: self._guarded(name, function) for name, function in functions.items()})
        self._lock = threading.RLock()
        self._deadline: float | None = None
        self._until_look = _TICKS_PER_LOOK

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile `source` (constant expressions run already). Raises jinja2.TemplateSyntaxError, TemplateFailed."""
        with self._lock:
            self._start_clock()
            try:
                template = self.from_string(source)
                template.globals = dict(template.globals)  # copied for every render: four times as slow of a ChainMap
                return template
            except RecursionError:
                raise TemplateFailed("the template is nested too deeply") from None

    def render_capped(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """The rendered text of `template`, which this environment compiled.

        Raises TemplateFailed with what was wrong: an error in the template, or a cap that it ran into.
        """
        with self._lock:
            self._start_clock()
            try:
                return template.render(values)
            except TemplateFailed:
                raise
            except Exception as problem:  # the template is the program here: whatever it raises is its own error
                name = "" if isinstance(problem, jinja2.TemplateError) else f"{type(problem).__name__}: "
                raise TemplateFailed(f"{name}{problem}") from problem

    def tick(self, size: float = 0) -> None:
        """Called on every loop turn, call and operation: ends a render that takes too long or grows too large.

        `size` is of what the operation will make, in characters or items: large ones bring the next look at the clock
        nearer.
        """
        _check_size(size)
        self._until_look -= 1 + int(size) // _CHARS_PER_TICK
        if self._until_look > 0:
            return
        self._until_look = _TICKS_PER_LOOK
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + MAX_RENDER_SECONDS
        elif now > self._deadline:
            raise TemplateFailed(f"rendering took more than {MAX_RENDER_SECONDS:g} s and was ended")

    def concat(self, parts: Iterable[str]) -> str:
        """Jinja's join of everything a block has put out, with the size cap."""
        pieces, size = [], 0
        for piece in parts:
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick(_operator_size(operator, left, right))
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        # The sandbox wraps str.format: what it wraps tells on which string.
        subject = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(subject, str):
            if obj.__name__ == "join":
                return self._join(args[0], subject)
            self.tick(_growth(obj.__name__, subject, (*args, *kwargs.values())))
        return _checked(super().call(context, obj, *args, **kwargs))

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        """Jinja's join filter, adding up as it goes."""
        items = values if attribute is None else (self.getitem(value, attribute) for value in values)
        pieces: list[str] = []
        size = 0
        for item in items:
            pieces.append(self.text(item))
            size += len(pieces[-1]) + len(separator)
            self.tick(len(separator))
            _check_size(size)
        return str(separator).join(pieces)

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.tick(_printed_size(value))
        return value if self._finalize_value is None else self._finalize_value(value)

    def text(self, value: Any) -> str:
        """A part of a `~` expression or of a join as text."""
        self.tick(_printed_size(value))
        return str(value)

    def _start_clock(self) -> None:
        self._deadline = None  # set at the first look: most templates end before it and never ask the clock
        self._until_look = _TICKS_PER_LOOK

    def _guarded(self, name: str, function: Any) -> Callable[..., Any]:
        passes_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)  # keeps the mark that tells Jinja what to pass first
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            head, rest = (args[:1], args[1:]) if passes_context else ((), args)
            if rest:
                self.tick(_growth(name, rest[0], (*rest[1:], *kwargs.values())))
            return _checked(function(*head, *rest, **kwargs))

        return guarded


class _TickingCodeGenerator(CodeGenerator):
    """Compiles loops and macros with a tick as their first statement, and `~` with the size cap."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _tick_statement(node.lineno))
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        node.body.insert(0, _tick_statement(node.lineno))
        return super().macro_body(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.text, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


def _tick_statement(lineno: int) -> nodes.ExprStmt:
    call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
    return nodes.ExprStmt(call.set_lineno(lineno, override=True), lineno=lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as models were trained on it. The options are those of chat templates."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_printed_scalar,
    )


def _printed_scalar(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _check_size(size: float, limit: int = MAX_RENDER_CHARS) -> None:
    if size > limit:
        raise TemplateFailed(f"a value grew beyond {limit} characters or items")


def _checked(value: Any) -> Any:
    """The value itself, when it is within the caps."""
    if isinstance(value, str):
        _check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        _check_size(len(value), MAX_ITEMS)
    return value


def _operator_size(operator: str, left: Any, right: Any) -> float:
    """How large the result of an operator can be, in characters, items or bits."""
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%" and isinstance(left, str):
        return _formatted_size(left, right)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right
    if operator == "*" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length()
    if operator == "*":
        return max(_length(left) * _reach([right]), _length(right) * _reach([left]))
    return 0


def _growth(name: str, value: Any, options: Sequence[Any]) -> float:
    """How large the result of a filter or a method of a string can be; 0 for those that cannot multiply."""
    text = value if isinstance(value, str) else ""
    if name == "replace" and len(options) >= 2 and isinstance(options[0], str):
        return len(text) + text.count(options[0]) * _length(options[1])
    if name in ("indent", "expandtabs"):
        return len(text) + (text.count("\n") + text.count("\t") + 1) * _reach(options)
    if name in ("wordwrap", "translate"):
        return len(text) * max(1, *(_printed_size(option) for option in options)) if options else 0
    if name in ("format", "format_map"):
        return _formatted_size(text, options)
    if name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "round"):
        return len(text) + _reach(options)
    if name in ("tojson", "pprint", "string", "urlencode", "xmlattr"):
        return _printed_size(value) * (1 + _reach(options))
    if name == "sum" and any(not isinstance(option, int | float | str) for option in options):
        return float("inf")  # lists can be added up too, each sum longer than the last
    return 0


def _formatted_size(pattern: str, values: Any) -> float:
    """A format pattern may print each value at each of its places, and as wide as it says."""
    if _WIDE_FORMAT.search(pattern):
        return float("inf")
    return len(pattern) + (pattern.count("%") + pattern.count("{")) * _printed_size(values)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _reach(options: Iterable[Any]) -> int:
    """The largest width or count among options: a number's value, a string's length, the largest in a tuple."""
    return max(map(_reach_of, options), default=0)


def _reach_of(option: Any) -> int:
    if isinstance(option, tuple):
        return max(len(option), _reach(option))
    return abs(option) if isinstance(option, int) else _length(option)


def _printed_size(value: Any) -> float:
    """About how many characters a value prints as; infinite where it holds too many items to count."""
    if isinstance(value, str):
        return len(value)
    size, items, todo = 0, 0, [value]
    while todo:
        item = todo.pop()
        items += 1
        size += 2 + (len(item) if isinstance(item, str | bytes) else 0)
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            todo += item
        if items > MAX_ITEMS or size > MAX_RENDER_CHARS:
            return float("inf")
    return size

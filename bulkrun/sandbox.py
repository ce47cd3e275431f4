"""Jinja that a hostile template cannot turn against the process: sandboxed, with a time and a size cap.

Used for the job's prompt templates and for models' chat templates (which come from the internet). Jinja's own
sandbox keeps templates away from Python's internals but lets them run for hours or fill the memory; here every
loop turn, call and filter checks the clock, and every operation that can multiply a string is measured first.
Knows nothing of rows, messages or tokens.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
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
_WIDE_FORMAT = re.compile(r"\d{6}|\*")


class TemplateFailed(Exception):
    """A template could not be rendered for these values; the message is for the row's `error_message`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment whose templates end: see the module's caps.

    `strict` makes an unknown name an error instead of an empty string. Other keywords are Jinja's.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *, strict: bool, **options: Any) -> None:
        undefined = jinja2.StrictUndefined if strict else jinja2.Undefined
        super().__init__(undefined=undefined, extensions=[loopcontrols], **options)
        self.code_generator_class = _TickingCodeGenerator
        del self.globals["lipsum"]
        for functions in (self.filters, self.tests):
            functions.update({name: self._guarded(name, function) for name, function in functions.items()})
        self._lock = threading.RLock()
        self._deadline: float | None = None
        self._ticks = 0

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile `source` (constant expressions run already). Raises jinja2.TemplateSyntaxError, TemplateFailed."""
        with self._lock:
            self._start_clock()
            try:
                return self.from_string(source)
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

    def tick(self) -> None:
        """Called by compiled templates on every loop turn and call: ends a render that takes too long."""
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK:
            return
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
        self.tick()
        _check_size(_operator_size(operator, left, right))
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        # The sandbox wraps str.format: what it wraps tells on which string.
        subject = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(subject, str):
            args = _check_growth(obj.__name__, subject, args, kwargs)
        return _checked(super().call(context, obj, *args, **kwargs))

    def _start_clock(self) -> None:
        self._deadline = None  # set at the first look: most templates end before it and never ask the clock
        self._ticks = 0

    def _guarded(self, name: str, function: Any) -> Callable[..., Any]:
        passes_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)  # keeps the mark that tells Jinja what to pass first
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            head, rest = (args[:1], args[1:]) if passes_context else ((), args)
            if rest:
                value, *options = rest
                if name == "join":
                    value = list(value)
                rest = (value, *_check_growth(name, value, tuple(options), kwargs))
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
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


def _tick_statement(lineno: int) -> nodes.ExprStmt:
    call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
    return nodes.ExprStmt(call.set_lineno(lineno, override=True), lineno=lineno)


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
    if operator == "*":
        return _length(left) * _count(right) if _length(left) else _length(right) * _count(left) or _bits(left, right)
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right
    if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
        return float("inf")
    return 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int) else 0


def _bits(left: Any, right: Any) -> int:
    return sum(value.bit_length() for value in (left, right) if isinstance(value, int))


def _check_growth(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a filter or string method that would multiply `value` beyond the cap; its arguments otherwise."""
    text = value if isinstance(value, str) else ""
    numbers = [abs(option) for option in (*args, *kwargs.values()) if isinstance(option, int)]
    widest = max(numbers, default=0)
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join":
        if isinstance(value, str) and args:
            args = (list(args[0]), *args[1:])
        pieces, separator = (args[0], value) if isinstance(value, str) and args else (value, args[0] if args else "")
        _check_size(sum(_length(piece) + _length(separator) for piece in pieces))
    elif name == "sum" and not isinstance(kwargs.get("start", 0), int | float):
        raise TemplateFailed("sum adds numbers only")
    elif name in ("indent", "expandtabs"):
        _check_size(len(text) + (text.count("\n") + text.count("\t") + 1) * widest)
    elif name in ("format", "format_map"):
        _check_size(float("inf") if _WIDE_FORMAT.search(text) else 0)
    elif name in ("center", "ljust", "rjust", "zfill", "batch", "slice", "round", "tojson", "wordwrap"):
        _check_size(widest, MAX_ITEMS)
    return args

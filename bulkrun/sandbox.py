"""Jinja that a hostile template cannot turn against the process: sandboxed, with a time and a size cap.

Used for the job's prompt templates and for models' chat templates (which come from the internet). Jinja's own
sandbox keeps templates away from Python's internals but lets them run for hours or fill the memory; here every
loop turn, call and filter checks the clock, and every operation that can multiply a string is measured first
(`template_growth`). Knows nothing of rows, messages or tokens.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef, operators
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bulkrun.template_growth import (
    CONTAINERS,
    MAX_CHARS,
    MAX_INTEGER_BITS,
    MAX_ITEMS,
    growth,
    method_growth,
    num_items,
    operator_size,
    printed_size,
)

MAX_RENDER_SECONDS = 1.0  # CPU time of the rendering thread: a loaded machine changes no result
_TICKS_PER_LOOK = 32  # the thread's clock is a system call
_CHARS_PER_TICK = 4096
# They compare or hash the values inside of what they are given; also the tests named like operators do.
_COMPARING_FILTERS = frozenset({"sort", "unique", "groupby", "min", "max"})
_COMPARING = _COMPARING_FILTERS | {
    *("dictsort", "in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan"),
    *(">", "ge", ">="),
}


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
        options["optimized"] = False  # folding constants takes the cube of how deep they are nested
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
        """Compile `source` (constant expressions run already). Raises jinja2.TemplateSyntaxError, TemplateFailed.

        What Jinja makes of a template is Python, which nests loops 20 deep and brackets 200 deep.
        """
        with self._lock:
            self._start_clock()
            try:
                template = self.from_string(source)
                template.globals = dict(template.globals)  # copied for every render: four times as slow of a ChainMap
                return template
            except (RecursionError, MemoryError):
                raise TemplateFailed("the template is nested too deeply") from None
            except SyntaxError as problem:
                raise TemplateFailed(f"the template cannot be compiled: {problem.msg}") from None

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

        `size` is what the operation will make, in characters or items: the more, the sooner the next look at the clock.
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
        self.tick(operator_size(operator, left, right))
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        # The sandbox wraps str.format: what it wraps tells on which string.
        subject = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(subject, str | bytes | int):
            if isinstance(subject, str) and obj.__name__ == "join":
                return self._join(args[0], subject)
            self.tick(method_growth(obj.__name__, subject, (*args, *kwargs.values())))
        elif not isinstance(obj, Macro):
            for arg in args:
                self.comparable(arg)
        return _checked(super().call(context, obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.comparable(argument)
        return super().getitem(obj, argument)

    def comparable(self, value: Any) -> Any:
        """The value itself, when it can be compared and hashed in time.

        Lists that hold the same list twice, and so on forty deep, take Python until the end of the world.
        """
        if isinstance(value, CONTAINERS):
            self.tick(num_items(value))
        return value

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
            self.tick(printed_size(value))
        return value if self._finalize_value is None else self._finalize_value(value)

    def text(self, value: Any) -> str:
        """A part of a `~` expression or of a join as text."""
        self.tick(printed_size(value))
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
            if rest and name in _COMPARING:
                rest = self._comparable(name, rest)
            if rest:
                self.tick(growth(name, rest[0], (*rest[1:], *kwargs.values())))
            return _checked(function(*head, *rest, **kwargs))

        return guarded

    def _comparable(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a filter or test that compares; what a generator would give, as a list."""
        if name in _COMPARING_FILTERS and isinstance(args[0], Iterator):
            args = (list(args[0]), *args[1:])
        return tuple(map(self.comparable, args))


class _TickingCodeGenerator(CodeGenerator):
    """Compiles loops and macros with a tick as their first statement, `~` with the size cap, and what compares and
    hashes values so that they are looked at first."""

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

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """No two values are compared for long of which one is a constant; but one may be hashed to be found in it."""
        alone, first = len(node.ops) == 1, node.ops[0]
        from_left, from_right = (alone and isinstance(one, nodes.Const) for one in (node.expr, first.expr))
        self.write("(")
        self._visit_value(node.expr, frame, known=from_left or (from_right and first.op not in ("in", "notin")))
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._visit_value(operand.expr, frame, known=from_left or from_right)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            self._visit_value(pair.key, frame, known=isinstance(pair.key, nodes.Const))
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _visit_value(self, expression: nodes.Expr, frame: Frame, *, known: bool) -> None:
        self.write("" if known else "environment.comparable(")
        self.visit(expression, frame)
        self.write("" if known else ")")


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


def _check_size(size: float, limit: int = MAX_CHARS) -> None:
    if size > limit:
        raise TemplateFailed(f"a value grew beyond {limit} characters or items")


def _checked(value: Any) -> Any:
    """The value itself, when it is within the caps."""
    if isinstance(value, str | bytes):
        _check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        _check_size(len(value), MAX_ITEMS)
    elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise TemplateFailed(f"a number grew beyond {MAX_INTEGER_BITS} bits")
    return value

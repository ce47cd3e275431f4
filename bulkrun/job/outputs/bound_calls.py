"""Finished answers that have to be calls: whether they are whole, and whether the arguments fit the functions.

Knows the format of calls and JSON schemas; knows no tokens.
"""

from __future__ import annotations

import json

import referencing
from jsonschema.exceptions import best_match
from referencing.exceptions import Unresolvable

from bulkrun.errors import shortened
from bulkrun.job.outputs.call import Call
from bulkrun.job.outputs.parsing import MAX_SHOWN, validator_class, what_cut
from bulkrun.job.outputs.tool_calls import split_calls
from bulkrun.request import Progress, RowError, StructuredOutput


class BoundCallsParser:
    """Checks the answers to one kind of `StructuredOutput` that is `tool_calls`."""

    def __init__(self, structured: StructuredOutput) -> None:
        bound = json.loads(structured.value)
        self._format, self._texts = bound["format"], json.dumps(bound.get("texts", {}))
        schemas = {one["name"]: one["parameters"] for one in bound["functions"]}
        make = validator_class()
        self._validators = {name: make(schema, registry=referencing.Registry()) for name, schema in schemas.items()}

    def parse(self, text: str, finish_reason: str, progress: Progress | None = None) -> tuple[None, RowError | None]:
        """Why the answer is not what has to be called, or None; never a value for the column `parsed`."""
        response, calls = split_calls(text, self._format, self._texts)
        try:
            if not calls:  # of several the last may be cut: its text stays in the response
                raise ValueError("the output ends before its calls are complete")
            if response is not None and (finish_reason, progress) == ("stop", None):  # which no grammar allows
                raise ValueError(f"{shortened(repr(response), MAX_SHOWN)} stands beside its calls")
            for call in calls:
                self._check(call)
        except ValueError as problem:
            return None, RowError("invalid_schema", f"{problem}{what_cut(finish_reason, progress)}")
        return None, None

    def _check(self, call: Call) -> None:
        if call.name not in self._validators:
            raise ValueError(f"calls {shortened(repr(call.name), MAX_SHOWN)}, which it may not")
        try:
            problem = best_match(self._validators[call.name].iter_errors(json.loads(call.arguments)))
        except RecursionError:
            raise ValueError(f"{call.name}: the arguments cannot be compared with the parameters") from None
        except Unresolvable as unresolvable:
            raise ValueError(f"{call.name}: the parameters refer to {unresolvable.ref!r}, which is not there") from None
        if problem is not None:
            shown = f"at {problem.json_path}: {shortened(problem.message, MAX_SHOWN)}"
            raise ValueError(f"{call.name}: the arguments do not fit the parameters: {shown}")

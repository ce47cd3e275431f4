"""The list of error codes is the list of error codes."""

from __future__ import annotations

import ast
from pathlib import Path

import bulkrun
from bulkrun.request import ERROR_CODES


def test_every_code_that_a_row_can_get_is_listed_and_every_listed_one_is_used() -> None:
    used = set()
    for path in Path(bulkrun.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RowError" and node.args:
                codes = [leaf for leaf in ast.walk(node.args[0]) if isinstance(leaf, ast.Constant)]
                used |= {str(code.value) for code in codes}
    assert used == set(ERROR_CODES)

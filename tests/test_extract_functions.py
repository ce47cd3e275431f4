"""`examples/extract_functions.py` on a small tree written by hand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "extract_functions.py"

SHAPES = '''\
"""A module's docstring is nobody's."""
import functools


class Circle:
    """A circle.

    With a second paragraph.
    """

    def area(self):
        """The area,
        in square   units.
        """
        return 3 * self.r**2

    @functools.cache
    async def grow(self):
        # kept: a comment
        def twice(x):
            """Doubled – naïvely."""
            return 2 * x

        return twice(self.r)


def only_docstring():
    """Nothing else."""


def one_line(): "Short."; return 'é'


if True:

    def undocumented(a, b=1):
        return a + b
'''


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extract_functions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    (root / "shapes").mkdir(parents=True)
    (root / "test").mkdir()
    (root / "shapes" / "__init__.py").write_text(SHAPES, encoding="utf-8")
    (root / "shapes" / "latin.py").write_bytes(
        b"# coding: latin-1\r\ndef caf\xe9():\r\n    '''Coffee.'''\r\n    return 1\r\n"
    )
    (root / "broken.py").write_text("def f(:\n")
    (root / "bytes.py").write_bytes(b"x = '\xff'\n")
    (root / "nul.py").write_bytes(b"x = 1\0\n")
    (root / "test" / "test_shapes.py").write_text("def skipped(): pass\n")
    return root


def rows_of(script: ModuleType, tree: Path, out: Path, limit: int | None = None) -> dict[str, dict]:
    script.extract([(tree, tree)], out, limit)
    return {row["name"]: row for row in pq.read_table(out).to_pylist()}


def test_every_function_and_class_is_a_row_with_its_first_paragraph(script, tree, tmp_path):
    rows = rows_of(script, tree, tmp_path / "f.parquet")
    assert {name: row["docstring"] for name, row in rows.items()} == {
        "Circle": "A circle.",
        "Circle.area": "The area, in square units.",
        "Circle.grow": None,
        "Circle.grow.twice": "Doubled – naïvely.",
        "only_docstring": "Nothing else.",
        "one_line": "Short.",
        "undocumented": None,
        "café": "Coffee.",
    }
    assert rows["Circle.area"]["id"] == f"shapes.Circle.area:{rows['Circle.area']['lineno']}"
    assert rows["café"]["module"] == "shapes.latin"


def test_source_is_dedented_and_has_no_docstring_of_its_own_or_inside(script, tree, tmp_path):
    rows = rows_of(script, tree, tmp_path / "f.parquet")
    assert rows["Circle.area"]["source"] == "def area(self):\n    return 3 * self.r**2"
    assert rows["Circle.grow"]["source"] == (
        "@functools.cache\nasync def grow(self):\n    # kept: a comment\n"
        "    def twice(x):\n        return 2 * x\n\n    return twice(self.r)"
    )
    assert rows["only_docstring"]["source"] == "def only_docstring():\n    ..."
    assert rows["one_line"]["source"].endswith("return 'é'")
    assert rows["undocumented"]["source"] == "def undocumented(a, b=1):\n    return a + b"
    assert not any('"""' in row["source"] or "'''" in row["source"] for row in rows.values())


def test_long_sources_are_cut(script):
    text = "def f():\n" + "    x = 1\n" * 10_000
    (row,) = script.functions_in(text, "m")
    assert len(row["source"]) == script.MAX_SOURCE_CHARS


def test_files_that_do_not_parse_are_skipped_and_counted(script, tree, tmp_path):
    done = script.extract([(tree, tree)], tmp_path / "f.parquet")
    assert (done.num_rows, done.num_files, done.num_skipped_files) == (8, 2, 3)


def test_limit_gives_the_first_rows_in_the_same_order(script, tree, tmp_path):
    whole = list(rows_of(script, tree, tmp_path / "whole.parquet").values())
    assert list(rows_of(script, tree, tmp_path / "some.parquet", limit=3).values()) == whole[:3]


def test_two_extractions_are_equal_and_leave_no_partial_file(script, tree, tmp_path):
    for name in ("a", "b"):
        script.extract([(tree, tree)], tmp_path / "out" / name)
    assert (tmp_path / "out" / "a").read_bytes() == (tmp_path / "out" / "b").read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "b"]


def test_command_line_extracts_the_standard_library(tmp_path):
    out = tmp_path / "functions.parquet"
    done = subprocess.run([sys.executable, SCRIPT, "--out", out, "--limit", "1200"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert pq.read_metadata(out).num_rows == 1200
    assert "1200 rows" in done.stdout


def test_unknown_package_is_named(tmp_path):
    command = [sys.executable, SCRIPT, "--out", tmp_path / "f", "--packages", "no_such_package"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no_such_package" in done.stderr

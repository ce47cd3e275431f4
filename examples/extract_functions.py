"""Write the functions and classes of your own Python installation to one Parquet file.

    python examples/extract_functions.py                      # the standard library
    python examples/extract_functions.py --packages all       # and everything installed beside it

One row per function or class, in a fixed order: where it stands, its source without docstrings, and the first
paragraph of its own docstring (null where nobody wrote one). Nothing is imported or run, only parsed.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
MAX_SOURCE_CHARS = 4000
ROW_GROUP_ROWS = 8192
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("module", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("lineno", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("docstring", pa.string()),
    ]
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Extracted(NamedTuple):
    """What one extraction wrote, and what it could not read."""

    num_rows: int
    num_files: int
    num_skipped_files: int


def python_files(root: Path) -> Iterator[Path]:
    """The `.py` files under `root` (or `root` itself), sorted, without tests and other people's folders."""
    if root.is_file():
        yield root
        return
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]):
            yield path


def module_name(path: Path, base: Path) -> str:
    """The dotted name under which `path` would be imported from `base`."""
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Every function and class in source order, with its qualified name (`Outer.method.inner`)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from definitions(node, prefix + node.name + ".")
        else:
            yield from definitions(node, prefix)


def first_paragraph(docstring: str | None) -> str | None:
    """The text up to the first blank line with its whitespace made single spaces; None where there is none."""
    paragraph = (docstring or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split()) or None


def docstring_statement(node: ast.AST) -> ast.Expr | None:
    """The statement that is the docstring of a function or class."""
    if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
        statement = node.body[0]
        assert isinstance(statement, ast.Expr)
        return statement
    return None


def source_without_docstrings(node: Definition, lines: list[bytes]) -> str:
    """The dedented source of `node`, decorators included, without its docstring and those inside it.

    `lines` are the file's lines in UTF-8, because `ast` counts columns in bytes.
    """
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    kept: list[bytes | None] = list(lines[first : node.end_lineno])
    for child in ast.walk(node):
        statement = docstring_statement(child)
        if statement is None:
            continue
        start, end = statement.lineno - 1 - first, statement.end_lineno - 1 - first
        filler = b"..." if len(child.body) == 1 else b""
        rest = (kept[start] or b"")[: statement.col_offset] + filler + (kept[end] or b"")[statement.end_col_offset :]
        kept[start : end + 1] = [rest if rest.strip() else None] + [None] * (end - start)
    text = b"\n".join(line for line in kept if line is not None).decode()
    return textwrap.dedent(text).strip()[:MAX_SOURCE_CHARS]


def functions_in(text: str, module: str) -> Iterator[dict[str, object]]:
    """One row per function or class of a module's text. Raises SyntaxError or ValueError where it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        tree = ast.parse(text)
    lines = text.encode().split(b"\n")
    for name, node in definitions(tree):
        yield {
            "id": f"{module}.{name}:{node.lineno}",
            "module": module,
            "name": name,
            "lineno": node.lineno,
            "source": source_without_docstrings(node, lines),
            "docstring": first_paragraph(ast.get_docstring(node)),
        }


def extract(roots: list[tuple[Path, Path]], out: Path, limit: int | None = None) -> Extracted:
    """Write the functions of all files under the `(folder or file, import base)` pairs to the Parquet file `out`.

    A file that does not parse is skipped and counted. `out` appears whole or not at all.
    """
    num_rows = num_files = num_skipped = 0
    rows: list[dict[str, object]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for path, base in ((path, base) for root, base in roots for path in python_files(root)):
            if limit is not None and num_rows >= limit:
                break
            try:
                with tokenize.open(path) as file:
                    found = list(functions_in(file.read(), module_name(path, base)))
            except (SyntaxError, ValueError):
                num_skipped += 1
                continue
            num_files += 1
            found = found if limit is None else found[: limit - num_rows]
            num_rows += len(found)
            rows += found
            if len(rows) >= ROW_GROUP_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    partial.replace(out)
    return Extracted(num_rows, num_files, num_skipped)


def roots_of(packages: list[str]) -> list[tuple[Path, Path]]:
    """The standard library and the named installed packages (`all`: every one), each with its import base."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    installed = Path(sysconfig.get_path("purelib"))
    roots = [(stdlib, stdlib)]
    for package in packages:
        folder, module = installed / package, installed / f"{package}.py"
        if package == "all":
            names = sorted(path for path in installed.iterdir() if path.is_dir() or path.suffix == ".py")
            roots += [(path, installed) for path in names if path.name not in SKIPPED_FOLDERS]
        elif folder.is_dir() or module.is_file():
            roots.append((folder if folder.is_dir() else module, installed))
        else:
            raise SystemExit(f"--packages {package}: not found in {installed}")
    return roots


def main() -> None:
    """Read the command line, extract, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/functions.parquet"), help="default: %(default)s")
    parser.add_argument("--limit", type=int, help="stop after this many rows")
    parser.add_argument("--packages", nargs="+", default=[], help="installed packages to add, or `all`")
    args = parser.parse_args()
    done = extract(roots_of(args.packages), args.out, args.limit)
    print(f"{args.out}: {done.num_rows} rows from {done.num_files} files ({done.num_skipped_files} did not parse)")


if __name__ == "__main__":
    main()

"""The house keeps its floors (CONTRIBUTING.md): a module imports from lower floors only, never across the columns."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bulkrun

PACKAGE = Path(bulkrun.__file__).parent
FLOORS = {
    "request": 0,
    "sampling_params": -1,  # a part of `request`
    "sampling_structures": -2,  # a part of that
    "settings": 0,
    "errors": 0,
    "hub_refusals": 0,
    "blocks": 0,
    "windows": 0,
    "sandbox": 0,
    "scratch": 0,
    "process_identity": -1,  # who owns what, also to `scratch`
    "template_growth": -1,  # a part of `sandbox`
    "ops": 1,
    "models": 2,
    "data": 2,
    "engine": 3,
    "job": 3,
    "text": 3,
    "executors": 4,
    "launch": 4,
    "cli": 5,
}
TENSOR_COLUMN = {"blocks", "windows", "ops", "models", "engine"}
JOB_COLUMN = {"data", "job", "executors"}
CONTRACT = {"request", "sampling_params", "sampling_structures", "settings", "errors"}
# Where names and bytes are made durable; the journal appends, doctor measures.
MAKES_DURABLE = {
    "data/storage/durable.py",
    "data/storage/exchange.py",
    "data/storage/new_name.py",
    "job/store/journal.py",
    "launch/doctor.py",
}
RENAMES = {
    "data/storage/durable.py",
    "ops/cpu/library.py",
}  # the library is one that was compiled here, and can be again
DURABLE_CALL = re.compile(
    r"os\.(?:fsync|fdatasync|link|rename|renames|replace)\(|\.(?:rename|hardlink_to)\(|\brenameat2\("
)
# Both make it for the instant of a look whether something can be written there.
MAKES_FOLDERS_FOR_A_WHILE = {"job/store/places.py", "launch/doctor.py"}
HEAVY = {"torch", "triton", "transformers"}
MAX_LINES = 300
JOB_ONLY = {"pyarrow", "duckdb", "click", "rich", "tqdm", "yaml", "pydantic"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names |= {node.module} if node.module != "bulkrun" else {f"bulkrun.{a.name}" for a in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_and_never_across(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    for name in imports(path):
        root, *rest = name.split(".")
        if root == "bulkrun" and rest and rest[0] in FLOORS and rest[0] != room:
            other = rest[0]
            beside = (room, other) == ("launch", "executors")
            assert FLOORS[other] < FLOORS[room] or beside, f"{path} imports {name}: that is not a lower floor"
            assert not (room in TENSOR_COLUMN and other in JOB_COLUMN | {"text"}), f"{path} crosses to {name}"
            assert not (room in JOB_COLUMN and other in TENSOR_COLUMN | {"text"}), f"{path} crosses to {name}"
            assert room != "text" or other in (*CONTRACT, "sandbox"), f"{path}: text imports {name}"
        if room in JOB_COLUMN | {"cli", *CONTRACT}:
            assert root not in HEAVY, f"{path} imports {name}"
        if room in TENSOR_COLUMN | CONTRACT:
            assert root not in JOB_ONLY, f"{path} imports {name}"


def test_files_get_their_names_and_are_synced_in_one_place() -> None:
    calling = {str(path.relative_to(PACKAGE)) for path in modules() if DURABLE_CALL.search(path.read_text())}
    assert calling == MAKES_DURABLE, "bulkrun.data.storage.durable has a verb for it"


def test_files_take_the_place_of_others_in_one_place() -> None:
    renaming = {str(path.relative_to(PACKAGE)) for path in modules() if renames_a_path(path)}
    assert renaming == RENAMES, "bulkrun.data.storage.durable has a verb for it"


def test_folders_for_a_while_are_made_in_one_place() -> None:
    making = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if re.search(r"\b(TemporaryDirectory|mkdtemp)\(", path.read_text())
    }
    assert making == MAKES_FOLDERS_FOR_A_WHILE, "a killed process leaves it for good: bulkrun.scratch has one that goes"


def renames_a_path(path: Path) -> bool:
    """Whether `Path.replace` is called: with one argument, where those of text and dataclasses have others."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "replace"]
    return any(len(call.args) == 1 and not call.keywords for call in named)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for types alone count: they hide a circle, they do not open it.

    `bulkrun` itself, which every module has above it, is left out: it imports what it is asked for.
    """
    in_order(import_graph())


def test_no_folder_imports_itself_by_way_of_others() -> None:
    """Each folder inside of a room is above those that it imports, as the rooms are."""
    graph: dict[str, set[str]] = {}
    for name, others in import_graph().items():
        graph.setdefault(folder_of(name), set()).update(set(map(folder_of, others)) - {folder_of(name)})
    in_order(graph)


def folder_of(module: str) -> str:
    """`bulkrun.job.store` of a module in it; a module right in a room, or beside the rooms, stands for itself.

    So does each of `ops`, where a folder holds the twins of the modules above it: it is no layer.
    """
    if module.startswith("bulkrun.ops."):
        return module
    return ".".join(module.split(".")[:3])


def in_order(graph: dict[str, set[str]]) -> None:
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as circle:
        raise AssertionError(" -> ".join(circle.args[1])) from None


def import_graph() -> dict[str, set[str]]:
    """What each module of the package imports of it."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    files = {name.removesuffix(".__init__"): path for name, path in files.items() if name != "bulkrun.__init__"}
    return {name: {other for other in modules_named(path) if other in files} for name, path in files.items()}


def modules_named(path: Path) -> set[str]:
    """What a file imports, whether it is a module or a name in one."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_module_is_longer_than_can_be_read_at_once() -> None:
    code = [path for kind in ("py", "cpp", "h") for path in PACKAGE.rglob(f"*.{kind}")]
    assert [str(path) for path in code if len(path.read_text().splitlines()) > MAX_LINES] == []


@pytest.mark.parametrize(
    "code",
    [
        "import bulkrun.cli.jobs, bulkrun.cli.runs, bulkrun.job.work.runner, bulkrun.data.results.query",
        "from click.testing import CliRunner; from bulkrun.cli import main; CliRunner().invoke(main, ['--help'])",
    ],
)
def test_the_job_column_never_loads_torch(code: str) -> None:
    assert loads(code) == []


def test_scheduling_never_loads_torch() -> None:
    """Numbers of blocks and tokens: its tests run in seconds, and without a tensor library."""
    names = sorted(path.stem for path in (PACKAGE / "engine" / "scheduling").glob("[a-z]*.py"))
    assert loads(f"from bulkrun.engine.scheduling import {', '.join(names)}") == []


def test_status_and_query_load_nothing_that_only_job_files_need() -> None:
    """A third of their start."""
    code = "from bulkrun.job.views import export_schema, metrics, status; from bulkrun.launch.runs import control; "
    code += "from bulkrun.data.results import export_files, query; import bulkrun.cli.runs"
    assert loads(code, {*HEAVY, "jinja2", "pyarrow.compute", "pydantic"}) == []


def loads(code: str, names: Iterable[str] = HEAVY) -> list[str]:
    """Those of these libraries that are loaded after `code`."""
    check = f"import sys; {code}; print(*[m for m in {sorted(names)} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[-1].split()

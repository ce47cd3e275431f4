"""Compiled ops are never needed: whatever is wrong with compiler, cache or library, there is a reason and no crash."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bulkrun.ops.cpu import library

COMPILED = library.compiled_ops().library  # the machine's own
NEEDS_COMPILER = pytest.mark.skipif(COMPILED is None, reason="no compiled ops on this machine")


@pytest.fixture(autouse=True)
def _nothing_loaded_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.compiled_ops.cache_clear()
    yield
    library.compiled_ops.cache_clear()


@pytest.fixture
def _compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes no time: what it would give is there."""
    compiled = Path(COMPILED._name if COMPILED else "nothing")
    if compiled.is_file():  # not where there is no cache
        monkeypatch.setattr(library, "_compile", lambda folder: Path(shutil.copyfile(compiled, folder / "ops.so")))


@pytest.fixture
def take_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has what a shell script does done in the place of compiling."""

    def take(script: str) -> None:
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/sh\n{script}")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    return take


def test_the_user_can_have_the_references(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BULKRUN_CPU_OPS", "reference")
    assert library.compiled_ops() == (None, "BULKRUN_CPU_OPS=reference")
    assert library.library() is None and not list(tmp_path.iterdir())


def test_without_a_compiler_the_log_says_once_what_runs_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert library.library() is None and library.library() is None
    assert [record.getMessage() for record in caplog.records] == [
        "compiled CPU ops are off, the slower torch reference runs instead: no C++ compiler (no-such-compiler)"
    ]


def test_a_compiler_that_fails_is_a_reason(take_compiler: Callable[[str], None]) -> None:
    take_compiler("echo 'error: unrecognized argument' >&2\nexit 1\n")
    found = library.compiled_ops()
    assert found.library is None and "unrecognized argument" in found.reason


def test_a_compiler_writes_where_there_is_room_whatever_tmpdir_says(
    take_compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_compiler('[ "$TMPDIR" -ef . ] && echo "error: there is room" >&2\nexit 1\n')
    monkeypatch.setenv("TMPDIR", "/dev/full")
    assert library.compiled_ops().reason.endswith("error: there is room")


def test_a_compiler_may_know_nothing_of_headers_that_were_read_before(
    take_compiler: Callable[[str], None], tmp_path: Path
) -> None:
    take_compiler('case "$*" in *c++-header* | *-include*) exit 1;; *-shared*) echo whole > ops.so;; esac\n')
    assert library._compile(tmp_path).read_text() == "whole\n"


def test_of_what_a_compiler_says_the_error_is_shown(take_compiler: Callable[[str], None]) -> None:
    said = "In file included from a.cpp:\\na.h: In instantiation of x:\\na.h:7:5: error: no AVX\\na.h:9: note: here\\n"
    take_compiler(f"printf '{said}' >&2\nexit 1\n")
    assert library.compiled_ops().reason == "a.h:7:5: error: no AVX"


@NEEDS_COMPILER
@pytest.mark.usefixtures("_compiled_before")
def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bulkrun").write_text("a file where the folder would be")
    assert library.library() is not None


def test_without_a_home_each_process_compiles_for_itself_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # that no passwd knows
    monkeypatch.setattr(library, "_compile", lambda folder: Path("libc.so.6"))
    with caplog.at_level(logging.WARNING):
        assert library.library() is not None
    assert "compiled again by every process" in caplog.text and "XDG_CACHE_HOME" in caplog.text


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "what", ["folder for all", "folder for a group", "file for all", "folder of another", "file of"]
)
def test_a_library_that_others_could_have_put_there_is_not_loaded(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bulkrun"
    folder.mkdir(mode=0o700)
    planted = folder / f"cpu-ops-{library._key()}.so"
    planted.write_bytes(b"")
    planted.chmod(0o666 if what == "file for all" else 0o600)
    folder.chmod({"folder for all": 0o777, "folder for a group": 0o770}.get(what, 0o700))
    another = folder if what == "folder of another" else planted if what == "file of" else None
    loaded: list[Path] = []
    own_stat = Path.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda path, **how: of_another(own_stat(path, **how)) if path == another else own_stat(path, **how),
    )
    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: loaded.append(Path(name)))
    monkeypatch.setattr(library, "_compile", lambda scratch: compiled(scratch / "ops.so"))
    library.compiled_ops()
    if "file" in what:
        assert loaded == [planted] and planted.read_bytes().startswith(b"ours"), "its own folder: replaced"
    else:
        assert [path.name for path in loaded] == ["ops.so"] and loaded[0].parent != folder
        assert f"{folder}: another user owns it or may write to it" in caplog.text


def of_another(found: os.stat_result) -> os.stat_result:
    return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:]))


def compiled(path: Path) -> Path:
    path.write_bytes(b"ours")
    return path


@NEEDS_COMPILER
@pytest.mark.usefixtures("_compiled_before")
@pytest.mark.parametrize("left", ["its beginning", "half of it", "zeros in it", "nothing"])
def test_a_torn_file_in_the_cache_is_replaced(left: str, tmp_path: Path) -> None:
    """As a power cut leaves one: half a library ends the process that loads it, one with zeros computes nonsense."""
    assert library.library() is not None
    cached = tmp_path / "bulkrun" / f"cpu-ops-{library._key()}.so"
    whole = cached.read_bytes()
    half = len(whole) // 2
    torn = {
        "its beginning": whole[:4],
        "half of it": whole[:half],
        "zeros in it": whole[:half] + bytes(4096) + whole[half + 4096 :],
        "nothing": b"",
    }
    library.compiled_ops.cache_clear()
    cached.unlink()  # another file than the one that is loaded, which must stay as it is
    cached.write_bytes(torn[left])
    cached.chmod(0o600)
    assert library.library() is not None
    assert cached.read_bytes() == whole


@NEEDS_COMPILER
def test_processes_that_compile_at_once_leave_one_whole_library_for_all_later_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    shutil.copy(library._SOURCES / "touch_pages.cpp", sources)  # which is soon compiled
    code = (
        "from pathlib import Path; from bulkrun.ops.cpu import library\n"
        f"library._SOURCES = Path({str(sources)!r}); assert library.library() is not None"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    assert sorted(path.suffix for path in (tmp_path / "bulkrun").iterdir()) == [".so"]
    monkeypatch.setattr(library, "_SOURCES", sources)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.library() is not None


@NEEDS_COMPILER
def test_the_library_uses_the_openmp_that_torch_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the machine's own cache: what is compiled there already serves
    code = (
        "from bulkrun.ops.cpu.library import compiled_ops; assert compiled_ops().library is not None\n"
        "paths = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rsplit('/')[-1]}\n"
        "assert len(paths) == 1, paths"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@NEEDS_COMPILER
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize(
    "processor",
    [
        "sapphirerapids",  # tiles
        "cascadelake",  # AVX-512 and bytes, no bf16
        "skylake-avx512",
        "haswell",  # AVX2
        "x86-64",
    ],
)
def test_other_processors_have_compiled_ops_too(processor: str) -> None:
    """All in one go: most of the time goes into the headers of the instructions."""
    sources = sorted(Path(library.__file__).parent.glob("*.cpp"))
    assert len(sources) > 10
    command = ["g++", *library._FLAGS, f"-march={processor}", "-fsyntax-only", "-x", "c++", "-"]
    included = "\n".join(f'#include "{source}"' for source in sources)
    done = subprocess.run(command, input=included, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@NEEDS_COMPILER
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
def test_multiply_adds_are_split_nowhere(tmp_path: Path) -> None:
    """Where some were, a row's attention in float32 had other bits alone than with others (GCC 14 on Zen 5)."""
    assert _split_bits(tmp_path, *library._FLAGS) == 0 < _split_bits(tmp_path)


def _split_bits(folder: Path, *flags: str) -> int:
    """The widest vectors whose chains of multiply-adds this compiler splits for a Zen; it leaves a file in `folder`."""
    command = ["g++", "-mtune=znver3", *flags, "-Q", "--help=params"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    found = re.search(r"avoid-fma-max-bits=\S*\s+(\d+)$", said, re.MULTILINE)
    assert found, said
    return int(found[1])

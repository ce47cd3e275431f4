"""The shared library of the compiled ops: found in the cache, else compiled by the machine's own g++. Knows no op.

Nothing needs installing: without a compiler, or when anything goes wrong, there is no library and the references run;
the log says so once. The library is linked without an OpenMP of its own: its symbols are those of the OpenMP that torch
has loaded, so that both share one set of threads. Compiling takes seconds, once per machine and version; processes
that do it at the same time each publish a whole file, and one of them stays. A library is code: one that others could
have put into the cache is not loaded, and neither is one that is not whole (a power cut): the first call into a page
that is missing would end the process, and one of zeros would compute nonsense. So its hash stands behind it in the
file, where no loader looks.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from bulkrun.scratch import Scratch

ENV = "BULKRUN_CPU_OPS"  # "reference": do not use compiled ops
_SOURCES = Path(__file__).parent
# Tuned for Zen, GCC splits some chains of multiply-adds and leaves others, by the code around them (from 14 on also
# those of AVX-512): a row would have other bits beside few rows than beside many.
_WHOLE_MULTIPLY_ADDS = ("--param", "avoid-fma-max-bits=0")
_NUMBERS = ("-fno-math-errno", "-fno-trapping-math", *_WHOLE_MULTIPLY_ADDS)
_FLAGS = ("-std=gnu++17", "-O3", "-march=native", *_NUMBERS, "-fPIC", "-fopenmp", "-c")
_COMPILE_LIMIT_S = 120
_HASH_BYTES = 16
_log = logging.getLogger(__name__)


class CompiledOps(NamedTuple):
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    reason: str


def library() -> ctypes.CDLL | None:
    """The compiled ops of this process; None: use the references. The first call may compile."""
    return compiled_ops().library


@cache
def c_function(name: str, *argtypes: type) -> Callable[..., None]:
    """A function of the library, which must be there; its arguments are converted to these ctypes."""
    ops = library()
    assert ops is not None, "without a library nobody gets here"
    found: Callable[..., None] = getattr(ops, name)
    found.argtypes, found.restype = argtypes, None  # type: ignore[attr-defined]
    return found


@cache
def c_number(name: str) -> int:
    """The int64 that a function of the library, which must exist, returns; it never changes."""
    ops = library()
    assert ops is not None, "without a library nobody gets here"
    function = getattr(ops, name)
    function.restype = ctypes.c_int64
    return int(function())


@cache
def compiled_ops() -> CompiledOps:
    """Find, else compile, and load; the outcome holds for the process."""
    if os.environ.get(ENV) == "reference":
        return CompiledOps(None, f"{ENV}=reference")
    try:
        return CompiledOps(_load(), "compiled for this processor")
    except (OSError, subprocess.SubprocessError, _NoCompiler) as error:
        reason = _first_line(error)
        _log.warning("compiled CPU ops are off, the slower torch reference runs instead: %s", reason)
        return CompiledOps(None, reason)


class _NoCompiler(Exception):
    pass


def _load() -> ctypes.CDLL:
    torch.get_num_threads()  # torch, and its OpenMP with it, is loaded
    with suppress(OSError):  # not there, or torn
        return ctypes.CDLL(str(_whole(_own(_cached()))))
    with Scratch() as scratch:
        built = _compile(scratch)
        try:
            return ctypes.CDLL(str(_publish(built, _cached())))
        except OSError as error:  # nowhere to keep it, or a disk mounted noexec: only this process has it
            _log.warning("CPU ops are compiled again by every process (set XDG_CACHE_HOME): %s", _first_line(error))
            return ctypes.CDLL(str(built))


def _key() -> str:
    """What the library depends on: sources, flags and what the processor can do (homes are shared by machines)."""
    digest = hashlib.sha256(repr((_FLAGS, platform.machine(), _processor_flags())).encode())
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), None) or platform.processor()


def _cached() -> Path:
    """Where the library is kept. Raises OSError where there is no such place: a uid that no passwd knows, no HOME."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error
    return folder / "bulkrun" / f"cpu-ops-{_key()}.so"


def _own(file: Path) -> Path:
    """The file itself. Raises PermissionError where another user owns or may write it or its folder."""
    for path in (file.parent, file):
        _check_own(path)
    return file


def _check_own(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path}: another user owns it or may write to it; what is in there is not loaded")


def _whole(file: Path) -> Path:
    """The file itself. Raises OSError unless its hash stands behind what it holds."""
    held = file.read_bytes()
    if _hash(held[:-_HASH_BYTES]) != held[-_HASH_BYTES:]:
        raise OSError(f"{file}: torn")
    return file


def _hash(held: bytes) -> bytes:
    return hashlib.blake2b(held, digest_size=_HASH_BYTES).digest()


def _compile(folder: Path) -> Path:
    """The library, made in a folder of its own. Raises _NoCompiler, with the compiler's first complaint."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise _NoCompiler(f"no C++ compiler ({compiler[0]})")
    sources = sorted(_SOURCES.glob("*.cpp"))
    common = _read_once(compiler, folder)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # each waits for a compiler
        list(threads.map(lambda source: _run([*compiler, *_FLAGS, *common, str(source)], folder), sources))
    _run([*compiler, "-shared", "-o", "ops.so", *(f"{source.stem}.o" for source in sources)], folder)
    return folder / "ops.so"


def _read_once(compiler: list[str], folder: Path) -> tuple[str, ...]:
    """Flags that give each source what the compiler has read already: its own header of instructions is most of what it
    has to read."""
    header = folder / "common.h"
    header.write_text(f'#include "{_SOURCES / "vector.h"}"\n', encoding="utf-8")
    try:
        _run([*compiler, *_FLAGS, "-x", "c++-header", "-o", f"{header}.gch", str(header)], folder)
    except _NoCompiler:  # of such headers; each source reads it itself
        return ()
    return ("-include", str(header))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},  # the user's may be full; this one can be written
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=_COMPILE_LIMIT_S,
    )
    if done.returncode != 0:
        raise _NoCompiler(f"{command[0]} fails: {done.stderr.strip()}")


def _publish(built: Path, cached: Path) -> Path:
    """Into the cache, whole or not at all. Raises OSError where that is no place for it."""
    cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(cached.parent)
    held = built.read_bytes()
    handle, name = tempfile.mkstemp(dir=cached.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(held + _hash(held))
        Path(name).replace(cached)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return cached


def _first_line(error: Exception) -> str:
    """The line that says what is wrong: a compiler puts where it was before that."""
    lines = (str(error).strip() or repr(error)).splitlines()
    return next((line for line in lines if "error:" in line), lines[0]).strip()[:200]

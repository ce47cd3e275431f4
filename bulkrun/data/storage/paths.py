"""Which files a local input path means: a file, a directory (read recursively) or a glob (`**` included).

Nothing that a path means is left out in silence: links are followed, a directory that a glob matches is read like one
that is named, and a folder that cannot be read is an InputError. Names that start with `.` or `_` are skipped unless
they are spelled out. Knows names; knows no format and reads no file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from bulkrun.data.storage.hub import of_a_browser
from bulkrun.errors import InputError, did_you_mean


def user_path(text: str | Path) -> Path:
    """A path as the user wrote it, with the home directory for a leading `~` or `~name`.

    What still begins with `~` is a name like any other, made absolute because Arrow and DuckDB expand it themselves.
    """
    path = Path(text)
    with suppress(RuntimeError):  # nobody has that name
        path = path.expanduser()
    return path.absolute() if path.parts[:1] and path.parts[0].startswith("~") else path


def expand(pattern: str, wanted: Callable[[Path], bool]) -> list[Path]:
    """The files that `pattern` means, sorted: of those in directories the `wanted` ones, of those it names all."""
    if "://" in pattern:
        hub = of_a_browser(pattern)
        fix = f"write {hub}" if hub else "copy the files to one of them"
        raise InputError(f"input.path: {pattern!r} is neither a local path nor s3:// nor hf://; {fix}")
    path = user_path(pattern)
    if path.is_dir():
        return sorted(filter(wanted, _files_below(path, path.parts)))
    if path.exists() or path.is_symlink():
        return [path]
    if glob.has_magic(pattern):
        return sorted(set(_matching(path, wanted)))
    raise InputError(f"input.path: {pattern!r} does not exist (looked from {Path.cwd()}){_nearest(path)}")


def _nearest(path: Path) -> str:
    """The name beside a file that is not there which is most like its own, as a question."""
    try:
        names = [beside.name for beside in path.parent.iterdir()]
    except OSError:
        return ""
    near = did_you_mean(path.name, names, lambda name: repr(str(path.with_name(name))))
    return f"; {near}" if near else ""


def is_hidden(parts: Sequence[str], spelled_out: Sequence[str]) -> bool:
    """Whether a name on the way is hidden and not one that the user spelled out."""
    return any(
        part[:1] in (".", "_") and part not in spelled_out for part in parts if part not in (os.curdir, os.pardir)
    )


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the names of a path are those of a glob; `**` is any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(matches(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


def would_take(pattern: str, folder: str) -> bool:
    """Whether an input path (local or s3://) means, now or later, the Parquet files that are written in `folder`."""
    if ("://" in pattern) is not ("://" in folder) or user_path(pattern).is_file():
        return False
    spelled, parts = _real_parts(pattern), (*_real_parts(folder), "part-00000.parquet")
    named = parts[: len(spelled)] == spelled  # a directory's own name may look like a glob
    found = named or any(matches(parts[:depth], spelled) for depth in range(1, len(parts) + 1))
    return found and not is_hidden(parts, spelled)


def _real_parts(path: str) -> tuple[str, ...]:
    return tuple(path.rstrip("/").split("/")) if "://" in path else user_path(path).resolve().parts


def partition_folders(parts: Sequence[str], pattern: Sequence[str]) -> str:
    """The folders like lang=en of a file, without those that `pattern` (a directory or a glob) spells out."""
    # A directory's own name may look like a glob; then it is on the way.
    magic = (number for number, part in enumerate(pattern) if glob.has_magic(part) and part not in parts)
    below = parts[next(magic, len(pattern)) : -1]
    return "/".join(part for part in below if "=" in part[1:])


def _matching(pattern: Path, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    deep = pattern.parts.index("**") if "**" in pattern.parts else len(pattern.parts)
    tail = pattern.parts[deep:]
    tail = (*tail, "*") if tail[-1:] == ("**",) else tail
    for base in _glob(Path(*pattern.parts[:deep])):
        if is_hidden(base.parts, pattern.parts):
            continue
        if not base.is_dir():
            yield from [] if tail else [base]
            continue
        for file in _files_below(base, pattern.parts):
            inside = file.relative_to(base).parts
            in_a_match = wanted(file) and any(matches(inside[:depth], tail) for depth in range(len(inside)))
            if in_a_match or matches(inside, tail):
                yield file


def _glob(pattern: Path) -> Iterator[Path]:
    if not glob.has_magic(str(pattern)):
        return iter([pattern])
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def _files_below(folder: Path, spelled_out: Sequence[str]) -> Iterator[Path]:
    """Every file below a directory. Links to directories come last and lead into each once, as they may lead back."""
    seen: set[tuple[int, int]] = set()
    starts = [folder]
    while starts:
        for place, inside, names in os.walk(starts.pop(0), onerror=_cannot_read):
            status = Path(place).stat()
            if (status.st_dev, status.st_ino) in seen:
                inside.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            inside[:] = sorted(name for name in inside if not is_hidden([name], spelled_out))
            starts += [path for name in inside if (path := Path(place, name)).is_symlink()]
            yield from (Path(place, name) for name in names if not is_hidden([name], spelled_out))


def _cannot_read(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: this folder of input.path cannot be read: {error.strerror}") from error

"""Names of columns as SQL compares them. Knows no types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def sql_name(name: str) -> str:
    """The name as DuckDB compares it: without the case of ASCII letters, and of no others."""
    return name.encode().lower().decode()


def twins(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each name that SQL takes for another one before it, after that one."""
    firsts: dict[str, str] = {}
    for name in names:
        first = firsts.setdefault(sql_name(name), name)
        if first != name:
            yield first, name

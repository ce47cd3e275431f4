"""Errors of libraries that say that memory or a thread was missing: nothing is known then of what was worked on."""

from __future__ import annotations

MORE = "give the process more memory or threads (`ulimit -v`, `ulimit -u`)"  # what can be done about it
_SAID = ("launch worker thread", "start new thread", "Out of Memory Error")  # by Arrow, Python, DuckDB


def is_shortage(error: Exception) -> bool:
    """Whether it is one of those."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _SAID)

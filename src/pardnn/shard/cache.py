"""One bounded cache for everything that follows from calls alone.

A network repeats its layers, and a process plans many graphs, so analyses, strategies, local calls
and templates are computed once per distinct call. Each module keeps its own tables; they are
counted together and emptied together, because tables refer to calls by number. This happens only
before a graph is planned, never while one is.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Table = TypeVar("_Table", bound="dict[Any, Any] | list[Any]")

#: Entries above which everything is thrown away; about 1 KiB each.
MAX_ENTRIES = 400_000

_TABLES: list[dict[Any, Any] | list[Any]] = []


def cached(table: _Table) -> _Table:
    """Return a table that counts towards the bound, and is emptied with all others."""
    _TABLES.append(table)
    return table


def num_entries() -> int:
    """Return the number of entries of all tables together."""
    return sum(map(len, _TABLES))


def forget() -> None:
    """Empty all tables, as in a new process. Numbers of calls become invalid."""
    for table in _TABLES:
        table.clear()


def begin_graph() -> None:
    """Empty all tables if they have grown beyond the bound, before a new graph is planned."""
    if num_entries() > MAX_ENTRIES:
        forget()

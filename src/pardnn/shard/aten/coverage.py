"""Which operators have a description: a table computed from the registry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import reason_without


@dataclass(frozen=True, slots=True)
class Coverage:
    """Whether one operator has a description.

    Attributes:
        kind: Such as "aten.mm.default".
        description: Name of the description that serves it, None if there is none.
        source: "file.py:line" of the description.
        reason: Why there is none, if that is known.
    """

    kind: str
    description: str | None
    source: str | None
    reason: str | None


def coverage(kinds: Iterable[str]) -> tuple[Coverage, ...]:
    """Look up the description of each operator, sorted by name.

    Args:
        kinds: Such as the kinds of a graph's calls.
    """
    rows: list[Coverage] = []
    for kind in sorted(set(kinds)):
        found = description_of(kind)
        if found is None:
            rows.append(Coverage(kind, None, None, reason_without(kind)))
        else:
            rows.append(Coverage(kind, found.name, found.source, None))
    return tuple(rows)

"""What the parts of the thesis's page share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Report = dict[str, Any]

#: The column of the thesis's steps without what this implementation adds.
ALONE = "`pardnn-thesis`"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty one at the end."""
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return [*head, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]

"""The schedule of a plan in pieces as a grid: what each device does, column by column in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Width of a column: a letter and the number of the piece.
CELL = 3
#: Columns below which a grid says nothing.
LEAST_COLUMNS = 8


class Slot(NamedTuple):
    """An op's time on its device.

    Attributes:
        start: Seconds.
        finish: Seconds.
        what: "F" forward, "B" gradients of inputs, "W" of weights, "U" the update.
        piece: Of the batch; -1 for what runs once.
    """

    start: float
    finish: float
    what: str
    piece: int


def grid_text(names: Sequence[str], rows: Sequence[Sequence[Slot]], width: int) -> list[str]:
    """Return a line per device; nothing if the text is not wide enough.

    A column shows what takes most of its time, and nothing where the device waits for more than
    half of it.

    Args:
        names: Of the devices.
        rows: Per device, what it runs, in order of time.
        width: Characters that a line may have.
    """
    head = max(map(len, names)) + 2
    columns = (width - head) // CELL
    end = max((slot.finish for row in rows for slot in row), default=0.0)
    if columns < LEAST_COLUMNS or end <= 0:
        return []
    named = zip(names, rows, strict=True)
    return [(name.ljust(head) + _line(row, columns, end)).rstrip() for name, row in named]


def _line(row: Sequence[Slot], columns: int, end: float) -> str:
    column_s = end / columns
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    for slot in row:
        text = f"{slot.what}{slot.piece if slot.piece >= 0 else ''}"[: CELL - 1]
        first = min(int(slot.start / column_s), columns - 1)
        last = min(int(slot.finish / column_s), columns - 1)
        for column in range(first, last + 1):
            begin = max(slot.start, column * column_s)
            share = min(slot.finish, (column + 1) * column_s) - begin
            spent[column][text] = spent[column].get(text, 0.0) + share
    cells = []
    for found in spent:
        busy = sum(found.values())
        best = max(found, key=lambda text: found[text]) if 2 * busy >= column_s else "."
        cells.append(best.ljust(CELL))
    return "".join(cells)

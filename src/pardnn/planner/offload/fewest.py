"""How many states must go to the host: found by bisection."""

from __future__ import annotations

from collections.abc import Callable

from pardnn.planner.outcome import Outcome


def fewest(tried: Callable[[int], Outcome | None], most: int) -> Outcome:
    """Return the plan that fits with the fewest states on the host. O(log most) trials.

    Args:
        tried: Plans with this many on the host; None if that does not fit. With all of them there,
            it raises instead.
        most: How many may be on the host.
    """
    best = tried(0)
    if best is not None:
        return best
    best, least = tried(most), 0
    while least + 1 < most:
        middle = (least + most) // 2
        found = tried(middle)
        best, least, most = (best, middle, most) if found is None else (found, least, middle)
    assert best is not None  # else the error of all of them was raised
    return best

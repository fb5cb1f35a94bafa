"""What one pattern of `changes` shows: a value changes between two calls of the same step.

Four calls on one rank, the change after the second. Equal: losses and states are those of eager
calls with the same change. Refused: the call, or capture, says what it does not follow. All else is
silently wrong. A pattern whose change eager calls do not feel tells nothing, and is said to.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pardnn
from bench.common.forked import forked
from bench.sweep.measure import COSTS, Row, as_list, compared, error_row, next_batch
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.user_step.sources import batch_indices, sources
from pardnn.cluster import Cluster
from pardnn.errors import PardnnError

#: Returns the step, its arguments as a list, and what changes them, or something else, between.
Pattern = Callable[[], tuple[Callable[..., Any], list[Any], Callable[[list[Any]], None]]]
CALLS, BEFORE = 4, 2
LIMIT_S = 60.0


def measure_change(pattern: Pattern, save: Callable[[Row], None]) -> None:
    """Measure one pattern; `save` gets the row."""
    try:
        changed = forked(1, lambda _rank, _store: _eager(pattern, True), LIMIT_S)[0]
        unchanged = forked(1, lambda _rank, _store: _eager(pattern, False), LIMIT_S)[0]
    except RuntimeError as error:
        save({"change": {"status": "broken", "text": str(error)}})
        return
    save({"change": {"status": "timeout"}})
    row = forked(1, lambda _rank, _store: _parallel(pattern, changed), LIMIT_S)[0]
    row["felt"] = changed != unchanged
    save({"change": row})


def _eager(pattern: Pattern, is_changed: bool) -> Row:
    step, args, change = pattern()
    losses = []
    for call in range(CALLS):
        next_batch(args, call)
        if is_changed and call == BEFORE:
            change(args)
        losses.append(float(loss_of(step(*args)).detach()))
    held = {each.name: each.get() for each in sources(step, args) if each.kind != "input"}
    return {"losses": losses, "state": {name: as_list(value) for name, value in held.items()}}


def _parallel(pattern: Pattern, expected: Row) -> Row:
    when = "capture"
    try:
        step, args, change = pattern()
        graph = pardnn.capture(step, *args)
        plan = pardnn.plan(graph, Cluster.uniform(1), algorithm="single", costs=COSTS)
        fast = pardnn.parallelize(step, *args, plan=plan, costs=COSTS)
        indices, losses = batch_indices(args), []
        for call in range(CALLS):
            when = "the change" if call == BEFORE else f"call {call + 1}"
            next_batch(args, call)
            if call == BEFORE:
                change(args)
                when = "the call after it"
            losses.append(float(loss_of(fast(*(args[i] for i in indices))).detach()))
        known = expected["state"]
        state = {n: as_list(fast.whole(n)) for n in fast.names if known.get(n) is not None}
        row = compared(losses, state, expected)
    except PardnnError as error:
        return error_row(error) | {"when": when}
    except Exception as error:
        return {
            "status": "failed", "code": type(error).__name__, "when": when,
            "text": traceback.format_exc(),
        }  # fmt: skip
    equal = row["loss_difference"] == 0 and row["state_difference"] == 0
    return row | {"status": "equal" if equal else "silently wrong"}

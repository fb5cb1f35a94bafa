"""Retention intervals by CP-SAT: MOCCASIN's model (Bartan et al., ICML 2023) of two calls an op.

The ops run in a given order. Before op j stand the second calls of ops before j, in their order, so
a second call is one number, the op before which it stands. Each call of an op holds its result from
its start to an end that the solver chooses; what is held at once is one cumulative constraint. Each
read, of a first call or a second one, is of a call that runs before and is held until then.

Unlike in `pardnn.place.recompute`, a second call need not stand right before its first reader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from ortools.sat.python import cp_model

from pardnn.place.recompute.problem import FREELY, Nodes

#: Ticks of all seconds of the step: rounding is 1e-6 of a step and op at most.
TICKS = 1e9


class Best(NamedTuple):
    """What a solver found within its time.

    Attributes:
        seconds: Of second calls; None if it found nothing.
        bound: No answer takes less, in this order.
        stage: The op before which the second call of each op stands; n if there is none.
    """

    seconds: float | None
    bound: float
    stage: ndarray


def solved(
    nodes: Nodes,
    limit: int,
    *,
    start: tuple[ndarray, ndarray] | None,
    seconds: float,
    workers: int,
) -> Best:
    """Return the best second calls that CP-SAT finds for ops without views or writes in place.

    Args:
        nodes: The ops.
        limit: Bytes.
        start: Where to start, if there is an answer: the last op up to which each first result is
            kept, and the op before which each second call stands, n where there is none.
        seconds: To search.
        workers: Threads.
    """
    n = nodes.num_ops
    assert len(nodes.views) == 0
    assert not nodes.workspace.any()
    model: Any = cp_model.CpModel()
    made = _Calls(model, nodes, start)
    makers = np.repeat(np.arange(n), np.diff(nodes.output_ptr))
    readers = [
        (int(makers[t]), int(op))
        for t in range(len(makers))
        for op in nodes.use_op[nodes.use_ptr[t] : nodes.use_ptr[t + 1]]
    ]
    for maker, reader in dict.fromkeys(readers):
        made.read(maker, reader)
    model.add_cumulative(made.intervals, made.bytes, int(limit - nodes.base))
    ticks = np.rint(nodes.seconds / nodes.seconds.sum() * TICKS).astype(int).tolist()
    model.minimize(sum(ticks[i] * again for i, again in made.again.items()))
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    scale = float(nodes.seconds.sum()) / TICKS
    found = np.full(n, n)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Best(None, solver.best_objective_bound * scale, found)
    chosen = [i for i, again in made.again.items() if solver.value(again)]
    found[chosen] = [solver.value(made.stage[i]) for i in chosen]
    # Not the ticks: what its answer costs.
    return Best(float(nodes.seconds[chosen].sum()), solver.best_objective_bound * scale, found)


class _Calls:
    """The variables of a model: where second calls stand, until when results are held."""

    def __init__(self, model: Any, nodes: Nodes, start: tuple[ndarray, ndarray] | None) -> None:
        self.model, self.n, self.start = model, nodes.num_ops, start
        self.again: dict[int, Any] = {}
        self.stage: dict[int, Any] = {}
        self.ends: list[tuple[Any, Any]] = []
        self.intervals: list[Any] = []
        self.bytes: list[int] = []
        last = self.at(self.n - 1, self.n - 1)
        for i in range(self.n):
            tensors = slice(nodes.output_ptr[i], nodes.output_ptr[i + 1])
            size = int(nodes.num_bytes[tensors].sum())
            first, second = model.new_int_var(self.at(i, i), last, ""), None
            if size:
                start = self.at(i, i)
                self._hold(model.new_interval_var(start, first - start + 1, first + 1, ""), size)
            if nodes.again[i] == FREELY and i < self.n - 1:
                second = self._second(i, last, size)
            self.ends.append((first, second))

    def at(self, stage: Any, op: int) -> Any:
        """Return when a call of an op runs that stands before the op `stage`, or is its first."""
        return stage * (self.n + 1) + op

    def _hold(self, interval: Any, size: int) -> None:
        self.intervals.append(interval)
        self.bytes.append(size)

    def _second(self, i: int, last: int, size: int) -> Any:
        model = self.model
        again, stage = model.new_bool_var(""), model.new_int_var(i + 1, self.n - 1, "")
        end = model.new_int_var(0, last, "")
        self.again[i], self.stage[i] = again, stage
        if self.start is not None:
            known = int(self.start[1][i])
            model.add_hint(again, int(known < self.n))
            model.add_hint(stage, min(known, self.n - 1))
        start = self.at(stage, i)
        held = model.new_int_var(1, last + 1, "")
        self._hold(model.new_optional_interval_var(start, held, end + 1, again, ""), size)
        model.add(stage == self.n - 1).only_enforce_if(again.negated())
        return end

    def read(self, maker: int, reader: int) -> None:
        """Hold what a reader's calls read: the maker's first result, or its second one."""
        model, (first, second) = self.model, self.ends[maker]
        calls = [(self.at(reader, reader), reader, [])]
        if reader in self.again:
            stage = self.stage[reader]
            calls.append((self.at(stage, reader), stage, [self.again[reader]]))
        for when, stage, given in calls:
            if second is None:
                model.add(first >= when).only_enforce_if(given)
                continue
            late = model.new_bool_var("")
            if self.start is not None:
                kept, known = self.start
                at = reader if not given else int(known[reader])
                model.add_hint(late, int(kept[maker] < at < self.n))
            model.add(first >= when).only_enforce_if([*given, late.negated()])
            model.add(second >= when).only_enforce_if([*given, late])
            model.add(self.stage[maker] <= stage).only_enforce_if([*given, late])
            model.add_implication(late, self.again[maker])

"""In-context profiling: the whole graph runs a few times on synthetic values, each call timed.

Problem: a call that is repeated alone finds its code and inputs in the fastest caches, or, if
caches are flushed before each repetition, in none. In a step neither is true: a small call after
other small calls is warm, a view after a large product is cold, and the result of the previous call
is warm. With flushing, small calls appear twice as slow as they are; without, views three times as
fast.

Idea: calls are timed in the context of the step. Only sources have synthetic values
(`synthetic_inputs.py`); all others are computed. Parameters are small, so that values stay finite;
if they do not, times do not change. If a call raises on them, its results are synthetic too, and it
is timed alone later. If the step does not fit into the memory that it may take, values are dropped
and replaced by synthetic ones (`evictions.py`), and a call that exceeds it by itself is left out.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pardnn.backends.torch.ops.codec import bind, constant_value
from pardnn.backends.torch.ops.host_allocator import keep_next
from pardnn.backends.torch.ops.out_forms import may_have_place
from pardnn.backends.torch.profile.cpu_clock import undisturbed
from pardnn.backends.torch.profile.evictions import visits
from pardnn.backends.torch.profile.synthetic_inputs import index_bounds, made_up
from pardnn.cost.call import is_free, is_view, signature, tensors_by_name
from pardnn.cost.costs import HOST_SIGNATURE, VIEW_SIGNATURE, view_signature
from pardnn.cost.host import available_bytes
from pardnn.cost.table import Entry
from pardnn.graph.csr import op_edges, topological_order
from pardnn.graph.ir import Graph, Op, Tensor, storage_owners
from pardnn.plan.partitioned_graph import JOIN
from pardnn.plan.piece_order import piece_by_piece
from pardnn.plan.pieces import piece_number

#: Timed runs of the graph: the least, the most, and the seconds after which no more start.
MIN_RUNS, MAX_RUNS, RUNS_SECONDS = 3, 12, 2.0

#: Share of the free memory that the tensors of a graph may take.
MEMORY_SHARE = 0.5

#: Hyperparameters on the host, such as a rate or a decay: small, so that parameters stay small.
_HOST_FLOAT = 1e-3

#: How many times the live bytes a heap takes that keeps all blocks; mostly less (decision 040).
WASTE = 3


class _Item(NamedTuple):
    """One op of the run, its call (None: nothing to run), and what happens to values around it.

    Attributes:
        op: The op.
        call: Its call; None: nothing to run.
        keeps: Whether its result has a fixed place on ranks.
        evicted: Values that are dropped before it.
        made: Its inputs that are made up before it.
        dropped: Values that end after it.
    """

    op: Op
    call: Callable[[dict[str, Any]], None] | None
    keeps: bool
    evicted: tuple[str, ...]
    made: tuple[str, ...]
    dropped: tuple[str, ...]


def profile_in_context(
    graph: Graph,
    end: float | None,
    memory: int | None = None,
    tell: Callable[[float], None] | None = None,
    refused: Collection[str] = (),
) -> Mapping[str, Entry]:
    """Time the calls of a graph in context, on this CPU.

    Args:
        graph: A captured graph, or a rank's share of a partitioned one.
        end: `time.perf_counter` after which no further run starts; None for no limit.
        memory: Bytes of tensors that it may take; None: a share of what this machine has free.
        tell: Called now and then with the share of the minimum work that is done.
        refused: Names of ops that are not run; their results are made up.

    Returns:
        By signature, the median over the runs, averaged over the positions of a call; the same for
        each kind of view, for all views and for host arithmetic. A call that exceeds the memory
        alone is absent.
    """
    budget = int(MEMORY_SHARE * available_bytes())
    budget = budget if memory is None else min(budget, memory)
    tensors = tensors_by_name(graph)
    make = _Values(graph, tensors)
    items = list(_items(graph))
    if _peak_bytes(items) <= budget:
        env = {t.name: make(t.name) for op in graph.ops if op.is_source for t in op.outputs}
    else:
        keeps = WASTE * budget <= available_bytes()
        items, env = list(_bounded_items(graph, budget, keeps=keeps)), {}
    taken: list[list[float]] = [[] for _ in items]
    failed = {at for at, item in enumerate(items) if item.op.name in refused}
    with undisturbed() as timed:
        told = _telling(items, 0, tell)
        _run(told, env, make, taken, failed, timed)  # loads kernels, plans convolutions
        for each in taken:
            each.clear()
        begin = time.perf_counter()
        for done in range(1, MAX_RUNS + 1):
            _run(_telling(items, done, tell), env, make, taken, failed, timed)
            now = time.perf_counter()
            if (end is not None and now > end) or (done >= MIN_RUNS and now - begin > RUNS_SECONDS):
                break
    return _entries(items, taken, failed, tensors)


def _peak_bytes(items: Sequence[_Item]) -> int:
    """Return the most bytes that a run holds; sources are held all the time."""
    own = {t.name: t.bytes for item in items for t in item.op.outputs if t.alias_of is None}
    live = sum(own[t.name] for item in items if item.op.is_source for t in item.op.outputs)
    peak = live
    for item in items:
        if not item.op.is_source:
            live += sum(own.get(t.name, 0) for t in item.op.outputs)
        peak = max(peak, live + item.op.workspace)
        live -= sum(own.get(name, 0) for name in item.dropped)
    return peak


def _telling(
    items: Sequence[_Item], run: int, tell: Callable[[float], None] | None
) -> Iterator[_Item]:
    """Yield the ops of a run; after every 128, report how far the runs have come."""
    for at, item in enumerate(items):
        if tell is not None and at % 128 == 0:
            tell(min(1.0, (run + at / len(items)) / (MIN_RUNS + 1)))
        yield item


def _in_order(graph: Graph) -> list[Op]:
    """Return the ops in the order of the graph, each piece as far as it goes before the next.

    This is how a rank runs them. With all pieces of an op in a row, a weight would be in the caches
    for all but the first.
    """
    pairs = op_edges(graph.arrays)
    piece = np.array([piece_number(op.name) for op in graph.ops], dtype=np.int64)
    order = piece_by_piece(pairs, piece, topological_order(pairs, len(graph.ops)))
    return [graph.ops[i] for i in order.tolist()]


def _items(graph: Graph) -> Iterator[_Item]:
    """Yield the ops in topological order, each with the values whose storages end after it."""
    ops, owners = _in_order(graph), storage_owners(graph.ops)
    sharing: dict[str | None, list[str]] = defaultdict(list)
    last: dict[str | None, int] = {}
    for at, op in enumerate(ops):
        names = [t.name for t in op.outputs]
        for name in (*op.inputs, *names):
            last[owners[name]] = at
        for name in names:
            sharing[owners[name]].append(name)
    ending: dict[int, list[str]] = defaultdict(list)
    kept = {t.name for op in ops if op.is_source for t in op.outputs}
    for owner, at in last.items():
        ending[at] += [name for name in sharing[owner] if name not in kept]
    for at, op in enumerate(ops):
        call = None if is_free(op) else bind(op, "cpu")
        yield _Item(op, call, may_have_place(op), (), (), tuple(ending[at]))


def _bounded_items(graph: Graph, budget: int, *, keeps: bool) -> Iterator[_Item]:
    """Yield the ops in topological order, with what keeps the values within a budget of bytes."""
    ops = _in_order(graph)
    for op, visit in zip(ops, visits(ops, budget), strict=True):
        call = bind(op, "cpu") if visit.is_run and not is_free(op) else None
        has_place = keeps and may_have_place(op)
        yield _Item(op, call, has_place, visit.evicted, visit.made, visit.ended)


class _Values:
    """Made-up values, small enough that those of a step stay finite."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._sources = {t.name: op for op in graph.ops if op.is_source for t in op.outputs}
        self._bounds = index_bounds(graph, tensors)
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, name: str) -> Any:
        """Return a value for a tensor of the graph."""
        tensor, source = self._tensors[name], self._sources.get(name)
        if source is not None and source.kind == "constant":
            return constant_value(source)
        if source is not None and tensor.dtype == "host.float":
            return _HOST_FLOAT
        value = made_up(tensor, range(self._bounds.get(name, 1)), self._generator)
        return _small(value) if source is not None and source.kind == "parameter" else value


def _small(value: torch.Tensor) -> torch.Tensor:
    """Centre a weight around zero and scale it by the fan-in of its layer."""
    if value.dim() > 1 and value.is_floating_point():
        return value.sub_(0.75).mul_(4 / math.sqrt(max(1, math.prod(value.shape[1:]))))
    return value


def _run(
    items: Iterable[_Item],
    env: dict[str, Any],
    make: _Values,
    taken: list[list[float]],
    failed: set[int],
    timed: Callable[[Callable[[], object]], float],
) -> None:
    for at, (op, call, keeps, evicted, made, dropped) in enumerate(items):
        for name in evicted:
            env.pop(name, None)
        env |= {name: make(name) for name in made}
        if call is not None and at not in failed:
            keep_next(keeps)
            try:
                taken[at].append(timed(functools.partial(call, env)))
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, ArithmeticError):
                failed.add(at)
        if at in failed:
            env |= {t.name: make(t.name) for t in op.outputs}
        for name in dropped:
            env.pop(name, None)


def _entries(
    items: Sequence[_Item],
    taken: Sequence[list[float]],
    failed: set[int],
    tensors: Mapping[str, Tensor],
) -> dict[str, Entry]:
    found: dict[str, list[list[float]]] = defaultdict(list)
    for at, (item, seconds) in enumerate(zip(items, taken, strict=True)):
        # Here a join copies what ranks receive in place.
        if item.call is None or at in failed or item.op.kind == JOIN:
            continue
        for text in _texts(item.op, tensors):
            found[text].append(sorted(seconds))
    return {text: _entry(places) for text, places in found.items()}


def _texts(op: Op, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the signatures that an op's time counts for."""
    if is_view(op):
        yield from (VIEW_SIGNATURE, view_signature(op))
    elif op.kind.startswith("scalar."):
        yield HOST_SIGNATURE
    else:
        yield signature(op, tensors)


def _entry(places: Sequence[list[float]]) -> Entry:
    middles = [statistics.median(each) for each in places]
    spreads = [(each[-1 - len(each) // 4] - each[len(each) // 4]) / 2 for each in places]
    return Entry(
        seconds=statistics.fmean(middles),
        spread=statistics.fmean(spreads),
        repetitions=len(places[0]),
    )

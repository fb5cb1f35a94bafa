"""Tables of a problem: what each way to compute costs under each layout, and the best choice.

A *state* has the layouts and loops of some mesh axes; other axes are *open*, and all that they
may be is tried. So one routine serves the first step of the recursion, the later ones inside of
the blocks that the steps before left, all steps jointly, and a second look at any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.plan.mesh import Layout
from pardnn.shard.cost import clipped, combined, fetched
from pardnn.shard.cutting import Cutting, extended, interned, loops_of, owned_array, whole
from pardnn.shard.eliminate import Minimum, Table, minimise
from pardnn.shard.leaves import Axes
from pardnn.shard.problem import Decision, Problem, Term, Use

#: Cost of what must not be.
NEVER = 1e30
#: Cost of a written tensor that is held whole though it could be cut: less than what must not be.
WHOLE = 1e18
#: Entries up to which a term becomes one table; above, its loops are a variable of their own.
TERM_ENTRIES = 1 << 16


class State(NamedTuple):
    """A choice for the first mesh axes.

    Attributes:
        layouts: Of each decision.
        axes: Of each term.
    """

    layouts: tuple[Layout, ...]
    axes: tuple[Axes, ...]


@runtime_checkable
class Objective(Protocol):
    """What is minimised."""

    @property
    def may_replicate(self) -> bool:
        """Whether tensors and ops may stay whole where they could be cut."""
        ...

    def moved(
        self, use: Use, ways: Sequence[Cutting], owned: ndarray, parts: tuple[int, ...]
    ) -> Float64[ndarray, "a l"]:
        """Cost of fetching and combining one tensor of one op, for each way and each layout."""
        ...

    def computed(self, term: Term, ways: Sequence[Cutting]) -> Float64[ndarray, " a"]:
        """Cost of computing one op, for each way."""
        ...

    def held(self, decision: Decision, layouts: Sequence[Layout], parts: tuple[int, ...]) -> Any:
        """Cost of holding a decision's tensors, for each layout."""
        ...


def elements(
    use: Use, ways: Sequence[Cutting], owned: ndarray, parts: tuple[int, ...]
) -> Float64[ndarray, "a l n"]:
    """Return the elements of a tensor that each device gets, for each way and each layout."""
    total = np.zeros((len(ways), len(owned), owned.shape[1]), dtype=np.float64)
    known: list[tuple[ndarray, ndarray]] = []
    for slot in use.slots if use.shape else ():
        read = np.array([way.contents.get(slot, False) for way in ways])
        if not read.any():
            continue
        regions = clipped(np.stack([way.regions[slot] for way in ways]), use.shape)
        new = read.copy()
        for other, there in known:
            new &= ~(there & (regions == other).all(axis=(1, 2, 3)))
        total += np.where(new[:, None, None], fetched(regions, owned), 0)
        known.append((regions, read))
    for output in use.outputs:
        for number, way in enumerate(ways):
            share = way.shares[output]
            if share is not None:
                inside = clipped(share, use.shape)
                total[number] += combined(inside, way.reduced[output], parts, owned)
    return total


def misplaced(use: Use, ways: Sequence[Cutting], owned: ndarray) -> ndarray:
    """Return for each way and layout whether a tensor is not just where the op works on it."""
    wrong = np.zeros((len(ways), len(owned)), dtype=bool)
    for number, way in enumerate(ways):
        boxes = [way.regions[slot] for slot in use.slots if slot in way.regions]
        for output in use.outputs:
            share = way.shares[output]
            if share is not None:
                boxes.append(share)
                wrong[number] |= any(way.reduced[output])
        for box in boxes:
            wrong[number] |= (owned != box[None]).any(axis=(1, 2, 3))
    return wrong


class ByBytes:
    """The objective `bytes`: exact traffic, every tensor cut as often as it can be."""

    may_replicate = False

    def moved(
        self, use: Use, ways: Sequence[Cutting], owned: ndarray, parts: tuple[int, ...]
    ) -> Float64[ndarray, "a l"]:
        """Bytes, summed over devices."""
        return elements(use, ways, owned, parts).sum(axis=-1) * use.item

    def computed(self, term: Term, ways: Sequence[Cutting]) -> Float64[ndarray, " a"]:
        """Nothing."""
        return np.zeros(len(ways))

    def held(self, decision: Decision, layouts: Sequence[Layout], parts: tuple[int, ...]) -> Any:
        """Nothing."""
        return np.zeros(len(layouts))


@dataclass
class Tables:
    """Options and tables of a problem, kept while it is searched.

    Attributes:
        problem: What is decided.
        objective: What is minimised.
        parts: Devices along each mesh axis, all of them.
        is_allowed: Further limits on layouts and ways, for baselines.
    """

    problem: Problem
    objective: Objective
    parts: tuple[int, ...]
    is_allowed: Any = None

    def __post_init__(self) -> None:
        """Nothing is known yet."""
        self._ways: dict[Any, list[tuple[Axes, Cutting]]] = {}
        self._layouts: dict[Any, list[Layout]] = {}
        self._moved: dict[Any, ndarray] = {}

    def layouts(self, decision: Decision, fixed: Layout, open_axes: Sequence[int]) -> list[Layout]:
        """Return the layouts that a decision may have, given those of the other mesh axes."""
        key = (decision.kind, decision.root if self.is_allowed else None, fixed, tuple(open_axes))
        if key not in self._layouts:
            self._layouts[key] = self._find_layouts(decision, fixed, open_axes)
        return self._layouts[key]

    def _find_layouts(
        self, decision: Decision, fixed: Layout, open_axes: Sequence[int]
    ) -> list[Layout]:
        parts = self.parts[: len(fixed)]
        found: list[Layout] = [()]
        for axis, dim in enumerate(fixed):
            choices = (*decision.dims, None) if axis in open_axes else (dim,)
            found = [
                (*layout, d)
                for layout in found
                for d in choices
                if all(_is_possible(f, (*layout, d), parts) for f in decision.forms)
            ]
        if self.is_allowed is not None:
            found = [layout for layout in found if self.is_allowed(decision, layout)] or found
        if not self.objective.may_replicate and not decision.is_written:
            found = _most_cut(found)
        return found

    def ways(self, term: Term, fixed: Axes, open_axes: Sequence[int]) -> list[tuple[Axes, Cutting]]:
        """Return the ways in which a term may be computed, given the loops of other mesh axes."""
        key = (term.number, term.is_local, fixed, tuple(open_axes))
        if key not in self._ways:
            self._ways[key] = self._find_ways(term, fixed, open_axes)
        return self._ways[key]

    def _find_ways(
        self, term: Term, fixed: Axes, open_axes: Sequence[int]
    ) -> list[tuple[Axes, Cutting]]:
        found: list[tuple[Axes, Cutting]] = [((), whole(interned(term.number)))]
        loops = loops_of(term.number)
        for axis, loop in enumerate(fixed):
            choices = (*loops, None) if axis in open_axes else (loop,)
            tried = [
                ((*axes, name), extended(cutting, name, self.parts[axis]))
                for axes, cutting in found
                for name in choices
            ]
            found = [(axes, cutting) for axes, cutting in tried if cutting is not None]
        if not self.objective.may_replicate and not term.is_local:
            found = _most_cut(found, lambda way: way[0])
        return found

    def moved(
        self, term: Term, use: Use, fixed: Axes, ways: Any, layouts: list[Layout], key: Any
    ) -> ndarray:
        """Return the table of one tensor of a term: ways by layouts."""
        key = (term.number, term.is_local, fixed, use.kind, *key)
        if key not in self._moved:
            parts = self.parts[: len(fixed)]
            own = [_own(use.dims, layout) for layout in layouts]
            boxes = [owned_array(use.shape, layout, parts) for layout in own]
            owned = np.stack([array for array in boxes if array is not None])
            cuttings = [cutting for _, cutting in ways]
            values = self.objective.moved(use, cuttings, owned, parts)
            if use.is_local:
                values = np.where(misplaced(use, cuttings, owned), NEVER, values)
            self._moved[key] = values
        return self._moved[key]


def _own(dims: Sequence[int | None], layout: Layout) -> Layout:
    return tuple(None if d is None else dims[d] for d in layout)


def _is_possible(form: Any, layout: Layout, parts: tuple[int, ...]) -> bool:
    shape, dims = form
    if any(d is not None and dims[d] is None for d in layout):
        return False
    return owned_array(shape, _own(dims, layout), parts[: len(layout)]) is not None


def _most_cut(found: list[Any], of: Any = lambda option: option) -> list[Any]:
    """Keep the options that leave the fewest mesh axes unused."""
    least = min(of(option).count(None) for option in found)
    return [option for option in found if of(option).count(None) == least]


class Solved(NamedTuple):
    """A state of least cost among those that were open.

    Attributes:
        state: The choice.
        cost: In the objective's unit, without penalties only if it is feasible.
        is_exact: Whether none is better, for the ties of the problem and the axes that were open.
    """

    state: State
    cost: float
    is_exact: bool


def solve(tables: Tables, fixed: State, open_axes: Sequence[int]) -> Solved:
    """Return the best choice of the open mesh axes.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose, below the length of the state.
    """
    return solve_many(tables, fixed, open_axes, (0.0,))[0]


def solve_many(
    tables: Tables, fixed: State, open_axes: Sequence[int], noises: Sequence[float]
) -> list[Solved]:
    """Return a choice of the open mesh axes for each disturbance of the tables.

    Args:
        tables: Of the problem.
        fixed: A state; entries at open axes do not count.
        open_axes: Mesh axes to choose, below the length of the state.
        noises: Relative: 0 gives the best choice, others give choices that are nearly as good.
    """
    opened = _opened_problem(tables, fixed, tuple(open_axes))
    sizes = [len(layouts) for layouts in opened.options]
    found = _held_tables(opened)
    found += _term_tables(tables.problem.terms, opened.parcels, sizes)
    return [
        _chosen(tables, opened, minimise(sizes, _disturbed(found, noise, seed)))
        for seed, noise in enumerate(noises)
    ]


def _chosen(tables: Tables, opened: _Opened, minimum: Minimum) -> Solved:
    chosen = minimum.assignment[: len(opened.options)]
    cost = sum(float(held[choice]) for held, choice in zip(opened.held, chosen, strict=True))
    axes: list[Axes] = []
    for term, parcel in zip(tables.problem.terms, opened.parcels, strict=True):
        total = parcel.computed
        for number, values in parcel.by_decision.items():
            total = total + values[:, chosen[number]]
        best = int(total.argmin())
        cost += float(total[best]) * len(term.ops)
        axes.append(parcel.ways[best][0])
    layouts = tuple(o[c] for o, c in zip(opened.options, chosen, strict=True))
    return Solved(State(layouts, tuple(axes)), cost, minimum.is_exact)


class _Parcel(NamedTuple):
    """The ways of a term, what computing costs, and what the layout of each decision costs."""

    ways: list[tuple[Axes, Cutting]]
    computed: ndarray
    by_decision: dict[int, ndarray]


class _Opened(NamedTuple):
    """All that may be chosen, with its tables."""

    options: list[list[Layout]]
    held: list[ndarray]
    parcels: list[_Parcel]


def _opened_problem(tables: Tables, fixed: State, open_axes: tuple[int, ...]) -> _Opened:
    problem = tables.problem
    bare = [_opened(layout, open_axes) for layout in fixed.layouts]
    options = [
        tables.layouts(decision, layout, open_axes)
        for decision, layout in zip(problem.decisions, bare, strict=True)
    ]
    keys = [
        (decision.kind, decision.root if tables.is_allowed else None, layout, open_axes)
        for decision, layout in zip(problem.decisions, bare, strict=True)
    ]
    held = [
        _held(tables, decision, layouts)
        for decision, layouts in zip(problem.decisions, options, strict=True)
    ]
    parcels: list[_Parcel] = []
    for term, axes in zip(problem.terms, fixed.axes, strict=True):
        axes = _opened(axes, open_axes)
        ways = tables.ways(term, axes, open_axes)
        by_decision: dict[int, ndarray] = {}
        for use in term.uses:
            number = use.decision
            values = tables.moved(term, use, axes, ways, options[number], keys[number])
            known = by_decision.get(number)
            by_decision[number] = values if known is None else known + values
        computed = tables.objective.computed(term, [cutting for _, cutting in ways])
        parcels.append(_Parcel(ways, computed, by_decision))
    return _Opened(options, held, parcels)


def _held(tables: Tables, decision: Decision, layouts: list[Layout]) -> ndarray:
    """Return what holding a decision costs in each layout; a written one had better be cut."""
    held = tables.objective.held(decision, layouts, tables.parts[: len(layouts[0])])
    if decision.is_written and not tables.objective.may_replicate:
        unused = np.array([layout.count(None) for layout in layouts])
        held = held + WHOLE * (unused - unused.min())
    return held


def _held_tables(opened: _Opened) -> list[Table]:
    return [
        Table((number,), held)
        for number, held in enumerate(opened.held)
        if len(held) > 1 and bool(held.any())
    ]


def _opened(choice: Any, open_axes: Sequence[int]) -> Any:
    return tuple(None if axis in open_axes else c for axis, c in enumerate(choice))


def _term_tables(
    terms: Sequence[Term], parcels: Sequence[_Parcel], sizes: list[int]
) -> list[Table]:
    """Return the tables of all terms; loops of terms with many tensors become new variables."""
    summed: dict[tuple[int, ...], ndarray] = {}
    for term, (ways, base, by_decision) in zip(terms, parcels, strict=True):
        weight, row = len(term.ops), base
        for number, values in by_decision.items():
            if sizes[number] == 1:
                row = row + values[:, 0]
        rest = {n: values for n, values in by_decision.items() if sizes[n] > 1}
        if not rest:
            continue
        keys = tuple(sorted(rest))
        entries = len(ways) * int(np.prod([float(sizes[n]) for n in keys]))
        if 0 < entries <= TERM_ENTRIES:
            total = row.reshape(-1, *[1] * len(keys))
            for position, number in enumerate(keys):
                shape = [len(ways), *[1] * len(keys)]
                shape[1 + position] = sizes[number]
                total = total + rest[number].reshape(shape)
            values = total.min(axis=0) * weight
            summed[keys] = summed[keys] + values if keys in summed else values
            continue
        own = len(sizes)
        sizes.append(len(ways))
        summed[(own,)] = row * weight
        for number in keys:
            summed[(number, own)] = rest[number].T * weight
    return [Table(keys, values) for keys, values in summed.items()]


def _disturbed(tables: list[Table], noise: float, seed: int) -> list[Table]:
    if not noise:
        return tables
    rng = np.random.default_rng(seed)
    return [Table(t.variables, t.values * (1 + noise * rng.random(t.values.shape))) for t in tables]

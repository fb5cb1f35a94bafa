"""Tables of a problem: what each way to compute costs under each layout, and the best choice.

A *state* has the layouts and loops of some mesh axes; other axes are *open*, and all that they
may be is tried. So one routine serves the first step of the recursion, the later ones inside of
the blocks that the steps before left, all steps jointly, and a second look at any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.plan.mesh import Layout
from pardnn.shard.partition.interning import loops_of
from pardnn.shard.partition.mesh_strategies import Flags, Ways, extended, owned_array, whole
from pardnn.shard.partition.per_device import Axes
from pardnn.shard.search.objective import Request, misplaced
from pardnn.shard.search.problem import Decision, Problem, Term, Use

Layouts = tuple[Layout, ...]
"""Layouts that a decision may have."""

#: Cost of what must not be.
NEVER = 1e30


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

    @property
    def are_axes_alike(self) -> bool:
        """Whether it does not matter which mesh axis is which, if they have as many devices."""
        ...

    def moved(self, requests: Sequence[Request]) -> list[Float64[ndarray, "a l"]]:
        """Cost of fetching and combining tensors of ops, for each way and each layout."""
        ...

    def computed(self, term: Term, ways: Ways) -> Float64[ndarray, " a"]:
        """Cost of computing one op, for each way."""
        ...

    def held(self, decision: Decision, layouts: Sequence[Layout], parts: tuple[int, ...]) -> Any:
        """Cost of holding a decision's tensors, for each layout."""
        ...


@dataclass
class Tables:
    """Options and tables of a problem, kept while it is searched.

    Attributes:
        problem: What is decided.
        objective: What is minimised.
        parts: Devices along each mesh axis, all of them.
        allows_layout: Further limits on layouts, for baselines: of a decision and its layout on
            the first mesh axes.
        allows_way: Further limits on loops: by output and mesh axis, whether results are partial.
        loop: The loop of a term that is cut where it can be, None if any may be.
        kept: What is known of the problem with these options, by name.
    """

    problem: Problem
    objective: Objective
    parts: tuple[int, ...]
    allows_layout: Callable[[Decision, Layout], bool] | None = None
    allows_way: Callable[[Sequence[Flags]], bool] | None = None
    loop: Callable[[Term], str | None] | None = None

    def __post_init__(self) -> None:
        """Nothing is known yet."""
        self._ways: dict[Any, Ways] = {}
        self._layouts: dict[Any, Layouts] = {}
        self._options: dict[Layouts, Layouts] = {}
        self._owned: dict[Any, ndarray] = {}
        self._beginnings: dict[tuple[int, Axes], Ways] = {}
        self._moved: dict[Any, ndarray] = {}
        self.kept: dict[str, Any] = {}

    def limited(
        self,
        *,
        layout: Callable[[Decision, Layout], bool] | None = None,
        way: Callable[[Sequence[Flags]], bool] | None = None,
        loop: Callable[[Term], str | None] | None = None,
    ) -> Tables:
        """Return tables with further limits, which share what is known here where they can."""
        found = Tables(self.problem, self.objective, self.parts, layout, way, loop)
        found._owned, found._options = self._owned, self._options
        found._beginnings = self._beginnings
        if way is None and loop is None:  # tables are known by the identity of ways
            found._ways, found._moved = self._ways, self._moved
        return found

    def layouts(self, decision: Decision, fixed: Layout, open_axes: Sequence[int]) -> Layouts:
        """Return the layouts that a decision may have, given those of the other mesh axes."""
        key = (
            decision.kind,
            decision.root if self.allows_layout else None,
            fixed,
            tuple(open_axes),
        )
        if key not in self._layouts:
            found = tuple(self._find_layouts(decision, fixed, open_axes))
            self._layouts[key] = self._options.setdefault(found, found)
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
            if self.allows_layout is not None and axis in open_axes:
                found = [o for o in found if self.allows_layout(decision, o)] or found
        if not self.objective.may_replicate and not decision.is_written:
            found = _most_cut(found)
        return found

    def ways(self, term: Term, fixed: Axes, open_axes: Sequence[int]) -> Ways:
        """Return the ways in which a term may be computed, given the loops of other mesh axes."""
        only = id(term) if self.allows_way else self.loop and self.loop(term)
        key = (term.number, term.is_local, fixed, tuple(open_axes), only)
        if key not in self._ways:
            self._ways[key] = self._find_ways(term, fixed, open_axes)
        return self._ways[key]

    def _find_ways(self, term: Term, fixed: Axes, open_axes: Sequence[int]) -> Ways:
        must_be_cut = not self.objective.may_replicate and not term.is_local
        if must_be_cut and self.allows_way is None:  # those that leave none unused come first
            found = self._cut(term, fixed, open_axes, ())
            if len(found):
                return found
        found = self._cut(term, fixed, open_axes, (None,))
        if must_be_cut and len(found):
            unused = [axes.count(None) for axes in found.axes]
            least = min(unused)
            if max(unused) > least:
                found = found.only([n for n, count in enumerate(unused) if count == least])
        return found

    def _cut(
        self, term: Term, fixed: Axes, open_axes: Sequence[int], others: tuple[None, ...]
    ) -> Ways:
        loops, wanted = loops_of(term.number), self.loop and self.loop(term)
        first = min(open_axes, default=len(fixed))
        found = self._begun(term.number, fixed[:first])
        for axis in range(first, len(fixed)):
            before, parts = found, self.parts[axis]
            if axis not in open_axes:
                found = extended(before, (fixed[axis],), parts)
                continue
            if wanted in loops:
                found = extended(before, (wanted,), parts)
            if wanted not in loops or not len(found):
                found = extended(before, (*loops, *others), parts)
            if self.allows_way is not None:
                allowed = [n for n, flags in enumerate(found.reduced) if self.allows_way(flags)]
                found = found.only(allowed) if 0 < len(allowed) < len(found) else found
        return found

    def _begun(self, number: int, axes: Axes) -> Ways:
        """Return the one way to cut loops at the first mesh axes, none if it cannot be."""
        if not axes:
            return whole(number)
        key = (number, axes)
        if key not in self._beginnings:
            before, parts = self._begun(number, axes[:-1]), self.parts[len(axes) - 1]
            self._beginnings[key] = extended(before, (axes[-1],), parts)
        return self._beginnings[key]

    def moved(self, asked: Sequence[tuple[Use, Ways, Layouts]]) -> list[ndarray]:
        """Return tables of tensors of terms: ways by layouts, both as they are kept here."""
        # What is kept is known by its id, which is always of the same.
        keys = [(id(ways), use.kind, id(layouts)) for use, ways, layouts in asked]
        known = self._moved
        new: dict[Any, Request] = {}
        for key, (use, ways, layouts) in zip(keys, asked, strict=True):
            if key not in known and key not in new:
                parts = self.parts[: len(layouts[0])]
                new[key] = Request(use, ways, self._owners(use, layouts, parts), parts)
        if new:
            found = self.objective.moved(list(new.values()))
            for (key, request), values in zip(new.items(), found, strict=True):
                is_local = request.use.is_local
                known[key] = np.where(misplaced(request), NEVER, values) if is_local else values
        return [known[key] for key in keys]

    def _owners(self, use: Use, layouts: Layouts, parts: tuple[int, ...]) -> ndarray:
        key = (use.shape, use.dims, id(layouts))
        if key not in self._owned:
            own = [owned_array(use.shape, _own(use.dims, layout), parts) for layout in layouts]
            self._owned[key] = np.array([array for array in own if array is not None])
        return self._owned[key]


def _own(dims: Sequence[int | None], layout: Layout) -> Layout:
    return tuple(None if d is None else dims[d] for d in layout)


def _is_possible(form: Any, layout: Layout, parts: tuple[int, ...]) -> bool:
    """Whether a tensor can be laid out so: the smallest block is cut last, and is rounded down."""
    shape, dims = form
    least = list(shape)
    for dim, count in zip(layout, parts, strict=False):
        if dim is not None:
            own = dims[dim]
            if own is None or least[own] < count:
                return False
            least[own] //= count
    return True


def _most_cut(found: list[Layout]) -> list[Layout]:
    """Keep the layouts that leave the fewest mesh axes unused."""
    least = min(layout.count(None) for layout in found)
    return [layout for layout in found if layout.count(None) == least]

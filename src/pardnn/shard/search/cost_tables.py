"""Cost tables of a problem: the cost of each sharding strategy under each layout.

A *state* has the layouts and loops of some mesh axes; the other axes are *open*, and all options
there are tried. So one routine serves the first step of the recursion, the later steps inside the
blocks of the earlier ones, all steps jointly, and the revision of any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from pardnn.plan.mesh import FREE, Layout
from pardnn.shard.partition.interning import cuttable_loops
from pardnn.shard.partition.mesh_strategies import Flags, MeshStrategies, extend, owned_array, uncut
from pardnn.shard.search.objective import Objective, TableRequest, not_local
from pardnn.shard.search.problem import Factor, Operand, Problem, Variable
from pardnn.shard.search.tensor_classes import is_possible
from pardnn.shard.sharding import AxisLoops
from pardnn.time_limit import check_time

Layouts = tuple[Layout, ...]
"""Layouts that a variable may have."""

#: Cost of what must not be.
NEVER = 1e30


class State(NamedTuple):
    """A choice for the first mesh axes.

    Attributes:
        layouts: By variable.
        axes: By factor, the loop that is cut at each mesh axis.
    """

    layouts: tuple[Layout, ...]
    axes: tuple[AxisLoops, ...]


@dataclass
class CostTables:
    """Options of a problem and their costs, kept during the search.

    Attributes:
        problem: What is decided.
        objective: What is minimised.
        axis_sizes: Devices along each mesh axis, all of them.
        allows_layout: Further limits on layouts, for baselines: of a variable and its layout on
            the first mesh axes.
        allows_strategy: Further limits on loops, by whether results are partial per output and mesh
            axis.
        loop: The loop of a factor to cut if possible; None if any may be cut.
        memo: Cached results for the problem with these options, by name.
    """

    problem: Problem
    objective: Objective
    axis_sizes: tuple[int, ...]
    allows_layout: Callable[[Variable, Layout], bool] | None = None
    allows_strategy: Callable[[Sequence[Flags]], bool] | None = None
    loop: Callable[[Factor], str | None] | None = None

    def __post_init__(self) -> None:
        """Nothing is known yet."""
        self._strategies: dict[Any, MeshStrategies] = {}
        self._layouts: dict[Any, Layouts] = {}
        self._options: dict[Layouts, Layouts] = {}
        self._owned: dict[Any, ndarray] = {}
        self._prefixes: dict[tuple[int, AxisLoops], MeshStrategies] = {}
        self._communication: dict[Any, ndarray] = {}
        self.memo: dict[str, Any] = {}

    def limited(
        self,
        *,
        layout: Callable[[Variable, Layout], bool] | None = None,
        strategy: Callable[[Sequence[Flags]], bool] | None = None,
        loop: Callable[[Factor], str | None] | None = None,
    ) -> CostTables:
        """Return tables with further limits, which share cached costs if possible.

        Args:
            layout: See `allows_layout`.
            strategy: See `allows_strategy`.
            loop: See `loop`.
        """
        found = CostTables(self.problem, self.objective, self.axis_sizes, layout, strategy, loop)
        found._owned, found._options = self._owned, self._options
        found._prefixes = self._prefixes
        if strategy is None and loop is None:  # tables are keyed by the identity of strategies
            found._strategies, found._communication = self._strategies, self._communication
        return found

    def layouts(self, variable: Variable, fixed: Layout, open_axes: Sequence[int]) -> Layouts:
        """Return the layouts that a variable may have.

        Args:
            variable: The variable.
            fixed: Its layout; entries at open axes do not count.
            open_axes: Mesh axes that are chosen.
        """
        key = (
            variable.kind,
            variable.root if self.allows_layout else None,
            fixed,
            tuple(open_axes),
        )
        if key not in self._layouts:
            found = tuple(self._find_layouts(variable, fixed, open_axes))
            self._layouts[key] = self._options.setdefault(found, found)
        return self._layouts[key]

    def _find_layouts(
        self, variable: Variable, fixed: Layout, open_axes: Sequence[int]
    ) -> list[Layout]:
        demanded = variable.fixed or (FREE,) * len(self.axis_sizes)
        sizes, found = self.axis_sizes, list[Layout]([()])
        for axis, dim in enumerate(fixed):
            choices = (*variable.dims, None) if axis in open_axes else (dim,)
            is_fixed, later = demanded[axis] != FREE, demanded[axis + 1 :]
            if axis in open_axes and is_fixed:
                choices = (demanded[axis],)
            found = [
                (*layout, d)
                for layout in found
                for d in choices
                if all(is_possible(*f, (*layout, d, *later), sizes) for f in variable.forms)
            ]
            if self.allows_layout is not None and axis in open_axes and not is_fixed:
                found = [o for o in found if self.allows_layout(variable, o)] or found
        if not self.objective.may_replicate and not variable.is_written:
            found = _least_replicated(found)
        return found

    def strategies(
        self, factor: Factor, fixed: AxisLoops, open_axes: Sequence[int]
    ) -> MeshStrategies:
        """Return the strategies by which a factor may be computed.

        Args:
            factor: The factor.
            fixed: Its loops; entries at open axes do not count.
            open_axes: Mesh axes that are chosen.
        """
        wanted = self.loop and self.loop(factor)
        key = (factor.number, factor.is_local, fixed, tuple(open_axes), wanted)
        if key not in self._strategies:
            check_time()
            self._strategies[key] = self._find_strategies(factor, fixed, open_axes)
        return self._strategies[key]

    def _find_strategies(
        self, factor: Factor, fixed: AxisLoops, open_axes: Sequence[int]
    ) -> MeshStrategies:
        must_be_cut = not self.objective.may_replicate and not factor.is_local
        if must_be_cut and self.allows_strategy is None:  # those that leave none unused come first
            found = self._cut(factor, fixed, open_axes, ())
            if len(found):
                return found
        found = self._cut(factor, fixed, open_axes, (None,))
        if must_be_cut and len(found):
            unused = [axes.count(None) for axes in found.axes]
            least = min(unused)
            if max(unused) > least:
                found = found.subset([n for n, count in enumerate(unused) if count == least])
        return found

    def _cut(
        self, factor: Factor, fixed: AxisLoops, open_axes: Sequence[int], others: tuple[None, ...]
    ) -> MeshStrategies:
        loops, wanted = cuttable_loops(factor.number), self.loop and self.loop(factor)
        first = min(open_axes, default=len(fixed))
        found = self._fixed_prefix(factor.number, fixed[:first])
        for axis in range(first, len(fixed)):
            before, axis_sizes = found, self.axis_sizes[axis]
            if axis not in open_axes:
                found = extend(before, (fixed[axis],), axis_sizes)
                continue
            if wanted in loops:
                found = extend(before, (wanted,), axis_sizes)
            if wanted not in loops or not len(found):
                found = extend(before, (*loops, *others), axis_sizes)
            if self.allows_strategy is not None:
                allowed = [
                    n for n, flags in enumerate(found.reduced) if self.allows_strategy(flags)
                ]
                found = found.subset(allowed) if 0 < len(allowed) < len(found) else found
        return found

    def _fixed_prefix(self, number: int, axes: AxisLoops) -> MeshStrategies:
        """Return the one strategy with these loops at the first mesh axes, none if impossible."""
        if not axes:
            return uncut(number)
        key = (number, axes)
        if key not in self._prefixes:
            before, axis_sizes = (
                self._fixed_prefix(number, axes[:-1]),
                self.axis_sizes[len(axes) - 1],
            )
            self._prefixes[key] = extend(before, (axes[-1],), axis_sizes)
        return self._prefixes[key]

    def communication(
        self, asked: Sequence[tuple[Operand, MeshStrategies, Layouts]]
    ) -> list[ndarray]:
        """Return cost tables of operands, strategies by layouts, both as they are kept here."""
        # Options are kept as long as these tables, so that an id is always of one.
        keys = [
            (id(strategies), operand.kind, id(layouts)) for operand, strategies, layouts in asked
        ]
        known = self._communication
        new: dict[Any, TableRequest] = {}
        for key, (operand, strategies, layouts) in zip(keys, asked, strict=True):
            if key not in known and key not in new:
                axis_sizes = self.axis_sizes[: len(layouts[0])]
                new[key] = TableRequest(
                    operand, strategies, self._owners(operand, layouts, axis_sizes), axis_sizes
                )
        if new:
            found = self.objective.communication(list(new.values()))
            for (key, request), values in zip(new.items(), found, strict=True):
                is_local = request.operand.is_local
                known[key] = np.where(not_local(request), NEVER, values) if is_local else values
        return [known[key] for key in keys]

    def _owners(self, operand: Operand, layouts: Layouts, axis_sizes: tuple[int, ...]) -> ndarray:
        key = (operand.shape, operand.dims, id(layouts))
        if key not in self._owned:
            own = [
                owned_array(operand.shape, _own(operand.dims, layout), axis_sizes)
                for layout in layouts
            ]
            assert all(array is not None for array in own), "options suit every member"
            self._owned[key] = np.array(own)
        return self._owned[key]


def _own(dims: Sequence[int | None], layout: Layout) -> Layout:
    return tuple(None if d is None else dims[d] for d in layout)


def _least_replicated(found: list[Layout]) -> list[Layout]:
    """Keep the layouts that leave the fewest mesh axes unused."""
    least = min(layout.count(None) for layout in found)
    return [layout for layout in found if layout.count(None) == least]

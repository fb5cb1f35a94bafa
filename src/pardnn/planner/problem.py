"""What an algorithm is given: a graph, a cluster, costs and options, as one value."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph
from pardnn.place.pardnn.warm_start import KnownPlaces
from pardnn.place.recipes.pipeline import CutStep
from pardnn.plan.check import capacities
from pardnn.plan.constraints import hard
from pardnn.plan.demands.layout_demands import layout_demands, layouts_of_demands
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace, usable_beside
from pardnn.planner.kept_state import fixed_layouts, pinned, pins_of
from pardnn.planner.options import PlanOptions
from pardnn.planner.search_log import SearchLog
from pardnn.planner.start.earlier import layouts_before, places_before
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.sharding import FixedLayouts
from pardnn.sim.machine import Machine, fastest_seconds, machine_of, restricted


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph to plan.

    Attributes:
        graph: One training step.
        cluster: What it runs on; memory limits are hard.
        costs: Durations of the graph's ops.
        options: How to plan.
        state: What lies on the devices already and stays where it is; None for nothing.
        start: The plan that a user starts from; None for none.
        cut: The graph beside the whole step, if its batch is in pieces.
        log: Of the search.
        allowed: Whether constraints let a device run an op (see `steering`); None: all.
        below: Seconds of a plan that is there: a plan that cannot be faster need not be made.
    """

    graph: Graph
    cluster: Cluster
    costs: Costs
    options: PlanOptions = field(default_factory=PlanOptions)
    state: StateInPlace | None = None
    start: Plan | None = None
    cut: CutStep | None = None
    log: SearchLog = field(default_factory=SearchLog)
    allowed: Bool[ndarray, "n k"] | None = None
    below: float = math.inf

    @functools.cached_property
    def machine(self) -> Machine:
        """Seconds of every op on every device, and what links cost.

        An op whose state lies whole on a device can run there alone.
        """
        machine = machine_of(self.costs, self.cluster)
        if self.allowed is not None:
            machine = restricted(machine, self.allowed)
        pins = self.known.pins
        return pinned(machine, pins) if bool((pins >= 0).any()) else machine

    @functools.cached_property
    def known(self) -> KnownPlaces:
        """Where state lies whole, and where ops ran before."""
        free = np.full(len(self.graph.ops), -1, dtype=np.int64)
        return KnownPlaces(
            pins=free if self.state is None else pins_of(self.graph, self.state),
            near=places_before(self.graph, self.before, self.cluster),
            alone=self.start is not None,
        )

    @property
    def before(self) -> Plan | None:
        """The plan that a search begins with: the one to start from, or the one that ran last."""
        return self.start or (self.state and self.state.near)

    @functools.cached_property
    def in_pieces(self) -> dict[int, tuple[Pieces, Problem]]:
        """The problems of its batch in pieces that are kept, by their number."""
        return {}

    @functools.cached_property
    def fixed(self) -> FixedLayouts | None:
        """Layouts that are decided: of state that lies cut, of the plan to start from, demanded.

        Raises:
            UsageError: E225, if it does not lie as a cut on one mesh leaves it.
        """
        if self.state is not None:
            return fixed_layouts(self.graph, self.state)
        before = layouts_before(self.graph, self.start, self.cluster)
        mesh = mesh_of(self.cluster)
        whole, pieces = (self.cut.whole, self.graph) if self.cut else (self.graph, None)
        demands = [*layout_demands(hard(self.options.constraints), whole, mesh, pieces)]
        wanted, _ = layouts_of_demands(demands, mesh)
        if before is not None and before.mesh == mesh:
            return FixedLayouts(mesh, {**before.layouts, **wanted})
        return FixedLayouts(mesh, wanted) if wanted else before

    @property
    def capacities(self) -> list[int | None]:
        """Usable bytes of each device; None if unlimited.

        That is its limit less the reserve, and less what state of other steps takes.
        """
        usable = capacities(self.cluster, self.options.reserve)
        return usable if self.state is None else usable_beside(self.graph, self.state, usable)

    @functools.cached_property
    def step(self) -> CutStep:
        """The graph beside the whole step; beside itself if its batch is whole."""
        graph = self.graph
        return self.cut or CutStep(graph, fastest_seconds(self.machine), graph, frozenset(), 1)

    def with_options(self, **changed: Any) -> Problem:
        """Return the same problem with some options changed."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changed))

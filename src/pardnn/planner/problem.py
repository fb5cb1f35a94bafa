"""The input of an algorithm: a graph, a cluster, costs and options, as one value."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from pardnn.planner.search.log import SearchLog
from pardnn.planner.sharded.sharding_seconds import least_computing
from pardnn.planner.start.earlier import layouts_before, places_before
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.sharding import FixedLayouts
from pardnn.sim.machine import Machine, fastest_seconds, machine_of, restricted

Kept = TypeVar("Kept")


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph to plan.

    Attributes:
        graph: One training step.
        cluster: What it runs on; memory limits are hard.
        costs: Durations of the graph's ops.
        options: How to plan.
        state: State that is already on the devices and stays there; None if there is none.
        start: The user's start plan; None if there is none.
        cut: The graph along with the whole step, if its batch is in pieces.
        log: Of the search.
        allowed: Whether constraints let a device run an op (see `steering`); None: all.
        below: Seconds of a known plan; a plan that cannot be faster need not be made.
        free: What a search without limits has found, for one under limits: outcomes by graph and
            algorithms, and what limits do not change; None: nothing is kept.
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
    free: dict[Any, Any] | None = None

    @functools.cached_property
    def machine(self) -> Machine:
        """Seconds of every op on every device, and what links cost.

        An op whose state is whole on a device can only run there.
        """
        machine = machine_of(self.costs, self.cluster)
        if self.allowed is not None:
            machine = restricted(machine, self.allowed)
        pins = self.known.pins
        return pinned(machine, pins) if bool((pins >= 0).any()) else machine

    @functools.cached_property
    def known(self) -> KnownPlaces:
        """Where state is whole, and where ops ran before."""
        free = np.full(len(self.graph.ops), -1, dtype=np.int64)
        return KnownPlaces(
            pins=free if self.state is None else pins_of(self.graph, self.state),
            near=places_before(self.graph, self.before, self.cluster),
            alone=self.start is not None,
        )

    @property
    def before(self) -> Plan | None:
        """The plan that a search starts from: the user's start plan, or the one that ran last."""
        return self.start or (self.state and self.state.near)

    @functools.cached_property
    def in_pieces(self) -> dict[tuple[int, bool], tuple[Pieces, Problem]]:
        """Cached problems with the batch in pieces, by their number and whether each sum is one."""
        return {}

    @functools.cached_property
    def work_in_pieces(self) -> dict[int, float]:
        """Seconds of the work of all devices, by number of pieces: cached by who cuts the batch."""
        return {}

    @functools.cached_property
    def least_cut_s(self) -> float:
        """Seconds for which each device computes at least where every op is cut over all."""
        return least_computing(self.graph, self.cluster, self.costs)

    @functools.cached_property
    def fixed(self) -> FixedLayouts | None:
        """Fixed layouts: of state that is cut, of the start plan, and of constraints.

        Raises:
            UsageError: E225, if state is not laid out as by a cut on one mesh.
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

        That is the limit minus the reserve, minus the state of other steps.
        """
        usable = capacities(self.cluster, self.options.reserve)
        return usable if self.state is None else usable_beside(self.graph, self.state, usable)

    @functools.cached_property
    def step(self) -> CutStep:
        """The graph along with the whole step; with itself if its batch is whole."""
        graph = self.graph
        return self.cut or CutStep(graph, fastest_seconds(self.machine), graph, frozenset(), 1)

    def without_limits(self) -> Problem:
        """Return the same problem on devices of any memory, with a log of its own."""
        devices = tuple(dataclasses.replace(each, memory=None) for each in self.cluster.devices)
        cluster = dataclasses.replace(self.cluster, devices=devices)
        free = dataclasses.replace(
            self, cluster=cluster, log=SearchLog(self.log.watch, beside=self.log)
        )
        for known in ("in_pieces", "work_in_pieces"):  # cuts of the batch know no limits
            vars(free)[known] = getattr(self, known)
        return free

    def kept(self, what: tuple[Any, ...], make: Callable[[], Kept]) -> Kept:
        """Return what no memory limit changes; a search under limits does not make it anew.

        Args:
            what: Tells it from all else that is made of this graph.
            make: Makes it.
        """
        if self.free is None:
            return make()
        key = ("kept", id(self.graph), *what)
        if key not in self.free:
            self.free[key] = self.graph, make()  # the graph stays, so its id is its own
        return self.free[key][1]

    def with_options(self, **changed: Any) -> Problem:
        """Return the same problem with some options changed."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changed))

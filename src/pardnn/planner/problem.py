"""What an algorithm is given: a graph, a cluster, costs and options, as one value."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities
from pardnn.planner.options import PlanOptions
from pardnn.sim.machine import Machine, machine_of


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph to plan.

    Attributes:
        graph: One training step.
        cluster: What it runs on; memory limits are hard.
        costs: Durations of the graph's ops.
        options: How to plan.
    """

    graph: Graph
    cluster: Cluster
    costs: Costs
    options: PlanOptions = field(default_factory=PlanOptions)

    @functools.cached_property
    def machine(self) -> Machine:
        """Seconds of every op on every device, and what links cost."""
        return machine_of(self.costs, self.cluster)

    @property
    def capacities(self) -> list[int | None]:
        """Usable bytes of each device: its limit less the reserve; None if unlimited."""
        return capacities(self.cluster, self.options.reserve)

    def with_options(self, **changed: Any) -> Problem:
        """Return the same problem with some options changed."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changed))

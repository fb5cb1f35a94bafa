"""A plan to ask about: its graph, costs, simulated times, and the layers of its ops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.graph.ir import Graph
from pardnn.graph.layers import known_layers, layers_of, origin
from pardnn.place.colocation import colocated
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.check import capacities
from pardnn.plan.constraints import placing
from pardnn.plan.demands.named import Named, named
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.planner.check_cut import proven_cluster
from pardnn.planner.costs import choice_of, costs_for
from pardnn.sim.engine import simulate
from pardnn.sim.machine import Machine, machine_of
from pardnn.sim.peak import peaks
from pardnn.sim.timeline import Timeline
from pardnn.sim.waits import Causes, causes

#: Times that differ by more, relative to each other, come from other costs.
SAME_TIME = 1e-9


@dataclass(frozen=True, eq=False)
class Case:
    """A valid plan, and everything known about it.

    Attributes:
        graph: That it is for.
        plan: The plan; it names its cluster.
        choice: Of costs, as for `plan`.
        planned: The graph whose ops it places: in pieces, cut, or with second calls.
        costs: Of the ops of `planned`.
        machine: These costs, and the links.
        arrays: The plan by numbers of `planned`.
        timeline: Its simulation.
    """

    graph: Graph
    plan: Plan
    choice: str | None
    planned: Graph
    costs: Costs
    machine: Machine
    arrays: PlanArrays
    timeline: Timeline

    @functools.cached_property
    def cluster(self) -> Cluster:
        """What the plan is made for, as if its devices shared nothing."""
        return _by_themselves(self.plan)

    @property
    def usable(self) -> list[int | None]:
        """Usable bytes of each device."""
        return capacities(self.cluster, self.plan.reserve)

    @property
    def devices(self) -> list[str]:
        """Names of the devices."""
        return [device.name for device in self.cluster.devices]

    @functools.cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of each device."""
        return tuple(peaks(self.planned.arrays, self.arrays).tolist())

    @functools.cached_property
    def causes(self) -> Causes:
        """Why everything starts when it does."""
        return causes(self.planned, self.machine, self.arrays, self.timeline)

    @functools.cached_property
    def layers(self) -> list[str]:
        """Layer of each op of `planned`."""
        own = layers_of(self.graph)
        if self.planned is self.graph:
            return own
        return layers_of(self.planned, known_layers(self.graph, own))

    @functools.cached_property
    def overwrites(self) -> Int64[ndarray, "w 2"]:
        """From `first_overwrites`."""
        return first_overwrites(self.planned)

    @functools.cached_property
    def groups(self) -> Int64[ndarray, " n"]:
        """Number of the ops that no placement may split, for each op."""
        return colocated(self.planned.arrays, self.overwrites)

    @functools.cached_property
    def tensor_names(self) -> list[str]:
        """Of the tensors of `planned`."""
        return [tensor.name for op in self.planned.ops for tensor in op.outputs]

    @functools.cached_property
    def layouts(self) -> dict[str, tuple[str, ...]]:
        """How a plan that cuts ops lays out each tensor; one in pieces as its first piece."""
        if self.plan.partition is None:
            return {}
        own = {name: tuple(words) for name, words in self.plan.partition.sharding.items()}
        of_pieces: dict[str, tuple[str, ...]] = {}
        for name, words in own.items():
            of_pieces.setdefault(origin(name), words)
        return of_pieces | own

    @functools.cached_property
    def seconds(self) -> ndarray:
        """Of each op where it runs."""
        return self.timeline.finish - self.timeline.start

    @functools.cached_property
    def constraints(self) -> tuple[Named, ...]:
        """What was demanded of the placement, by numbers of `planned`."""
        demanded, partition = placing(self.plan.constraints or ()), self.plan.partition
        k, width = self.plan.num_devices, 1 if partition is None else partition.mesh.size
        return named(demanded, self.graph, self.planned, self.cluster, k, width)

    def constraints_on(self, ops: Sequence[int]) -> list[Named]:
        """Return the constraints on some ops, or on what must be with them."""
        groups = set(self.groups[list(ops)].tolist())
        return [
            each
            for each in self.constraints
            if any(int(self.groups[i]) in groups for row in each.members for i in row)
        ]

    @property
    def transfer_bytes(self) -> int:
        """Bytes sent between devices."""
        return self.timeline.transfer_bytes(self.planned)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know about the times."""
        said, now = self.plan.predicted, self.timeline.makespan
        if self.cluster != self.plan.cluster:
            note = f"times are without what devices share (`sharing`): {now:.6g} s for the step"
            note += "" if said is None else f"; with it the plan predicts {said.makespan_s:.6g} s"
            return (note,)
        if said is None or abs(said.makespan_s - now) <= SAME_TIME * max(now, said.makespan_s):
            return ()
        others = "" if said.costs is None else f" ({said.costs})"
        note = (
            f"the plan was made with other costs{others}: it predicts {said.makespan_s:.6g} s for "
            f"the step, those used here ({self.costs.source}) give {now:.6g} s; choose with "
            "--costs"
        )
        return (note,)


def _by_themselves(plan: Plan) -> Cluster:
    assert plan.cluster is not None
    return dataclasses.replace(plan.cluster, sharing=None)


def opened(graph: Graph, plan: Plan, costs: str | None = None) -> Case:
    """Check a plan and simulate it.

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        costs: As for `plan`; None for the preset that the plan was made with, if it was one.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if the plan is not valid.
        UsageError: E212, if it names no cluster.
    """
    proven_cluster(graph, plan)
    cluster = _by_themselves(plan)
    planned = planned_graph(graph, plan)
    costs = choice_of(plan, costs, graph, planned)
    found = costs_for(planned, cluster, costs, whole=graph)
    machine, arrays = machine_of(found, cluster), plan_arrays(planned, plan)
    timeline = simulate(planned, machine, arrays)
    return Case(graph, plan, costs, planned, found, machine, arrays, timeline)


def layer_seconds(case: Case, inside: ndarray) -> ndarray:
    """Return the seconds that each device computes for some ops.

    Args:
        case: The plan.
        inside: Whether each op counts.
    """
    weights = np.where(inside, case.seconds, 0.0)
    return np.bincount(case.arrays.place, weights=weights, minlength=case.plan.num_devices)

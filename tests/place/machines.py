"""Clusters and machines for tests, small numbers that add up exactly."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from pardnn.cluster import Cluster, Device, Rate
from pardnn.cost.costs import graph_costs
from pardnn.graph.ir import Graph
from pardnn.place.colocation import colocated
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.place.pardnn.problem import Problem, problem_of
from pardnn.plan.plan import PlanArrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine, machine_of
from pardnn.sim.timeline import Timeline


def cluster_of(
    num_devices: int,
    *,
    memory: int | None = None,
    bandwidth: float = 64.0,
    latency: float = 0.25,
    speeds: tuple[float, ...] = (1.0,),
    types: tuple[str, ...] = ("accelerator",),
    serial: bool = False,
) -> Cluster:
    """Devices that take turns in speed and type; the first is the first of both."""
    return Cluster(
        devices=tuple(
            Device(
                name=f"d{i}",
                type=types[i % len(types)],
                speed=speeds[i % len(speeds)],
                memory=memory,
            )
            for i in range(num_devices)
        ),
        default_link=Rate(bandwidth=bandwidth, latency=latency),
        link_model="serial" if serial else "independent",
    )


@st.composite
def clusters(draw: st.DrawFn, most: int = 3, *, serial: bool = True) -> Cluster:
    """Draw a cluster without limits."""
    return cluster_of(
        draw(st.integers(1, most)),
        bandwidth=draw(st.sampled_from([16.0, 64.0, 1024.0])),
        latency=draw(st.sampled_from([0.0, 0.25, 1.0])),
        speeds=draw(st.sampled_from([(1.0,), (1.0, 2.0)])),
        types=draw(st.sampled_from([("accelerator",), ("accelerator", "cpu")])),
        serial=serial and draw(st.booleans()),
    )


def machine_for(graph: Graph, cluster: Cluster) -> Machine:
    """Costs as the graph states them."""
    return machine_of(graph_costs(graph), cluster)


def limited(cluster: Cluster, memory: int | None) -> Cluster:
    """The cluster with one limit for every device."""
    devices = tuple(dataclasses.replace(device, memory=memory) for device in cluster.devices)
    return dataclasses.replace(cluster, devices=devices)


def problem_for(graph: Graph, num_devices: int = 2, *, with_views: bool = False) -> Problem:
    group = colocated(graph.arrays, first_overwrites(graph), with_views=with_views)
    group.setflags(write=False)
    machine = machine_for(graph, cluster_of(num_devices))
    return problem_of(graph.arrays._replace(group=group), machine)


def random_place(graph: Graph, num_devices: int, seed: int) -> np.ndarray:
    group = colocated(graph.arrays, first_overwrites(graph), with_views=bool(seed % 2))
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_devices, int(group.max()) + 1)[group]


def schedule(
    graph: Graph, machine: Machine, place: np.ndarray, timeline: Timeline | None = None
) -> PlanArrays:
    """Return the plan of a placement, in the order of a timeline or of an emulation by levels."""
    a = graph.arrays
    timeline = timeline or emulate(a, machine, place, -bottom_levels(a, machine, place))
    return ordered_plan(a, machine.num_devices, place, timeline, first_overwrites(graph))


def uneven_machine(graph: Graph, num_devices: int, seed: int) -> Machine:
    """Devices of two speeds whose links all differ, in powers of two: sums are exact."""
    machine = machine_for(graph, cluster_of(num_devices, speeds=(1.0, 2.0)))
    rng, k = np.random.default_rng(seed), num_devices
    return machine._replace(
        latency=np.where(np.eye(k), 0.0, rng.integers(0, 4, (k, k)) / 4),
        bandwidth=np.where(np.eye(k), np.inf, 2.0 ** rng.integers(3, 12, (k, k))),
    )

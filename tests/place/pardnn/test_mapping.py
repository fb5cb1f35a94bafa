"""Mapping: every group whole, on a device, and the devices are those of Algorithm 2 and Eq. 4.2."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.pardnn.cluster_graph import cluster_graph_of
from pardnn.place.pardnn.mapping import map_clusters, placement
from pardnn.place.pardnn.problem import Clusters, Problem, problem_of
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.sim.levels import slowest_link
from tests.place.machines import cluster_of, machine_for, problem_for, uneven_machine
from tests.reference.mapping import Paths, mapped
from tests.strategies import FAMILIES, graphs, random_graph


@given(graph=graphs(min_ops=2, max_ops=14), num_devices=st.integers(1, 4))
def test_mapping_and_swaps_place_every_group_whole(graph: Graph, num_devices: int) -> None:
    problem = problem_for(graph, num_devices)
    clusters = slice_graph(problem, num_devices)
    device, cluster_graph = map_clusters(problem, clusters)
    swapped = swap_clusters(problem, clusters, cluster_graph, device)
    assert np.all(cluster_graph.begin <= cluster_graph.end)
    for devices in (device, swapped):
        place = placement(problem, clusters, devices)
        assert place.min() >= 0
        assert place.max() < num_devices
        for number in range(len(problem.runs)):
            assert len(set(place[problem.arrays.group == number].tolist())) == 1


def test_devices_are_those_of_algorithm_2() -> None:
    """Both halves of it decide: of the clusters some are merged, others balanced by level."""
    merged = balanced = 0
    for seed in range(72):
        graph = random_graph(seed, 8 + seed % 9, FAMILIES[seed % 6], memory=seed % 3 == 0)
        num_devices = 2 + seed % 3
        arrays = problem_for(graph, num_devices).arrays
        alike = machine_for(graph, cluster_of(num_devices))  # ties of Eq. 4.2
        machine = alike if seed % 2 else uneven_machine(graph, num_devices, seed)
        problem = problem_of(arrays, machine)
        clusters = slice_graph(problem, num_devices)
        paths = Paths(*(each.tolist() for each in clusters))
        expected, count = mapped(graph, problem.machine, slowest_link(problem.machine), paths)
        assert map_clusters(problem, clusters)[0].tolist() == expected
        merged, balanced = merged + count, balanced + len(expected) - num_devices - count
    assert min(merged, balanced) > 25


def test_ties_of_equation_4_2_are_decided_by_communication_and_load() -> None:
    """Ops of one second, messages of one second each or of none: costs are equal everywhere."""
    decided = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        ops = [_op("0", 1.0, 0)]
        for i in range(1, 10 + seed % 8):
            reads = rng.choice(i, min(i, int(rng.integers(0, 3))), replace=False)
            ops.append(_op(str(i), 1.0, 0, *map(str, sorted(reads.tolist()))))
        graph = build_graph("units", ops)
        cluster = cluster_of(2 + seed % 2, bandwidth=1.0, latency=float(seed % 4 > 0))
        problem = problem_of(graph.arrays, machine_for(graph, cluster))
        clusters = slice_graph(problem, cluster.num_devices)
        paths = Paths(*(each.tolist() for each in clusters))
        expected, merged = mapped(graph, problem.machine, slowest_link(problem.machine), paths)
        assert map_clusters(problem, clusters)[0].tolist() == expected
        decided += len(expected) - cluster.num_devices - merged
    assert decided > 60


def test_kernels_see_one_layout_whatever_the_devices() -> None:
    """Of unlike devices, rows once lay column by column: each kernel was compiled once more."""
    graph = random_graph(0, 12, "layered")
    for machine in (uneven_machine(graph, 3, 0), machine_for(graph, cluster_of(3))):
        problem = problem_of(problem_for(graph, 3).arrays, machine)
        found = cluster_graph_of(problem, slice_graph(problem, 3))
        assert found.seconds.flags.c_contiguous


def _op(name: str, seconds: float, size: int, *reads: str) -> Op:
    return Op(
        name=name,
        kind="aten.mm.default" if reads else "input",
        inputs=tuple(f"{read}.out" for read in reads),
        outputs=(Tensor(name=f"{name}.out", bytes=size),),
        seconds={"accelerator": seconds},
    )


def _of(
    ops: list[Op], of: list[int], heads: list[str], tails: list[str]
) -> tuple[Problem, Clusters]:
    """A problem on two devices with links of 1 byte/s, and its clusters."""
    graph = build_graph("by hand", ops)
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0, latency=0.0))
    number = {op.name: i for i, op in enumerate(graph.ops)}
    ends = ([number[name] for name in names] for names in (heads, tails))
    return problem_of(graph.arrays, machine), Clusters(np.array(of), *map(np.array, ends))


def test_a_cluster_joins_the_primary_it_cannot_wait_for() -> None:
    """`s` of 1 s reads 9 bytes of `a0` and sends 2 to `a2`: 11 s, with 9 s of others meanwhile.

    With 12 s of others to hide behind it is not merged, and goes where there is less to do.
    """
    for others, device in ((9.0, 0), (12.0, 1)):
        ops = [
            _op("a0", 1.0, 9), _op("b0", 0.5, 0), _op("a1", others, 0, "a0"),
            _op("s", 1.0, 2, "a0"), _op("a2", 1.0, 0, "a1", "s"),
        ]  # fmt: skip
        problem, clusters = _of(ops, [0, 1, 0, 2, 0], ["a0", "b0", "s"], ["a2", "b0", "s"])
        found, graph = map_clusters(problem, clusters)
        assert graph.potential[2] == others
        assert found.tolist() == [0, 1, device]


def test_balancing_counts_the_messages_with_other_devices() -> None:
    """`s` runs beside 6 s of `a1` and 5 s of `b1`, and reads 4 bytes of device 0: 6 or 5 + 4 s."""
    for size, device in ((4, 0), (0, 1)):
        ops = [
            _op("a0", 1.0, size), _op("b0", 1.0, 0), _op("a1", 6.0, 0, "a0"),
            _op("b1", 5.0, 0, "b0"), _op("s", 1.0, 0, "a0"),
        ]  # fmt: skip
        problem, clusters = _of(ops, [0, 1, 0, 1, 2], ["a0", "b0", "s"], ["a1", "b1", "s"])
        found, graph = map_clusters(problem, clusters)
        assert graph.potential[2] > 4.0, "else it is merged"
        assert found.tolist() == [0, 1, device]


def test_a_cluster_that_no_device_runs_whole_is_mapped_and_its_groups_part() -> None:
    """Of `s` -> `u`, `u` runs on device 0 alone and `s` on device 1 alone: each goes there."""
    ops = [
        _op("a0", 3.0, 1), _op("b0", 3.0, 1), _op("a1", 6.0, 0, "a0"), _op("b1", 6.0, 0, "b0"),
        _op("s", 1.0, 1, "a0"), _op("u", 1.0, 0, "s"),
    ]  # fmt: skip
    problem, clusters = _of(ops, [0, 1, 0, 1, 2, 2], ["a0", "b0", "s"], ["a1", "b1", "u"])
    runs = problem.runs.copy()
    group = dict(zip(("a0", "b0", "a1", "b1", "s", "u"), problem.arrays.group, strict=True))
    runs[group["s"]], runs[group["u"]] = (False, True), (True, False)
    problem = problem._replace(runs=runs)
    device, _ = map_clusters(problem, clusters)
    assert set(device.tolist()) == {0, 1}
    assert placement(problem, clusters, device)[4:].tolist() == [1, 0]


def test_the_heaviest_primary_is_of_the_fastest_device_of_those_that_can_do_most() -> None:
    """A device that runs one op of three in no time is no place for the critical path."""
    graph = build_graph("three", [_op("a", 4.0, 0), _op("b", 2.0, 0), _op("c", 1.0, 0)])
    machine = machine_for(graph, cluster_of(3, speeds=(1.0, 2.0, 4.0)))
    seconds = machine.seconds.copy()
    seconds[2, 1:] = np.inf  # the fastest runs `a` alone
    problem = problem_of(graph.arrays, machine._replace(seconds=seconds))
    ends = np.arange(3)
    assert map_clusters(problem, Clusters(ends, ends, ends))[0].tolist() == [1, 0, 2]

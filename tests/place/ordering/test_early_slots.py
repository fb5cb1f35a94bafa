"""Early slots: receives posted early so that the sender fits, counted on both sides."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.baselines.exact import place_exact
from pardnn.place.decision import Decision
from pardnn.place.ordering.early_slots import with_early_slots
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan, memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import PlanArrays, plan_from_arrays
from pardnn.sim.engine import simulate
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, limited, machine_for, random_place
from tests.reference.early_slots import early_slots
from tests.reference.least_limit import least_limit
from tests.strategies import FAMILIES, Row, graphs, ops_of, random_graph


def op_of(
    name: str,
    reads: tuple[str, ...],
    makes: dict[str, int],
    group: str,
    workspace: int = 0,
    memory: str = "normal",
) -> Op:
    return Op(
        name=name,
        kind="parameter" if memory == "residual" else "aten.mm.default",
        inputs=reads,
        outputs=tuple(Tensor(name=n, bytes=size) for n, size in makes.items()),
        memory="residual" if memory == "residual" else "normal",
        workspace=workspace,
        seconds={"accelerator": 1.0},
        group=group,
    )


def sender_is_full() -> tuple[Graph, Cluster]:
    """Two devices of 12 bytes: t leaves the sender before C runs, while B still waits for C."""
    ops = [
        op_of("X", (), {"x": 3}, "g1", memory="residual"),
        op_of("E", (), {"e": 1}, "g1"),
        op_of("A", (), {"t": 6, "s": 1}, "g0"),
        op_of("C", ("s",), {"c": 1}, "g0", workspace=6),
        op_of("B", ("t", "c", "e", "x"), {"b": 1}, "g1"),
    ]
    return build_graph("full", ops), cluster_of(2, memory=12, bandwidth=1.0, latency=0.0)


@pytest.mark.jit
@pytest.mark.parametrize("place", [place_pardnn, place_exact])
def test_a_receive_posted_early_frees_the_sender(
    place: Callable[..., Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    if place is place_exact:
        pytest.importorskip("ortools")
        monkeypatch.setattr("pardnn.place.baselines.exact.MAX_FORBIDDEN", 1)
    graph, cluster = sender_is_full()
    plan = place(graph, machine_for(graph, cluster), [12, 12]).plan
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    assert sorted(peak_bytes(graph, plan)) == [8, 12]
    # t is received while B, which reads it, still waits for C.
    (message,) = [m for m in plan_from_arrays(graph, plan).messages if m.tensor == "t"]
    assert message.hold_until == "A"
    assert message.post_before in ("E", "B")
    assert least_limit(graph, [0, 0, 1, 1, 0]) == 12


@pytest.mark.jit
def test_one_byte_less_is_refused() -> None:
    graph, cluster = sender_is_full()
    with pytest.raises(InfeasibleError):
        place_pardnn(graph, machine_for(graph, cluster), [11, 11])


def test_the_proof_counts_the_copy_and_the_original() -> None:
    """With t posted where it is read, the sender holds 14 bytes while C runs."""
    graph, cluster = sender_is_full()
    machine, overwrites = machine_for(graph, cluster), first_overwrites(graph)
    place = graph.arrays.group
    late = latest_slot_plan(graph.arrays, 2, place, file_positions(graph.arrays), overwrites)
    early = memory_bounded_plan(
        graph.arrays, machine, place, file_positions(graph.arrays), [12, 12], overwrites
    )
    assert sorted(peak_bytes(graph, late)) == [12, 14]
    assert sorted(peak_bytes(graph, early)) == [8, 12]
    assert peaks(graph.arrays, early).tolist() == peak_bytes(graph, early)


@given(graph=graphs(max_ops=14), seed=st.integers(0, 9), share=st.sampled_from([0.95, 0.8, 0.6]))
def test_plans_are_valid_and_deadlock_free(graph: Graph, seed: int, share: float) -> None:
    cluster = cluster_of(3)
    machine = machine_for(graph, cluster)
    place, position = random_place(graph, 3, seed), file_positions(graph.arrays)
    overwrites = first_overwrites(graph)
    late = peaks(graph.arrays, latest_slot_plan(graph.arrays, 3, place, position, overwrites))
    capacities = [int(peak * share) for peak in late]
    plan = memory_bounded_plan(graph.arrays, machine, place, position, capacities, overwrites)
    if fits(graph.arrays, plan, capacities):
        cluster = limited(cluster, max(1, *capacities))
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
    simulate(graph, machine, plan)  # raises on a deadlock


def planned_as_by_the_twin(
    a: GraphArrays, late: PlanArrays, position: np.ndarray, capacity: np.ndarray, before_ops: bool
) -> PlanArrays:
    plan = with_early_slots(a, late, position, capacity, before_ops=before_ops)
    slots = zip(plan.message_post.tolist(), plan.message_hold.tolist(), strict=True)
    assert list(slots) == early_slots(a, late, position, capacity, before_ops)
    return plan


def test_slots_are_those_of_the_naive_twin() -> None:
    """Storages by size, each message where its receiver has room; many of them do move.

    The second time, devices have what the plan then takes and no byte more.
    """
    moved = 0
    for seed in range(24):
        graph = random_graph(seed, 20, FAMILIES[seed % 6])
        a, k = graph.arrays, 2 + seed % 3
        place, position = random_place(graph, k, seed), file_positions(graph.arrays)
        late = latest_slot_plan(a, k, place, position, first_overwrites(graph))
        rng = np.random.default_rng(seed)
        capacity = (peaks(a, late) * rng.choice([0.7, 0.9, 1.0, 2.0], k)).astype(np.int64)
        for before_ops in (False, True, False, True):
            plan = planned_as_by_the_twin(a, late, position, capacity, before_ops)
            moved += int((plan.message_post != late.message_post).sum())
            if before_ops:
                capacity = peaks(a, plan)
    assert moved > 20


@pytest.mark.parametrize("seed", [4, 9, 81, 82, 95, 191, 223])
def test_what_several_devices_read_leaves_early_for_all_of_them_or_none(seed: int) -> None:
    """Drawn so that some receivers have room for a copy and others have none."""
    rng = np.random.default_rng(seed)
    rows = [
        Row(
            "compute" if i else "input",
            tuple(rng.integers(max(0, i - 8), i, 3).tolist()) if i else (),
            bytes=int(rng.integers(1, 60)),
            workspace=int(rng.integers(0, 60)),
        )
        for i in range(18)
    ]
    graph = build_graph("wide", ops_of(rows))
    a, place, position = graph.arrays, rng.integers(0, 4, 18), file_positions(graph.arrays)
    late = latest_slot_plan(a, 4, place, position, first_overwrites(graph))
    capacity = (peaks(a, late) * rng.choice([0.7, 0.9, 1.0, 1.5], 4)).astype(np.int64)
    for before_ops in (False, True):
        planned_as_by_the_twin(a, late, position, capacity, before_ops)

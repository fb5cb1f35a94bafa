"""The objective `seconds`: what it chooses, and that memory is a limit."""

import numpy as np
import pytest

from pardnn.cluster import Cluster, Device, Link
from pardnn.cost.costs import Costs, preset_costs
from pardnn.errors import UsageError
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import plan_arrays, planned_graph
from pardnn.shard.partition.mesh_strategies import mesh_strategy_of, owned_array
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING, op_calls
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.memory_estimate import memory_weights, peak_estimate
from pardnn.shard.search.objective import TableRequest
from pardnn.shard.search.objective_seconds import SecondsObjective, seconds_objective, traffic
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import best_state
from pardnn.shard.search.tofu import find_sharding, search
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.time_limit import OutOfTimeError, time_limit
from testbed.hand_graphs import matmul, mlp
from tests.shard.search.test_tofu import assert_valid
from tests.shard.spmd.test_relays import levels, product

pytestmark = pytest.mark.jit


def _found(graph, cluster, **options):
    return find_sharding(graph, cluster, "seconds", costs=preset_costs(graph, "a100"), **options)


def test_small_batch_and_fast_links_give_column_then_row():
    graph = mlp(2048, 4096, 16384, 4096)
    found = _found(graph, Cluster.uniform(4))
    assert found.sharding.layouts["w1"] == (1, 1)
    assert found.sharding.layouts["w2"] == (0, 0)
    assert found.sharding.axes["h"] == ("j", "j")
    assert found.sharding.axes["y"] == ("k", "k")
    assert_valid(graph, found.sharding)


def test_a_large_batch_is_cut():
    graph = mlp(262_144, 512, 512, 512)
    found = _found(graph, Cluster.uniform(4))
    for name in ("h", "a", "y", "dh"):
        assert found.sharding.layouts[name] == (0, 0)
    assert_valid(graph, found.sharding)


def test_slow_links_leave_all_whole():
    graph = mlp(64, 64, 64, 64)
    found = _found(graph, Cluster.uniform(2, bandwidth="1MB/s", latency="1s"))
    assert set(found.sharding.layouts.values()) == {(None,)}


@pytest.mark.parametrize("level", [NEEDED, TRAINING, REPEATED])
def test_a_step_left_whole_takes_what_its_ops_take_however_coarse(level):
    graph = mlp(64, 96, 160, 32)
    cluster = Cluster.uniform(2, bandwidth="1B/s", latency="1s")
    costs = preset_costs(graph, "a100")
    problem = make_problem(graph, level)
    objective = seconds_objective(graph, problem, cluster, costs)
    best = best_state(CostTables(problem, objective, (2,)))
    assert set(best.state.layouts) == {(None,)}
    assert best.cost == pytest.approx(costs.seconds["accelerator"].sum())


def test_memory_is_a_limit():
    graph = mlp(64, 64, 64, 64)
    cluster = Cluster.uniform(4, bandwidth="1MB/s")
    problem = make_problem(graph, NEEDED)
    objective = seconds_objective(graph, problem, cluster, preset_costs(graph, "a100"))
    mesh = make_mesh((2, 2))

    def live_bytes(found):
        layouts = tuple(found.sharding.layouts.get(d.root, ()) for d in problem.variables)
        return peak_estimate(problem, objective.weights, State(layouts, ()), mesh.shape)

    free = _found(graph, cluster)
    just = _found(graph, cluster, capacity=live_bytes(free))
    assert just.sharding == free.sharding
    limited = _found(graph, cluster, capacity=0.5 * live_bytes(free))
    assert live_bytes(limited) <= 0.5 * live_bytes(free)


def test_what_messages_cost_is_not_asked_again_at_another_price(monkeypatch):
    graph, cluster = mlp(64, 64, 64, 64), Cluster.uniform(4, bandwidth="1MB/s")
    plain, asked = SecondsObjective.communication, []

    def counted(self, requests):
        asked.append(len(requests))
        return plain(self, requests)

    def anew(tables, **limits):
        return CostTables(tables.problem, tables.objective, tables.axis_sizes, *limits.values())

    monkeypatch.setattr(SecondsObjective, "communication", counted)
    found, few = _found(graph, cluster, capacity=30_000), sum(asked)
    monkeypatch.setattr(CostTables, "limited", anew)
    assert _found(graph, cluster, capacity=30_000) == found
    assert sum(asked) - few > 2 * few


def test_weights_are_what_is_held_at_the_fullest_moment():
    graph = matmul(4, 8, 2)
    problem = make_problem(graph, NEEDED)
    assert sum(memory_weights(graph, problem).values()) == 4 * (4 * 8 + 8 * 2 + 4 * 2)


def test_slow_pairs_cost_what_their_link_does():
    devices = tuple(Device(name=f"d{i}") for i in range(2))
    links = (Link(source="d0", target="d1", bandwidth=1e6),)
    cluster = Cluster(devices=devices, links=links)
    graph = matmul(8, 4, 4)
    problem = make_problem(graph, NEEDED)
    objective = seconds_objective(graph, problem, cluster, preset_costs(graph, "a100"))
    (factor,) = problem.factors
    (call,) = op_calls(graph)
    strategies = mesh_strategy_of(call.call, ("i",), make_mesh((2,)))
    assert strategies is not None
    operand = next(operand for operand in factor.operands if operand.shape == (4, 4))
    own = owned_array((4, 4), (0,), (2,))
    assert own is not None
    owned = own[None]
    assert traffic(operand, strategies, owned, (2,)).tolist() == [[[[0, 8], [8, 0]]]]
    assert np.allclose(
        objective.communication([TableRequest(operand, strategies, owned, (2,))]), 8 * 4 / 1e6
    )


def test_a_table_of_messages_is_begun_only_within_the_time():
    graph = matmul(8, 4, 4)
    problem = make_problem(graph, NEEDED)
    objective = seconds_objective(graph, problem, Cluster.uniform(2), preset_costs(graph, "a100"))
    factor = problem.factors[0]
    strategies = CostTables(problem, objective, (2,)).strategies(factor, (None,), [0])
    own = owned_array((8, 4), (0,), (2,))
    assert own is not None
    request = TableRequest(factor.operands[0], strategies, own[None], (2,))
    with time_limit(-1.0):
        assert objective.communication([]) == []
        with pytest.raises(OutOfTimeError):
            objective.communication([request])
    assert len(objective.communication([request])) == 1


def test_an_all_reduce_adds_up_in_shares():
    (call,) = op_calls(matmul(8, 4, 4))
    problem = make_problem(matmul(8, 4, 4), NEEDED)
    strategies = mesh_strategy_of(call.call, ("k",), make_mesh((2,)))
    assert strategies is not None
    operand = next(operand for operand in problem.factors[0].operands if operand.outputs)
    own = owned_array((8, 4), (None,), (2,))
    assert own is not None
    owned = own[None]
    assert traffic(operand, strategies, owned, (2,)).tolist() == [[[[0, 32], [32, 0]]]]


def test_seconds_need_links():
    with pytest.raises(UsageError, match="links"):
        search(matmul(8, 8, 8), make_mesh((2,)), "seconds")


@pytest.mark.parametrize("bandwidths", [(1e9, 1e11), (1e9, 1e10, 1e11)])
@pytest.mark.parametrize(("loop", "dims"), [("i", (0, 0, 0)), ("j", (0, 1, 1)), ("k", (1, 0, 0))])
def test_priced_seconds_are_those_of_the_messages_and_relays_save_none(bandwidths, loop, dims):
    """In the simulator each pair of devices has a link: what is passed on arrives later.

    So the price of direct fetches is the least, and exact. Plans relay only up to `RELAYED`.
    """
    n = len(bandwidths)
    shape, cluster, graph = (2,) * n, levels(*bandwidths), product(64, 256, 512)
    layouts = {name: (dim,) * n for name, dim in zip("xwy", dims, strict=True)}
    problem = make_problem(graph, NEEDED)
    objective = seconds_objective(graph, problem, cluster, preset_costs(graph, "k80"))
    (call,), (factor,) = op_calls(graph), problem.factors
    strategies = mesh_strategy_of(call.call, (loop,) * n, make_mesh(shape))
    assert strategies is not None
    priced = 0.0
    for operand in factor.operands:
        name = "y" if operand.outputs else {64: "x", 256: "w"}[operand.shape[0]]
        owned = owned_array(operand.shape, layouts[name], shape)
        assert owned is not None
        request = TableRequest(operand, strategies, owned[None], shape)
        priced += float(objective.communication([request])[0][0, 0])
    sharding = Sharding(make_mesh(shape), layouts, {"y": (loop,) * n})
    direct, relayed = (
        message_seconds(graph, spmd_partition(graph, sharding, relay_axes=axes), cluster)
        for axes in (0, n - 1)
    )
    assert direct == pytest.approx(priced)
    assert relayed > direct


def message_seconds(graph, plan, cluster):
    """What the messages of a plan take in the simulator, ops taking no time."""
    local = planned_graph(graph, plan)
    costs = Costs({"accelerator": np.zeros(len(local.ops))}, "graph")
    return simulate(local, machine_of(costs, cluster), plan_arrays(local, plan)).makespan

"""Of a partitioned graph one rank's ops are timed, and of the others what only they call."""

import pytest
import torch

from pardnn.backends.torch.profile.op_times import profile_graph
from pardnn.backends.torch.profile.rank_shares import rank_shares
from pardnn.cluster import Cluster
from pardnn.cost.call import is_free, is_view, signature, tensors_by_name
from pardnn.graph.build import build_graph
from pardnn.plan.pieces import piece_number
from pardnn.plan.plan import planned_graph
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from tests.cost.helpers import call, mlp_graph, source, tensor


def cut(batch, devices):
    """Return a perceptron cut over devices: unevenly where they do not divide the batch."""
    graph, cluster = mlp_graph(batch), Cluster.uniform(devices, bandwidth=1e9, latency=1e-6)
    options = PlanOptions(algorithm="data-parallel")
    plan, _ = make_plan(Problem(graph, cluster, costs_for(graph, cluster, "v100"), options))
    return planned_graph(graph, plan)


def calls(graph):
    """Return the first op of each distinct call, by signature."""
    tensors, found = tensors_by_name(graph), {}
    for op in graph.ops:
        if not (is_free(op) or is_view(op)):
            found.setdefault(signature(op, tensors), op)
    return found


@pytest.mark.parametrize(("batch", "ranks"), [(8, 4), (8, 3)])
def test_shares_make_every_call_and_few_ops_twice(batch, ranks):
    graph = cut(batch, ranks)
    wanted = calls(graph)
    shares = list(rank_shares(graph, list(wanted.values())))
    assert set().union(*map(calls, shares)) == set(wanted)
    ops = [{op.name for op in share.ops if not op.is_source} for share in shares]
    assert {piece_number(name) for name in ops[0]} == {0}
    assert len(shares) == (1 if ranks == 4 else 2)
    assert sum(map(len, ops)) < len([op for op in graph.ops if not op.is_source]) / 1.5


def test_what_the_first_rank_calls_is_not_timed_again():
    graph = cut(8, 3)
    wanted = calls(graph)
    others = [op for op in wanted.values() if piece_number(op.name) != 0]
    (share,) = rank_shares(graph, others)
    assert {op.name for op in others} <= {op.name for op in share.ops}
    assert len(share.ops) < len(graph.ops) / 2
    read = {name for op in others for name in op.inputs}
    makers = {op.name for op in graph.ops if any(t.name in read for t in op.outputs)}
    assert makers <= {op.name for op in share.ops}  # so that calls find their inputs as in a step


def test_calls_of_all_ranks_have_times(tmp_path):
    graph = cut(8, 3)
    table, stats = profile_graph(graph, folder=tmp_path)
    assert set(calls(graph)) <= set(table.entries)
    assert stats.estimated == ()


LIBRARY = torch.library.Library("pardnn_denormal_test", "FRAGMENT")
LIBRARY.define("seen(Tensor x) -> Tensor")
SEEN = []


def flushes():
    return not (torch.tensor(1e-39) * 1.0).item()


@torch.library.impl(LIBRARY, "seen", "CPU")
def _seen(x):
    SEEN.append(flushes())
    return x + 1


@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_cost_nothing_while_calls_are_timed(before, tmp_path):
    ops = [source("x", 8), call("y", "pardnn_denormal_test::seen.default", ["x"], [tensor("y", 8)])]
    if not torch.set_flush_denormal(before):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        profile_graph(build_graph("g", ops), folder=tmp_path)
        assert SEEN
        assert all(SEEN)
        assert flushes() is before
    finally:
        torch.set_flush_denormal(False)
        SEEN.clear()

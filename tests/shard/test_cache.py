"""All that is cached of calls is counted together and thrown away together."""

from collections.abc import Callable
from typing import Any

import pytest

from pardnn.plan.mesh import make_mesh
from pardnn.shard import cache
from pardnn.shard.partition.interning import find_call, intern_call
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.coarsening import op_calls
from pardnn.shard.search.tofu import find_sharding
from testbed.hand_graphs import matmul, mlp


def test_forget_leaves_nothing() -> None:
    find_sharding(mlp(4, 8, 8, 4), make_mesh((2,)))
    assert cache.num_entries() > 100
    cache.forget()
    assert cache.num_entries() == 0


def test_a_second_search_adds_nothing_and_finds_the_same() -> None:
    cache.forget()
    graph, mesh = mlp(4, 8, 8, 4), make_mesh((2, 2))
    first = find_sharding(graph, mesh)
    entries = cache.num_entries()
    assert find_sharding(graph, mesh) == first
    assert cache.num_entries() == entries


@pytest.mark.parametrize("choose", [find_sharding, *BASELINES.values()])
def test_each_search_begins_by_looking_at_the_bound(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[..., Any]
) -> None:
    """So a process that plans many graphs keeps what one of them needs, at least."""
    cache.forget()
    graph, mesh = matmul(4, 8, 6), make_mesh((2,))
    found = choose(graph, mesh)
    entries = cache.num_entries()
    find_sharding(mlp(4, 8, 8, 4), mesh)
    assert cache.num_entries() > entries
    monkeypatch.setattr(cache, "MAX_ENTRIES", 1)
    assert choose(graph, mesh) == found
    assert cache.num_entries() == entries


def test_the_bound_holds_when_a_graph_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.forget()
    calls = op_calls(mlp(4, 8, 8, 4))
    numbers = {intern_call(c.call) for c in calls}
    cache.begin_graph()
    assert {intern_call(c.call) for c in calls} == numbers  # still valid
    monkeypatch.setattr(cache, "MAX_ENTRIES", 1)
    cache.begin_graph()
    assert cache.num_entries() == 0
    assert find_call("anything") is None

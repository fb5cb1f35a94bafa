"""The search for retention intervals: never over the limit, on small steps the optimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.recompute import search
from pardnn.place.recompute.annealing import Front
from pardnn.place.recompute.problem import Nodes, nodes_of
from pardnn.place.recompute.retention import (
    cost_of,
    empty_schedule,
    evaluate,
    evaluate_stale,
)
from pardnn.place.recompute.search import retention
from tests.strategies import examples, graphs

#: Bytes and seconds of each layer's result.
LAYERS = ((8, 3.0), (4, 1.0), (16, 2.0), (6, 5.0), (12, 1.0))


def layers() -> Graph:
    """A step of five layers: each gradient reads the gradient after it and its layer's input."""
    ops = [Op(name="f0", kind="input", outputs=(Tensor(name="f0", bytes=2),))]
    for i, (size, seconds) in enumerate(LAYERS, start=1):
        ops.append(Op(name=f"f{i}", kind="aten.relu.default", inputs=(f"f{i - 1}",),
                      outputs=(Tensor(name=f"f{i}", bytes=size),),
                      seconds={"accelerator": seconds}))  # fmt: skip
    last = f"f{len(LAYERS)}"
    for i in range(len(LAYERS), 0, -1):
        ops.append(Op(name=f"g{i}", kind="aten.mm.default", inputs=(last, f"f{i - 1}"),
                      outputs=(Tensor(name=f"g{i}", bytes=2),),
                      seconds={"accelerator": 1.0}))  # fmt: skip
        last = f"g{i}"
    return build_graph("layers", ops)


def nodes() -> Nodes:
    graph = layers()
    seconds = np.array([(op.seconds or {}).get("accelerator", 0.0) for op in graph.ops])
    return nodes_of(graph, graph.arrays.topological, seconds)


def optimum(problem: Nodes, limit: int) -> float | None:
    """Return the fewest seconds of all choices of what is made twice for the backward pass."""
    n, schedule = problem.num_ops, empty_schedule(problem)
    best: float | None = None
    for chosen in itertools.product((len(LAYERS) + 1, n), repeat=len(LAYERS)):
        kept = np.array([n, *chosen, *[n] * len(LAYERS)])
        cost = cost_of(problem, kept, limit, schedule)
        if cost.peak <= limit and (best is None or cost.seconds < best):
            best = cost.seconds
    return best


@pytest.mark.jit
@pytest.mark.parametrize("limit", [24, 28, 30, 36, 40, 44, 48, 50])
def test_small_steps_are_solved_to_the_optimum(limit: int) -> None:
    problem = nodes()
    expected, found = optimum(problem, limit), retention(problem, limit, work=1)
    kept, cost = found
    assert (cost.peak <= limit) == (expected is not None)
    assert expected is None or cost.seconds <= expected
    assert cost == cost_of(problem, kept, limit, empty_schedule(problem))


@pytest.mark.jit
@pytest.mark.parametrize(("limit", "works"), [(10, [1]), (24, [1]), (40, [1, 60])])
def test_a_limit_out_of_reach_takes_a_glance(
    limit: int, works: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[int] = []

    def front_of(nodes: Nodes, *, seed: int, work: int) -> Front:
        spent.append(work)
        return given(nodes, seed=seed, work=work)

    given = search.front_of
    monkeypatch.setattr(search, "front_of", front_of)
    monkeypatch.setattr(search, "HOPELESS", 1.0)
    search._known_front.cache_clear()
    retention(nodes(), limit, work=60)
    assert spent == works


@pytest.mark.jit
def test_a_larger_limit_never_takes_more_seconds() -> None:
    problem, before = nodes(), float("inf")
    for limit in range(20, 52):
        cost = retention(problem, limit, work=1)[1]
        assert cost.peak <= limit or before == float("inf")
        if cost.peak <= limit:
            assert cost.seconds <= before
            before = cost.seconds


@examples(15)
@given(graphs(min_ops=3, max_ops=14), st.data())
def test_schedules_settled_in_part_are_those_settled_whole(
    graph: Graph, data: st.DataObject
) -> None:
    n = len(graph.ops)
    seconds = np.array([(op.seconds or {}).get("accelerator", 0.0) for op in graph.ops])
    problem = nodes_of(graph, graph.arrays.topological, seconds)
    kept = np.full(n, n, dtype=np.int64)
    partly, whole = empty_schedule(problem), empty_schedule(problem)
    evaluate(problem, kept, 100, partly)
    for _ in range(6):
        op, last = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n))
        kept[op], partly.is_stale[op] = last, True
        cost = evaluate_stale(problem, kept, 100, partly)
        assert cost == evaluate(problem, kept, 100, whole)
        assert (partly.end[0] == whole.end[0]).all()
        assert (partly.live == whole.live).all()


def residual_blocks(count: int) -> Graph:
    """A step of blocks y = x + narrow(wide(view(norm(x)))): each makes much, little crosses it."""

    def op(name: str, size: int, *inputs: str, kind: str = "aten.mm.default", of: str | None = None,
           seconds: float = 1.0) -> Op:  # fmt: skip
        tensor = Tensor(name=name, bytes=size, alias_of=of)
        memory = "reference" if of else "normal"
        return Op(name=name, kind=kind, inputs=inputs, outputs=(tensor,), memory=memory,
                  seconds={"accelerator": seconds})  # fmt: skip

    ops = [op("y0", 8, kind="input")]
    for i in range(1, count + 1):
        ops += [
            op(f"norm{i}", 8, f"y{i - 1}"),
            op(f"view{i}", 8, f"norm{i}", kind="aten.view.default", of=f"norm{i}", seconds=0.0),
            op(f"wide{i}", 64, f"view{i}", seconds=4.0),
            op(f"narrow{i}", 8, f"wide{i}", seconds=4.0),
            op(f"y{i}", 8, f"y{i - 1}", f"narrow{i}"),
        ]
    ops += [op("wide_head", 120, f"y{count}", seconds=12.0), op("g", 8, "wide_head")]
    for i in range(count, 0, -1):
        after = "g" if i == count else f"d{i + 1}"
        ops += [
            op(f"dw{i}", 64, after, f"wide{i}"),
            op(f"dv{i}", 8, f"dw{i}", f"view{i}"),
            op(f"d{i}", 8, f"dv{i}", f"y{i - 1}", after),
        ]
    return build_graph("blocks", ops)


@pytest.mark.jit
@pytest.mark.parametrize("count", [6, 24])
def test_checkpoints_at_the_ends_of_layers_are_tried(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refined in ("knapsack", "_searched"):
        monkeypatch.setattr(search, refined, lambda *_: None)
    graph = residual_blocks(count)
    seconds = np.array([(op.seconds or {}).get("accelerator", 0.0) for op in graph.ops])
    problem = nodes_of(graph, graph.arrays.topological, seconds)
    names = [graph.ops[i].name for i in graph.arrays.topological]
    turn, schedule = names.index("g"), empty_schedule(problem)
    inner = [name.startswith(("norm", "view", "wide")) and name != "wide_head" for name in names]
    each_block = np.where(inner, turn, problem.num_ops)
    expert = cost_of(problem, each_block, 0, schedule)
    front = search.front_of(problem)
    one_result = 8
    fits = front.peak <= expert.peak + one_result - problem.base
    assert front.seconds[fits].min(initial=np.inf) <= expert.seconds


@pytest.mark.jit
def test_a_step_of_which_nothing_crosses_an_op_has_no_checkpoints() -> None:
    small, large = (Tensor(name=name, bytes=size) for name, size in (("a", 1), ("b", 90)))
    ops = [Op(name="a", kind="aten.mm.default", outputs=(small,)),
           Op(name="b", kind="aten.mm.default", inputs=("a",), outputs=(large,))]  # fmt: skip
    problem = nodes_of(build_graph("short", ops), np.arange(2), np.ones(2))
    assert retention(problem, 10, work=1)[1].peak == 91

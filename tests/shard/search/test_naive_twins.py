"""What the search counts, estimates and chooses greedily, beside naive twins and by hand."""

import itertools
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs, preset_costs
from pardnn.cost.presets import device_model
from pardnn.cost.roofline import op_seconds
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import Mesh, make_mesh, owned_boxes
from pardnn.shard.partition.axis_strategies import axis_strategies_of
from pardnn.shard.partition.interning import cuttable_loops
from pardnn.shard.partition.mesh_strategies import mesh_strategy_of, owned_array
from pardnn.shard.search.alignment import alignment_of, free_loop
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.batch import batch_dims, batch_variables
from pardnn.shard.search.coarsening import NEEDED, TRAINING, op_calls
from pardnn.shard.search.communication_bytes import combined, fetched, total_bytes
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.memory_estimate import (
    largest_share,
    memory_weights,
    owned_estimate,
    peak_estimate,
)
from pardnn.shard.search.objective import TableRequest
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.objective_seconds import local_op, seconds_objective, traffic
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tensor_classes import TensorClasses
from testbed.hand_graphs import Steps, chain, matmul, mlp
from testbed.least_by_counting import _moved
from tests.strategies import examples, graphs

pytestmark = pytest.mark.jit

Points = set[tuple[int, ...]]


def points(box: Any) -> Points:
    return set(itertools.product(*(range(int(a), int(z)) for a, z in box)))


def cut_boxes(
    rng: np.random.Generator, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> np.ndarray:
    """What each device owns in some layout."""
    layout = tuple(rng.choice([None, *range(len(shape))]) for _ in mesh)
    found = owned_array(shape, layout, mesh)
    return cut_boxes(rng, shape, mesh) if found is None else found


MESHES = [(2,), (3,), (2, 2), (3, 2)]


@pytest.mark.parametrize("mesh", MESHES)
def test_elements_that_are_fetched_and_combined(mesh: tuple[int, ...]) -> None:
    """Needed and not owned; of partial results what others hold of the own block."""
    rng, shape = np.random.default_rng(1), (6, 8)
    for _ in range(20):
        needed, owned = cut_boxes(rng, shape, mesh), cut_boxes(rng, shape, mesh)
        pairs = list(zip(map(points, needed), map(points, owned), strict=True))
        expected = sum(len(one - other) for one, other in pairs)
        assert fetched(needed[None], owned[None]).tolist() == [[expected]]
        flags = tuple(bool(rng.random() < 0.5) for _ in mesh)
        coordinates = list(itertools.product(*map(range, mesh)))
        if any(flags):  # whatever is summed up along an axis, devices there compute the same block
            layout = tuple(None if f else rng.choice([None, 0, 1]) for f in flags)
            needed = owned_array(shape, layout, mesh)
            assert needed is not None
        groups: dict[tuple[int, ...], set[Any]] = {}
        for at, box in zip(coordinates, needed, strict=True):
            key = tuple(c for c, f in zip(at, flags, strict=True) if f)
            groups.setdefault(key, set()).add(tuple(map(tuple, box.tolist())))
        total = 0
        for own, mine in zip(map(points, owned), map(points, needed), strict=True):
            parts = [sum(len(own & points(box)) for box in boxes) for boxes in groups.values()]
            total += sum(parts) - len(own & mine)
        assert combined(needed[None], [flags], mesh, owned[None]).tolist() == [[total]]


def sent_naively(regions: list[Points], owned: list[Points], group: list[int] | None) -> np.ndarray:
    """Elements by receiver and sender; with groups `regions` are results on their way to owners.

    Whoever has an element sends an equal part of it; owners of one block add up a part each.
    """
    n = len(owned)
    found = np.zeros((n, n))
    copies = [sum(block == other for other in owned) for block in owned]
    for r in range(n):
        if group is None:
            for e in regions[r] - owned[r]:
                there = [s for s in range(n) if e in owned[s]]
                found[r, there] += 1 / len(there)
            continue
        is_partial = len(set(group)) > 1
        for number, e in itertools.product(sorted(set(group)), owned[r]):
            there = [s for s in range(n) if group[s] == number and e in regions[s]]
            if r not in there:
                found[r, there] += 1 / len(there) / (copies[r] if is_partial else 1)
        if is_partial:
            for s in range(n):
                if s != r and owned[s] == owned[r]:
                    found[r, s] += len(owned[r]) / copies[r]
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_traffic_by_receiver_and_sender(mesh: tuple[int, ...]) -> None:
    graph = matmul(12, 6, 18)
    (call,), problem = op_calls(graph), make_problem(graph, NEEDED)
    coordinates = list(itertools.product(*map(range, mesh)))
    for loops in itertools.product("ijk", repeat=len(mesh)):
        strategies = mesh_strategy_of(call.call, loops, make_mesh(mesh))
        if strategies is None:
            continue
        for operand in problem.factors[0].operands:
            for layout in itertools.product((None, 0, 1), repeat=len(mesh)):
                owned = owned_array(operand.shape, layout, mesh)
                assert owned is not None
                blocks = [points(box) for box in owned]
                group = None
                boxes = strategies.region(operand.slots[0])[0] if operand.slots else None
                if boxes is None:
                    boxes = strategies.result(0)[0]  # type: ignore[index]
                    keys = [
                        tuple(c for c, loop in zip(at, loops, strict=True) if loop == "k")
                        for at in coordinates
                    ]
                    group = [sorted(set(keys)).index(key) for key in keys]
                expected = sent_naively([points(box) for box in boxes], blocks, group)
                found = traffic(operand, strategies, owned[None], mesh)
                assert found[0, 0] == pytest.approx(expected), (loops, layout, operand.shape)


def test_a_device_waits_for_its_slowest_message_or_for_all_where_links_are_serial() -> None:
    """x in rows is gathered whole by all four: 3 blocks of 24 x 4 bytes each, over unlike links."""
    graph = matmul(12, 8, 4)
    (call,), problem = op_calls(graph), make_problem(graph, NEEDED)
    strategies = mesh_strategy_of(call.call, ("j", "j"), make_mesh((2, 2)))
    operand = next(o for o in problem.factors[0].operands if o.shape == (12, 8))
    owned = owned_array((12, 8), (0, 0), (2, 2))
    assert strategies is not None
    assert owned is not None
    for is_serial in (False, True):
        cluster = Cluster.uniform(4, bandwidth=1e6, latency=1e-3)
        timed = seconds_objective(graph, problem, cluster, preset_costs(graph, "a100"))
        timed.is_serial = is_serial
        timed.bandwidth = timed.bandwidth.copy()
        timed.latency = timed.latency.copy()
        timed.bandwidth[2, 1], timed.latency[0, 3] = 1e5, 7e-3
        block = 24 * 4
        fast, slow, late = 1e-3 + block / 1e6, 1e-3 + block / 1e5, 7e-3 + block / 1e6
        # Device 1 waits for 2, device 3 for 0; each has two other messages.
        each = [slow + 2 * fast, late + 2 * fast] if is_serial else [slow, late]
        request = TableRequest(operand, strategies, owned[None], (2, 2))
        assert timed.communication([request])[0] == pytest.approx(np.array([[max(each)]]))


def local_product(graph: Graph, m: int, k: int, n: int) -> float:
    """Seconds by the model of a product of these sizes."""
    other = matmul(m, k, n)
    tensors = {t.name: t for op in other.ops for t in op.outputs}
    return op_seconds(other.ops[-1], tensors, device_model("a100"))


def test_computing_takes_the_share_of_the_largest_local_op() -> None:
    """37 rows on 2 are 18 and 19; a device's share of the whole op is by the model's seconds."""
    graph = matmul(37, 512, 1024)
    cluster = Cluster.uniform(2, bandwidth=1e9)
    costs = Costs({"accelerator": np.array([0.0, 0.0, 8.0])}, "a100")
    problem = make_problem(graph, NEEDED)
    timed = seconds_objective(graph, problem, cluster, costs)
    (factor,) = problem.factors
    tables = CostTables(problem, timed, (2,))
    strategies = tables.strategies(factor, (None,), [0])
    found = dict(zip(strategies.axes, timed.computation(factor, strategies).tolist(), strict=True))
    whole = local_product(graph, 37, 512, 1024)
    for loop, sizes in (("i", (19, 512, 1024)), ("j", (37, 512, 512)), ("k", (37, 256, 1024))):
        expected = 8.0 * local_product(graph, *sizes) / whole
        assert found[(loop,)] == pytest.approx(expected), loop
        assert 3.9 < found[(loop,)] < 8.0
    assert found[(None,)] == pytest.approx(8.0)
    nothing = seconds_objective(
        graph, problem, cluster, Costs({"accelerator": np.zeros(3)}, "a100")
    )
    assert nothing.computation(factor, strategies).tolist() == [0.0] * len(strategies)
    on_k80 = Costs({"accelerator": np.array([0.0, 0.0, 8.0])}, "measured", timed_on="k80")
    assert seconds_objective(graph, problem, cluster, on_k80).model == device_model("k80")
    assert timed.computation(factor, strategies.subset([])).tolist() == []


def test_a_view_that_was_measured_takes_its_time_however_it_is_cut() -> None:
    """The model takes a view for free: no part of it is quicker than the whole."""
    s = Steps()
    s.source("x", (6, 8), "input")
    s.call("flat", "aten.view.default", ["x", [48]], (48,), alias="x")
    graph = s.graph()
    problem = make_problem(graph, NEEDED)
    costs = Costs({"accelerator": np.array([0.0, 3.0])}, "measured")
    timed = seconds_objective(graph, problem, Cluster.uniform(2, bandwidth=1e9), costs)
    (factor,) = problem.factors
    strategies = CostTables(problem, timed, (2,)).strategies(factor, (None,), [0])
    assert (None,) in strategies.axes
    assert timed.computation(factor, strategies).tolist() == [3.0] * len(strategies)


_VALUES_AND_INDICES = tuple(
    Tensor(name=name, bytes=size * 8, shape=(8,), dtype=dtype)
    for name, size, dtype in (("v", 2, "float16"), ("n", 8, "int64"))
)


def test_a_local_op_is_the_call_on_its_shapes_each_result_of_its_own_type() -> None:
    """Values of 2 bytes, indices of 8: of half of the rows."""
    s = Steps()
    s.source("x", (8, 6), "input")
    s.ops.append(Op(
        name="most", kind="aten.max.dim", inputs=("x",), outputs=_VALUES_AND_INDICES,
        arguments={"args": [{"tensor": "x"}, 1]},
    ))  # fmt: skip
    (call,) = op_calls(s.graph())
    loop = next(loop for loop in cuttable_loops(call.number))
    half = axis_strategies_of(call.number, 2).calls(loop)[0]
    for number, rows in ((call.number, 8), (half, 4)):
        local, tensors = local_op(call.op, number)
        assert [(t.shape, t.bytes, t.dtype) for t in local.outputs] == [
            ((rows,), 2 * rows, "float16"), ((rows,), 8 * rows, "int64"),
        ]  # fmt: skip
        (read,) = (tensors[name] for name in local.inputs)
        assert read.shape == (rows, 6)
        assert (local.kind, local.memory) == ("aten.max.dim", "normal")
        assert [t.name for t in tensors.values()] == [
            *local.inputs,
            *(t.name for t in local.outputs),
        ]


def test_a_result_that_is_not_computed_has_no_part_in_a_local_op() -> None:
    s = Steps()
    s.source("x", (8, 6), "input")
    s.ops.append(Op(
        name="three", kind="mylib::three", inputs=("x",), outputs=_VALUES_AND_INDICES,
        arguments={"args": [{"tensor": "x"}], "returns": [None, "v", "n"]},
    ))  # fmt: skip
    (call,) = op_calls(s.graph())
    local, _ = local_op(call.op, call.number)
    assert [(t.bytes, t.dtype) for t in local.outputs] == [(16, "float16"), (64, "int64")]


def test_what_follows_a_tensor_takes_its_least_and_a_share_of_the_rest() -> None:
    """An element-wise op of 5 s, of which launch and fill are fixed; the rest by the share."""
    graph = mlp(40, 4, 8, 6)
    cluster = Cluster.uniform(2, bandwidth=1e9)
    model, names = device_model("a100"), [op.name for op in graph.ops]
    seconds = np.zeros(len(names))
    seconds[names.index("a")] = 5.0
    problem = make_problem(graph, TRAINING)
    timed = seconds_objective(graph, problem, cluster, Costs({"accelerator": seconds}, "a100"))
    root = problem.classes.root["a"]
    variable = problem.variables[problem.numbers[root]]
    fixed = model.launch + model.fill / model.bandwidth
    assert timed.free[root] == pytest.approx((fixed, 5.0 - fixed))
    layouts = [(None,), *((d,) for d in variable.dims)]
    found = timed.layout_cost(variable, layouts, (2,)).tolist()
    assert found == pytest.approx([5.0, *[fixed + (5.0 - fixed) / 2] * (len(layouts) - 1)])
    timed.free = {}
    assert timed.layout_cost(variable, layouts, (2,)).tolist() == [0.0] * len(layouts)
    timed.free, timed.price = {root: (fixed, 5.0 - fixed)}, 0.5
    weight = timed.weights[root]
    priced = timed.layout_cost(variable, layouts, (2,)).tolist()
    shares = [1.0, *[0.5] * (len(layouts) - 1)]
    assert priced == pytest.approx(
        [a + 0.5 * weight * s for a, s in zip(found, shares, strict=True)]
    )


@examples(25)
@given(graph=graphs(max_ops=12))
def test_weights_are_what_is_live_at_the_fullest_moment(graph: Graph) -> None:
    """Storages by owner; what outlives the step always, others from their op to their last use."""
    order = [graph.ops[i] for i in graph.arrays.topological.tolist()]
    tensors = {t.name: t for op in order for t in op.outputs}

    def owner(name: str) -> str:
        while (of := tensors[name].alias_of) is not None:
            name = of
        return name

    born: dict[str, int] = {}
    last: dict[str, int] = {}
    stays: set[str] = set()
    for at, op in enumerate(order):
        for t in op.outputs:
            born.setdefault(t.name, at)
            last[owner(t.name)] = max(last.get(owner(t.name), at), at)
            if t.alias_of is None and op.memory == "residual":
                stays.add(t.name)
        for name in op.inputs:
            last[owner(name)] = max(last[owner(name)], at)
    own = [n for n, t in tensors.items() if t.alias_of is None and t.bytes]
    live = [
        [n for n in own if n not in stays and born[n] <= at <= last[n]] for at in range(len(order))
    ]
    held = [sum(tensors[n].bytes for n in names) for names in live]
    fullest = live[held.index(max(held))]
    expected = {n: float(tensors[n].bytes) for n in own if n in stays or n in fullest}
    problem: Any = SimpleNamespace(classes=TensorClasses(dict.fromkeys(tensors, ())))
    assert memory_weights(graph, problem) == expected


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)])
def test_the_largest_share_of_a_tensor_is_that_of_its_boxes(mesh: tuple[int, ...]) -> None:
    problem = make_problem(matmul(7, 10, 13), NEEDED)
    weights = {v.root: 100.0 + n for n, v in enumerate(problem.variables[1:])}
    rng = np.random.default_rng(0)
    for _ in range(20):
        state, total, owned = [()], 0.0, 0.0
        for variable in problem.variables[1:]:
            layout = tuple(rng.choice([None, 0, 1]) for _ in mesh)
            boxes = owned_boxes(variable.forms[0][0], layout, make_mesh(mesh))
            if boxes is None:
                layout = (None,) * len(mesh)
                boxes = owned_boxes(variable.forms[0][0], layout, make_mesh(mesh))
            assert boxes is not None
            whole = math.prod(variable.forms[0][0])
            share = max(len(points(box)) for box in boxes) / whole
            assert largest_share(variable, layout, mesh) == pytest.approx(share)
            state.append(layout)
            total += weights[variable.root] * share
            owned += 4 * whole * share
        found = State(tuple(state), ())
        assert peak_estimate(problem, weights, found, mesh) == pytest.approx(total)
        assert owned_estimate(problem, found, mesh) == pytest.approx(owned)


def test_a_price_on_memory_adds_to_layouts_and_to_large_fetches() -> None:
    """10 per byte of the share; 24 x 4 bytes fetched count 1 + 96 / 32 times."""
    graph = matmul(12, 8, 4)
    problem = make_problem(graph, NEEDED)
    priced = BytesObjective({"x": 100.0}, price=10.0, scale=32.0)
    x = next(v for v in problem.variables if v.root == "x")
    assert priced.layout_cost(x, [(None,), (0,)], (2,)).tolist() == [1000.0, 500.0]
    w = next(v for v in problem.variables if v.root == "w")
    assert priced.layout_cost(w, [(None,), (0,)], (2,)).tolist() == [0.0, 0.0]
    assert BytesObjective({"x": 100.0}).layout_cost(x, [(None,)], (2,)).tolist() == [0.0]
    plain = CostTables(problem, BytesObjective(), (2,))
    (factor,) = problem.factors
    strategies = plain.strategies(factor, (None,), [0])
    for operand in factor.operands:
        ask = [(operand, strategies, ((0,), (1,)))]
        one = plain.communication(ask)[0]
        other = CostTables(problem, priced, (2,)).communication(ask)[0]
        assert other == pytest.approx(one * (1 + one / 32.0))
        assert one.any()


def by_name(graph: Graph) -> dict[str, Any]:
    return {c.op.name: c for c in op_calls(graph)}


def test_the_batch_is_handed_on_by_the_loops_that_cut_it() -> None:
    """x and target come in; dw1 and dw2 sum over the batch, so no dim of theirs is one."""
    graph = mlp(8, 4, 6, 10)
    dims, loops = batch_dims(graph)
    assert dims == {"x": 0, "target": 0, "h": 0, "a": 0, "y": 0, "dy": 0, "da": 0, "dh": 0,
                    "a.t": 1, "x.t": 1}  # fmt: skip
    assert loops["h"] == loops["y"] == "i"
    assert loops["dw1"] == loops["dw2"] == "k"
    assert "w1.new" not in loops
    problem = make_problem(graph, TRAINING)
    batch = batch_variables(problem, dims)
    members = {
        name: (root, problem.classes.dims[name])
        for root, names in problem.classes.members.items()
        for name in names
    }
    for name, dim in dims.items():
        root, own = members[name]
        assert own[batch[root]] == dim
    assert members["w1"][0] not in batch
    assert batch_dims(graph, op_calls(graph)) == (dims, loops)


def test_a_class_runs_over_the_batch_by_a_dim_that_it_has() -> None:
    """`stack` is cut along its rows, of which the class has none; `more` along what is left."""
    classes = TensorClasses({"row": (6,), "stack": (4, 6), "more": (6, 4)})
    assert classes.merge("row", "stack", (1,), hard=True)
    assert classes.merge("stack", "more", (1, 0), hard=True)
    assert classes.members.keys() == {"row"}
    problem: Any = SimpleNamespace(classes=classes, variables=(None, SimpleNamespace(root="row")))
    assert batch_variables(problem, {"stack": 0}) == {}
    assert batch_variables(problem, {"stack": 0, "more": 0}) == {"row": 0}


def test_of_tensors_that_disagree_on_the_batch_the_first_of_a_class_is_followed() -> None:
    """Two inputs, one of them turned around: both have the samples in dim 0."""
    classes = TensorClasses({"x": (4, 4), "y": (4, 4), "y.t": (4, 4)})
    assert classes.merge("x", "y.t")
    assert classes.merge("y.t", "y", (1, 0))
    problem: Any = SimpleNamespace(classes=classes, variables=(None, SimpleNamespace(root="x")))
    assert batch_variables(problem, {"x": 0, "y": 0, "y.t": 1}) == {"x": 0}
    assert batch_variables(problem, {"y": 0, "y.t": 1}) == {"x": 1}


def test_which_dims_calls_cut_together() -> None:
    s = Steps()
    s.source("x", (4, 6), "input")
    s.source("row", (6,))
    s.call("sum", "aten.add.Tensor", ["x", "row"], (4, 6))
    s.t("turned", "sum")
    s.call("total", "aten.sum.dim_IntList", ["turned", [0]], (6 - 2,))
    s.call("part", "aten.slice.Tensor", ["x", 1, 0, 3], (4, 3), alias="x")
    s.call("zeros", "aten.zeros_like.default", ["x"], (4, 6))
    s.call("scaled", "aten.mul.Tensor", ["x", s.source("number", ())], (4, 6))
    s.mm("product", "x", s.source("w", (6, 3)))
    calls = by_name(s.graph())

    def aligned(name: str) -> Any:
        return alignment_of(calls[name].number)

    def slot(name: str, tensor: str) -> Any:
        return next(p for p, n in calls[name].places.items() if n == tensor)

    add = aligned("sum")
    assert add.pairs == {slot("sum", "x"): (0, 1)}
    assert not add.is_total  # the row lacks a dim
    assert sorted(cuts[slot("sum", "x")] for cuts in add.loops.values()) == [0, 1]
    (along,) = [cuts for cuts in add.loops.values() if slot("sum", "row") in cuts]
    assert along == {slot("sum", "x"): 1, slot("sum", "row"): 0, 0: 1}
    turn = aligned("turned")
    assert turn.pairs == {slot("turned", "sum"): (1, 0)}
    assert turn.is_total
    for dim in (0, 1):
        loop = free_loop(calls["turned"].number, dim)
        assert loop is not None
        assert turn.loops[loop][0] == dim
        assert turn.loops[loop][slot("turned", "sum")] == 1 - dim
    rows_alone = [cuts.get(slot("part", "x")) for cuts in aligned("part").loops.values()]
    assert rows_alone == [0, None]  # 3 of 6 columns are not all of them
    assert aligned("part").pairs == {}
    assert aligned("zeros").pairs == {slot("zeros", "x"): (0, 1)}
    assert aligned("zeros").is_total
    assert aligned("scaled").is_total  # a number has no dims that could be cut
    total = aligned("total")
    assert total.pairs == {}
    assert not total.is_total
    product = aligned("product")
    assert product.pairs == {}
    assert free_loop(calls["product"].number, 1) == "j"
    assert free_loop(calls["product"].number, 2) is None


def costs_of(
    ops: Iterable[Op], loops: str, layouts: dict[str, int], graph: Graph, axes: int = 1
) -> float:
    """Elements that products move, each by its best loops among some.

    What is not laid out yet counts nothing.
    """
    shapes = {t.name: t.shape for op in graph.ops for t in op.outputs}
    total = 0.0
    for op in ops:
        names = (op.outputs[0].name, *op.inputs)
        sizes = dict(zip("ijk", (*shapes[names[0]], shapes[names[1]][1]), strict=True))
        total += min(
            sum(
                _moved(sizes, (loop,) * axes, dims, (layouts[name],) * axes, not place, False)
                for place, (name, dims) in enumerate(zip(names, ("ij", "ik", "kj"), strict=True))
                if name in layouts
            )
            for loop in loops
        )
    return total


SIZES = [(4, 8, 12, 16), (16, 4, 8, 4), (8, 8, 4, 12), (12, 4, 16, 8), (8, 16, 4, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_baselines_choose_as_their_papers_say(sizes: tuple[int, ...]) -> None:
    """On two devices; equal chop on four, along one dim in quarters."""
    graph, two, four = chain(*sizes), make_mesh((2,)), make_mesh((2, 2))
    tensors = [t for op in graph.ops for t in op.outputs]
    names, ops = [t.name for t in tensors], [op for op in graph.ops if not op.is_source]

    def found(name: str, mesh: Mesh = two) -> int:
        return total_bytes(graph, BASELINES[name](graph, mesh)) // 4

    assert found("allrow-greedy") == costs_of(ops, "ijk", dict.fromkeys(names, 0), graph)
    rows = itertools.product((0, 1), repeat=len(names))
    every = [dict(zip(names, row, strict=True)) for row in rows]
    assert found("icml18") == min(costs_of(ops, "ij", row, graph) for row in every)
    assert found("equal-chop", four) == min(costs_of(ops, "ijk", row, graph, 2) for row in every)
    chosen: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda t: -t.bytes):
        near = [op for op in ops if tensor.name in (*op.inputs, op.outputs[0].name)]
        options = [costs_of(near, "ijk", chosen | {tensor.name: dim}, graph) for dim in (0, 1)]
        chosen[tensor.name] = options.index(min(options))
    greedy = BASELINES["spartan"](graph, two)
    assert {n: layout[0] for n, layout in greedy.layouts.items()} == chosen
    assert found("spartan") == costs_of(ops, "ijk", chosen, graph)


def test_strategies_of_a_call_are_its_loops_on_each_axis() -> None:
    graph = matmul(6, 4, 10)
    (call,), problem = op_calls(graph), make_problem(graph, NEEDED)
    assert set(cuttable_loops(call.number)) == set("ijk")
    tables = CostTables(problem, BytesObjective(), (2, 2))
    (factor,) = problem.factors
    found = tables.strategies(factor, (None, None), [0, 1])
    assert sorted(found.axes) == sorted(itertools.product("ijk", repeat=2))
    second = tables.strategies(factor, ("k", None), [1])
    assert sorted(second.axes) == [("k", loop) for loop in "ijk"]
    assert [any(flags[0]) for flags in second.reduced] == [True] * 3
    only = tables.limited(strategy=lambda flags: not any(map(any, flags)))
    assert sorted(only.strategies(factor, (None, None), [0, 1]).axes) == sorted(
        itertools.product("ij", repeat=2)
    )
    named = tables.limited(loop=lambda factor: "k")
    assert list(named.strategies(factor, (None, None), [0, 1]).axes) == [("k", "k")]
    sums = tables.limited(strategy=lambda flags: all(map(all, flags)))  # other limits, same factor
    assert list(sums.strategies(factor, (None, None), [0, 1]).axes) == [("k", "k")]
    short = CostTables(make_problem(matmul(3, 4, 10), NEEDED), BytesObjective(), (2, 2))
    (factor,) = short.problem.factors
    assert len(short.strategies(factor, ("i", "i"), ())) == 0  # three rows make no four parts
    (factor,) = problem.factors
    rows = tables.limited(layout=lambda variable, layout: layout[-1] == 0)
    for variable in problem.variables[1:]:
        assert rows.layouts(variable, (None, None), [0, 1]) == ((0, 0),)
        assert set(tables.layouts(variable, (None, None), [0, 1])) == set(
            itertools.product((0, 1), repeat=2)
        )
        assert set(tables.layouts(variable, (1, None), [1])) == {(1, 0), (1, 1)}

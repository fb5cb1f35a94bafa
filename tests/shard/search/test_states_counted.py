"""What tables say of any choice is what its sharding moves and takes, element by element.

Choices are drawn, not searched: a table that is wrong where the optimum is not shows as well. The
graphs are coarsened to each level, so the sum over factors also says what each stands for.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pardnn.cluster import Cluster, Device, Link
from pardnn.cost.costs import preset_costs
from pardnn.cost.presets import device_model
from pardnn.cost.roofline import op_seconds
from pardnn.graph.ir import Graph, Op, Tensor, writes
from pardnn.plan.mesh import make_mesh, owned_boxes
from pardnn.shard.partition.call import Call, call_of
from pardnn.shard.partition.per_device import LocalOp, input_names, local_ops
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING
from pardnn.shard.search.cost_tables import NEVER, CostTables, State
from pardnn.shard.search.dynamic_program import WHOLE, layout_cost
from pardnn.shard.search.objective import Objective
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.objective_seconds import seconds_objective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import expanded
from pardnn.shard.sharding import Sharding
from testbed.hand_graphs import Steps, mlp
from testbed.naive_bytes import indices, naive_bytes
from tests.shard.search.test_free_gradients import scan
from tests.shard.search.test_kept_coarse import layered, recurrent, views
from tests.shard.search.test_kept_shardings import attention
from tests.shard.search.test_naive_twins import sent_naively

pytestmark = pytest.mark.jit


def turned() -> Graph:
    """A sum with its own transpose; a write that a row is stretched for; a sum to one number."""
    s = Steps()
    s.source("x", (6, 6), "input")
    s.source("w", (6, 6))
    s.source("row", (6,), "input")
    s.call("both", "aten.add.Tensor", ["x", s.t("x.t", "x")], (6, 6))
    s.call("w.new", "aten.add_.Tensor", ["w", "row"], (6, 6), alias="w")
    s.call("zeros", "aten.zeros_like.default", ["x"], (6, 6))
    s.call("more", "aten.add.Tensor", ["both", "zeros"], (6, 6))
    s.call("sum", "aten.sum.default", [s.mm("y", "more", "w.new")], ())
    s.call("scaled", "aten.mul.Tensor", ["both", "sum"], (6, 6))
    return s.graph()


GRAPHS = {
    "turned": turned(), "mlp": mlp(5, 4, 6, 3), "recurrent": recurrent(3, batch=3, width=4),
    "layers": layered(3), "views": views(), "scan": scan(4, 3, 5), "attention": attention(),
}  # fmt: skip
LEVELS = (NEEDED, TRAINING, REPEATED)


def drawn(tables: CostTables, rng: np.random.Generator) -> tuple[State, float, float]:
    """A choice by chance; what the tables say of its layouts, and of its ops."""
    problem, axes = tables.problem, range(len(tables.axis_sizes))
    none = (None,) * len(tables.axis_sizes)
    options = [tables.layouts(variable, none, axes) for variable in problem.variables]
    at = [int(rng.integers(len(each))) for each in options]
    alone = sum(
        float(layout_cost(tables, variable, each)[chosen])
        for variable, each, chosen in zip(problem.variables, options, at, strict=True)
    )
    total, loops = 0.0, []
    for factor in problem.factors:
        found = tables.strategies(factor, none, axes)
        costs = tables.objective.computation(factor, found)
        for operand in factor.operands:
            asked = [(operand, found, options[operand.variable])]
            costs = costs + tables.communication(asked)[0][:, at[operand.variable]]
        one = int(rng.choice(np.flatnonzero(costs < NEVER)))
        total += len(factor.ops) * float(costs[one])
        loops.append(found.axes[one])
    layouts = tuple(each[chosen] for each, chosen in zip(options, at, strict=True))
    return State(layouts, tuple(loops)), alone, total


def choices(
    graph: Graph, level: int, objective: Any, shape: tuple[int, ...], count: int
) -> Iterable[tuple[CostTables, Sharding, float, float]]:
    """Some choices as shardings, with what the tables say of each."""
    problem = make_problem(graph, level)
    tables = CostTables(problem, objective(problem), shape)
    assert isinstance(tables.objective, Objective)
    rng = np.random.default_rng(level)
    for _ in range(count):
        state, alone, total = drawn(tables, rng)
        yield tables, expanded(problem, state, make_mesh(shape), graph), alone, total


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3,)])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_choice_moves_what_its_tables_say(name: str, shape: tuple[int, ...]) -> None:
    """What is written in place may be left whole where it could be cut, at a forbidding price."""
    for level in LEVELS:
        found = choices(GRAPHS[name], level, lambda _: BytesObjective(), shape, 3)
        for tables, sharding, alone, total in found:
            assert total == naive_bytes(GRAPHS[name], sharding)
            whole = 0
            for variable in tables.problem.variables[1:]:
                every = tables.layouts(variable, (None,) * len(shape), range(len(shape)))
                least = min(layout.count(None) for layout in every)
                whole += sharding.layouts[variable.root].count(None) - least
            assert alone == pytest.approx(WHOLE * whole)


def islands(is_serial: bool) -> Cluster:
    """Four devices, no two links alike."""
    devices = tuple(Device(name=f"d{i}") for i in range(4))
    links = tuple(
        Link(
            source=f"d{i}", target=f"d{j}", bandwidth=1e8 * (1 + i + 3 * j), latency=1e-7 * (2 + j)
        )
        for i, j in itertools.permutations(range(4), 2)
    )
    return Cluster(
        devices=devices, links=links, link_model="serial" if is_serial else "independent"
    )


def local_seconds(op: Op, local: LocalOp) -> float:
    """What a device's part of an op takes by the model; a write is no view of what it writes."""
    call = local.call
    tensors = {
        name: Tensor(name=name, bytes=4 * math.prod(shape), shape=shape, dtype="float32")
        for name, shape in call.shapes.items()
    }
    made = tuple(
        Tensor(name=f"made {i}", bytes=4 * math.prod(shape), shape=shape, dtype="float32")
        for i, shape in enumerate(call.outputs)
        if shape is not None
    )
    mine = replace(
        op, inputs=tuple(tensors), outputs=made, memory="normal" if writes(op) else op.memory,
        arguments={"args": list(call.args), "kwargs": dict(call.kwargs)},
    )  # fmt: skip
    return op_seconds(mine, tensors | {t.name: t for t in made}, device_model("k80"))


def naive_seconds(
    graph: Graph, sharding: Sharding, cluster: Cluster, whole: dict[str, float], free: set[str]
) -> float:
    """Sum over ops: the slowest device's computing, and its slowest messages or all of them.

    What follows its tensors takes its launch and fill, and the largest share of the rest.
    """
    tensors = {t.name: t for op in graph.ops for t in op.outputs}
    model, total = device_model("k80"), 0.0
    for op in graph.ops:
        if op.is_source:
            continue
        call = call_of(op, tensors)
        found = local_ops(call, sharding.axes[op.name], sharding.mesh)
        assert found is not None
        returned = (op.arguments or {}).get("returns") or [t.name for t in op.outputs]
        for name in dict.fromkeys([*op.inputs, *(t.name for t in op.outputs)]):
            outputs = [i for i, made in enumerate(returned) if made == name]
            total += slowest_messages(call, found, outputs, tensors[name], sharding, cluster)
        seconds, own = whole[op.name], op.outputs[0]
        if op.name in free:
            boxes = owned_boxes(own.shape or (), sharding.layouts[own.name], sharding.mesh)
            share = max(math.prod(b - a for a, b in box) for box in boxes or ())
            fixed = min(seconds, model.launch + model.fill / model.bandwidth)
            total += fixed + (seconds - fixed) * share / math.prod(own.shape or ())
        elif seconds:
            alone = local_ops(call, (None,), make_mesh((1,)))
            assert alone is not None
            slowest = max(local_seconds(op, local) for local in found)
            total += seconds * slowest / local_seconds(op, alone[0])
    return total


def slowest_messages(
    call: Call, found: tuple[LocalOp, ...], outputs: list[int], tensor: Tensor, sharding: Sharding,
    cluster: Cluster,
) -> float:  # fmt: skip
    """Seconds of the device that waits longest for one tensor of an op."""
    shape, mesh = tensor.shape or (), sharding.mesh
    boxes = owned_boxes(shape, sharding.layouts[tensor.name], mesh)
    assert boxes is not None
    owned = [indices(box, shape) for box in boxes]
    sent, seen = np.zeros((mesh.size, mesh.size)), list[Any]()
    for slot, name in input_names(call).items():
        regions = [local.regions[slot] for local in found]
        if name != tensor.name or not regions[0].content:
            continue
        needed = [indices(region.box, shape) for region in regions]
        if needed not in seen:
            seen.append(needed)
            sent += sent_naively(needed, owned, None)
    for number in outputs:
        results = [r for local in found if (r := local.results[number]) is not None]
        if results:
            flags = [reducer is not None for reducer in results[0].reducers]
            keys = [
                tuple(c for c, flag in zip(mesh.coordinates(d), flags, strict=True) if flag)
                for d in range(mesh.size)
            ]
            group = [sorted(set(keys)).index(key) for key in keys]
            sent += sent_naively([indices(r.box, shape) for r in results], owned, group)
    arrays, item = cluster.arrays, tensor.bytes // math.prod(shape)
    waits = [
        [
            arrays.latency[s, r] + n * item / arrays.bandwidth[s, r] if n else 0.0
            for s, n in enumerate(row)
        ]
        for r, row in enumerate(sent.tolist())
    ]
    return max(sum(row) if cluster.link_model == "serial" else max(row) for row in waits)


@pytest.mark.parametrize("is_serial", [False, True])
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "attention"])  # large
def test_a_choice_takes_what_its_tables_say(name: str, is_serial: bool) -> None:
    """On four devices with unlike links; ops that follow their tensors count with these."""
    graph, cluster = GRAPHS[name], islands(is_serial)
    costs = preset_costs(graph, "k80")
    whole = dict(zip((op.name for op in graph.ops), costs.seconds["accelerator"], strict=True))
    for level in LEVELS:
        found = choices(
            graph, level, lambda p: seconds_objective(graph, p, cluster, costs), (2, 2), 2
        )
        for tables, sharding, alone, total in found:
            free = {c.op.name for c in tables.problem.free}
            expected = naive_seconds(graph, sharding, cluster, whole, free)
            assert alone + total == pytest.approx(expected, rel=1e-9)

"""Coarse graphs, and what the search makes of them, where steps are too large to choose at once.

Small graphs, with the bounds lowered from which on the search coarsens, goes axis by axis and
polishes; the choices are those that are kept as text.
"""

import dataclasses
import math
from typing import Any

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import preset_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import baselines, recursion, tofu
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.batch import batch_dims, batch_variables
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING
from pardnn.shard.search.communication_bytes import total_bytes
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import Factor, Problem, make_problem
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.sharding import FixedLayouts
from testbed.hand_graphs import Steps, mlp
from tests.kept import assert_kept
from tests.shard.search.test_free_gradients import scan
from tests.shard.search.test_kept_shardings import attention, pair_of_islands, text_of

pytestmark = pytest.mark.jit


def recurrent(steps: int, batch: int = 6, width: int = 8) -> Graph:
    """A cell unrolled, a head, the way back, gradients summed over the steps, momentum."""
    s, of, square = Steps(), {}, (width, width)
    for name, shape in (("h0", (batch, width)), ("target", (batch, 10))):
        s.source(name, shape, "input")
    for name in ("w", "u", "m"):
        s.source(name, square)
    s.source("v", (width, 10))
    s.source("b", (width,))
    for t in range(1, steps + 1):
        s.source(f"x{t}", (batch, width), "input")
        s.mm(f"p{t}", f"h{t - 1}", "w")
        s.call(f"q{t}", "aten.addmm.default", ["b", f"x{t}", "u"], (batch, width))
        s.call(f"s{t}", "aten.add.Tensor", [f"p{t}", f"q{t}"], (batch, width))
        s.call(f"h{t}", "aten.relu.default", [f"s{t}"], (batch, width))
        of |= {f"{name}{t}": (f"m.py:{line}", "cell") for line, name in enumerate("pqsh")}
    last = f"h{steps}"
    s.mm("y", last, "v")
    s.call("dy", "aten.sub.Tensor", ["y", "target"], (batch, 10))
    s.mm("dv", s.t("h.t", last, of="y"), "dy", of="y")
    s.mm(f"d{last}", "dy", s.t("v.t", "v", of="y"), of="y")
    for t in range(steps, 0, -1):
        s.call(f"ds{t}", "aten.threshold_backward.default", [f"dh{t}", f"s{t}", 0],
               (batch, width), of=f"h{t}")  # fmt: skip
        s.mm(f"dw{t}", s.t(f"h{t}.t", f"h{t - 1}", of=f"p{t}"), f"ds{t}", of=f"p{t}")
        s.mm(f"du{t}", s.t(f"x{t}.t", f"x{t}", of=f"q{t}"), f"ds{t}", of=f"q{t}")
        s.call(f"db{t}", "aten.sum.dim_IntList", [f"ds{t}", [0]], (width,), of=f"q{t}")
        of |= {f"{n}{t}": (f"m.py:{i}", "cell") for i, n in enumerate(("ds", "dw", "du", "db"))}
        if t > 1:
            s.mm(f"dh{t - 1}", f"ds{t}", s.t(f"w{t}.t", "w", of=f"p{t}"), of=f"p{t}")
            of[f"dh{t - 1}"] = of[f"w{t}.t"] = ("m.py:0", "cell")
    for name, shape in (("dw", square), ("du", square), ("db", (width,))):
        for t in range(steps - 1, 0, -1):
            one = f"{name}{steps}" if t == steps - 1 else f"{name}.sum{t + 1}"
            s.call(f"{name}.sum{t}", "aten.add.Tensor", [one, f"{name}{t}"], shape)
    s.call("m.new", "aten.add_.Tensor", ["m", "dw.sum1"], square, alias="m")
    s.update("w", "m.new")
    for name in "ub":
        s.update(name, f"d{name}.sum1")
    s.update("v", "dv")
    return with_lines(s, of)


def layered(layers: int) -> Graph:
    """Equal layers of a product, a skip and a softmax; forward alone."""
    s, of = Steps(), {}
    last = s.source("x", (6, 8), "input")
    for i in range(layers):
        weight, bias = s.source(f"net.{i}.w", (8, 8)), s.source(f"net.{i}.b", (8,))
        made = s.call(f"y{i}", "aten.addmm.default", [bias, last, weight], (6, 8))
        soft = s.call(f"p{i}", "aten._softmax.default", [made, 1, False], (6, 8))
        last = s.call(f"z{i}", "aten.add.Tensor", [soft, last], (6, 8))
        of |= {f"{n}{i}": (f"m.py:{line}", f"net.{i}") for line, n in enumerate("ypz")}
    return with_lines(s, of)


def views() -> Graph:
    """Writes through views that drop, turn, cut or add dims; dims of one; results left out."""
    s = Steps()
    s.source("x", (6, 8), "input")
    s.source("row", (8,), "input")
    s.source("thin", (6, 1), "input")
    s.source("scale", ())
    for name in ("w", "u", "v"):
        s.source(name, (6, 8))
    s.call("w.row", "aten.select.int", ["w", 0, 2], (8,), alias="w")
    s.call("w.row.new", "aten.add_.Tensor", ["w.row", "row"], (8,), alias="w.row")
    s.call("u.t", "aten.t.default", ["u"], (8, 6), alias="u")
    s.call("x.t", "aten.t.default", ["x"], (8, 6), alias="x")
    s.call("u.t.new", "aten.add_.Tensor", ["u.t", "x.t"], (8, 6), alias="u.t")
    s.call("v.part", "aten.slice.Tensor", ["v", 1, 0, 4], (6, 4), alias="v")
    s.call("v.part.new", "aten.mul_.Scalar", ["v.part", 2.0], (6, 4), alias="v.part")
    s.call("v.more", "aten.unsqueeze.default", ["v", 1], (6, 1, 8), alias="v")
    s.call("v.more.new", "aten.mul_.Scalar", ["v.more", 2.0], (6, 1, 8), alias="v.more")
    s.call("thin.exp", "aten.exp.default", ["thin"], (6, 1))
    s.call("wide", "aten.mul.Tensor", ["x", "thin.exp"], (6, 8))
    s.call("scaled", "aten.mul.Tensor", ["wide", "scale"], (6, 8))
    s.call("square", "aten.mul.Tensor", ["scaled", "scaled"], (6, 8))
    s.mm("gram", "square", s.t("square.t", "square"))
    (mean, norm, rest), made = ("mean", "norm", "rest"), s.shapes
    args = [{"tensor": "square"}, [8], None, None, 1e-5]
    outputs = tuple(
        Tensor(name=name, bytes=4 * math.prod(shape), shape=shape, dtype="float32")
        for name, shape in ((norm, (6, 8)), (rest, (6, 1)))
    )
    s.ops.append(
        Op(
            name=mean,
            kind="aten.native_layer_norm.default",
            inputs=("square",),
            outputs=outputs,
            arguments={"args": args, "returns": [norm, None, rest]},
        )
    )
    made |= {tensor.name: tensor.shape for tensor in outputs}
    s.call("last", "aten.mul.Tensor", [norm, rest], (6, 8))
    return s.graph()


def with_lines(steps: Steps, of: dict[str, tuple[str, str]]) -> Graph:
    return build_graph("by hand", [
        dataclasses.replace(op, source=of[op.name][0], module=of[op.name][1])
        if op.name in of else op
        for op in steps.ops
    ])  # fmt: skip


GRAPHS = {
    "mlp": mlp(12, 24, 36, 8), "attention": attention(), "recurrent": recurrent(3),
    "layers": layered(3), "views": views(), "scan": scan(8, 4, 16),
}  # fmt: skip


def words(dims: Any) -> str:
    return "".join("-" if d is None else str(d) for d in dims)


def factor_text(problem: Problem, factor: Factor) -> str:
    operands = [
        f"{problem.variables[o.variable].root}/{words(o.dims)}{'!' * o.is_local}"
        f"{list(o.slots)}{list(o.outputs)}"
        for o in factor.operands
    ]
    return f"{'+'.join(c.op.name for c in factor.ops)}: {' '.join(operands)}"


CASES = [(name, level, True) for name in GRAPHS for level in (NEEDED, TRAINING, REPEATED)]


@pytest.mark.parametrize(
    ("name", "level", "tied"), [*CASES, ("recurrent", REPEATED, False), ("scan", TRAINING, False)]
)
def test_coarse_graphs_are_those_that_are_kept(name: str, level: int, tied: bool) -> None:
    graph = GRAPHS[name]
    problem = make_problem(graph, level, tied=tied)
    batch = batch_variables(problem, batch_dims(graph)[0])
    lines = [f"{name}, level {level}, {'tied' if tied else 'untied'}"]
    for variable in problem.variables[1:]:
        members = problem.classes.members[variable.root]
        text = " ".join(f"{m}/{words(problem.classes.dims[m])}" for m in members)
        marks = f"{'!' * variable.is_written}{len(variable.forms)} {variable.bytes}"
        lines.append(f"{text}: {words(variable.dims)}{marks} {batch.get(variable.root, '-')}")
    lines += [factor_text(problem, factor) for factor in problem.factors]
    lines.append(" ".join(["free:", *(c.op.name for c in problem.free)]))
    assert_kept("coarse.txt", lines)


def lower_bounds(monkeypatch: pytest.MonkeyPatch, *, many: bool) -> None:
    """Let small graphs be searched as large ones are."""
    for module in (recursion, tofu, baselines):
        monkeypatch.setattr(module, "FEW_FACTORS", 0)
    monkeypatch.setattr(tofu, "FEW_CALLS", 0)
    monkeypatch.setattr(recursion, "SMALL_STRATEGIES", 0)
    if many:
        monkeypatch.setattr(recursion, "MANY_FACTORS", 2)
        monkeypatch.setattr(tofu, "MANY_FACTORS", 2)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_found_axis_by_axis_is_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, name: str, many: bool
) -> None:
    lower_bounds(monkeypatch, many=many)
    graph, lines = GRAPHS[name], [f"{name} axis by axis, {'many' if many else 'few'}"]
    costs = preset_costs(graph, "k80")
    if not many:
        found = find_sharding(graph, make_mesh((2, 2)), memory_price=4.0)
        lines.append(f"at a price: {found.cost:g}, {text_of(graph, found.sharding)}")
    for shape in ((2, 2, 2),) if many and name != "attention" else ((2, 2), (3, 2)):
        found = find_sharding(graph, make_mesh(shape))
        assert found.cost == total_bytes(graph, found.sharding)
        lines.append(f"{shape}: {found.cost:g}, {found.num_factors}")
        lines.append(text_of(graph, found.sharding))
    cluster = Cluster.uniform(4, bandwidth=1e12, latency=1e-9) if many else pair_of_islands()
    for capacity in (None, 900):
        found = find_sharding(graph, cluster, "seconds", costs=costs, capacity=capacity)
        lines.append(f"{capacity}: {found.cost:.6g} s, {found.level}")
        lines.append(text_of(graph, found.sharding))
    assert_kept("coarse.txt", lines)


@pytest.mark.parametrize("algorithm", BASELINES)
def test_baselines_of_repeated_ops_are_those_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    lower_bounds(monkeypatch, many=False)
    lines = [f"repeated by {algorithm}"]
    for name in ("recurrent", "layers"):
        found = BASELINES[algorithm](GRAPHS[name], make_mesh((2, 2)))
        lines.append(text_of(GRAPHS[name], found))
    assert_kept("coarse.txt", lines)


def test_state_that_stays_is_not_freed_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is memory that has a price: the last pass knows of neither."""
    lower_bounds(monkeypatch, many=False)
    graph, mesh = GRAPHS["scan"], make_mesh((2,))
    asked: list[str] = []
    monkeypatch.setattr(tofu, "free_gradients", lambda *_: asked.append("asked"))
    find_sharding(graph, mesh)
    assert asked.pop() == "asked"
    for layout in ((0,), (1,)):
        found = find_sharding(graph, mesh, fixed=FixedLayouts(mesh, {"w": layout}))
        assert found.sharding.layouts["w"] == layout
    find_sharding(graph, mesh, memory_price=1.0)
    assert asked == []


#: Two axes at a time; state that stays cut while the others are polished.
POLISHED = [((2, 2, 2), {}), ((3, 2, 2), {}), ((2, 2), {"w1": (1, 0)}),
            ((2, 2, 2), {"w2": (0, -1, 1)})]  # fmt: skip


@pytest.mark.parametrize(("shape", "layouts"), POLISHED)
def test_what_polish_makes_of_odd_sizes_is_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], layouts: dict[str, Any]
) -> None:
    """The joint choice is bounded so that two axes are chosen at once, three are not."""
    graph, mesh = mlp(23, 17, 29, 19), make_mesh(shape)
    monkeypatch.setattr(recursion, "SMALL_STRATEGIES", 100)
    fixed = FixedLayouts(mesh, layouts) if layouts else None
    lines = [f"odd sizes on {shape}, {layouts} stay"]
    tables = CostTables(make_problem(graph, TRAINING, fixed=fixed), BytesObjective(), shape)
    for start in (recursion.recursive_search(tables), recursion.best_state(tables)):
        found = recursion.polished(tables, start)
        sharding = recursion.expanded(tables.problem, found.state, mesh, graph)
        lines.append(f"{start.cost:g}, {found.cost:g}: {text_of(graph, sharding)}")
    assert_kept("coarse.txt", lines)

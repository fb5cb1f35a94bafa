"""Shardings of small steps, by each algorithm and objective, are those that are kept as text."""

import pytest

from pardnn.cluster import Cluster, Device, Link
from pardnn.cost.costs import preset_costs
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Mesh, make_mesh
from pardnn.shard.search.baselines import BASELINES
from pardnn.shard.search.communication_bytes import total_bytes
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.sharding import FixedLayouts, Sharding
from testbed.hand_graphs import Steps, chain, mlp
from tests.kept import assert_kept
from tests.shard.search.test_coarsening import unrolled

pytestmark = pytest.mark.jit


def attention() -> Graph:
    """A head with a skip, a mean over the samples, and a product that reads all of them again."""
    s = Steps()
    s.source("x", (6, 8, 12), "input")
    s.source("w", (12, 24))
    s.source("bias", (24,))
    s.call("rows", "aten.view.default", ["x", [48, 12]], (48, 12), alias="x")
    s.call("p", "aten.addmm.default", ["bias", "rows", "w"], (48, 24))
    s.call("q", "aten.view.default", ["p", [6, 8, 24]], (6, 8, 24), alias="p")
    s.call("left", "aten.slice.Tensor", ["q", 2, 0, 12], (6, 8, 12), alias="q")
    s.call("right", "aten.slice.Tensor", ["q", 2, 12, 24], (6, 8, 12), alias="q")
    s.call("r.t", "aten.permute.default", ["right", [0, 2, 1]], (6, 12, 8), alias="right")
    s.call("scores", "aten.bmm.default", ["left", "r.t"], (6, 8, 8))
    s.call("soft", "aten._softmax.default", ["scores", -1, False], (6, 8, 8))
    s.call("mixed", "aten.bmm.default", ["soft", "right"], (6, 8, 12))
    s.call("skip", "aten.add.Tensor", ["mixed", "x"], (6, 8, 12))
    s.call("mean", "aten.mean.dim", ["skip", [0], False], (8, 12))
    s.call("both", "aten.constant_pad_nd.default", ["mean", [0, 12], 0.0], (8, 24))
    s.call("exp", "aten.exp.default", ["both"], (8, 24))
    s.call("total", "aten.sum.default", ["exp"], ())
    return s.graph()


def pair_of_islands() -> Cluster:
    """Four devices, two and two by a fast link, with a slow one in between."""
    names = ("d0", "d1", "d2", "d3")
    devices = tuple(Device(name=name, type="accelerator", memory=2**30) for name in names)
    links = tuple(
        Link(source=one, target=other, bandwidth=1e9 if i // 2 != j // 2 else 1e11, latency=1e-5)
        for i, one in enumerate(names)
        for j, other in enumerate(names)
        if i != j
    )
    return Cluster(devices=devices, links=links)


GRAPHS = {
    "mlp": mlp(12, 24, 36, 8), "wide mlp": mlp(8, 64, 256, 32), "odd mlp": mlp(7, 5, 9, 3),
    "chain": chain(6, 12, 4, 20, 8), "time steps": unrolled(["m.py:7"] * 4),
    "attention": attention(),
}  # fmt: skip
MESHES = [make_mesh((2,)), make_mesh((2, 2)), make_mesh((3, 2))]


def text_of(graph: Graph, found: Sharding) -> str:
    words = [
        f"{name}:{''.join('-' if dim is None else str(dim) for dim in layout)}"
        for name, layout in found.layouts.items()
    ]
    loops = ["".join(loop or "-" for loop in axes) for axes in found.axes.values()]
    return f"{total_bytes(graph, found)} bytes, {' '.join(words)}, {' '.join(loops)}"


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.shape))
@pytest.mark.parametrize("name", GRAPHS)
def test_shardings_by_bytes_are_those_that_are_kept(name: str, mesh: Mesh) -> None:
    graph, lines = GRAPHS[name], [f"{name} on {mesh.shape}"]
    for price in (0.0, 1.0):
        found = find_sharding(graph, mesh, memory_price=price)
        lines.append(f"tofu {found.cost:g} {found.is_exact}: {text_of(graph, found.sharding)}")
    for algorithm, choose in BASELINES.items():
        lines.append(f"{algorithm}: {text_of(graph, choose(graph, mesh))}")
    assert_kept("shardings.txt", lines)


#: State that stays: by graph, mesh and layouts.
FIXED = [
    ("mlp", (2, 2), {"w1": (1, 0), "w2": (None, 0)}),
    ("odd mlp", (3,), {"w2": (None,)}),
    ("chain", (2,), {"w1": (0,), "w3": (1,)}),
]


@pytest.mark.parametrize(("name", "shape", "layouts"), FIXED)
def test_shardings_around_state_are_those_that_are_kept(
    name: str, shape: tuple[int, ...], layouts: dict[str, tuple[int | None, ...]]
) -> None:
    graph, fixed = GRAPHS[name], FixedLayouts(make_mesh(shape), layouts)
    lines = [f"{name} on {shape}, {layouts} stay"]
    found = find_sharding(graph, fixed.mesh, fixed=fixed)
    lines.append(f"tofu {found.cost:g} {found.is_exact}: {text_of(graph, found.sharding)}")
    for algorithm, choose in BASELINES.items():
        if algorithm == "equal-chop" and len(shape) > 1:
            with pytest.raises(UsageError, match="along one axis"):
                choose(graph, fixed)
            continue
        sharding = choose(graph, fixed)
        assert {kept: sharding.layouts[kept] for kept in layouts} == layouts
        lines.append(f"{algorithm}: {text_of(graph, sharding)}")
    cluster = Cluster.uniform(fixed.mesh.size)
    costs = preset_costs(graph, "k80")
    found = find_sharding(graph, cluster, "seconds", costs=costs, fixed=fixed)
    lines.append(f"seconds {found.cost:.6g}: {text_of(graph, found.sharding)}")
    assert_kept("shardings.txt", lines)


@pytest.mark.parametrize("name", GRAPHS)
def test_shardings_by_seconds_are_those_that_are_kept(name: str) -> None:
    graph = GRAPHS[name]
    costs, lines = preset_costs(graph, "k80"), [f"{name} by seconds"]
    fast = Cluster.uniform(4, bandwidth=1e12, latency=1e-9)
    for cluster in (fast, Cluster.uniform(6), pair_of_islands()):
        for share in (None, 0.5):
            capacity = None
            if share is not None:
                sizes = (tensor.bytes for op in graph.ops for tensor in op.outputs)
                capacity = share * sum(sizes) / cluster.num_devices
            found = find_sharding(graph, cluster, "seconds", costs=costs, capacity=capacity)
            text = text_of(graph, found.sharding)
            lines.append(f"{cluster.num_devices}, {capacity}: {found.cost:.6g} s, {text}")
    assert_kept("shardings.txt", lines)

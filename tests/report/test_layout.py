"""The picture and the table of a sharded plan, on a matrix product written by hand."""

import xml.etree.ElementTree as ET

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan
from pardnn.report.layout import COLOURS, LayoutRow, layout_result, layout_svg
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, bytes=4 * shape[0] * shape[1], shape=shape, dtype="float32")


def product(number: int, x: str) -> tuple[Op, Op]:
    weight, result = f"blocks.{number}.weight", f"y{number}"
    args = {"args": [{"tensor": x}, {"tensor": weight}]}
    return (
        Op(name=weight, kind="parameter", outputs=(tensor(weight, 8, 8),), memory="residual"),
        Op(
            name=f"mm{number}", kind="aten.mm.default", inputs=(x, weight), arguments=args,
            outputs=(tensor(result, 4, 8),), module=f"blocks.{number}.linear",
        ),
    )  # fmt: skip


def two_products() -> tuple[Graph, Plan]:
    x = Op(name="x", kind="input", outputs=(tensor("x", 4, 8),))
    graph = build_graph("two", [x, *product(0, "x"), *product(1, "y0")])
    layouts = {f"blocks.{n}.weight": (1, None) for n in (0, 1)} | {"y0": (1, 0), "y1": (1, 0)}
    sharding = Sharding(make_mesh((2, 2)), layouts, {"mm0": ("j", "i"), "mm1": ("j", "i")})
    return graph, spmd_partition(graph, sharding)


def test_repeated_blocks_are_one_row() -> None:
    result = layout_result(*two_products())
    assert result.rows == (
        LayoutRow(
            tensor="blocks.*.weight", role="weight", shape=(8, 8),
            placements=("Shard(1)", "Replicate()"), count=2, block=(8, 4),
        ),
        LayoutRow(
            tensor="blocks.*.linear.output", role="activation", shape=(4, 8),
            placements=("Shard(1)", "Shard(0)"), count=2, block=(2, 4),
        ),
    )  # fmt: skip


def test_the_picture_has_a_tile_for_each_block() -> None:
    picture = ET.fromstring(layout_svg("a <title>", layout_result(*two_products())))
    space = "{http://www.w3.org/2000/svg}"
    filled = [r for r in picture.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    # Two halves of the weight, each on two devices; four quarters of the result.
    assert len(filled) == 2 * 2 + 4
    assert {r.get("fill") for r in filled} == set(COLOURS[:4])
    area = sum(float(r.get("width", 0)) * float(r.get("height", 0)) for r in filled)
    assert abs(area - 2 * 120 * 60) < 1

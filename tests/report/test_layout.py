"""The picture and the table of a sharded plan, on a matrix product written by hand."""

import dataclasses
import xml.etree.ElementTree as ET

from rich.console import Group
from rich.table import Table

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan
from pardnn.report.layout import (
    LayerCut,
    LayoutResult,
    LayoutRow,
    layout_result,
    layout_text,
    reading,
)
from pardnn.report.layout_picture import COLOURS, layout_svg
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import partition_for_submeshes, spmd_partition


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


def test_a_layer_is_said_to_be_cut_by_what_its_devices_compute_parts_of() -> None:
    result = layout_result(*two_products())
    by = ("samples", "output features")
    assert result.cuts == (LayerCut(layer="blocks.*.linear", count=2, by=by),)
    assert reading(result) == ["blocks.* (x 2): linear by samples and output features"]


def test_what_is_added_up_is_a_cut_by_input_features() -> None:
    graph, _ = two_products()
    layouts = {"blocks.0.weight": (1,), "y0": (1,), "blocks.1.weight": (0,), "y1": (None,)}
    sharding = Sharding(make_mesh((2,)), layouts, {"mm0": ("j",), "mm1": ("k",)})
    result = layout_result(graph, spmd_partition(graph, sharding))
    assert [cut.by for cut in result.cuts] == [("output features",), ("input features",)]
    # Nothing is laid out alike, so all go by their own names.
    assert [row.tensor for row in result.rows[:2]] == ["blocks.0.weight", "blocks.1.weight"]
    assert reading(result) == [
        "blocks.0.linear by output features, blocks.1.linear by input features (column, then row)"
    ]


def test_a_name_is_one_line_and_a_block_that_is_one_layer_goes_by_its_own() -> None:
    cuts = [("a\nb", 1), ("convs.*", 5)]
    result = LayoutResult(
        mesh=(2,),
        axes=("x",),
        rows=(),
        cuts=tuple(LayerCut(layer=name, count=n, by=("samples",)) for name, n in cuts),
    )
    assert reading(result) == ["a\\nb by samples", "convs.* (x 5) by samples"]


def test_a_plan_of_submeshes_names_positions_and_pieces_of_a_batch_once() -> None:
    """Device 2 is position 0 of the second submesh; "y0@0" and "y0@1" are pieces of "y0"."""
    graph, _ = two_products()
    ops = [dataclasses.replace(op, name=op.outputs[0].name, module=None) for op in graph.ops]
    graph = build_graph("g", ops)
    pieces = cut_batch(graph, 2)
    names = [f"y{n}@{piece}" for n in (0, 1) for piece in (0, 1)]
    layouts, loops = dict.fromkeys(names, (1,)), dict.fromkeys(names, ("j",))
    sharding = Sharding(make_mesh((2,)), layouts, loops)
    made = partition_for_submeshes(build_graph("g", pieces.ops), sharding, 2)
    plan = Plan(placement={}, order=(), pieces=pieces, partition=made.partition)
    result = layout_result(graph, plan)
    assert [row.tensor for row in result.rows[1:]] == ["y0", "y1"]
    assert (result.mesh, result.submeshes) == ((2,), 2)
    told = layout_text(result)
    assert isinstance(told, Group)
    *_, rows = told.renderables
    assert isinstance(rows, Table)
    assert str(rows.title).startswith("2 submeshes, each a mesh m0=2; ")
    texts = {each.text for each in ET.fromstring(layout_svg("t", result)).iter()}
    assert {"position 0", "position 1"} < texts
    assert not any("device" in (text or "") for text in texts)


def test_columns_then_rows_are_called_so() -> None:
    column, between = ("output features",), ("features",)
    cuts = [("b.*.up", column), ("b.*.act", between), ("b.*.down", ("input features",)),
            ("b.*.norm", ())]  # fmt: skip
    result = LayoutResult(
        mesh=(2,),
        axes=("x",),
        rows=(),
        cuts=tuple(LayerCut(layer=n, count=3, by=by) for n, by in cuts),
    )
    up, down = "up by output features", "down by input features (column, then row)"
    assert reading(result) == [f"b.* (x 3): {up}, act by features, {down}"]


def test_what_all_devices_hold_is_grey_and_layers_that_lie_alike_share_a_row() -> None:
    def row(layer: str, role: str) -> LayoutRow:
        placements = ("Replicate()",) if role == "output" else ("Shard(0)",)
        return LayoutRow(
            tensor=f"{layer}.{role}", role="weight" if role == "weight" else "activation",
            shape=(8, 8), placements=placements, count=1, block=(4, 8),
        )  # fmt: skip

    rows = tuple(row(layer, role) for role in ("weight", "output") for layer in ("a", "b"))
    picture = ET.fromstring(layout_svg("t", LayoutResult(mesh=(2,), axes=("x",), rows=rows)))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in picture.iter(f"{space}title")]
    assert titles == ["t", "device 0", "device 1", "all devices"]

"""How a sharded plan tiles weights and activations: a picture, and a table (Tofu, Fig. 11).

Each tensor is drawn over the two dims that are cut first; a tile has the colours of the devices
that hold it, several colours if several do. Blocks that repeat are folded into one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check_partitioned_graph import boxes_of
from pardnn.plan.mesh import Box, Mesh
from pardnn.plan.plan import Plan
from pardnn.report.results import STRICT
from pardnn.report.text import escaped, table

#: Colours of devices (Okabe and Ito), then hues around the circle.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#666666",
)  # fmt: skip
WIDTH, LEFT, ROW, TILE = 900, 430, 76, 60


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One tensor, or several equal ones of repeated blocks.

    Attributes:
        tensor: Its name; "*" stands for the numbers of repeated blocks.
        role: "weight" or "activation".
        shape: Sizes of the dims.
        placements: In DTensor's words, one per mesh axis.
        count: How many tensors are laid out so.
        block: Shape of what the first device owns.
    """

    __pydantic_config__ = STRICT

    tensor: str
    role: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    count: int
    block: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """What `layout` found.

    Attributes:
        mesh: Devices along each axis.
        axes: Names of the axes.
        rows: In the order of the step.
        shares: Of the devices along each axis; empty if equal.
    """

    __pydantic_config__ = STRICT

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    rows: tuple[LayoutRow, ...]
    shares: tuple[tuple[int, ...], ...] = ()


def layout_result(graph: Graph, plan: Plan) -> LayoutResult:
    """Return the layouts of a sharded plan's weights and activations, repeated blocks folded.

    Activations are the largest new tensor of each module in the forward pass. O(tensors).
    """
    partition = plan.partition
    assert partition is not None
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    counts: dict[tuple[Any, ...], int] = {}
    blocks: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for name, role, label in _chosen(graph):
        tensor, words = tensors[name], partition.sharding[name]
        boxes = boxes_of(tensor, words, partition.mesh)
        assert boxes is not None
        key = (_folded(label), role, tensor.shape or (), words)
        counts[key] = counts.get(key, 0) + 1
        blocks.setdefault(key, tuple(end - begin for begin, end in boxes[0]))
    rows = tuple(
        LayoutRow(
            tensor=label, role=role, shape=shape, placements=words, count=count,
            block=blocks[label, role, shape, words],
        )
        for (label, role, shape, words), count in counts.items()
    )  # fmt: skip
    mesh = partition.mesh
    return LayoutResult(mesh=mesh.shape, axes=mesh.names, rows=rows, shares=mesh.shares)


def _folded(name: str) -> str:
    """Return a name with "*" for the numbers that tell repeated blocks apart."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)


def _chosen(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Yield tensor, role and label of what is shown."""
    for op in graph.ops:
        if op.kind == "parameter":
            yield op.outputs[0].name, "weight", op.outputs[0].name
    largest: dict[str, tuple[int, str]] = {}
    for op in _forward(graph):
        where = op.module or op.name
        for tensor in op.outputs:
            is_new = tensor.alias_of is None and len(tensor.shape or ()) > 1
            if is_new and tensor.bytes >= largest.get(where, (0, ""))[0]:
                largest[where] = (tensor.bytes, tensor.name)
    for where, (_, name) in largest.items():
        yield name, "activation", f"{where}.output" if where != name else name


def _forward(graph: Graph) -> Iterator[Op]:
    """Yield the calls before the first one of the backward pass."""
    order = graph.arrays.topological.tolist()
    ops = [graph.ops[number] for number in order]
    first = next((i for i, op in enumerate(ops) if op.backward_of is not None), len(ops))
    yield from (op for op in ops[:first] if not op.is_source and op.memory == "normal")


def layout_text(result: LayoutResult) -> RenderableType:
    """Return the layouts as a table."""
    rows = [
        (
            row.tensor,
            f"x {row.count}" if row.count > 1 else "",
            "x".join(map(str, row.shape)),
            ", ".join(row.placements),
            "x".join(map(str, row.block)),
        )
        for row in result.rows
    ]
    parts = ["/".join(map(str, row)) for row in result.shares] or map(str, result.mesh)
    axes = ", ".join(f"{n}={size}" for n, size in zip(result.axes, parts, strict=True))
    columns = ("tensor", "", "shape", "layout", "block")
    return table(f"mesh {axes}; layouts name what each of its axes cuts", columns, rows)


def layout_svg(title: str, result: LayoutResult) -> str:
    """Return the layouts as a picture."""
    mesh = Mesh(shape=result.mesh, names=result.axes, shares=result.shares)
    height = 70 + ROW * len(result.rows)
    body = "\n".join(_body(title, mesh, result.rows))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escaped(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def colour(device: int) -> str:
    """Return the colour of a device."""
    if device < len(COLOURS):
        return COLOURS[device]
    return f"hsl({device * 137 % 360},60%,{35 + device * 7 % 35}%)"


def _body(title: str, mesh: Mesh, rows: Sequence[LayoutRow]) -> Iterator[str]:
    yield f'<text x="20" y="22" font-size="14" fill="#222222">{escaped(title)}</text>'
    for device in range(min(mesh.size, 16)):
        x = 20 + 52 * device
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{colour(device)}"/>'
        yield f'<text x="{x + 15}" y="44" fill="#222222">{device}</text>'
    for number, row in enumerate(rows):
        yield from _row(row, mesh, 62 + ROW * number)


def _row(row: LayoutRow, mesh: Mesh, top: int) -> Iterator[str]:
    times = f" (x {row.count})" if row.count > 1 else ""
    shape = " x ".join(map(str, row.shape)) or "number"
    words = ", ".join(row.placements)
    yield f'<text x="20" y="{top + 20}" fill="#222222">{escaped(row.tensor)}{times}</text>'
    yield f'<text x="20" y="{top + 36}" fill="#555555">{row.role}, {shape}</text>'
    yield f'<text x="20" y="{top + 52}" fill="#555555">{escaped(words)}</text>'
    dims = _shown_dims(row)
    sizes = {dim: row.shape[dim] for dim in dims}
    across = TILE * (4 if len(dims) == 1 else 2)
    for place, devices in _tiles(row, mesh, dims).items():
        (a, b), (c, d) = _scaled(place, dims, sizes)
        yield from _tile(
            LEFT + across * c, top + TILE * a, across * (d - c), TILE * (b - a), devices
        )
    if dims:
        label = " x ".join(f"dim {dim}" for dim in dims)
        yield f'<text x="{LEFT + across + 10}" y="{top + 34}" fill="#555555">{label}</text>'


def _shown_dims(row: LayoutRow) -> tuple[int, ...]:
    """Return the dims that are drawn: those cut first, then the first ones, in their order."""
    cut = [int(word[6:-1]) for word in row.placements if word.startswith("Shard(")]
    listed = list(dict.fromkeys([*cut, *range(len(row.shape))]))[:2]
    return tuple(sorted(listed))


def _tiles(
    row: LayoutRow, mesh: Mesh, dims: Sequence[int]
) -> Mapping[tuple[tuple[int, int], ...], list[int]]:
    boxes = boxes_of(Tensor(name="", bytes=0, shape=row.shape), row.placements, mesh)
    assert boxes is not None
    found: dict[Box, list[int]] = {}
    for device, box in enumerate(boxes):
        found.setdefault(tuple(box[dim] for dim in dims), []).append(device)
    return found


def _scaled(
    place: tuple[tuple[int, int], ...], dims: Sequence[int], sizes: Mapping[int, int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of a tile down and across, from 0 to 1."""
    ends = [(a / max(sizes[dim], 1), b / max(sizes[dim], 1)) for dim, (a, b) in
            zip(dims, place, strict=True)]  # fmt: skip
    if len(ends) == 2:
        return ends[0], ends[1]
    return (0.0, 1.0), ends[0] if ends else (0.0, 1.0)


def _tile(x: float, y: float, width: float, height: float, devices: Sequence[int]) -> Iterator[str]:
    """Draw a tile, one stripe for each device that holds it."""
    stripe = width / len(devices)
    for number, device in enumerate(devices):
        yield (
            f'<rect x="{x + number * stripe:.1f}" y="{y:.1f}" width="{stripe:.1f}" '
            f'height="{height:.1f}" fill="{colour(device)}"><title>device {device}</title></rect>'
        )
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none" '
        f'stroke="#ffffff" stroke-width="1.5"/>'
    )

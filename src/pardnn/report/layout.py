"""How a sharded plan cuts layers and lays out their tensors; blocks that repeat are one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from pardnn.errors import printable
from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import boxes_of
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.pieces import whole_name
from pardnn.plan.plan import Plan, graph_in_pieces
from pardnn.report.results import STRICT
from pardnn.report.text import table

#: What multiplies: an op whose result tells how its layer is cut.
_PRODUCTS = re.compile(r"mm|conv|linear|attention|embedding|lstm|gru|rnn")


#: A block whose own ops are cut, beside those of the layers within it.
ITSELF = "the block itself"


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
class LayerCut:
    """How the largest op of a layer is cut, or of several equal layers of repeated blocks.

    Attributes:
        layer: Its path; "*" stands for the numbers of repeated blocks.
        count: How many there are.
        by: What each device computes a part of: "samples", "output features", "input features"
            (partial sums are added up), "heads" and so on; empty if each computes all.
    """

    __pydantic_config__ = STRICT

    layer: str
    count: int
    by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """What `layout` found.

    Attributes:
        mesh: Devices along each axis.
        axes: Names of the axes.
        rows: In the order of the step.
        cuts: Of the layers, in the same order.
        shares: Of the devices along each axis; empty if equal.
        submeshes: How many such meshes the devices form; each op is cut on one of them.
    """

    __pydantic_config__ = STRICT

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    rows: tuple[LayoutRow, ...]
    cuts: tuple[LayerCut, ...] = ()
    shares: tuple[tuple[int, ...], ...] = ()
    submeshes: int = 1


def layout_result(graph: Graph, plan: Plan) -> LayoutResult:
    """Return the layouts of a sharded plan's weights and activations, repeated blocks folded.

    Activations are the largest new tensor of each module in the forward pass. O(tensors).
    """
    partition, graph = plan.partition, graph_in_pieces(graph, plan)
    assert partition is not None
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    found: dict[tuple[Any, ...], list[str]] = {}
    blocks: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for name, role, label in _chosen(graph, in_pieces=plan.pieces is not None):
        tensor, words = tensors[name], partition.sharding[name]
        boxes = boxes_of(tensor, words, partition.mesh)
        assert boxes is not None
        key = (_folded(label), role, tensor.shape or (), words)
        found.setdefault(key, []).append(label)
        blocks.setdefault(key, tuple(end - begin for begin, end in boxes[0]))
    rows = tuple(
        LayoutRow(
            tensor=folded if len(labels) > 1 else labels[0], role=role, shape=shape,
            placements=words, count=len(labels), block=blocks[folded, role, shape, words],
        )
        for (folded, role, shape, words), labels in found.items()
    )  # fmt: skip
    mesh = partition.mesh
    return LayoutResult(
        mesh=mesh.shape,
        axes=mesh.names,
        rows=rows,
        cuts=_cuts(graph, partition),
        shares=mesh.shares,
        submeshes=partition.submeshes,
    )


def _cuts(graph: Graph, partition: Partition) -> tuple[LayerCut, ...]:
    """Return how layers are cut, in the order of the step."""
    largest: dict[str, tuple[bool, int, Op]] = {}
    for op in _forward(graph):
        if op.module is None or not op.outputs:
            continue
        size = sum(tensor.bytes for tensor in op.outputs if tensor.alias_of is None)
        found = (_PRODUCTS.search(op.kind) is not None, size, op)
        if size and found[:2] > largest.get(op.module, (False, -1, op))[:2]:
            largest[op.module] = found
    local = {op.name: op for op in partition.ops}
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for module, (_, _, op) in largest.items():
        key = (_folded(f"{module}.")[:-1], _cut_by(op, local.get(f"{op.name}@0"), partition))
        alike.setdefault(key, []).append(module)
    return tuple(
        LayerCut(layer=folded if len(modules) > 1 else modules[0], count=len(modules), by=by)
        for (folded, by), modules in alike.items()
    )


def _cut_by(op: Op, local: Op | None, partition: Partition) -> tuple[str, ...]:
    """Return which part of an op each device computes."""
    loops = (partition.loops or {}).get(op.name, ())
    devices = math.prod(
        size for size, loop in zip(partition.mesh.shape, loops, strict=False) if loop is not None
    )
    if local is None or devices == 1:
        return ()
    whole, part = op.outputs[0].shape or (), local.outputs[0].shape or ()
    cut = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if b < a]
    found = [_dim_words(op, dim, len(whole)) for dim in cut]
    if math.prod(-(-whole[dim] // max(part[dim], 1)) for dim in cut) < devices:
        found.append("input features" if _PRODUCTS.search(op.kind) else "what it adds up")
    return tuple(found)


def _dim_words(op: Op, dim: int, rank: int) -> str:
    """Return what a dim of an op's result is, in the usual terms for networks."""
    if dim == 0:
        return "samples"
    if "conv" in op.kind:
        return "output channels" if dim == 1 else "positions"
    if dim == rank - 1:
        return "output features" if _PRODUCTS.search(op.kind) else "features"
    return "heads" if rank == 4 and dim == 1 else "positions"


def _folded(name: str) -> str:
    """Return a name with "*" for the numbers that tell repeated blocks apart."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)


def _chosen(graph: Graph, *, in_pieces: bool) -> Iterator[tuple[str, str, str]]:
    """Yield tensor, role and label of what is shown; pieces of a batch have one label."""
    plain = whole_name if in_pieces else str
    for op in graph.ops:
        if op.kind == "parameter":
            yield op.outputs[0].name, "weight", op.outputs[0].name
    largest: dict[str, tuple[int, str]] = {}
    for op in _forward(graph):
        where = op.module or plain(op.name)
        for tensor in op.outputs:
            is_new = tensor.alias_of is None and len(tensor.shape or ()) > 1
            if is_new and tensor.bytes >= largest.get(where, (0, ""))[0]:
                largest[where] = (tensor.bytes, tensor.name)
    for where, (_, name) in largest.items():
        label = plain(name)
        yield name, "activation", f"{where}.output" if where != label else label


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
            short_placements(row.placements),
            "x".join(map(str, row.block)),
        )
        for row in result.rows
    ]
    parts = ["/".join(map(str, row)) for row in result.shares] or map(str, result.mesh)
    axes = ", ".join(f"{n}={size}" for n, size in zip(result.axes, parts, strict=True))
    columns = ("tensor", "", "shape", "layout", "block")
    many = f"{result.submeshes} submeshes, each a " if result.submeshes > 1 else ""
    title = f"{many}mesh {axes}; layouts name what each of its axes cuts (S: Shard, R: Replicate)"
    return Group(*reading(result), table(title, columns, rows))


def reading(result: LayoutResult) -> list[str]:
    """Return what the layout means, in a line for each group of blocks: layers by what cuts them.

    Layers that each device computes in full are left out. Megatron's pair, a layer cut by output
    features and the next one by input features, is called by its name.
    """
    blocks: dict[str, list[LayerCut]] = {}
    for cut in result.cuts:
        head, star, _ = cut.layer.rpartition("*")
        blocks.setdefault(head + star, []).append(cut)
    lines: list[str] = []
    for block, cuts in blocks.items():
        texts, before = list[str](), ()
        for cut in cuts:
            name = cut.layer[len(block) :].strip(".") or ITSELF
            if cut.by:
                is_pair = before == ("output features",) and cut.by == ("input features",)
                pair = " (column, then row)" if is_pair else ""
                texts.append(f"{printable(name)} by {' and '.join(cut.by)}{pair}")
            # What is computed in parts of features between the two keeps the pair together.
            before = before if cut.by == ("features",) else cut.by
        if texts:
            where = f"{printable(block)} (x {max(cut.count for cut in cuts)}): " if block else ""
            line = f"{where}{', '.join(texts)}"
            lines.append(line.replace(f": {ITSELF}", "") if len(texts) == 1 else line)
    return lines


def short_placements(placements: Sequence[str]) -> str:
    """Return DTensor's short words for a layout: "S(0) R"."""
    return " ".join(f"S{word[5:]}" if word.startswith("Shard") else word[0] for word in placements)

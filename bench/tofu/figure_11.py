"""Tofu's Fig. 11: how the convolutions of WResNet-152-10 are cut over 8 devices, and its claims.

The paper draws the partition and observes three things: batch and channels are both cut;
convolutions of one block are cut unlike, repeated blocks alike but for the first of a group; low
layers fetch weights, high ones activations. Here each convolution's layouts are read from the
sharding that the search found, and what it fetches is counted box by box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import placements
from pardnn.report.layout import LayoutResult, LayoutRow
from pardnn.report.layout_picture import layout_svg
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.mesh_strategies import mesh_strategy_of, owned_array
from pardnn.shard.search.communication_bytes import (
    combined,
    element_bytes,
    fetched,
    needed,
    produced,
    slots_of,
)
from pardnn.shard.sharding import Sharding

Row = Mapping[str, Any]

CONVOLUTION = "aten.convolution.default"
#: Rows and columns of an image in each group of blocks.
GROUPS = (56, 28, 14, 7)
#: Loops of a convolution that cut its batch, its channels and its image.
DIMS = {"b": "batch", "co": "channels", "ci": "channels", "x0": "image", "x1": "image"}


def partition_rows(graph: Graph, sharding: Sharding) -> list[dict[str, Any]]:
    """Return the convolutions of the forward pass, equal ones of one group once.

    Args:
        graph: A captured WResNet.
        sharding: Of its tensors and ops.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    forward = [op for op in graph.ops if op.kind == CONVOLUTION]
    firsts = {_block(op) for op in forward if (op.module or "").endswith("shortcut")}
    images: dict[str, int] = {}  # of a block: what its last convolution makes
    for op in forward:
        size = list(op.outputs[0].shape or (0,))[-1]
        images[_block(op)] = min(size, images.get(_block(op), size))
    rows: dict[Any, dict[str, Any]] = {}
    for op in forward:
        data, weight = (tensors[name] for name in op.inputs[:2])
        image = images[_block(op)]
        row: dict[str, Any] = {
            "group": GROUPS.index(image) + 1 if image in GROUPS else 0,
            "first": _block(op) in firsts,
            "part": (op.module or "").rpartition(".")[2],
            "loops": list(sharding.axes[op.name]),
        }
        for role, tensor in (("activation", data), ("weight", weight)):
            words = placements(sharding.layouts[tensor.name])
            row[role] = {"shape": tensor.shape, "bytes": tensor.bytes, "placements": words}
        moved = _moved(op, tensors, sharding)
        key = (row["group"], row["first"], row["part"], *row["loops"],
               *row["activation"]["placements"], *row["weight"]["placements"])  # fmt: skip
        known = rows.setdefault(key, row | {"count": 0, "moved": dict.fromkeys(moved, 0)})
        known["count"] += 1
        known["moved"] = {role: known["moved"][role] + size for role, size in moved.items()}
    return list(rows.values())


def _block(op: Op) -> str:
    return (op.module or "").rpartition(".")[0]


def _moved(op: Op, tensors: Mapping[str, Any], sharding: Sharding) -> dict[str, int]:
    """Return the bytes that a convolution fetches of its inputs, and of partial sums."""
    call = call_of(op, dict(tensors))
    strategies = mesh_strategy_of(call, sharding.axes[op.name], sharding.mesh)
    assert strategies is not None
    shape = sharding.mesh.shape

    def owned(name: str) -> Any:
        boxes = owned_array(tensors[name].shape, sharding.layouts[name], shape)
        assert boxes is not None
        return boxes[None]

    found = {"activation": 0, "weight": 0, "sums": 0}
    for name, regions in needed(strategies, slots_of(call)).items():
        role = "weight" if name == op.inputs[1] else "activation"
        found[role] += int(fetched(regions, owned(name)).sum()) * element_bytes(tensors[name])
    for name, result, flags in produced(op, strategies):
        moved = int(combined(result[None], [flags], shape, owned(name)).sum())
        found["sums"] += moved * element_bytes(tensors[name])
    return found


def picture(rows: Sequence[Row], mesh: tuple[int, ...]) -> str:
    """Draw weights and activations of the blocks that repeat, a tile for each device's own.

    Args:
        rows: Of `partition_rows`.
        mesh: Devices along each axis.
    """
    drawn = []
    for row in rows:
        if row["first"] or not row["group"]:
            continue
        for role in ("activation", "weight"):
            found = row[role]
            drawn.append(
                LayoutRow(
                    tensor=f"group {row['group']}, {row['part']}", role=role,
                    shape=tuple(found["shape"]), placements=tuple(found["placements"]),
                    count=row["count"], block=(),
                )
            )  # fmt: skip
    names = tuple(f"m{axis}" for axis in range(len(mesh)))
    title = "WResNet-152-10 on 8 devices, objective bytes: convolutions of repeated blocks"
    return layout_svg(title, LayoutResult(mesh=mesh, axes=names, rows=tuple(drawn)))


def section(rows: Sequence[Row], chart: str) -> Iterator[str]:
    """Yield the part of the page: table, picture, and the paper's claims held against both.

    Args:
        rows: Of `partition_rows`.
        chart: Path of the picture.
    """
    yield from ("## Figure 11: the partition of WResNet-152-10 (simulated)", "")
    yield "Convolutions of the forward pass, first blocks of a group apart. Layouts in DTensor's"
    yield "words, one for each halving of the devices; loops as in the description of a"
    yield "convolution: `b` batch, `co` and `ci` channels, `x0` rows of the image. GB fetched, or"
    yield from ("added up, by all devices together.", "")
    columns = ("group", "convolution", "times", "activation", "weight", "loops",
               "activations, GB", "weights, GB", "sums, GB")  # fmt: skip
    yield "| " + " | ".join(columns) + " |"
    yield "| --- " * len(columns) + "|"
    for row in rows:
        where = f"{row['group']}, first block" if row["first"] else row["group"] or "stem"
        words = [" ".join(row[role]["placements"]) for role in ("activation", "weight")]
        moved = [f"{row['moved'][role] / 1e9:.2f}" for role in ("activation", "weight", "sums")]
        cells = [where, row["part"], row["count"], *words, " ".join(row["loops"]), *moved]
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield from (
        "",
        f"![Figure 11]({chart})",
        "",
        "What the paper observes, and what is found here:",
    )
    yield from ("", *(f"- {claim}" for claim in claims(rows)), "")


def claims(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the paper's observations, each with the figures that bear it or do not."""
    total = sum(row["count"] for row in rows)
    kinds = [frozenset(DIMS[loop] for loop in row["loops"]) for row in rows]
    counts = {
        name: sum(r["count"] for r, kind in zip(rows, kinds, strict=True) if name in kind)
        for name in ("batch", "channels", "image")
    }
    mixed = sum(r["count"] for r, kind in zip(rows, kinds, strict=True) if len(kind) > 1)
    yield (
        "*Both the batch and the channel dimensions are partitioned.* Of "
        f"{total} convolutions {counts['batch']} cut the batch, {counts['channels']} channels, "
        f"{counts['image']} rows of the image (which the paper does not), {mixed} more than one."
    )
    same, of = _groups_alike(rows)
    yield (
        "*Different plans within one residual block; repeated blocks alike but for the first.* "
        f"The three convolutions of a repeated block are cut along the same loops in {same} of "
        f"{of} groups. {_repeats(rows)}"
    )
    shares = []
    for group in range(1, len(GROUPS) + 1):
        moved = [row["moved"] for row in rows if row["group"] == group]
        fetched_bytes = sum(m["weight"] + m["activation"] for m in moved)
        if fetched_bytes:
            shares.append(f"{sum(m['weight'] for m in moved) / fetched_bytes:.0%}")
        else:
            shares.append("nothing fetched")
    yield (
        "*Low layers fetch weights, high ones activations.* Weights are this share of what forward "
        f"convolutions fetch, from the lowest group to the highest: {', '.join(shares)}."
    )


def _groups_alike(rows: Sequence[Row]) -> tuple[int, int]:
    """Count the groups whose repeated blocks cut all their convolutions alike, and all groups."""
    loops: dict[int, set[tuple[str, ...]]] = {}
    for row in rows:
        if row["group"] and not row["first"]:
            loops.setdefault(row["group"], set()).add(tuple(row["loops"]))
    return sum(len(each) == 1 for each in loops.values()), len(loops)


def _repeats(rows: Sequence[Row]) -> str:
    """Say whether repeated blocks are cut alike, and whether first ones differ."""
    plans: dict[tuple[int, str], list[Row]] = {}
    firsts: dict[tuple[int, str], Row] = {}
    for row in rows:
        if row["first"]:
            firsts[row["group"], row["part"]] = row
        elif row["group"]:
            plans.setdefault((row["group"], row["part"]), []).append(row)
    alike = sum(len(each) == 1 for each in plans.values())
    other = sum(
        firsts[key]["loops"] != each[0]["loops"] for key, each in plans.items() if key in firsts
    )
    return (
        f"Of {len(plans)} convolutions of repeated blocks {alike} are cut alike in all blocks of "
        f"their group; the first block cuts {other} of them otherwise."
    )

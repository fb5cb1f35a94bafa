"""What constraints demand of layouts, by tensor and mesh axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pardnn.errors import shown
from pardnn.graph.ir import Graph, Tensor
from pardnn.graph.layers import origin
from pardnn.plan.constraints import WHOLE, Constraint, unusable
from pardnn.plan.demands.named import Names
from pardnn.plan.mesh import FREE, Layout, Mesh


class LayoutDemand(NamedTuple):
    """One tensor on one mesh axis: the dim that is cut there, None for whole."""

    constraint: Constraint
    tensor: str
    axis: int
    dim: int | None


def layout_demands(
    constraints: Sequence[Constraint], graph: Graph, mesh: Mesh, cut: Graph | None = None
) -> Iterator[LayoutDemand]:
    """Yield what constraints of kind "layout" demand; others are passed over.

    Args:
        constraints: Of the user.
        graph: The step, whose names they use.
        mesh: Whose axes cut.
        cut: The step with its batch in pieces, for demands on what it has of each tensor; None if
            it is whole.

    Raises:
        UsageError: E245, if a name, a dim or an axis is not there.
    """
    of_layout = [each for each in constraints if each.kind == "layout"]
    if not of_layout:
        return  # names are of all ops, and most plans have no such constraint
    names, pieces = Names(graph, graph), _pieces(cut)
    for each in of_layout:
        dim = None if isinstance(each.dim, str) else each.dim
        for text in each.what:
            for tensor in _with_dim(names.tensors(text, each), each, dim):
                for name in pieces.get(tensor.name, (tensor.name,)):
                    for axis in _axes(each, mesh):
                        yield LayoutDemand(each, name, axis, dim)


def _pieces(cut: Graph | None) -> dict[str, list[str]]:
    """Return the names of the pieces of each tensor that a step in pieces has no whole one of."""
    found: dict[str, list[str]] = {}
    if cut is None:
        return found
    names = {tensor.name: None for op in cut.ops for tensor in op.outputs}
    for name in names:
        if (whole := origin(name)) not in names:
            found.setdefault(whole, []).append(name)
    return found


def _with_dim(found: Sequence[Tensor], each: Constraint, dim: int | None) -> list[Tensor]:
    fitting = [t for t in found if dim is None or dim < len(t.shape or ())]
    if not fitting:
        dims = len(found[0].shape or ())
        raise unusable(each, f"{shown(found[0].name)} has no dim {dim}, it has {dims}")
    return fitting


def _axes(each: Constraint, mesh: Mesh) -> Sequence[int]:
    count, axis = len(mesh.shape), each.axis
    if axis is None:
        return range(count)
    text = str(axis)
    if text in mesh.names:
        return (mesh.names.index(text),)
    if text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < count:
        return (int(text),)
    known = ", ".join(f"{name} ({size})" for name, size in zip(mesh.names, mesh.shape, strict=True))
    raise unusable(
        each, f"there is no mesh axis {shown(text)}", f"\nThere are, with their devices: {known}."
    )


def layouts_of_demands(
    demands: Sequence[LayoutDemand], mesh: Mesh
) -> tuple[dict[str, Layout], tuple[Constraint, ...]]:
    """Return the layout demanded of each tensor, free on other axes; and two that are in conflict.

    Args:
        demands: From `layout_demands`.
        mesh: The same.

    Returns:
        The layouts, and the first two constraints that demand two things of one tensor on one
        axis; empty if there are none.
    """
    found: dict[str, list[int | None]] = {}
    owner: dict[tuple[str, int], LayoutDemand] = {}
    for each in demands:
        other = owner.setdefault((each.tensor, each.axis), each)
        if other.dim != each.dim:
            return {}, (other.constraint, each.constraint)
        found.setdefault(each.tensor, [FREE] * len(mesh.shape))[each.axis] = each.dim
    return {name: tuple(layout) for name, layout in found.items()}, ()


def how(dim: int | None) -> str:
    """Return a dim of a layout as people say it."""
    return WHOLE if dim is None else f"cut along dim {dim}"

"""The checker of sums that devices hold the terms of (`mesh.PARTIAL`): each is added up once.

It proves that nothing reads terms but what adds terms of the same layout, and what makes the whole
of them; and that this adds up, on each device, one term of every position along the axes that the
sum is partial over. That a term is a partial result, only descriptions know. O(local ops).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import PARTIAL, Layout, Mesh, layout_of
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE, UPDATE, Partition
from pardnn.plan.pieces import ADD

_MOVES = frozenset({SLICE, FETCH, JOIN, UPDATE, REDUCE})


def term_problems(graph: Graph, partition: Partition) -> Iterator[str]:
    """Yield what is wrong with the sums that devices hold terms of.

    Args:
        graph: The graph that is partitioned.
        partition: Its ops stand where they can run.
    """
    layouts = {name: layout_of(words) or () for name, words in partition.sharding.items()}
    partial = {name for name, layout in layouts.items() if PARTIAL in layout}
    if not partial:
        return
    makers = {tensor.name: op for op in partition.ops for tensor in op.outputs}
    local = {op.name: op for op in partition.ops}
    for op in graph.ops:
        read = [name for name in op.inputs if name in partial]
        made = [tensor.name for tensor in op.outputs if tensor.name in partial]
        if op.is_source and made:
            yield f"partition.sharding: {made[0]!r:.60} exists before the step and is not a sum"
        if not read:
            continue
        names = (*op.inputs, *(tensor.name for tensor in op.outputs))
        if op.kind == ADD and len({layouts[name] for name in names}) == 1:
            continue
        if op.kind != REDUCE or made or len(op.inputs) != 1:
            yield (
                f"partition: op {op.name!r:.60} reads terms of {read[0]!r:.60}, which is not a sum"
            )
            continue
        for position in range(partition.mesh.size):
            total = local.get(f"{op.name}@{position}")
            found = total and _added(total, read[0], makers, layouts[read[0]], partition.mesh)
            if not found:
                yield (
                    f"partition: op {op.name + f'@{position}'!r:.60} does not add up one term of "
                    f"{read[0]!r:.60} from each device"
                )


def _added(total: Op, name: str, makers: Mapping[str, Op], layout: Layout, mesh: Mesh) -> bool:
    """Whether an op adds up one term of each position along the axes that a sum is partial over."""
    terms: list[tuple[int, ...]] = []
    for addend in _addends(total, makers):
        devices = _devices(addend, name, makers)
        if -1 in devices:
            return False
        places = {
            tuple(at for at, dim in zip(mesh.coordinates(d), layout, strict=True) if dim == PARTIAL)
            for d in devices
        }
        if len(places) != 1:
            return False
        terms += places
    wanted = 1
    for size, dim in zip(mesh.shape, layout, strict=True):
        wanted *= size if dim == PARTIAL else 1
    return len(terms) == len(set(terms)) == wanted


def _addends(op: Op, makers: Mapping[str, Op]) -> Iterator[str]:
    """Yield the tensors that a sum adds up, through sums of groups of devices."""
    args: list[Any] = (op.arguments or {})["args"] if op.kind == REDUCE else ["", []]
    names: list[str] = [each["tensor"] for each in args[1]] if args[0] == "sum" else []
    for name in names:
        maker = makers.get(name)
        if maker is not None and maker.kind == REDUCE:
            yield from _addends(maker, makers)
        else:
            yield name


def _devices(tensor: str, name: str, makers: Mapping[str, Op]) -> set[int]:
    """Return the devices whose terms a tensor is cut out of; -1 stands for anything else."""
    of, _, device = tensor.rpartition("@")
    if of == name and device.isdecimal():
        return {int(device)}
    maker = makers.get(tensor)
    if maker is None or maker.kind not in _MOVES or not maker.inputs:
        return {-1}
    return {each for read in maker.inputs for each in _devices(read, name, makers)}

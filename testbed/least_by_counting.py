"""The least bytes of a small step over all layouts and strategies, counted element by element.

An oracle for searches: it is written from the definition of the objective alone and shares no
code with what it judges. Every tensor is cut in halves of halves, every op along any of its loops
on each axis. A device that needs an element which it does not own fetches it; one that owns an
element fetches each partial result of it that it has not computed itself. A write in place, and a
view of what is written, moves nothing. Layouts are tried by exact elimination: of one tensor after
the other all layouts, for all layouts of those that it meets at an op.

Sizes are divisible by the number of devices: how others are rounded is not part of the definition.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy import ndarray

from pardnn.graph.ir import Graph, Op

#: The result's dims and those of each input, by loops; a loop that the result has not is summed up.
LOOPS = {
    "aten.mm.default": ("ij", "ik", "kj"),
    "aten.t.default": ("ij", "ji"),
    "aten.relu.default": ("ij", "ij"),
    "aten.sub.Tensor": ("ij", "ij", "ij"),
    "aten.threshold_backward.default": ("ij", "ij", "ij"),
    "aten.add_.Tensor": ("ij", "ij", "ij"),
}
IN_PLACE = "aten.add_.Tensor"
Spans = dict[str, tuple[int, int]]


def least_bytes_counted(graph: Graph, axes: int = 2, item: int = 4) -> int:
    """Return the least bytes that a step moves.

    Args:
        graph: Of matrices, and of the operators in `LOOPS`.
        axes: The devices are 2 to the power of it.
        item: Bytes of an element.
    """
    shapes = {t.name: tuple(t.shape or ()) for op in graph.ops for t in op.outputs}
    home, is_turned = _storages(graph)
    tables = [_table(op, shapes, home, is_turned, axes) for op in graph.ops if op.kind in LOOPS]
    return item * int(_least(tables))


def _storages(graph: Graph) -> tuple[dict[str, str], dict[str, bool]]:
    """The tensor whose layout each one has, itself unless written, and whether transposed."""
    alias = {t.name: (op, t.alias_of) for op in graph.ops for t in op.outputs}

    def root(name: str) -> tuple[str, bool]:
        op, of = alias[name]
        if of is None:
            return name, False
        base, is_turned = root(of)
        return base, is_turned != (op.kind == "aten.t.default")

    written = {root(op.inputs[0])[0] for op in graph.ops if op.kind == IN_PLACE}
    found = {name: root(name) if root(name)[0] in written else (name, False) for name in alias}
    return {n: base for n, (base, _) in found.items()}, {n: turn for n, (_, turn) in found.items()}


def _table(
    op: Op, shapes: dict[str, tuple[int, ...]], home: dict[str, str], is_turned: dict[str, bool],
    axes: int,
) -> tuple[tuple[str, ...], ndarray]:  # fmt: skip
    """The least elements that an op moves, for all layouts of its tensors."""
    output, letters = op.outputs[0].name, LOOPS[op.kind]
    names = [output, *op.inputs]
    sizes = {
        letter: size
        for name, dims in zip(names, letters, strict=True)
        for letter, size in zip(dims, shapes[name], strict=True)
    }
    variables = tuple(dict.fromkeys(home[name] for name in names))
    layouts = list(itertools.product(range(2), repeat=axes))
    least = np.full([len(layouts)] * len(variables), np.inf)
    for cuts in itertools.product(sorted(sizes), repeat=axes):
        total = np.zeros([1] * len(variables))
        for name, dims in zip(names, letters, strict=True):
            moved = np.array([
                _moved(sizes, cuts, dims, layout, name == output, is_turned[name])
                for layout in layouts
            ], dtype=float)  # fmt: skip
            if op.outputs[0].alias_of and home[output] == home[name] and home[name] != output:
                moved[moved > 0] = np.inf  # it must be found, or left, where it is
            shape = [1] * len(variables)
            shape[variables.index(home[name])] = len(layouts)
            total = total + moved.reshape(shape)
        least = np.minimum(least, total)
    return variables, least


def _moved(
    sizes: dict[str, int], cuts: tuple[str, ...], dims: str, layout: tuple[int, ...],
    is_output: bool, is_turned: bool,
) -> int:  # fmt: skip
    """Elements of one tensor that all devices fetch, for the loops of the op cut so."""
    own = tuple(dims[d != is_turned] for d in layout)
    summed = [axis for axis, loop in enumerate(cuts) if loop not in dims] if is_output else []
    total = 0
    for device in itertools.product(range(2), repeat=len(cuts)):
        owned = _elements(sizes, dims, own, device)
        worked = _elements(sizes, dims, cuts, device)
        if not is_output:
            total += np.count_nonzero(worked & ~owned)
            continue
        # Of its own share of the sums it lacks what it has not computed; of the others' shares all.
        total += np.count_nonzero(owned & ~worked)
        total += (2 ** len(summed) - 1) * np.count_nonzero(owned)
    return int(total)


def _elements(
    sizes: dict[str, int], dims: str, cuts: tuple[str, ...], device: tuple[int, ...]
) -> ndarray:
    """The elements of a tensor within a device's part of the loops."""
    spans = {letter: (0, size) for letter, size in sizes.items()}
    for loop, half in zip(cuts, device, strict=True):
        low, high = spans[loop]
        middle = (low + high) // 2
        spans[loop] = (middle, high) if half else (low, middle)
    found = np.zeros([sizes[letter] for letter in dims], dtype=bool)
    found[tuple(slice(*spans[letter]) for letter in dims)] = True
    return found


def _least(tables: list[tuple[tuple[str, ...], ndarray]]) -> float:
    """The least sum of tables over all values of their variables."""
    while any(variables for variables, _ in tables):
        met: dict[str, set[str]] = {}
        for variables, _ in tables:
            for each in variables:
                met.setdefault(each, set()).update(variables)
        name = min(sorted(met), key=lambda each, met=met: len(met[each]))
        mine = [table for table in tables if name in table[0]]
        order = (name, *sorted(met[name] - {name}))
        total = np.zeros([1] * len(order))
        for variables, values in mine:
            at = [order.index(v) for v in variables]
            moved = np.transpose(values, np.argsort(at))
            shape = [1] * len(order)
            for place, size in zip(sorted(at), moved.shape, strict=True):
                shape[place] = size
            total = total + moved.reshape(shape)
        tables = [table for table in tables if name not in table[0]]
        tables.append((order[1:], total.min(axis=0)))
    return math.fsum(float(values) for _, values in tables)

"""Partial results of three pieces, added up by hand in all places a sum may lie in, and faults."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.partitioned_graph import REDUCE, SLICE
from pardnn.plan.pieces import ADD, Pieces
from pardnn.plan.rewritten.check_pieces import pieces_problems

POINTS = (0, 1, 3, 6)
MM, INTO = "aten.mm.default", "aten.addmm_.default"
Change = Callable[[Op], Op | None]


def tensor(name: str, *shape: int, alias_of: str | None = None) -> Tensor:
    return Tensor(name=name, bytes=24, shape=shape or (2, 3), dtype="float32", alias_of=alias_of)


def refs(*names: str) -> list[Any]:
    return [{"tensor": name} for name in names]


def call(name: str, kind: str, *reads: str, made: Tensor | None = None, args: Any = None) -> Op:
    return Op(name=name, kind=kind, inputs=reads, outputs=(made or tensor(name),),
              arguments={"args": refs(*reads) if args is None else args})  # fmt: skip


def step() -> Graph:
    """Two products over the samples, `g` and `p`, whose pieces are partial results."""
    x = Op(name="x", kind="input", outputs=(tensor("x", 6, 3),))
    w = Op(name="w", kind="parameter", outputs=(tensor("w"),), memory="residual")
    return build_graph("sums", [
        x, w, call("g", "aten.g.default", "x", args=[*refs("x"), [6, 3]]), call("p", MM, "w", "x"),
        call("n", "aten.n.default", "g", "p"),
    ])  # fmt: skip


def cut(graph: Graph) -> Pieces:
    """`g` is added up in the storage of its first piece and copied; `p` in two accumulators."""
    whole = {op.name: op for op in graph.ops}
    slices = [
        call(f"x:slice@{i}", SLICE, "x", made=tensor(f"x@{i}", b - a, 3),
             args=[*refs("x"), [[a, b], [0, 3]]])
        for i, (a, b) in enumerate(itertools.pairwise(POINTS))
    ]  # fmt: skip
    return Pieces(points=POINTS, batch={"x": (0, 1, 1)}, ops=(
        whole["x"], whole["w"], *slices,
        *(call(f"g@{i}", "aten.g.default", f"x@{i}", args=[*refs(f"x@{i}"), [size, 3]])
          for i, size in enumerate((1, 2, 3))),
        call("g:add@1", ADD, "g@0", "g@1", made=tensor("g:1", alias_of="g@0")),
        call("g:add@2", ADD, "g:1", "g@2", made=tensor("g:2", alias_of="g:1")),
        call("g:total", REDUCE, "g:2", made=tensor("g"), args=["sum", refs("g:2"), None]),
        call("p@0", MM, "w", "x@0"),
        call("p@1", INTO, "p@0", "w", "x@1", made=tensor("p:1", alias_of="p@0")),
        call("p@2", MM, "w", "x@2"),
        call("p:gather@2", ADD, "p:1", "p@2", made=tensor("p", alias_of="p:1")),
        whole["n"],
    ))  # fmt: skip


def problems(changes: dict[str, Change]) -> list[str]:
    """What is wrong where the ops of these names are changed."""
    graph = step()
    pieces = cut(graph)
    assert changes.keys() <= {op.name for op in pieces.ops}
    ops = (changes.get(op.name, lambda op: op)(op) for op in pieces.ops)
    kept = tuple(op for op in ops if op is not None)
    return list(pieces_problems(graph, dataclasses.replace(pieces, ops=kept)))


def reading(*names: str) -> Change:
    """An op that reads other tensors, and returns the first of them if it is in place."""

    def change(op: Op) -> Op:
        (made,) = op.outputs
        made = dataclasses.replace(made, alias_of=names[0]) if made.alias_of else made
        return call(op.name, op.kind, *names, made=made)

    return change


def reduced(how: str, *names: str, weights: Any = None) -> Change:
    args = [how, refs(*names), weights]
    return lambda op: call(op.name, op.kind, *names, made=op.outputs[0], args=args)


def making(**fields: Any) -> Change:
    """An op whose result is another one."""
    return lambda op: dataclasses.replace(
        op, outputs=(dataclasses.replace(op.outputs[0], **fields),)
    )


def of_kind(kind: str) -> Change:
    return lambda op: dataclasses.replace(op, kind=kind)


def plain(piece: int) -> Change:
    """A piece of the product that is added to nothing."""
    return lambda op: call(op.name, MM, "w", f"x@{piece}")


def into(total: str, piece: int, samples: int | None = None) -> Change:
    """A piece of the product that is added to a sum."""
    samples = piece if samples is None else samples
    made = tensor("p" if piece == 2 else "p:1", alias_of=total)
    return lambda op: call(op.name, INTO, total, "w", f"x@{samples}", made=made)


def gone(op: Op) -> None:
    """Leave out an op."""


#: Op of which the problem is told, what it says, and what is changed.
FAULTS: dict[str, tuple[str, str, dict[str, Change]]] = {
    "a copy of an unfinished sum": (
        "g:total", "does not combine pieces", {"g:add@2": gone, "g:total": reduced("sum", "g:1")},
    ),
    "a copy of the last piece": (
        "g:total", "does not combine pieces", {"g:add@2": gone, "g:total": reduced("sum", "g@2")},
    ),
    "a copy of no sum": ("g:total", "does not combine pieces", {"g:total": reduced("sum", "x@2")}),
    "the largest of one": ("g:total", "not combine pieces", {"g:total": reduced("max", "g:2")}),
    "a copy with a weight": (
        "g:total", "not combine pieces", {"g:total": reduced("sum", "g:2", weights=[2.0])},
    ),
    "a copy of a sum and more": (
        "g:total", "not combine pieces", {"g:total": reduced("sum", "g:2", "w")},
    ),
    "a sum twice": ("g:total", "not combine pieces", {"g:total": reduced("sum", "g:2", "g:2")}),
    "a copy of another kind": ("g:total", "not combine pieces", {"g:total": of_kind(ADD)}),
    "a copy by another name": (
        "g:total", "does not combine pieces", {"g:total": making(name="g:3")},
    ),
    "a copy of another form": ("g:total", "has shape [3, 2]", {"g:total": making(shape=(3, 2))}),
    "no copy": ("g:add@2", "does not combine pieces", {"g:total": gone}),
    "a sum by the name of its copy": (
        "g:add@2", "does not combine pieces", {"g:add@2": making(name="g")},
    ),
    "sizes of another piece": (
        "g@1", "its arguments differ",
        {"g@1": lambda op: call("g@1", op.kind, "x@1", args=[*refs("x@1"), [3, 3]])},
    ),
    "a sum of no sum": (
        "g:add@1", "does not combine pieces", {"g:add@1": reading("x@0", "g@1")},
    ),
    "no partial result": (
        "g:add@1", "does not combine pieces", {"g:add@1": reading("g@0", "x@1")},
    ),
    "a sum added to again": (
        "p:gather@2", "are not valid", {"p:gather@2": reading("p@0", "p@2")},
    ),
    "accumulators in another order": (
        "p:gather@2", "does not combine pieces", {"p:gather@2": reading("p@2", "p:1")},
    ),
    "an accumulator of another sum": (
        "p:gather@2", "does not combine pieces", {"p:gather@2": reading("p:1", "g")},
    ),
    "a piece left out of an accumulator": (
        "p@2", "not the sum of the pieces before 2",
        {"p@1": plain(1), "p@2": into("p@0", 2), "p:gather@2": gone},
    ),
    "an accumulator of another product": (
        "p@1", "not the sum of the pieces before 1", {"p@1": into("g@1", 1)},
    ),
    "an accumulator that is no partial result": (
        "p@1", "not the sum of the pieces before 1", {"p@1": into("w", 1)},
    ),
    "an accumulator that is not written": (
        "p@1", "it has no such result", {"p@1": making(alias_of=None)},
    ),
    "a piece that writes what it multiplies": (
        "p@1", "it has no such result", {"p@1": making(alias_of="w")},
    ),
    "a sum of another form": ("p@1", "it has no such result", {"p@1": making(dtype="float64")}),
    "another product": (
        "p@1", "it is aten.addmm.default, not a piece of aten.mm.default",
        {"p@1": of_kind("aten.addmm.default")},
    ),
    "the wrong samples": ("p@1", "'x@2', which 'p' does not read", {"p@1": into("p@0", 1, 2)}),
}  # fmt: skip


def test_sums_in_any_place_are_valid() -> None:
    assert problems({}) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sum_that_is_none_is_told(fault: str) -> None:
    name, why, changes = FAULTS[fault]
    found = problems(changes)
    assert any(f"op {name!r}: " in each and why in each for each in found), found


def test_partial_results_of_unknown_shape_are_added_up_as_others() -> None:
    def plain(op: Op) -> Op:
        made = (dataclasses.replace(t, shape=None if t.name[0] in "gp" else t.shape)
                for t in op.outputs)  # fmt: skip
        return dataclasses.replace(op, outputs=tuple(made))

    graph, pieces = step(), cut(step())
    graph = build_graph("sums", list(map(plain, graph.ops)))
    pieces = dataclasses.replace(pieces, ops=tuple(map(plain, pieces.ops)))
    assert list(pieces_problems(graph, pieces)) == []

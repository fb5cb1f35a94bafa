"""A batch cut in three by hand, with every kind of op that combines pieces, and faults in it."""

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.partitioned_graph import FETCH, REDUCE, SLICE
from pardnn.plan.pieces import ADD, Pieces
from pardnn.plan.rewritten.check_pieces import pieces_problems

POINTS = (0, 2, 3, 5)
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (5, 3), "w": (3, 2), "y": (5,), "d": (), "t": (2, 5), "u": (10, 2),
    "h": (5, 2), "g": (3, 2), "m": (2,), "l": (), "z": (5, 2), "k": (5, 2), "b": (5, 2),
    "q": (2, 5), "r": (10, 2), "n": (5, 2),
}  # fmt: skip
#: Dim that runs over the samples, elements per sample in a row, and rows of the batch.
BATCH = {"x": (0, 1, 1), "h": (0, 1, 1), "k": (0, 1, 1), "b": (0, 1, 1), "t": (1, 1, 1),
         "q": (1, 1, 1), "u": (0, 2, 1), "r": (0, 2, 1)}  # fmt: skip
READS = {
    "h": ("x", "w"), "g": ("x", "h"), "m": ("h",), "l": ("h", "y"), "z": ("h",), "k": ("d", "h"),
    "b": ("h",), "q": ("t",), "r": ("u",), "n": ("h", "g", "m", "l", "z", "k", "b", "q", "r"),
}  # fmt: skip
#: A number beside the tensors: of the whole op, of its pieces.
MORE: dict[str, list[Any]] = {"k": [1, 2]}
KINDS = {"z": "aten.zeros_like.default", "l": "aten.mean.default"}
Row = tuple[dict[str, str], list[list[int]]]


def _tensor(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    size = 4
    for length in shape:
        size *= length
    return Tensor(name=name, bytes=size, shape=shape, dtype=dtype)


def _graph() -> Graph:
    return build_graph("by hand", [
        Op(name=name, kind=KINDS.get(name, f"aten.{name}.default") if name in READS else "input",
           inputs=READS.get(name, ()),
           outputs=(_tensor(name, shape, "int64" if name == "y" else "float32"),),
           arguments={"args": [*({"tensor": read} for read in READS.get(name, ())),
                               *MORE.get(name, [])[:1]]})
        for name, shape in SHAPES.items()
    ])  # fmt: skip


def _box(name: str, piece: int) -> list[list[int]]:
    """The samples of a piece."""
    dim, scale, _ = BATCH[name]
    box = [[0, length] for length in SHAPES[name]]
    box[dim] = [POINTS[piece] * scale, POINTS[piece + 1] * scale]
    return box


def _lengths(name: str, piece: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in _box(name, piece))


def _op(name: str, kind: str, args: list[Any], reads: tuple[str, ...], out: Tensor) -> Op:
    return Op(name=name, kind=kind, inputs=reads, outputs=(out,), arguments={"args": args})


def _part(name: str, piece: int, *reads: str) -> Op:
    """A piece of an op: of a batch, or a partial result."""
    shape = _lengths(name, piece) if name in BATCH else SHAPES[name]
    kind = KINDS.get(name, f"aten.{name}.default")
    args: list[Any] = _refs(iter(reads))
    return _op(f"{name}@{piece}", kind, args + MORE.get(name, [])[1:],
               reads, _tensor(f"{name}@{piece}", shape))  # fmt: skip


def _refs(names: Iterator[str]) -> list[dict[str, str]]:
    return [{"tensor": name} for name in names]


def _of_piece(i: int) -> list[Op]:
    """Slices and pieces; the samples of `t` lie apart and are copied."""
    lengths = list(_lengths("t", i))
    view = _tensor(f"t:view@{i}", tuple(lengths))
    row = [{"tensor": view.name}, [[0, length] for length in lengths]]
    blank = _tensor(f"b:self:blank@{i}", _lengths("h", i))
    ops = [
        _op(f"{name}:slice@{i}", SLICE, [{"tensor": name}, _box(name, i)], (name,),
            _tensor(f"{name}@{i}", _lengths(name, i)))
        for name in ("x", "u")
    ]  # fmt: skip
    return [
        *ops,
        _op(f"t:slice@{i}", SLICE, [{"tensor": "t"}, _box("t", i)], ("t",), view),
        _op(f"t:copy@{i}", FETCH, [lengths, None, [row]], (view.name,),
            _tensor(f"t@{i}", tuple(lengths))),
        _op(blank.name, FETCH, [list(blank.shape or ()), None, []], (), blank),
        _part("h", i, f"x@{i}", "w"),
        _part("g", i, f"x@{i}", f"h@{i}"),
        _part("m", i, f"h@{i}"),
        _part("l", i, f"h@{i}", "y"),
        _part("k", i, "k:share", f"h@{i}"),
        _part("b", i, blank.name),
        _part("q", i, f"t@{i}"),
        _part("r", i, f"u@{i}"),
    ]  # fmt: skip


def _join(name: str) -> Op:
    rows = [[{"tensor": f"{name}@{i}"}, _box(name, i)] for i in range(3)]
    reads = tuple(f"{name}@{i}" for i in range(3))
    args = [list(SHAPES[name]), None, rows]
    return _op(f"{name}:join", FETCH, args, reads, _tensor(name, SHAPES[name]))


def _reduce(of: str, made: str) -> Op:
    parts = tuple(f"{of}@{i}" for i in range(3))
    args = ["sum", _refs(iter(parts)), None]
    return _op(f"{made}:reduce", REDUCE, args, parts, _tensor(made, SHAPES[of]))


def _add(first: str, i: int, made: str) -> Op:
    reads = (first, f"g@{i}")
    total = dataclasses.replace(_tensor(made, SHAPES["g"]), alias_of=first)
    return _op(f"g:add@{i}", ADD, _refs(iter(reads)), reads, total)


def _pieces(graph: Graph) -> Pieces:
    whole = {op.name: op for op in graph.ops}
    scalar = _tensor("k:share", ())
    nothing = dataclasses.replace(
        whole["z"], kind=FETCH, inputs=(), arguments={"args": [[5, 2], 0.0, []]}
    )
    rows = dataclasses.replace(_tensor("l:rows", (5,)), dtype="bool")
    return Pieces(points=POINTS, batch=BATCH, ops=(
        *(whole[name] for name in ("x", "w", "y", "d", "t", "u")),
        _op("k:share", "aten.mul.Scalar", [{"tensor": "d"}, 1 / 10], ("d",), scalar),
        *(op for i in range(3) for op in _of_piece(i)),
        _add("g@0", 1, "g:1"), _add("g:1", 2, "g"),
        _reduce("m", "m"), _reduce("l", "l:sum"),
        _op("l:rows", "aten.ne.Scalar", [{"tensor": "y"}, -100], ("y",), rows),
        _op("l:count", "aten.sum.default", [{"tensor": "l:rows"}], ("l:rows",),
            _tensor("l:count", ())),
        _op("l:divide", "aten.div.Tensor", _refs(iter(("l:sum", "l:count"))),
            ("l:sum", "l:count"), _tensor("l", ())),
        nothing,
        *(_join(name) for name in ("h", "k", "b", "q", "r")),
        whole["n"],
    ))  # fmt: skip


def _problems(change: Callable[[Op], Op | None] | None = None, **fields: Any) -> list[str]:
    graph = _graph()
    pieces = dataclasses.replace(_pieces(graph), **fields)
    if change is not None:
        kept = (change(op) for op in pieces.ops)
        pieces = dataclasses.replace(pieces, ops=tuple(op for op in kept if op is not None))
    return list(pieces_problems(graph, pieces))


def _at(name: str, change: Callable[[Op], Op | None]) -> Callable[[Op], Op | None]:
    return lambda op: change(op) if op.name == name else op


NAMES = [op.name for op in _pieces(_graph()).ops]
#: Ops of no graph: what combines pieces, and the pieces themselves.
HELPERS = [name for name in NAMES if ":" in name]


def test_the_cut_without_faults_is_valid() -> None:
    assert _problems() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_needed_and_of_its_kind_and_shape(name: str) -> None:
    (out,) = next(op for op in _pieces(_graph()).ops if op.name == name).outputs
    longer = _tensor(out.name, (*(out.shape or ()), 7))
    assert _problems(_at(name, lambda op: None))
    assert _problems(_at(name, lambda op: dataclasses.replace(op, kind="aten.other.default")))
    if "blank" not in name and name != "l:rows":
        assert _problems(_at(name, lambda op: dataclasses.replace(op, outputs=(longer,))))
        half = dataclasses.replace(out, dtype="float16")
        assert _problems(_at(name, lambda op: dataclasses.replace(op, outputs=(half,))))


def _numbers(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where the numbers of nested lists and mappings are."""
    for at, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, int | float):
            yield value, at
        elif isinstance(each, list | dict):
            yield from _numbers(each)


@pytest.mark.parametrize("name", [name for name in HELPERS if name != "l:rows"])
def test_every_number_of_a_slice_or_a_join_is_checked(name: str) -> None:
    op = next(op for op in _pieces(_graph()).ops if op.name == name)
    for number, _ in enumerate(_numbers(op.arguments)):
        for by in (1, -1):
            spoilt = copy.deepcopy(op.arguments)
            owner, at = list(_numbers(spoilt))[number]
            owner[at] += by
            wrong = dataclasses.replace(op, arguments=spoilt)
            assert _problems(_at(name, lambda op, wrong=wrong: wrong)), spoilt


def _reading(*names: str) -> Callable[[Op], Op]:
    return lambda op: dataclasses.replace(op, inputs=names, arguments={"args": _refs(iter(names))})


def _with(**fields: Any) -> Callable[[Op], Op]:
    return lambda op: dataclasses.replace(op, **fields)


def _arguments(*args: Any, **fields: Any) -> Callable[[Op], Op]:
    return _with(arguments={"args": list(args)}, **fields)


FAULTS: dict[str, tuple[str, Callable[[Op], Op | None], str]] = {
    "a mean where a sum is needed": (
        "k@0", _arguments({"tensor": "k:share"}, {"tensor": "h@0"}, 1), "its arguments differ",
    ),
    "a sum of no share": (
        "k@0", _arguments({"tensor": "d"}, {"tensor": "h@0"}, 2, inputs=("d", "h@0")),
        "its arguments differ",
    ),
    "a number too many": (
        "h@0", _arguments({"tensor": "x@0"}, {"tensor": "w"}, 1), "its arguments differ",
    ),
    "tensors in another order": (
        "h@0", _arguments({"tensor": "w"}, {"tensor": "x@0"}), "its arguments differ",
    ),
    "results that are named": (
        "h@0", _with(arguments={"args": _refs(iter(("x@0", "w"))), "returns": ["h@0"]}),
        "gives its results other names",
    ),
    "a piece that is missing": ("h@1", lambda op: None, "op 'h' has 2 of 3 pieces"),
    "another one's samples": ("h@1", _with(inputs=("x@0", "w")), "'x@0', which 'h' does not read"),
    "another one's samples in the second place": (
        "k@0", _with(inputs=("k:share", "h@1")), "'h@1', which 'k' does not read",
    ),
    "what it does not read": ("h@1", _with(inputs=("u@1", "w")), "'u@1', which"),
    "what is not there": ("h@1", _with(inputs=("none", "w")), "'none', which"),
    "a view with gaps": ("q@1", _with(inputs=("t:view@1",)), "'t:view@1', which is not complete"),
    "not a piece of it": (
        "h@1", _with(outputs=(_tensor("h@0", (1, 2)),)), "'h@0' is not a piece of its results",
    ),
    "shape of another piece": (
        "h@1", _with(outputs=(_tensor("h@1", (2, 2)),)), r"has shape \[2, 2\], not \[1, 2\]",
    ),
    "an op before what it reads": ("h:join", lambda op: None, "it reads 'h' before it is whole"),
    "another op of the graph": ("n", _with(kind="aten.neg.default"), "is not the aten.n.default"),
    "results that are not those": (
        "n", _with(outputs=(_tensor("n", (4, 2)),)), "its results are not those of the graph",
    ),
    "nothing is read": (
        "n", _arguments([5, 2], 0.0, [], kind=FETCH, inputs=()), "it reads nothing",
    ),
    "a slice of what is no batch": ("x:slice@1", _reading("w"), "it is not an op|are not valid"),
    "a blank that reads": ("b:self:blank@0", _with(inputs=("x@0",)), "does not combine pieces"),
    "a blank with slices": (
        "b:self:blank@0", _arguments([2, 2], None, [[{"tensor": "h@0"}, [[0, 2], [0, 2]]]]),
        "does not combine pieces",
    ),
    "a blank of nothing": ("b:self:blank@0", _with(name="b:blank@0"), "are not valid"),
    "a blank of no type": (
        "b:self:blank@0",
        _with(outputs=(dataclasses.replace(_tensor("b:self:blank@0", (2, 2)), dtype="int8"),)),
        "does not combine pieces",
    ),
    "a share of something else": (
        "k:share", _arguments({"tensor": "w"}, 1 / 10, inputs=("w",)), "does not combine pieces",
    ),
    "a sum begun with the second": ("g:add@1", _reading("g@1", "g@1"), "does not combine pieces"),
    "a part twice": ("g:add@2", _reading("g:1", "g@1"), "are not valid"),
    "a part left out": ("g:add@1", _reading("g@0", "g@2"), "does not combine pieces"),
    "parts of two tensors": ("g:add@1", _reading("g@0", "m@1"), "does not combine pieces"),
    "a sum that is no sum yet": (
        "g:add@2", _with(outputs=(dataclasses.replace(_tensor("g:2", (3, 2)), alias_of="g:1"),)),
        "does not combine pieces",
    ),
    "a sum in a storage of its own": (
        "g:add@2", _with(outputs=(_tensor("g", (3, 2)),)), "does not combine pieces",
    ),
    "a part that is read after it has taken another": (
        "m:reduce", _arguments("sum", _refs(iter(("g@0", "g@1", "g@2"))), None,
                               inputs=("g@0", "g@1", "g@2")),
        "are not valid",
    ),
    "parts in another order": (
        "m:reduce", _arguments("sum", _refs(iter(("m@1", "m@0", "m@2"))), None),
        "does not combine pieces",
    ),
    "parts of something else": (
        "m:reduce", _arguments("sum", _refs(iter(("k@0", "k@1", "k@2"))), None),
        "does not combine pieces",
    ),
    "a mean of no sum": ("l:divide", _with(inputs=("m", "l:count")), "does not combine pieces"),
    "a mean by rows": ("l:divide", _with(inputs=("l:sum", "l:rows")), "does not combine pieces"),
    "a count of other rows": ("l:count", _with(inputs=("y",)), "does not combine pieces"),
    "rows of a piece": ("l:rows", _with(inputs=("h@0",)), "does not combine pieces"),
    "a sum after the last part": (
        "l:divide", lambda op: dataclasses.replace(
            _reading("l:sum", "l@2")(op), name="l:add@3", kind=ADD
        ), "does not combine pieces",
    ),
    "a join by another name": (
        "h:join", _with(outputs=(_tensor("h.2", (5, 2)),)), "does not combine pieces",
    ),
    "rows of no count": ("l:rows", _with(name="l:lines"), "does not combine pieces"),
    "arguments that are none": ("x:slice@0", _with(arguments={"args": [1]}), "are not valid"),
    "no arguments": ("x:slice@0", _with(arguments=None), r"are not valid \('args'\)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    name, change, message = FAULTS[fault]
    problems = _problems(_at(name, change))
    assert any(re.search(message, problem) for problem in problems), problems


@pytest.mark.parametrize("shape", [None, (0, 2)])
def test_a_mean_of_no_or_of_unknown_elements_has_no_share(shape: tuple[int, ...] | None) -> None:
    graph, pieces = _graph(), _pieces(_graph())
    h = _with(outputs=(dataclasses.replace(_tensor("h", ()), shape=shape),))
    k = _arguments({"tensor": "d"}, 1.0)
    graph = build_graph("by hand", [_at("h", h)(op) or op for op in graph.ops])
    ops = tuple(_at("k:share", k)(op) or op for op in pieces.ops)
    found = list(pieces_problems(graph, dataclasses.replace(pieces, batch={}, ops=ops)))
    assert any("'k:share': it is not an op of the graph" in problem for problem in found), found


def test_a_join_is_of_the_pieces_themselves() -> None:
    """What has the name of a piece that nobody made may be samples of another tensor."""
    whole = _pieces(_graph())
    by_name = {op.name: op for op in whole.ops}
    nothing = dataclasses.replace(
        by_name["b@1"], outputs=(),
        arguments={**(by_name["b@1"].arguments or {}), "returns": [None]},
    )  # fmt: skip
    view, size = _tensor("h:view@1", (1, 2)), [[0, 1], [0, 2]]
    foreign = [
        _op("h:slice@1", SLICE, [{"tensor": "h"}, _box("h", 1)], ("h",), view),
        _op("h:copy@1", FETCH, [[1, 2], None, [[{"tensor": view.name}, size]]], (view.name,),
            _tensor("b@1", (1, 2))),
    ]  # fmt: skip
    ops = [nothing if op.name == "b@1" else op for op in whole.ops]
    at = next(i for i, op in enumerate(ops) if op.name == "b:join")
    found = _problems(ops=(*ops[:at], *foreign, *ops[at:]))
    assert "op 'b:join': it is not an op" in found[0]


@pytest.mark.parametrize(("points", "are_two"), [((0, 5), False), ((0, 2, 5), True)])
def test_two_pieces_are_enough(points: tuple[int, ...], are_two: bool) -> None:
    graph = build_graph("x", [_graph().ops[0]])
    pieces = Pieces(points=points, batch={}, ops=graph.ops)
    assert (list(pieces_problems(graph, pieces)) == []) == are_two


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"points": (0, 5)}, "are not the starts of two or more pieces"),
        ({"points": (1, 2, 3, 5)}, "are not the starts"),
        ({"points": (0, 3, 3, 5)}, "are not the starts"),
        ({"points": (0, 2, 3, 6)}, "has no batch at dim"),
        ({"batch": BATCH | {"x": (2, 1, 1)}}, r"'x' of shape \[5, 3\] has no batch at dim 2"),
        ({"batch": BATCH | {"x": (-2, 1, 1)}}, "has no batch at dim -2"),
        ({"batch": BATCH | {"x": (1, 1, 1)}}, "has no batch at dim 1"),
        ({"batch": BATCH | {"x": (0, 0, 1)}}, "has no batch at dim 0"),
        ({"batch": BATCH | {"x": (0, 1, 0)}}, "has no batch at dim 0"),
        ({"batch": BATCH | {"x": (0, 1, 2)}}, "has no batch at dim 0"),
        ({"batch": BATCH | {"none": (0, 1, 1)}}, "'none' of shape"),
    ],
)
def test_points_and_batches_are_those_of_the_graph(fields: dict[str, Any], message: str) -> None:
    assert re.search(message, _problems(**fields)[0])


def test_pieces_of_rows_that_stand_apart_are_neither_sliced_nor_joined() -> None:
    """Twice the batch in a row instead of two elements per sample: boxes of the same sizes."""
    problems = _problems(batch=BATCH | {"u": (0, 1, 2)})
    assert "op 'u:slice@0': it is not an op of the graph" in "".join(problems)

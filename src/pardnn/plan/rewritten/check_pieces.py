"""The checker of cut graphs: independent of the code that cuts a batch.

It proves that every op of the graph is there, whole or once per piece, that each piece reads whole
tensors or its own samples of what the op reads, that slices and joins are of the samples that they
claim, and that partial results are added up all, once, in the order of the pieces. Which loops can
be cut, and which samples an op needs, only its description knows; the numeric tests certify that.
O(ops).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, REDUCE, SLICE
from pardnn.plan.pieces import ADD, INTO, Pieces, piece_of
from pardnn.plan.rewritten.check_piece_calls import Share, call_problem


class _Meaning(NamedTuple):
    """What a tensor of the cut graph is.

    Attributes:
        what: "whole", "piece", "view" (of a piece), "part" (a sum of partial results), "rows"
            (which rows of a target count), "share" (of a loss's gradient) or "blank".
        of: A tensor of the graph.
        number: Of the piece; of the first piece of a sum.
        end: The piece after the last of a sum.
    """

    what: str
    of: str
    number: int = 0
    end: int = 0


def pieces_problems(graph: Graph, pieces: Pieces) -> Iterator[str]:
    """Yield what is wrong with a cut graph."""
    points = pieces.points
    if len(points) < 3 or points[0] != 0 or any(a >= b for a, b in itertools.pairwise(points)):
        yield f"pieces: {list(points)} are not the starts of two or more pieces and an end"
        return
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    for name, (dim, scale, outer) in pieces.batch.items():
        shape = tensors[name].shape or () if name in tensors else ()
        is_there = 0 <= dim < len(shape) and min(scale, outer) >= 1
        if not is_there or shape[dim] != points[-1] * scale * outer:
            yield f"pieces: {name!r:.60} of shape {list(shape)} has no batch at dim {dim}"
            return
    checker = _Checker(graph, pieces, tensors)
    yield from checker.missing()
    for op in pieces.ops:
        try:
            problem = checker.problem(op)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            problem = f"its arguments are not valid ({error!s:.60})"
        if problem is not None:
            yield f"pieces: op {op.name!r:.60}: {problem}"


def _args(op: Op) -> list[Any]:
    return (op.arguments or {})["args"]


@final
class _Checker:
    """Follows what each tensor of a cut graph is."""

    def __init__(self, graph: Graph, pieces: Pieces, tensors: Mapping[str, Tensor]) -> None:
        self.pieces, self.tensors = pieces, tensors
        self.number, self.last = len(pieces.points) - 1, pieces.points[-1]
        self.whole = {op.name: op for op in graph.ops}
        self.there = {op.name for op in pieces.ops}
        self.part_of = {
            piece_of(op.name, i): (op, i) for op in graph.ops for i in range(self.number)
        }
        self.meaning: dict[str, _Meaning] = {}

    def missing(self) -> Iterator[str]:
        """Yield the ops of the graph that are not there, whole or in all pieces."""
        for name in self.whole:
            parts = sum(piece_of(name, i) in self.there for i in range(self.number))
            if parts + self.number * (name in self.there) != self.number:
                yield f"pieces: op {name!r:.60} has {parts} of {self.number} pieces"

    def box(self, name: str, piece: int) -> Box:
        """Return the samples of a piece of a tensor; in runs, as if they stood together."""
        (dim, scale, outer), points = self.pieces.batch[name], self.pieces.points
        full = tuple((0, size) for size in self.tensors[name].shape or ())
        ends = (points[piece] * scale * outer, points[piece + 1] * scale * outer)
        return (*full[:dim], ends, *full[dim + 1 :])

    def problem(self, op: Op) -> str | None:
        """Return what is wrong with an op, and note what its results are."""
        if op.kind == FETCH:
            shape = _args(op)[0]
            if tuple(shape) != op.outputs[0].shape:
                return f"it makes {list(shape)}, its result is of {op.outputs[0].shape}"
        if op.name in self.whole:
            return self._same(op, self.whole[op.name])
        if op.name in self.part_of:
            return self._part(op, *self.part_of[op.name])
        args, (output,) = _args(op), op.outputs
        found = self._helper(op, args)
        if found is None:
            return f"it is not an op of the graph, and {op.kind!r:.40} does not combine pieces"
        self.meaning[output.name] = found
        return self._shaped(output, found)

    def _same(self, op: Op, whole: Op) -> str | None:
        for tensor in op.outputs:
            self.meaning[tensor.name] = _Meaning("whole", tensor.name)
        if op.outputs != whole.outputs:
            return "its results are not those of the graph"
        if op.kind == FETCH and _args(op)[2] == [] and not op.inputs:
            name = whole.kind.removeprefix("aten.").rpartition(".")[0]
            return None if name.endswith("_like") or name.startswith("new_") else "it reads nothing"
        if (op.kind, op.inputs, op.arguments) != (whole.kind, whole.inputs, whole.arguments):
            return f"it is not the {whole.kind} of the graph"
        wrong = [name for name in op.inputs if self.meaning.get(name) != _Meaning("whole", name)]
        return f"it reads {wrong[0]!r:.60} before it is whole" if wrong else None

    def _part(self, op: Op, whole: Op, piece: int) -> str | None:
        args = _args(op)
        total: _Meaning | None = None
        if op.kind == INTO.get(whole.kind):
            total = self._taken(args[0]["tensor"], whole.outputs[0].name)
            args = args[1:]
            if total is None or total.end != piece:
                return f"what it adds its result to is not the sum of the pieces before {piece}"
        elif op.kind != whole.kind:
            return f"it is {op.kind}, not a piece of {whole.kind}"
        read = op.inputs[1:] if total else op.inputs
        problem = next((p for p in (self._read(name, whole, piece) for name in read) if p), None)
        share = Share(self.pieces.points[piece + 1] - self.pieces.points[piece], self.last)
        problem = problem or call_problem(op, args, whole, piece, share, self._stands_for)
        if problem is not None:
            return problem
        if total is not None:
            found = self._summed(op, _Meaning("part", total.of, total.number, piece + 1))
            return "it has no such result" if found is None else None
        results = {piece_of(tensor.name, piece): tensor.name for tensor in whole.outputs}
        for tensor in op.outputs:
            of = results.get(tensor.name)
            if of is None:
                return f"{tensor.name!r:.60} is not a piece of its results"
            is_piece = of in self.pieces.batch
            found = self.meaning[tensor.name] = (
                _Meaning("piece", of, piece) if is_piece else _Meaning("part", of, piece, piece + 1)
            )
            problem = self._shaped(tensor, found)
            if problem is not None:
                return problem
        return None

    def _read(self, name: str, whole: Op, piece: int) -> str | None:
        """Return what is wrong with a tensor that a piece reads."""
        found = self.meaning.get(name)
        if found is None or found.of not in whole.inputs:
            return f"it reads {name!r:.60}, which {whole.name!r:.60} does not read"
        is_share = found.what == "share" and name == f"{whole.name}:share"
        if found.what != "whole" and not is_share and found.number != piece:
            return f"it reads {name!r:.60}, which {whole.name!r:.60} does not read"
        if not is_share and found.what not in ("whole", "piece", "blank"):
            return f"it reads {name!r:.60}, which is not complete"
        return None

    def _stands_for(self, name: str, of: str) -> bool:
        """Whether a piece may read a tensor in place of another one, of the graph."""
        found = self.meaning[name]
        if found.what == "blank":
            return self.tensors[found.of].dtype == self.tensors[of].dtype
        return found.of == of

    def _shaped(self, tensor: Tensor, found: _Meaning) -> str | None:
        """Return whether a tensor has the shape of what it is."""
        whole = self.tensors[found.of]
        expected = whole.shape or ()
        if found.what in ("piece", "view"):
            expected = tuple(b - a for a, b in self.box(found.of, found.number))
        is_free = found.what in ("blank", "rows")
        if is_free or ((tensor.shape or ()) == expected and tensor.dtype == whole.dtype):
            return None
        return f"{tensor.name!r:.60} has shape {list(tensor.shape or ())}, not {list(expected)}"

    def _helper(self, op: Op, args: Any) -> _Meaning | None:
        """Return what an op makes that is no op of the graph; None if nothing of it."""
        (output,) = op.outputs
        of, _, last = op.name.rpartition(":")
        what, _, number = last.partition("@")
        piece = int(number) if number else 0
        read = [self.meaning[name] for name in op.inputs]
        if what in ("slice", "join") and self.pieces.batch[of][2] > 1:
            return None  # pieces in runs are no boxes
        if what == "slice" and op.kind == SLICE and read == [_Meaning("whole", of)]:
            name = output.name == piece_of(of, piece)
            is_box = args[1] == [list(ends) for ends in self.box(of, piece)]
            return _Meaning("piece" if name else "view", of, piece) if is_box else None
        if what == "copy" and op.kind == FETCH and read == [_Meaning("view", of, piece)]:
            is_all = [list(ends) for _, ends in args[2]] == [[[0, n] for n in output.shape or ()]]
            return _Meaning("piece", of, piece) if is_all else None
        if what == "blank" and op.kind == FETCH and not op.inputs and args[2] == []:
            name, _, slot = of.rpartition(":")
            return self._blank(name, piece, output) if slot else None
        if output.name == of and what == "join" and op.kind == FETCH:
            return _Meaning("whole", of) if self._joins(of, args) else None
        if what == "share" and op.kind == "aten.mul.Scalar":
            return self._share(of, args, read)
        return self._sum(op, what, of, args, read)

    def _blank(self, reader: str, piece: int, output: Tensor) -> _Meaning | None:
        """Return of which input of a piece that a tensor takes the place."""
        like = [n for n in self.whole[reader].inputs if self.tensors[n].dtype == output.dtype]
        return _Meaning("blank", like[0], piece) if like else None

    def _share(self, reader: str, args: Any, read: list[_Meaning]) -> _Meaning | None:
        """Return the gradient of a loss that a share of it stands for: of a mean of elements."""
        grad, of = (each["tensor"] for each in _args(self.whole[reader])[:2])
        shape = self.tensors[of].shape
        number = 0 if shape is None else math.prod(shape)
        is_share = number > 0 and args[1] == 1 / number and read == [_Meaning("whole", grad)]
        return _Meaning("share", grad) if is_share else None

    def _joins(self, of: str, args: Any) -> bool:
        rows = [
            [{"tensor": piece_of(of, i)}, [list(ends) for ends in self.box(of, i)]]
            for i in range(self.number)
        ]
        pieces = [_Meaning("piece", of, i) for i in range(self.number)]
        made = [self.meaning.get(piece_of(of, i)) for i in range(self.number)]
        return args[2] == rows and made == pieces

    def _sum(self, op: Op, what: str, of: str, args: Any, read: list[_Meaning]) -> _Meaning | None:
        """Return what an op makes that adds up partial results, or divides their sums."""
        (output,) = op.outputs
        if what in ("add", "gather") and op.kind == ADD:
            first, part = (self._taken(each["tensor"], of) for each in args)
            if first is None or part is None or part.number != first.end:
                return None
            return self._summed(op, first._replace(end=part.end))
        if what == "total" and op.kind == REDUCE:
            is_copy = output.name == of and args[::2] == ["sum", None]
            taken = [self._taken(each["tensor"], of) for each in args[1]]
            is_all = taken == [_Meaning("part", of, 0, self.number)]
            return _Meaning("whole", of) if is_copy and is_all else None
        if what == "reduce" and op.kind == REDUCE:
            is_sum = of.endswith(":sum") and output.name == of
            of = of.removesuffix(":sum") if is_sum else of
            parts = [_Meaning("part", of, i, i + 1) for i in range(self.number)]
            if [self.meaning[each["tensor"]] for each in args[1]] != parts:
                return None
            return _Meaning("part", of, 0, self.number) if is_sum else _Meaning("whole", of)
        if what == "divide" and op.kind == "aten.div.Tensor" and output.name == of:
            is_mean = read[:1] == [_Meaning("part", of, 0, self.number)] and read[1].what == "whole"
            return _Meaning("whole", of) if is_mean else None
        return self._count(op, what, of, read)

    def _taken(self, name: str, of: str) -> _Meaning | None:
        """Return what sum of a tensor's parts is written or added now: none may read it again."""
        found = self.meaning.pop(name, None)
        return found if found is not None and found[:2] == ("part", of) else None

    def _summed(self, op: Op, found: _Meaning) -> _Meaning | None:
        """Return what an op makes in place of its first input; None if that is not what it says."""
        (output,) = op.outputs
        is_all = (found.number, found.end) == (0, self.number)
        is_all = is_all and f"{found.of}:total" not in self.there  # else it is copied by that
        if output.alias_of != op.inputs[0] or (output.name == found.of) != is_all:
            return None
        found = self.meaning[output.name] = _Meaning("whole", found.of) if is_all else found
        return None if self._shaped(output, found) else found

    def _count(self, op: Op, what: str, of: str, read: list[_Meaning]) -> _Meaning | None:
        """Return what an op makes that counts rows for a mean."""
        if what == "rows" and op.kind == "aten.ne.Scalar" and read[0].what == "whole":
            return _Meaning("rows", of)
        is_count = op.kind == "aten.sum.default" and read == [_Meaning("rows", of)]
        return _Meaning("whole", of) if what == "count" and is_count else None

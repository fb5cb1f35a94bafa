"""The cut graph: a step with its batch in pieces, as a graph that is placed like any other.

Idea: an op that is cut becomes one op per piece, "h@0", "h@1" and so on, in the order of the graph;
all others stay as they are. A whole tensor is sliced where pieces read it (a view), a tensor in
pieces is joined where an op reads it whole, and partial results are added in the order of the
pieces (`sums`), so that no number depends on where they run. Every name of the graph remains the
name of the same whole value.
Two things that would make all pieces wait for each other are avoided: an op that reads only the
shape of a value makes its result without it, and the number of rows that a mean loss divides by
comes from the targets alone.
Complexity: O(ops x pieces).
Deviations: random ops run once, on the whole, so that the numbers are those of one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from pardnn.errors import UnsupportedError, shown
from pardnn.graph.ir import Graph, MemoryKind, Op, Tensor, alias_of
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, SLICE, check_batch_is_read_only
from pardnn.plan.pieces import Pieces, piece_of
from pardnn.shard.boxes import bytes_of, is_one_run, lengths, whole
from pardnn.shard.cache import begin_graph
from pardnn.shard.microbatch.analysis import BatchCut, analyse_batch
from pardnn.shard.microbatch.call_cut import CallCut, piece_box, piece_boxes
from pardnn.shard.microbatch.early_results import changed, filled, is_counting, with_sums
from pardnn.shard.microbatch.sheet import Sheet, in_order, new_tensor
from pardnn.shard.microbatch.strides import piece_strides, stated, strides_of
from pardnn.shard.microbatch.sums import Sums
from pardnn.shard.spmd.emitter import box_list
from pardnn.shard.spmd.templates import localised, result_names
from pardnn.shard.tdl.language import Reducer


def cut_batch(
    graph: Graph, num_pieces: int, accumulators: int | None = None, *, totals: bool = False
) -> Pieces:
    """Return a step with its batch in pieces.

    Args:
        graph: A captured graph.
        num_pieces: At least 2; they differ by at most one sample.
        accumulators: Into how many storages partial sums are added, each from consecutive pieces: 1
            if one device has all pieces of a layer, or the number of copies of a layer that work in
            parallel. None: a storage for each piece, which any device may add to the others.
        totals: Whether sums are copied out of the storage in which they are added up: devices that
            have a part of each piece then add up their own terms, and those of each other only
            once.

    Raises:
        UsageError: E226, if the step has no batch that can be cut in this way.
        UnsupportedError: E823, if it writes its batch in place.
        DescriptionError: E220, if a description is wrong.
    """
    check_batch_is_read_only(graph)
    begin_graph()
    summed = with_sums(graph)
    cut = analyse_batch(summed, num_pieces)
    sums = Sums(Sheet(), cut.points, accumulators or num_pieces, totals=totals)
    writer = _Writer(summed, cut, sums)
    whole = {op.name: op for op in graph.ops}
    for number in summed.arrays.topological.tolist():
        op = summed.ops[number]
        of = op.name if op.name in whole else op.name.removesuffix(":share")
        if of in cut.ops:
            writer.write(op)
        elif of == op.name:
            writer.write(whole[of])
    return Pieces(
        points=cut.points,
        batch={
            name: (at.dim, at.scale, at.outer)
            for name, at in cut.dims.items()
            if name in writer.used
        },
        ops=in_order(writer.sheet),
    )


@final
class _Writer:
    """The cut graph while it is written."""

    def __init__(self, graph: Graph, cut: BatchCut, sums: Sums) -> None:
        self.cut = cut
        self.tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
        self.by_name = {op.name: op for op in graph.ops}
        self.sheet, self.sums = sums.sheet, sums
        #: Tensors of which there are pieces.
        self.used: set[str] = set()
        #: Tensors that are made of their pieces, and the op that joins them.
        self.joined: dict[str, str] = {}
        #: Results of ops that are cut, and of what follows from all of their pieces.
        self.late: set[str] = set()
        #: Tensors of pieces whose storage is that of a whole tensor.
        self.of_whole: set[str] = set()
        for op in graph.ops:
            if any("@" in name for name in (op.name, *(t.name for t in op.outputs))):
                raise UnsupportedError(
                    f"the name of op {shown(op.name)} has an @, which names pieces of a batch.\n"
                    "Rename it, or plan without microbatches.",
                    code="E825",
                )

    def write(self, op: Op) -> None:
        """Write an op: its pieces, or itself."""
        if op.name in self.cut.ops:
            self._pieces(op)
            return
        is_late = any(name in self.late for name in op.inputs)
        if is_late and (made := filled(op)) is not None:
            self.sheet.ops.append(made)
            return
        for name in op.inputs:
            self._whole(name, op)
        self.late.update(tensor.name for tensor in op.outputs if is_late)
        after = tuple(dict.fromkeys(self._after(op, None)))
        backward = op.backward_of
        if backward in self.cut.ops:
            backward = None
        self.sheet.ops.append(changed(op, after=after, backward_of=backward))

    def _after(self, op: Op, piece: int | None) -> list[str]:
        """Return what comes before an op, or a piece of it, without being read."""
        found: list[str] = []
        for name in op.after:
            if name not in self.cut.ops:
                found.append(name)
            elif piece is not None:
                found.append(piece_of(name, piece))
            else:
                found += [piece_of(name, i) for i in range(self.cut.num_pieces)]
            inputs = self.by_name[name].inputs
            found += [self.joined[read] for read in inputs if read in self.joined]
        return found

    def _whole(self, name: str, reader: Op) -> str:
        """Return a tensor as a whole, joined if it is in pieces."""
        if name in self.cut.made and name not in self.joined:
            self._join(name, reader)
        return name

    def _join(self, name: str, reader: Op, memory: MemoryKind = "normal") -> None:
        tensor, at = self.tensors[name], self.cut.dims[name]
        boxes = piece_boxes(tensor.shape or (), at, self.cut.points)
        names = [piece_of(name, i) for i in range(self.cut.num_pieces)]
        rows = [[{"tensor": n}, box_list(box)] for n, box in zip(names, boxes, strict=True)]
        op_name = self.joined[name] = f"{name}:join"
        args = [list(tensor.shape or ()), None, rows]
        made = new_tensor(tensor, name)
        self.sheet.helper(op_name, FETCH, args, names, made, reader, memory=memory)

    def _piece(self, name: str, reader: Op, piece: int) -> str:
        """Return a piece of a tensor; of one that is whole it is a slice."""
        if name not in self.cut.made and name not in self.used:
            boxes = piece_boxes(
                self.tensors[name].shape or (), self.cut.dims[name], self.cut.points
            )
            for i, box in enumerate(boxes):
                self._slice(name, reader, i, box)
        self.used.add(name)
        return piece_of(name, piece)

    def _slice(self, name: str, reader: Op, piece: int, box: Box) -> None:
        tensor, out = self.tensors[name], piece_of(name, piece)
        shape, args = lengths(box), [{"tensor": name}, box_list(box)]
        strides = strides_of(tensor)
        is_copied = is_one_run(tensor.shape or (), strides) and not is_one_run(shape, strides)
        view = f"{name}:view@{piece}" if is_copied else out
        found = Tensor(
            name=view, bytes=bytes_of(tensor, shape), shape=shape, dtype=tensor.dtype,
            strides=stated(shape, strides), alias_of=name,
        )  # fmt: skip
        self.sheet.helper(
            f"{name}:slice@{piece}", SLICE, args, (name,), found, reader, memory="reference"
        )
        if is_copied:
            rows = [[{"tensor": view}, box_list(whole(shape))]]
            made = new_tensor(tensor, out, box)
            self.sheet.helper(
                f"{name}:copy@{piece}", FETCH, [list(shape), None, rows], (view,), made, reader
            )
        else:
            self.of_whole.add(out)

    def _blank(self, op: Op, slot: str, piece: int, shape: tuple[int, ...], like: Tensor) -> str:
        """Return a tensor of which only the shape counts."""
        name = f"{op.name}:{slot}:blank@{piece}"
        made = new_tensor(like, name, whole(shape))
        self.sheet.helper(name, FETCH, [list(shape), None, []], (), made, op)
        return name

    def _pieces(self, op: Op) -> None:
        """Write an op that is cut, and what combines its partial results."""
        cut, call = self.cut.ops[op.name], self.cut.calls[op.name]
        slots = {slot: name for slot, name in call.places.items() if isinstance(slot, str)}
        counted = self._count(op) if is_counting(op) else None
        for i in range(self.cut.num_pieces):
            self._one(op, cut, slots, i, counted)
        reducers = dict(zip(result_names(op), cut.outputs, strict=True))
        for tensor in op.outputs:
            self.late.add(tensor.name)
            reducer = reducers.get(tensor.name)
            if isinstance(reducer, Reducer) and tensor.name != counted:
                self.sums.combine(op, tensor, reducer, [r.name for r in op.outputs])
            elif tensor.name in self.cut.made:
                self.used.add(tensor.name)
                if op.memory == "residual":
                    self._join(tensor.name, op, "residual")
        if counted is not None:
            self.late.discard(counted)

    def _one(
        self, op: Op, cut: CallCut, slots: Mapping[str, str], piece: int, counted: str | None
    ) -> None:
        """Write one piece of an op."""
        worker = cut.pieces[piece]
        local = {slot: self._input(op, cut, slot, slots[slot], piece) for slot in worker.regions}
        by_name = {slots[slot]: name for slot, name in local.items()}
        outputs = tuple(
            self._output(op, tensor, piece, by_name)
            for tensor in op.outputs
            if tensor.name != counted
        )
        fraction = (self.cut.points[piece + 1] - self.cut.points[piece]) / self.cut.points[-1]
        backward = op.backward_of
        if backward in self.cut.ops:
            backward = piece_of(str(backward), piece)
        made = Op(
            name=piece_of(op.name, piece), kind=op.kind,
            inputs=tuple(dict.fromkeys(local.values())),
            after=tuple(dict.fromkeys(self._after(op, piece))), outputs=outputs,
            memory="normal" if op.memory == "residual" else op.memory,
            seconds=op.seconds and {k: s * fraction for k, s in op.seconds.items()},
            workspace=math.ceil(op.workspace * fraction), group=op.group, source=op.source,
            module=op.module, backward_of=backward, step=op.step,
            arguments=_arguments(op, cut, piece, local, by_name, counted),
        )  # fmt: skip
        self.sheet.piece[made.name] = piece
        self.sheet.ops.append(self.sums.adding(made, op, cut.outputs, piece))

    def _input(self, op: Op, cut: CallCut, slot: str, name: str, piece: int) -> str:
        """Return what a piece reads in a slot."""
        at, tensor = cut.inputs[slot], self.tensors[name]
        shape = lengths(cut.pieces[piece].regions[slot].box)
        if slot not in cut.unread:
            return self._whole(name, op) if at is None else self._piece(name, op, piece)
        if at is not None:
            box = piece_box(tensor.shape or (), at, self.cut.points, piece)
            if lengths(box) == shape:
                return self._piece(name, op, piece)
        if shape == tensor.shape and name not in self.late:
            return name
        return self._blank(op, slot, piece, shape, tensor)

    def _output(self, op: Op, tensor: Tensor, piece: int, by_name: Mapping[str, str]) -> Tensor:
        """Return what a piece makes of a result: its samples, or a partial result."""
        name, source = piece_of(tensor.name, piece), alias_of(op, tensor)
        if tensor.name not in self.cut.made:
            return new_tensor(tensor, name)
        at = self.cut.dims[tensor.name]
        box = piece_box(tensor.shape or (), at, self.cut.points, piece)
        if source is None:
            return new_tensor(tensor, name, box)
        source, shape = by_name[source], lengths(box)
        strides = strides_of(tensor)
        if source in self.of_whole:
            self.of_whole.add(name)
        else:
            strides = piece_strides(tensor.shape or (), strides, at, shape[at.dim])
        return Tensor(
            name=name, bytes=bytes_of(tensor, shape), shape=shape, dtype=tensor.dtype,
            strides=stated(shape, strides), alias_of=source,
        )  # fmt: skip

    def _count(self, op: Op) -> str:
        """Write the number of rows that count, from the targets alone; return its name."""
        total = op.outputs[1]
        args = (op.arguments or {})["args"]
        target = self._whole(self.cut.counted(args[1]["tensor"]), op)
        shape = self.tensors[target].shape or ()
        counted = Tensor(
            name=f"{total.name}:rows", bytes=math.prod(shape), shape=shape, dtype="bool"
        )
        self.sheet.helper(
            counted.name, "aten.ne.Scalar", [{"tensor": target}, args[4]], (target,), counted, op
        )
        self.sheet.helper(
            f"{total.name}:count", "aten.sum.default", [{"tensor": counted.name}],
            (counted.name,), new_tensor(total, total.name), op,
            kwargs={"dtype": {"dtype": total.dtype}},
        )  # fmt: skip
        return total.name


def _arguments(
    op: Op,
    cut: CallCut,
    piece: int,
    local: Mapping[str, str],
    by_name: Mapping[str, str],
    counted: str | None,
) -> dict[str, Any]:
    """Return the arguments of a piece, given its tensors by slot."""
    call, found = cut.pieces[piece].call, dict(op.arguments or {})
    found["args"] = [localised(value, local) for value in call.args]
    if "kwargs" in found or call.kwargs:
        found["kwargs"] = {key: localised(value, local) for key, value in call.kwargs.items()}
    if found.get("returns") or counted is not None:
        found["returns"] = [
            None if name in (None, counted) else piece_of(str(name), piece)
            for name in result_names(op)
        ]
    if "mutates" in found:
        found["mutates"] = [by_name[name] for name in found["mutates"]]
    return found

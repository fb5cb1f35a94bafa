"""The batch followed through a step: which ops are cut along it, and which run whole.

Problem: the user's step has one batch and does not mention microbatches.
Idea: the first dim of the inputs is the batch. Ops are visited in order; an op that reads a tensor
in pieces is cut along the loop that reads it so (`call_cut`), and its results are in pieces, or
partial and added up. An op without such a loop (batch norm in training) runs once on the joined
pieces, and its results of the same shape may be sliced again. Nothing here can be wrong, only slow,
because each piece reads the boxes that its description names.
Ops on a storage that is written in place are all cut, or all whole; and ops stay whole if their
result would have to be joined while the batch comes after another dim (`runs`).
Complexity: O(ops), with each distinct call analysed once; again whenever a storage is found that
only some of its ops cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pardnn.errors import UsageError, shown
from pardnn.graph.ir import Graph, Op, Tensor, addressed, alias_of, writes
from pardnn.plan.mesh import cut_points
from pardnn.plan.state_layout import STATE_KINDS
from pardnn.shard.microbatch.call_cut import BatchDim, CallCut, Mark, cut_call
from pardnn.shard.microbatch.early_results import filled, is_counting
from pardnn.shard.microbatch.runs import VIEWS, cut_in_runs
from pardnn.shard.search.coarsening import OpCall, op_calls, storage_of
from pardnn.shard.spmd.random_ops import is_random_op
from pardnn.shard.tdl.language import Reducer


@dataclass
class BatchCut:
    """How a step is cut along its batch.

    Attributes:
        points: First sample of each piece, and the number of samples.
        dims: Where the batch is, of each tensor that is in pieces or can be sliced.
        made: Tensors whose pieces are results of pieces.
        ops: Of each op that is cut.
        calls: The calls on tensors, by op.
    """

    points: tuple[int, ...]
    dims: dict[str, BatchDim] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    ops: dict[str, CallCut] = field(default_factory=dict)
    calls: dict[str, OpCall] = field(default_factory=dict)

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return len(self.points) - 1

    def counted(self, name: str) -> str:
        """Return a tensor with the same elements, a whole one if there is one.

        A view has the elements of the tensor that it views; counting them needs no order.
        """
        views = {
            each.op.outputs[0].name: each.op.inputs[0]
            for each in self.calls.values()
            if each.op.kind in VIEWS and len(each.op.inputs) == 1
        }
        now = name
        while now in self.made and now in views:
            now = views[now]
        return name if now in self.made else now


def analyse_batch(graph: Graph, num_pieces: int, *, in_runs: bool = True) -> BatchCut:
    """Return how a step is cut in pieces of its batch.

    Args:
        graph: A captured graph.
        num_pieces: At least 2. They differ by at most one sample.
        in_runs: Whether the batch may come after others in a dim, so that pieces are not boxes.

    Raises:
        UsageError: E226, if the step has no batch of as many samples, or no op can be cut.
    """
    calls = op_calls(graph)
    state = {op.name for op in graph.ops if op.kind in STATE_KINDS}
    owners, leading = storage_of(graph).owners, _leading(graph)
    best, most = None, 0
    for size, seeds in _batches(graph):
        points = cut_points(size, num_pieces)
        if points is None:
            continue
        found = _settled(graph, calls, BatchCut(points), seeds, in_runs=in_runs)
        number = sum(_work(found.calls[name]) for name in found.ops)
        if any(owners[name] in state for name in found.dims):  # features: weights are cut, too
            number = min(number, 1 if size in leading else 0)
        if number > most:
            best, most = found, number
    if best is None:
        all_sizes = sorted({size for size, _ in _batches(graph)})
        sizes = [size for size in all_sizes if size < num_pieces] or all_sizes
        raise UsageError(
            f"the batch of {shown(graph.name)} cannot be cut in {num_pieces} pieces: its inputs "
            f"have {', '.join(map(str, sizes)) or 'no'} samples.\nAsk for fewer microbatches, or "
            "pass the batch as an argument of the step.",
            code="E226",
        )
    return best


def most_pieces(graph: Graph, wanted: int) -> int:
    """Return into how many pieces a step can be cut, up to a maximum; 1 if not at all."""
    sizes = {min(size, wanted) for size, _ in _batches(graph)}
    for number in sorted(sizes, reverse=True):
        try:
            analyse_batch(graph, number)
        except UsageError:
            continue
        return number
    return 1


def _work(call: OpCall) -> int:
    """Return the bytes that a call makes, of which a cut makes pieces."""
    return sum(tensor.bytes for tensor in call.op.outputs)


def _batches(graph: Graph) -> list[tuple[int, dict[str, BatchDim]]]:
    """Return the sizes that may be the batch, and where each input would have it."""
    inputs = [op.outputs[0] for op in graph.ops if op.kind == "input" and op.outputs[0].shape]
    new = [
        op.outputs[0]
        for op in graph.ops
        if not op.inputs and op.outputs and op.outputs[0].shape and _is_new(op)
    ]
    sizes = [(t.shape or ())[dim] for dim in (0, 1) for t in inputs if len(t.shape or ()) > dim]
    return [
        (size, dict(_holding([*inputs, *new], size))) for size in dict.fromkeys(sizes) if size > 1
    ]


def _leading(graph: Graph) -> set[int]:
    """Return the sizes of the first dims of inputs."""
    return {shape[0] for op in graph.ops if op.kind == "input" and (shape := op.outputs[0].shape)}


def _is_new(op: Op) -> bool:
    """Whether an op makes the first state of a recurrent network, noise or labels of one value."""
    filled = op.kind.rpartition(".")[0] in ("aten.zeros", "aten.ones", "aten.full", "aten.empty")
    return filled or (not op.is_source and is_random_op(op.kind))


def _holding(tensors: Iterable[Tensor], size: int) -> Iterable[tuple[str, BatchDim]]:
    for tensor in tensors:
        shape = tensor.shape or ()
        dim = next((dim for dim in (0, 1) if len(shape) > dim and shape[dim] == size), None)
        if dim is not None:
            yield tensor.name, BatchDim(dim, 1)


def _settled(
    graph: Graph,
    calls: Sequence[OpCall],
    empty: BatchCut,
    seeds: Mapping[str, BatchDim],
    *,
    in_runs: bool,
) -> BatchCut:
    """Analyse again until no storage that is written is cut by some of its ops alone.

    And until no runs are to be joined.
    """
    sharers = _sharers(graph)
    random = {op.name for op in graph.ops if not op.is_source and is_random_op(op.kind)}
    forced = {name for ops in sharers if ops.keys() & random for name in ops}
    while True:
        found = BatchCut(empty.points, dict(seeds))
        _follow(graph, calls, found, forced, in_runs=in_runs)
        joined = _joined_runs(calls, found) if in_runs else set[str]()
        cut = [sum(_in_pieces(found, name, made) for name, made in ops.items()) for ops in sharers]
        torn = [ops for number, ops in zip(cut, sharers, strict=True) if 0 < number < len(ops)]
        if not torn and not joined:
            return found
        forced.update(joined, *torn)


def _joined_runs(calls: Sequence[OpCall], found: BatchCut) -> set[str]:
    """Return the ops that make pieces of runs which some op reads as a whole, or state keeps."""
    runs = {name for name in found.made if found.dims[name].outer > 1}
    maker = {tensor.name: call.op for call in calls for tensor in call.op.outputs}
    joined = {name for name in runs if maker[name].memory == "residual"}
    for call in calls if runs else ():
        read = {slot: n for slot, n in call.places.items() if isinstance(slot, str) and n in runs}
        cut = found.ops.get(call.op.name)
        if not read or (cut is None and filled(call.op) is not None):
            continue
        if cut is None:
            joined.update(read.values())
            continue
        joined.update(
            name
            for slot, name in read.items()
            if cut.inputs.get(slot) is None and slot not in cut.unread
        )
        if is_counting(call.op) and call.places["target"] in runs:  # rows are counted in all pieces
            target = found.counted(str(call.places["target"]))
            joined.update({target} & runs)
    return {maker[name].name for name in joined}


def _in_pieces(found: BatchCut, name: str, made: Sequence[str]) -> bool:
    """Whether what an op makes of a storage is in pieces; partial results are whole once added."""
    if name not in found.ops:
        return False
    return not made or any(tensor in found.made for tensor in made)


def _sharers(graph: Graph) -> list[dict[str, list[str]]]:
    """Return the ops that share each storage that is written, or addressed by an offset.

    Each with its results there: of a norm's backward pass the gradient of the weight, which an
    optimizer may write, and not that of the input.
    """
    storage = storage_of(graph)
    special = {storage.owners[name] for op in graph.ops for name in (*writes(op), *addressed(op))}
    found: dict[str, dict[str, list[str]]] = {}
    for op in graph.ops:
        made = [tensor.name for tensor in op.outputs]
        for name in (*made, *writes(op), *addressed(op)):
            if (owner := storage.owners[name]) in special:
                here = found.setdefault(owner, {}).setdefault(op.name, [])
                here += [name] if name in made else []
    return list(found.values())


def _follow(
    graph: Graph, calls: Sequence[OpCall], found: BatchCut, forced: set[str], *, in_runs: bool
) -> None:
    """Decide op by op, in the order of the step."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    for call in calls:
        op = call.op
        found.calls[op.name] = call
        slots = {place: name for place, name in call.places.items() if isinstance(place, str)}
        marks = {
            slot: Mark(found.dims[name], name in found.made)
            for slot, name in slots.items()
            if name in found.dims
        }
        if not marks:
            continue
        changed = frozenset(slot for slot, name in slots.items() if name in writes(op))
        cut = None
        if op.name not in forced and not is_random_op(op.kind):
            if all(mark.at.outer == 1 for mark in marks.values()):
                cut = cut_call(call.number, marks, found.points, changed)
            if cut is None and in_runs and _is_dense(tensors, slots, marks):
                cut = cut_in_runs(call.number, marks, found.points, changed)
        if cut is not None and _is_possible(op, cut, call, slots):
            _take(found, cut, call, slots)
        else:
            _split_again(found, op, marks, slots, tensors)


def _is_dense(
    tensors: Mapping[str, Tensor], slots: Mapping[str, str], marks: Mapping[str, Mark]
) -> bool:
    """Whether inputs that are sliced are dense: slices are copied then, and can be viewed."""
    sliced = (slots[slot] for slot, mark in marks.items() if not mark.is_made)
    return all(tensors[name].strides is None for name in sliced)


def _is_possible(op: Op, cut: CallCut, call: OpCall, slots: Mapping[str, str]) -> bool:
    """Whether what a cut op makes is what a plan can say: partial results own their storage."""
    listed = {name: place for place, name in call.places.items() if isinstance(place, int)}
    by_name = {name: slot for slot, name in slots.items()}
    for tensor in op.outputs:
        source = alias_of(op, tensor)
        place = listed.get(tensor.name)
        if place is None:  # new contents of what it changes beside its results
            slot = by_name.get(str(source))
            if slot is None or cut.inputs.get(slot) is None:
                return False
        elif isinstance(cut.outputs[place], Reducer):
            if source is not None:
                return False
        elif cut.outputs[place] is None or (
            source is not None and cut.inputs.get(by_name.get(source, "")) is None
        ):
            return False
    return True


def _take(found: BatchCut, cut: CallCut, call: OpCall, slots: Mapping[str, str]) -> None:
    """Note what a cut op reads and makes."""
    found.ops[call.op.name] = cut
    for slot, at in cut.inputs.items():
        if at is not None and slot not in cut.unread:
            found.dims.setdefault(slots[slot], at)
    by_name = {name: slot for slot, name in slots.items()}
    places = {name: place for place, name in call.places.items() if isinstance(place, int)}
    for tensor in call.op.outputs:
        place = places.get(tensor.name)
        source = alias_of(call.op, tensor)
        at = cut.inputs[by_name[str(source)]] if place is None else cut.outputs[place]
        if isinstance(at, BatchDim):
            found.dims[tensor.name] = at
            found.made.add(tensor.name)


def _split_again(
    found: BatchCut,
    op: Op,
    marks: Mapping[str, Mark],
    slots: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> None:
    """Note where the batch may be in the results of an op that runs whole."""
    for tensor in op.outputs:
        for slot, mark in marks.items():
            if mark.at.outer == 1 and tensors[slots[slot]].shape == tensor.shape:
                found.dims.setdefault(tensor.name, mark.at)

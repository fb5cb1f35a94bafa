"""Coarsening: which tensors of a training step share one decision.

Idea: an equivalence on tensors is all that is needed. Ops follow: those that then read and write
the same classes by the same call are one op of the coarse graph, counted as often as they occur.
The levels, each with all that the ones before tie:

0. *needed*: storages that are written in place, with all their views;
1. *steps of training*: a tensor with its gradient, the sums of gradients, chains of element-wise
   ops and transposes, hence a parameter with its optimizer state and its update;
2. *repetition*: unrolled time steps and every second of a row of equal layers. Two neighbours stay
   free to differ, so that a layer may be cut by columns and the next by rows.

Reference: Tofu (EuroSys 2019), section 5.1. Deviations: repeated layers are ours; time steps and
layers are found from source lines, module paths and shapes, no annotation is needed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph, Op, Tensor, storage_owners, writes
from pardnn.shard.aligned import Alignment, Place, alignment_of
from pardnn.shard.call import Call, call_of, walk
from pardnn.shard.cost import is_call, slots_of
from pardnn.shard.cutting import intern_call
from pardnn.shard.ties import Dims, Ties

NEEDED, TRAINING, REPEATED = range(3)

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op of the graph that is a call on tensors.

    Attributes:
        op: The op.
        call: Its call.
        number: Of the call, see `cutting.intern_call`.
        places: Name of the tensor at each slot and each output that is computed.
    """

    op: Op
    call: Call
    number: int
    places: Mapping[Place, str]


def op_calls(graph: Graph) -> list[OpCall]:
    """Return all calls on tensors, in the order of the graph. O(size of the arguments)."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    order: dict[int, dict[str, int]] = {}
    found: list[OpCall] = []
    for index in graph.arrays.topological.tolist():
        op = graph.ops[index]
        if is_call(op):
            found.append(_op_call(op, tensors, order))
    return found


def _op_call(op: Op, tensors: Mapping[str, Tensor], order: dict[int, dict[str, int]]) -> OpCall:
    call = call_of(op, tensors)
    number = intern_call(call)
    names = list(_references(call))
    if number not in order:
        order[number] = _slots(call)
    places: dict[Place, str] = {slot: names[at] for slot, at in order[number].items()}
    returned = (op.arguments or {}).get("returns") or [tensor.name for tensor in op.outputs]
    places.update((i, name) for i, name in enumerate(returned) if name is not None)
    return OpCall(op, call, number, places)


def _slots(call: Call) -> dict[str, int]:
    """Return at which mention of a tensor in the arguments each slot is."""
    count = itertools.count()
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str | None] = {}

    def visit(name: str, _: str) -> dict[str, str]:
        new = str(next(count))
        shapes[new], dtypes[new] = call.shapes[name], call.dtypes.get(name)
        return {"tensor": new}

    args = tuple(walk(value, "", visit) for value in call.args)
    kwargs = {key: walk(value, "", visit) for key, value in call.kwargs.items()}
    named = Call(call.kind, args, kwargs, shapes, call.outputs, dtypes)
    try:
        return {slot: int(name) for slot, name in slots_of(named).items()}
    except PardnnError:  # a description that does not fit: slots are names
        return {}


def _references(call: Call) -> Iterator[str]:
    """Names of tensors in the arguments, in their order, repeated as they are."""
    waiting: list[Any] = [*call.args, *call.kwargs.values()][::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple):
            waiting.extend(reversed(value))
        elif isinstance(value, dict) and set(value) == {"tensor"}:
            yield value["tensor"]


def coarsened(graph: Graph, calls: Sequence[OpCall], level: int) -> Ties:
    """Return which tensors share a decision.

    Args:
        graph: The graph.
        calls: From `op_calls`.
        level: `NEEDED`, `TRAINING` or `REPEATED`.
    """
    ties = Ties({t.name: t.shape or () for op in graph.ops for t in op.outputs})
    _tie_written(graph, calls, ties)
    if level >= REPEATED:
        _tie_repeated(graph, calls, ties)
    if level >= TRAINING:
        for op_call in calls:
            _tie_aligned(op_call, alignment_of(op_call.number), ties)
        _tie_gradients(calls, ties)
    return ties


def _tie_written(graph: Graph, calls: Sequence[OpCall], ties: Ties) -> None:
    """Tie all aliases of storages that are written: a write must find what it writes locally."""
    owners = storage_owners(graph.ops)
    written = {owners[name] for op in graph.ops for name in writes(op)}
    sources = {t.name: op for op in graph.ops for t in op.outputs if op.is_source}
    for op_call in calls:
        for place, name in op_call.places.items():
            if not isinstance(place, int) or owners[name] not in written or name in sources:
                continue
            base = next((n for n in op_call.op.inputs if owners[n] == owners[name]), None)
            if base is None:
                continue
            slot = next(p for p, n in op_call.places.items() if n == base and isinstance(p, str))
            ties.tie(base, name, view_dims(op_call, slot, place), hard=True)


def view_dims(op_call: OpCall, slot: Place, output: int) -> Dims:
    """Return which dim of an output each dim of an input becomes, if one loop cuts both."""
    dims: list[int | None] = [None] * len(op_call.call.shapes[op_call.places[slot]])
    for cuts in alignment_of(op_call.number).loops.values():
        if slot in cuts and output in cuts:
            dims[cuts[slot]] = cuts[output]
    return tuple(dims)


def _tie_aligned(op_call: OpCall, alignment: Alignment, ties: Ties) -> None:
    for place, dims in alignment.pairs.items():
        ties.tie(op_call.places[0], op_call.places[place], dims)


def _tie_gradients(calls: Sequence[OpCall], ties: Ties) -> None:
    """Tie a tensor with its gradient.

    What a backward op computes and a backward op of another forward op reads, of the shape of the
    latter's result, is the gradient of that result.
    """
    made = {name: c for c in calls for place, name in c.places.items() if isinstance(place, int)}
    forward = {c.op.name: c for c in calls}
    for op_call in calls:
        origin = forward.get(op_call.op.backward_of or "")
        if origin is None:
            continue
        results = [name for place, name in origin.places.items() if isinstance(place, int)]
        for name in dict.fromkeys(n for p, n in op_call.places.items() if isinstance(p, str)):
            source = made.get(name)
            if source is None or source.op.backward_of in (None, origin.op.name):
                continue
            shape = ties.shapes[name]
            for position, result in enumerate(results):
                if ties.shapes[result] == shape and shape:
                    ties.tie(result, name)
                    results.pop(position)
                    break


def _tie_repeated(graph: Graph, calls: Sequence[OpCall], ties: Ties) -> None:
    """Tie what the same call of the same line makes of the same, in time steps and equal layers."""
    parity = _Parity([c.op.module for c in calls] + [op.name for op in graph.ops if op.is_source])
    colour: dict[str, Any] = {}
    for op in graph.ops:
        if op.is_source:
            for tensor in op.outputs:
                colour[tensor.name] = (op.kind, tensor.shape, parity.of(op.name))
    base: list[Any] = []
    for c in calls:
        base.append((c.number, c.op.source, parity.of(c.op.module), c.op.backward_of is None))
        colour.update((n, (base[-1], p)) for p, n in c.places.items() if isinstance(p, int))
    numbers: dict[Any, int] = {}
    plain = {name: numbers.setdefault(key, len(numbers)) for name, key in colour.items()}
    first: dict[Any, str] = {}
    for op in graph.ops:
        if op.is_source:
            for tensor in op.outputs:
                _tie_to_first(first, plain[tensor.name], tensor.name, ties)
    for key, c in zip(base, calls, strict=True):
        seen = tuple(plain.get(name, -1) for name in c.op.inputs)
        for place, name in c.places.items():
            if isinstance(place, int):
                _tie_to_first(first, (key, seen, place), name, ties)


def _tie_to_first(first: dict[Any, str], key: Any, name: str, ties: Ties) -> None:
    if ties.shapes[name]:
        ties.tie(first.setdefault(key, name), name)


class _Parity:
    """Whether a name such as "blocks.3.mlp" is an even or an odd one of its row."""

    def __init__(self, names: Sequence[str | None]) -> None:
        rows: dict[str, set[tuple[int, ...]]] = {}
        for name in set(names):
            if name is not None:
                pattern, numbers = self._split(name)
                rows.setdefault(pattern, set()).add(numbers)
        self._rank = {
            (pattern, numbers): rank % 2
            for pattern, found in rows.items()
            for rank, numbers in enumerate(sorted(found))
        }
        self._kept: dict[str | None, Any] = {None: None}

    @staticmethod
    def _split(name: str) -> tuple[str, tuple[int, ...]]:
        return _NUMBERS.sub("*", name), tuple(map(int, _NUMBERS.findall(name)))

    def of(self, name: str | None) -> Any:
        if name not in self._kept:
            pattern, numbers = self._split(name or "")
            self._kept[name] = (pattern, self._rank[pattern, numbers])
        return self._kept[name]

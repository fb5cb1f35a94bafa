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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pardnn.graph.ir import Graph, Op, writes
from pardnn.shard.aligned import Alignment, Place, alignment_of
from pardnn.shard.call import Call, call_of, skeleton_of
from pardnn.shard.cost import is_call
from pardnn.shard.interned import KEPT, added, interned, known_number
from pardnn.shard.ties import Dims, Ties

NEEDED, TRAINING, REPEATED = range(3)

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op of the graph that is a call on tensors.

    Attributes:
        op: The op.
        number: Of its call, see `interned.intern_call`.
        places: Name of the tensor at each slot and each output that is computed.
    """

    op: Op
    number: int
    places: Mapping[Place, str]

    @property
    def call(self) -> Call:
        """The call, its tensors named by slot."""
        return interned(self.number)


def op_calls(graph: Graph) -> list[OpCall]:
    """Return all calls on tensors, in the order of the graph. O(size of the arguments)."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    shapes = {name: tensor.shape or () for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    order: dict[int, dict[str, int]] = {}
    found: list[OpCall] = []
    for index in graph.arrays.topological.tolist():
        op = graph.ops[index]
        if not is_call(op):
            continue
        arguments = op.arguments or {}
        returned = arguments.get("returns") or [tensor.name for tensor in op.outputs]
        outputs = tuple([None if name is None else tensors[name].shape for name in returned])
        skeleton = skeleton_of(op.kind, arguments.get("args", ()), arguments.get("kwargs", {}))
        key = skeleton.key(shapes, dtypes, outputs)
        number = known_number(key)
        if number is None:
            number = added(key, call_of(op, tensors), skeleton)
        if number not in order:
            order[number] = _slots(number)
        names = skeleton.names
        places: dict[Place, str] = {slot: names[at] for slot, at in order[number].items()}
        places.update((i, name) for i, name in enumerate(returned) if name is not None)
        found.append(OpCall(op, number, places))
    return found


def _slots(number: int) -> dict[str, int]:
    """Return at which mention of a tensor in the arguments each slot is."""
    family, _ = KEPT.calls[number]
    return dict(zip(family.form.slots, family.mentions, strict=True))


class Storage(NamedTuple):
    """Who owns the storage of each tensor, and which storages are written in place.

    Attributes:
        owners: By name of the tensor.
        written: Owners.
    """

    owners: Mapping[str, str]
    written: frozenset[str]


def storage_of(graph: Graph) -> Storage:
    """Return who owns and who writes storage. O(tensors log tensors)."""
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    alias = graph.arrays.tensor_alias
    owner = np.where(alias >= 0, alias, np.arange(len(alias)))
    while True:
        above = owner[owner]
        if (above == owner).all():
            break
        owner = above
    owners = {name: names[i] for name, i in zip(names, owner.tolist(), strict=True)}
    return Storage(owners, frozenset(owners[n] for op in graph.ops for n in writes(op)))


def coarsened(graph: Graph, calls: Sequence[OpCall], level: int, storage: Storage) -> Ties:
    """Return which tensors share a decision.

    Args:
        graph: The graph.
        calls: From `op_calls`.
        level: `NEEDED`, `TRAINING` or `REPEATED`.
        storage: From `storage_of`.
    """
    ties = Ties({t.name: t.shape or () for op in graph.ops for t in op.outputs})
    _tie_written(graph, calls, ties, storage)
    if level >= REPEATED:
        _tie_repeated(graph, calls, ties)
    if level >= TRAINING:
        for op_call in calls:
            _tie_aligned(op_call, alignment_of(op_call.number), ties)
        _tie_gradients(calls, ties)
    return ties


def _tie_written(graph: Graph, calls: Sequence[OpCall], ties: Ties, storage: Storage) -> None:
    """Tie all aliases of storages that are written: a write must find what it writes locally."""
    owners, written = storage
    for op_call in calls:
        for tensor in op_call.op.outputs:
            name = tensor.name
            if owners[name] not in written:
                continue
            base = next((n for n in op_call.op.inputs if owners[n] == owners[name]), None)
            if base is None:
                continue
            places = op_call.places.items()
            place = next((p for p, n in places if n == name and isinstance(p, int)), None)
            slot = next((p for p, n in places if n == base and isinstance(p, str)), None)
            if isinstance(place, int) and slot is not None:
                dims = view_dims(op_call, slot, place, len(ties.shapes[base]))
                ties.tie(base, name, dims, hard=True)


def view_dims(op_call: OpCall, slot: Place, output: int, rank: int) -> Dims:
    """Return which dim of an output each dim of an input becomes, if one loop cuts both."""
    dims: list[int | None] = [None] * rank
    for cuts in alignment_of(op_call.number).loops.values():
        if slot in cuts and output in cuts:
            dims[cuts[slot]] = cuts[output]
    return tuple(dims)


def _tie_aligned(op_call: OpCall, alignment: Alignment, ties: Ties) -> None:
    places = op_call.places
    for place, dims in alignment.pairs.items():
        ties.tie(places[0], places[place], dims)


def _tie_gradients(calls: Sequence[OpCall], ties: Ties) -> None:
    """Tie a tensor with its gradient.

    What a backward op computes and a backward op of another forward op reads, of the shape of the
    latter's result, is the gradient of that result.
    """
    made = {t.name: c.op.backward_of for c in calls for t in c.op.outputs}
    forward = {c.op.name: c for c in calls}
    for op_call in calls:
        origin = forward.get(op_call.op.backward_of or "")
        if origin is None:
            continue
        results = [name for place, name in origin.places.items() if isinstance(place, int)]
        for name in dict.fromkeys(n for p, n in op_call.places.items() if isinstance(p, str)):
            if made.get(name) in (None, origin.op.name):
                continue
            shape = ties.shapes[name]
            for position, result in enumerate(results):
                if shape and ties.shapes[result] == shape:
                    ties.tie(result, name)
                    results.pop(position)
                    break


def _tie_repeated(graph: Graph, calls: Sequence[OpCall], ties: Ties) -> None:
    """Tie what the same call of the same line makes of the same, in time steps and equal layers."""
    parity = _Parity([c.op.module for c in calls] + [op.name for op in graph.ops if op.is_source])
    numbers: dict[Any, int] = {}
    plain: dict[str, int] = {}
    first: dict[Any, str] = {}
    for op in graph.ops:
        if op.is_source:
            for tensor in op.outputs:
                key = (op.kind, tensor.shape, parity.of(op.name))
                plain[tensor.name] = number = numbers.setdefault(key, len(numbers))
                _tie_to_first(first, number, tensor.name, ties)
    base: list[int] = []
    for c in calls:
        key = (c.number, c.op.source, parity.of(c.op.module), c.op.backward_of is None)
        base.append(numbers.setdefault(key, len(numbers)))
        for place, name in c.places.items():
            if isinstance(place, int):
                plain[name] = numbers.setdefault((base[-1], place), len(numbers))
    for number, c in zip(base, calls, strict=True):
        seen = tuple([plain.get(name, -1) for name in c.op.inputs])
        for place, name in c.places.items():
            if isinstance(place, int):
                _tie_to_first(first, (number, seen, place), name, ties)


def _tie_to_first(first: dict[Any, str], key: Any, name: str, ties: Ties) -> None:
    if ties.shapes[name]:
        known = first.setdefault(key, name)
        if known is not name:
            ties.tie(known, name)


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

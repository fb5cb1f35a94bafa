"""Coarsening: tensors of a training step that share one layout, and ops that share one factor.

Problem: a step has thousands of ops; the dynamic program needs tens, nearly in a chain.
Idea: an equivalence on tensors is enough. Ops follow: those that read and write the same classes by
the same call are one op of the coarse graph, weighted by their number. Each level also merges
everything that the earlier ones merge:

0. *needed*: storages that are written in place, with all their views;
1. *steps of training*: a tensor with its gradient, the sums of gradients, chains of element-wise
   ops and transposes, hence a parameter with its optimizer state and its update;
2. *repetition*: unrolled time steps, and every second layer in a row of equal layers. Two
   neighbours may differ, so that a layer can be cut by columns and the next by rows.

Complexity: O(tensors log tensors + size of the arguments).
Reference: Tofu (EuroSys 2019), section 5.1, "Grouping forward and backward operations" and
"Coalescing operators".
Deviations: from level 1 on a tensor and its gradient have one layout, where the paper tries all
combinations inside a group; `free_gradients` makes up for it in a last pass. Ops need no groups, as
each chooses its strategy by itself. Merging repeated layers is an addition; time steps and layers
are found from source lines, module paths and shapes, without annotations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pardnn.graph.ir import Graph, Op, writes
from pardnn.shard.partition.call import Call, call_of, skeleton_of
from pardnn.shard.partition.interning import add_call, classified, find_call, interned_call
from pardnn.shard.search.alignment import Alignment, Place, alignment_of
from pardnn.shard.search.communication_bytes import is_call
from pardnn.shard.search.tensor_classes import Dims, TensorClasses
from pardnn.shard.sharding import FixedLayouts
from pardnn.time_limit import check_time

NEEDED, TRAINING, REPEATED = range(3)

_NUMBERS = re.compile(r"\d+")


class OpCall(NamedTuple):
    """An op of the graph that is a call on tensors.

    Attributes:
        op: The op.
        number: Of its call, see `interning`.
        places: The tensor at each slot, and at each output that is computed, by name.
    """

    op: Op
    number: int
    places: Mapping[Place, str]

    @property
    def call(self) -> Call:
        """The call, its tensors named by slot."""
        return interned_call(self.number)


def op_calls(graph: Graph) -> list[OpCall]:
    """Return all calls on tensors, in the order of the graph. O(size of the arguments)."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    types = {name: (tensor.shape or (), tensor.dtype) for name, tensor in tensors.items()}
    slots: dict[int, list[tuple[Place, int]]] = {}
    found: list[OpCall] = []
    are_calls: dict[str, bool] = {}
    for index in graph.arrays.topological.tolist():
        check_time()
        op = graph.ops[index]
        if op.kind not in are_calls:
            are_calls[op.kind] = is_call(op)
        if not are_calls[op.kind]:
            continue
        arguments = op.arguments or {}
        returned = arguments.get("returns") or [tensor.name for tensor in op.outputs]
        outputs = tuple([None if name is None else tensors[name].shape for name in returned])
        skeleton = skeleton_of(op.kind, arguments.get("args", ()), arguments.get("kwargs", {}))
        names = skeleton.names
        key = (skeleton.structure, tuple([types[name] for name in names]), outputs)
        number = find_call(key)
        if number is None:
            number = add_call(key, call_of(op, tensors), skeleton)
        if number not in slots:
            slots[number] = _slots(number)
        places: dict[Place, str] = {slot: names[at] for slot, at in slots[number]}
        places.update((output, name) for output, name in enumerate(returned) if name is not None)
        found.append(OpCall(op, number, places))
    return found


def _slots(number: int) -> list[tuple[Place, int]]:
    """Return at which mention of a tensor in the arguments each slot is."""
    shape_class, _ = classified(number)
    return list(zip(shape_class.dim_slices.inputs, shape_class.mentions, strict=True))


class Storage(NamedTuple):
    """The owner of each tensor's storage, and the storages that are written in place.

    Attributes:
        owners: By name of the tensor.
        written: Tensors whose storage is written in place.
    """

    owners: Mapping[str, str]
    written: frozenset[str]


def storage_of(graph: Graph) -> Storage:
    """Return the owner of each tensor's storage, and which storages are written. O(tensors)."""
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    owner = graph.arrays.tensor_owner.tolist()
    owners = {name: names[i] for name, i in zip(names, owner, strict=True)}
    written = {owners[n] for op in graph.ops if _may_write(op) for n in writes(op)}
    return Storage(owners, frozenset([n for n, owner in owners.items() if owner in written]))


def _may_write(op: Op) -> bool:
    """Whether it is worth asking what an op writes."""
    return "_." in op.kind or op.kind.endswith("_") or "mutates" in (op.arguments or ())


@dataclass(slots=True)
class Group:
    """Ops that make the same call on the same classes, however these are merged later.

    Attributes:
        first: The first of them.
        local: Tensors of the first op that it must read or write where they are owned.
        ops: All of them.
    """

    first: OpCall
    local: set[str]
    ops: list[OpCall]


class Coarse(NamedTuple):
    """A coarse graph.

    Attributes:
        classes: Which tensors share a layout.
        groups: Of all ops, by first occurrence.
    """

    classes: TensorClasses
    groups: list[Group]


def coarsened(
    graph: Graph,
    calls: Sequence[OpCall],
    level: int,
    storage: Storage,
    fixed: FixedLayouts | None = None,
    *,
    tied: bool = True,
) -> Coarse:
    """Coarsen a graph: which tensors share a layout, and which ops are one factor.

    Args:
        graph: The graph.
        calls: From `op_calls`.
        level: `NEEDED`, `TRAINING` or `REPEATED`.
        storage: From `storage_of`.
        fixed: Fixed layouts; tensors with different ones do not share a class. None for none.
        tied: Whether a gradient may share a class with other tensors.
    """
    classes = TensorClasses({t.name: t.shape or () for op in graph.ops for t in op.outputs})
    if fixed is not None:
        classes.fixed.update(fixed.layouts)
        classes.axis_sizes = fixed.mesh.shape
    _merge_written(calls, classes, storage)
    if level >= REPEATED:
        _merge_repeated(graph, calls, classes)
    groups = _groups(calls, classes, storage)
    if level >= TRAINING:
        apart = frozenset[str]() if tied else gradient_names(calls)
        for group in groups:  # what is merged for one of a group is merged for all
            _merge_aligned(group.first, alignment_of(group.first.number), classes, apart)
        if tied:
            _merge_gradients(calls, groups, classes)
    return Coarse(classes, groups)


def _groups(calls: Sequence[OpCall], classes: TensorClasses, storage: Storage) -> list[Group]:
    found: dict[Any, Group] = {}
    for op_call in calls:
        local = local_names(op_call, storage)
        key = op_key(op_call, classes, local)
        group = found.get(key)
        if group is None:
            found[key] = Group(op_call, local, [op_call])
        else:
            group.ops.append(op_call)
    return list(found.values())


def op_key(op_call: OpCall, classes: TensorClasses, local: set[str]) -> Any:
    """Return a key that is equal for ops of the same factor, whatever the names of their tensors.

    Args:
        op_call: The op.
        classes: Of the tensors.
        local: From `local_names`.
    """
    names = list(op_call.places.values())
    root, dims = classes.root, classes.dims
    twice = len(set(names)) < len(names)
    same = tuple(map(names.index, names)) if twice else None
    where = tuple([name in local for name in names]) if local else None
    rest = tuple([root[name] for name in names]), tuple([dims[name] for name in names])
    return (op_call.number, rest, same, where)


def local_names(op_call: OpCall, storage: Storage) -> set[str]:
    """Return the tensors that an op must read or write where they are owned: written storage."""
    owners, written = storage
    op = op_call.op
    if written.isdisjoint(op.inputs):
        return set()
    local = set(writes(op))
    outputs = {tensor.name for tensor in op.outputs}
    for name in outputs:
        if name in written and owners[name] not in outputs:
            local.add(name)
            local.update(n for n in op.inputs if owners[n] == owners[name])
    return local


def _merge_written(calls: Sequence[OpCall], classes: TensorClasses, storage: Storage) -> None:
    """Merge all aliases of written storages: a write must find what it writes locally."""
    owners, written = storage
    known: dict[Any, Dims] = {}
    for op_call in calls:
        for tensor in op_call.op.outputs:
            name = tensor.name
            if name not in written:
                continue
            base = next((n for n in op_call.op.inputs if owners[n] == owners[name]), None)
            if base is None:
                continue
            places = op_call.places.items()
            place = next((p for p, n in places if n == name and isinstance(p, int)), None)
            slot = next((p for p, n in places if n == base and isinstance(p, str)), None)
            if isinstance(place, int) and slot is not None:
                key = (op_call.number, slot, place)
                if key not in known:
                    known[key] = view_dims(op_call, slot, place, len(classes.shapes[base]))
                classes.merge(base, name, known[key], hard=True)


def view_dims(op_call: OpCall, slot: Place, output: int, rank: int) -> Dims:
    """Return which dim of an output each dim of an input becomes, if one loop cuts both.

    Args:
        op_call: The op.
        slot: Of the input.
        output: Number of the output.
        rank: Of the input.
    """
    dims: list[int | None] = [None] * rank
    for cuts in alignment_of(op_call.number).loops.values():
        if slot in cuts and output in cuts:
            dims[cuts[slot]] = cuts[output]
    return tuple(dims)


def gradient_names(calls: Sequence[OpCall]) -> frozenset[str]:
    """Return results of backward ops, and results that depend on these alone, such as sums."""
    found: set[str] = set()
    for c in calls:
        read = [name for place, name in c.places.items() if isinstance(place, str)]
        if c.op.backward_of is not None or (read and found.issuperset(read)):
            found.update(tensor.name for tensor in c.op.outputs)
    return frozenset(found)


def _merge_aligned(
    op_call: OpCall, alignment: Alignment, classes: TensorClasses, apart: frozenset[str]
) -> None:
    places = op_call.places
    for place, dims in alignment.pairs.items():
        if (places[0] in apart) == (places[place] in apart):
            classes.merge(places[0], places[place], dims)


def _merge_gradients(
    calls: Sequence[OpCall], groups: Sequence[Group], classes: TensorClasses
) -> None:
    """Merge a tensor with its gradient.

    What a backward op computes and a backward op of another forward op reads, of the shape of the
    latter's result, is the gradient of that result.
    """
    backward = [c for c in calls if c.op.backward_of]
    made = {t.name: c.op.backward_of for c in backward for t in c.op.outputs}
    forward = {c.op.name: (n, c) for n, group in enumerate(groups) for c in group.ops}
    known: set[Any] = set()
    for op_call in backward:
        number, origin = forward.get(op_call.op.backward_of or "", (0, None))
        if origin is None:
            continue
        names = [name for place, name in op_call.places.items() if isinstance(place, str)]
        own = (None, origin.op.name)
        are_others = [made.get(name) not in own for name in names]
        key = (forward[op_call.op.name][0], number, *are_others)  # all that merging depends on
        if key not in known:
            known.add(key)
            others = [n for n, is_other in zip(names, are_others, strict=True) if is_other]
            _merge_results(origin, others, classes)


def _merge_results(origin: OpCall, gradients: Sequence[str], classes: TensorClasses) -> None:
    """Merge each of some gradients with a result of its shape."""
    results = [name for place, name in origin.places.items() if isinstance(place, int)]
    for name in dict.fromkeys(gradients):
        for result in results:
            if classes.shapes[name] and classes.shapes[result] == classes.shapes[name]:
                classes.merge(result, name)
                results.remove(result)
                break


def _merge_repeated(graph: Graph, calls: Sequence[OpCall], classes: TensorClasses) -> None:
    """Merge what the same call of the same line makes of the same, in time steps and layers."""
    parity = _Parity([c.op.module for c in calls] + [op.name for op in graph.ops if op.is_source])
    numbers: dict[Any, int] = {}
    plain: dict[str, int] = {}
    first: dict[Any, str] = {}
    for op in graph.ops:
        if op.is_source:
            for tensor in op.outputs:
                key = (op.kind, tensor.shape, parity.of[op.name])
                plain[tensor.name] = number = -2 - numbers.setdefault(key, len(numbers))
                _merge_with_first(first, number, tensor.name, classes)
    width = max([len(c.places) for c in calls], default=0)
    base: list[int] = []
    for c in calls:
        op = c.op
        key = (c.number, op.source, parity.of[op.module], op.backward_of is None)
        number = numbers.setdefault(key, len(numbers))
        base.append(number)
        for place, name in c.places.items():
            if isinstance(place, int):
                plain[name] = number * width + place
    known: dict[Any, OpCall] = {}
    for number, c in zip(base, calls, strict=True):
        like = known.setdefault((number, *[plain.get(name, -1) for name in c.op.inputs]), c)
        if like is not c:
            for place, name in c.places.items():
                if isinstance(place, int) and classes.shapes[name]:
                    classes.merge(like.places[place], name)


def _merge_with_first(first: dict[Any, str], key: Any, name: str, classes: TensorClasses) -> None:
    if classes.shapes[name]:
        known = first.setdefault(key, name)
        if known is not name:
            classes.merge(known, name)


class _Parity:
    """Whether a name such as "blocks.3.mlp" is an even or an odd one of its row: `of[name]`."""

    def __init__(self, names: Sequence[str | None]) -> None:
        rows: dict[str, set[tuple[int, ...]]] = {}
        for name in set(names):
            if name is not None:
                pattern, numbers = self._split(name)
                rows.setdefault(pattern, set()).add(numbers)
        rank = {
            (pattern, numbers): rank % 2
            for pattern, found in rows.items()
            for rank, numbers in enumerate(sorted(found))
        }
        self.of: dict[str | None, Any] = {None: None}
        for name in set(names) - {None}:
            pattern, numbers = self._split(name or "")
            self.of[name] = (pattern, rank[pattern, numbers])

    @staticmethod
    def _split(name: str) -> tuple[str, tuple[int, ...]]:
        return _NUMBERS.sub("*", name), tuple(map(int, _NUMBERS.findall(name)))

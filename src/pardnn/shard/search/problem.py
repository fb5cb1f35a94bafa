"""The choice of a sharding as a sum of small tables: decisions for tensors, terms for ops.

Each class of tied tensors is a *decision*: a layout. Each op of the coarse graph is a *term*: the
least cost, over the loops it may cut, of what it fetches and combines, given the layouts of its
tensors. For fixed loops that cost is a sum over the tensors, so a term is made of one table per
tensor, loops by layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pardnn.graph.ir import Graph, Tensor
from pardnn.shard.search.alignment import alignment_of, free_loop
from pardnn.shard.search.coarsening import OpCall, Storage, coarsened, op_calls, op_key, storage_of
from pardnn.shard.search.communication_bytes import element_bytes
from pardnn.shard.search.tensor_classes import Dims, TensorClasses, composed


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of an op.

    Attributes:
        variable: Whose layout it has.
        kind: Number of all the rest: uses that differ in their decision alone have the same.
        dims: Its dim for each dim of the decision's root.
        shape: Of the tensor.
        item: Bytes of an element.
        slots: Where the op reads it.
        outputs: Which of its outputs it is.
        is_local: Whether the op must find or leave it where it is owned: it is written in place,
            or a view of what is.
    """

    variable: int
    kind: int
    dims: Dims
    shape: tuple[int, ...]
    item: int
    slots: tuple[str, ...]
    outputs: tuple[int, ...]
    is_local: bool


@dataclass(slots=True)
class Factor:
    """Equal ops on equal decisions.

    Attributes:
        number: Of the call.
        operands: Tensors that have dims, or are partial results.
        ops: The ops by name; their number is the weight of the term.
        is_local: Whether some tensor must be where it is owned.
    """

    number: int
    operands: tuple[Operand, ...]
    ops: list[OpCall] = field(default_factory=list)
    is_local: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note once what is asked for thousands of times."""
        self.is_local = any(operand.is_local for operand in self.operands)


@dataclass(frozen=True, slots=True)
class Variable:
    """One class of tensors.

    Attributes:
        root: The tensor whose dims layouts are of.
        dims: Dims of the root that may be cut.
        forms: Distinct (shape, dims) of the members, the root's first.
        is_written: Whether some member is written in place.
        bytes: Of all members together.
        kind: Number of dims, forms and `is_written`.
    """

    root: str
    dims: tuple[int, ...]
    forms: tuple[tuple[tuple[int, ...], Dims], ...]
    is_written: bool
    bytes: int
    kind: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What has to be decided.

    Attributes:
        variables: One per class; the first stands for all tensors without dims.
        factors: One per distinct op whose cost depends on them.
        free: Ops that follow their tensors at no cost.
        classes: The classes.
        number: Of the decision of each class, by root.
        tensors: Of the graph, by name.
    """

    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    free: tuple[OpCall, ...]
    classes: TensorClasses
    number: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def layout(self, name: str, layouts: Sequence[tuple[int | None, ...]]) -> tuple[Any, ...]:
        """Return a tensor's own layout, given one for each decision."""
        dims = self.classes.dims[name]
        chosen = layouts[self.number[self.classes.root[name]]]
        return tuple(None if d is None else dims[d] for d in chosen)


def make_problem(graph: Graph, level: int, calls: Sequence[OpCall] | None = None) -> Problem:
    """Return the problem of a graph, coarsened to a level of `coarsen`. O(tensors + arguments)."""
    calls = op_calls(graph) if calls is None else calls
    storage = storage_of(graph)
    classes, groups = coarsened(graph, calls, level, storage)
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    roots = [root for root in classes.members if classes.shapes[root]]
    number = dict.fromkeys(classes.members, 0) | {root: i for i, root in enumerate(roots, 1)}
    kinds: dict[Any, int] = {}
    factors: dict[Any, Factor] = {}
    free: list[OpCall] = []
    known: dict[Any, Factor | None] = {}
    for group in groups:
        op_call = group.first
        key = op_key(op_call, classes, group.local)
        if key not in known:
            known[key] = None
            if not _is_free(op_call, classes):
                operands = _uses(op_call, classes, number, tensors, group.local, kinds)
                known[key] = factors.setdefault(
                    (op_call.number, operands), Factor(op_call.number, operands)
                )
        factor = known[key]
        (free if factor is None else factor.ops).extend(group.ops)
    scalars = Variable("", (), (((), ()),), False, 0, -1)
    others = [_decision(root, classes, tensors, storage, kinds) for root in roots]
    return Problem(
        (scalars, *others), tuple(factors.values()), tuple(free), classes, number, tensors
    )


def _is_free(op_call: OpCall, classes: TensorClasses) -> bool:
    alignment = alignment_of(op_call.number)
    if not alignment.is_total:
        return False
    output = op_call.places[0]
    root = classes.root[output]
    sizes = classes.shapes[root]
    for place, pair in alignment.pairs.items():
        name = op_call.places[place]
        if classes.root[name] != root:
            return False
        through = composed(classes.dims[output], pair)
        if any(a != b for a, b, n in zip(through, classes.dims[name], sizes, strict=True) if n > 1):
            return False
    return all(
        free_loop(op_call.number, d) is not None
        for d, n in zip(classes.dims[output], sizes, strict=True)
        if d is not None and n > 1
    )


def _uses(
    op_call: OpCall,
    classes: TensorClasses,
    number: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    local: set[str],
    kinds: dict[Any, int],
) -> tuple[Operand, ...]:
    found: dict[str, tuple[list[str], list[int]]] = {}
    for place, name in op_call.places.items():
        slots, outputs = found.setdefault(name, ([], []))
        if isinstance(place, int):
            outputs.append(place)
        else:
            slots.append(place)
    operands: list[Operand] = []
    for name, (slots, outputs) in found.items():
        if classes.shapes[name] or outputs:
            rest = (
                classes.dims[name],
                classes.shapes[name],
                element_bytes(tensors[name]),
                tuple(slots),
                tuple(outputs),
                name in local,
            )
            kind = kinds.setdefault(rest, len(kinds))
            operands.append(Operand(number[classes.root[name]], kind, *rest))
    return tuple(operands)


def _decision(
    root: str,
    classes: TensorClasses,
    tensors: Mapping[str, Tensor],
    storage: Storage,
    kinds: dict[Any, int],
) -> Variable:
    members = classes.members[root]
    owners, written = storage
    forms = dict.fromkeys([(classes.shapes[name], classes.dims[name]) for name in members])
    blocked = classes.blocked.get(root, set())
    dims = tuple(d for d, n in enumerate(classes.shapes[root]) if n > 1 and d not in blocked)
    is_written = not written.isdisjoint(members)
    return Variable(
        root,
        dims,
        tuple(forms),
        is_written,
        sum(tensors[name].bytes for name in members if owners[name] == name),
        kinds.setdefault((dims, tuple(forms), is_written), len(kinds)),
    )

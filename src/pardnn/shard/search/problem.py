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
from pardnn.shard.search.tensor_classes import Dims, Ties, composed


@dataclass(frozen=True, slots=True)
class Use:
    """A tensor of an op.

    Attributes:
        decision: Whose layout it has.
        kind: Number of all the rest: uses that differ in their decision alone have the same.
        dims: Its dim for each dim of the decision's root.
        shape: Of the tensor.
        item: Bytes of an element.
        slots: Where the op reads it.
        outputs: Which of its outputs it is.
        is_local: Whether the op must find or leave it where it is owned: it is written in place,
            or a view of what is.
    """

    decision: int
    kind: int
    dims: Dims
    shape: tuple[int, ...]
    item: int
    slots: tuple[str, ...]
    outputs: tuple[int, ...]
    is_local: bool


@dataclass(slots=True)
class Term:
    """Equal ops on equal decisions.

    Attributes:
        number: Of the call.
        uses: Tensors that have dims, or are partial results.
        ops: The ops by name; their number is the weight of the term.
        is_local: Whether some tensor must be where it is owned.
    """

    number: int
    uses: tuple[Use, ...]
    ops: list[OpCall] = field(default_factory=list)
    is_local: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note once what is asked for thousands of times."""
        self.is_local = any(use.is_local for use in self.uses)


@dataclass(frozen=True, slots=True)
class Decision:
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
        decisions: One per class; the first stands for all tensors without dims.
        terms: One per distinct op whose cost depends on them.
        free: Ops that follow their tensors at no cost.
        ties: The classes.
        number: Of the decision of each class, by root.
        tensors: Of the graph, by name.
    """

    decisions: tuple[Decision, ...]
    terms: tuple[Term, ...]
    free: tuple[OpCall, ...]
    ties: Ties
    number: Mapping[str, int]
    tensors: Mapping[str, Tensor]

    def layout(self, name: str, layouts: Sequence[tuple[int | None, ...]]) -> tuple[Any, ...]:
        """Return a tensor's own layout, given one for each decision."""
        dims = self.ties.dims[name]
        chosen = layouts[self.number[self.ties.root[name]]]
        return tuple(None if d is None else dims[d] for d in chosen)


def make_problem(graph: Graph, level: int, calls: Sequence[OpCall] | None = None) -> Problem:
    """Return the problem of a graph, coarsened to a level of `coarsen`. O(tensors + arguments)."""
    calls = op_calls(graph) if calls is None else calls
    storage = storage_of(graph)
    ties, groups = coarsened(graph, calls, level, storage)
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    roots = [root for root in ties.members if ties.shapes[root]]
    number = dict.fromkeys(ties.members, 0) | {root: i for i, root in enumerate(roots, 1)}
    kinds: dict[Any, int] = {}
    terms: dict[Any, Term] = {}
    free: list[OpCall] = []
    known: dict[Any, Term | None] = {}
    for group in groups:
        op_call = group.first
        key = op_key(op_call, ties, group.local)
        if key not in known:
            known[key] = None
            if not _is_free(op_call, ties):
                uses = _uses(op_call, ties, number, tensors, group.local, kinds)
                known[key] = terms.setdefault((op_call.number, uses), Term(op_call.number, uses))
        term = known[key]
        (free if term is None else term.ops).extend(group.ops)
    scalars = Decision("", (), (((), ()),), False, 0, -1)
    others = [_decision(root, ties, tensors, storage, kinds) for root in roots]
    return Problem((scalars, *others), tuple(terms.values()), tuple(free), ties, number, tensors)


def _is_free(op_call: OpCall, ties: Ties) -> bool:
    alignment = alignment_of(op_call.number)
    if not alignment.is_total:
        return False
    output = op_call.places[0]
    root = ties.root[output]
    sizes = ties.shapes[root]
    for place, pair in alignment.pairs.items():
        name = op_call.places[place]
        if ties.root[name] != root:
            return False
        through = composed(ties.dims[output], pair)
        if any(a != b for a, b, n in zip(through, ties.dims[name], sizes, strict=True) if n > 1):
            return False
    return all(
        free_loop(op_call.number, d) is not None
        for d, n in zip(ties.dims[output], sizes, strict=True)
        if d is not None and n > 1
    )


def _uses(
    op_call: OpCall,
    ties: Ties,
    number: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    local: set[str],
    kinds: dict[Any, int],
) -> tuple[Use, ...]:
    found: dict[str, tuple[list[str], list[int]]] = {}
    for place, name in op_call.places.items():
        slots, outputs = found.setdefault(name, ([], []))
        if isinstance(place, int):
            outputs.append(place)
        else:
            slots.append(place)
    uses: list[Use] = []
    for name, (slots, outputs) in found.items():
        if ties.shapes[name] or outputs:
            rest = (
                ties.dims[name],
                ties.shapes[name],
                element_bytes(tensors[name]),
                tuple(slots),
                tuple(outputs),
                name in local,
            )
            kind = kinds.setdefault(rest, len(kinds))
            uses.append(Use(number[ties.root[name]], kind, *rest))
    return tuple(uses)


def _decision(
    root: str,
    ties: Ties,
    tensors: Mapping[str, Tensor],
    storage: Storage,
    kinds: dict[Any, int],
) -> Decision:
    members = ties.members[root]
    owners, written = storage
    forms = dict.fromkeys([(ties.shapes[name], ties.dims[name]) for name in members])
    blocked = ties.blocked.get(root, set())
    dims = tuple(d for d, n in enumerate(ties.shapes[root]) if n > 1 and d not in blocked)
    is_written = not written.isdisjoint(members)
    return Decision(
        root,
        dims,
        tuple(forms),
        is_written,
        sum(tensors[name].bytes for name in members if owners[name] == name),
        kinds.setdefault((dims, tuple(forms), is_written), len(kinds)),
    )

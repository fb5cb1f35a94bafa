"""The search problem as a factor graph: variables for tensors, factors for ops.

Each equivalence class of tensors is a *variable*: a layout. Each op of the coarse graph is a
*factor*: the least cost, over its sharding strategies, of fetching its inputs and combining its
results, given the layouts of its tensors. For a fixed strategy this cost is a sum over the tensors,
so a factor consists of one table per tensor, strategies by layouts.
Reference: Tofu (EuroSys 2019), section 5.1 and Fig. 5(c).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pardnn.graph.ir import Graph, Tensor
from pardnn.plan.mesh import Layout
from pardnn.shard.search.alignment import alignment_of, free_loop
from pardnn.shard.search.coarsening import OpCall, Storage, coarsened, op_calls, op_key, storage_of
from pardnn.shard.search.communication_bytes import element_bytes
from pardnn.shard.search.tensor_classes import Dims, TensorClasses, check_fixed, composed
from pardnn.shard.sharding import FixedLayouts


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of an op.

    Attributes:
        variable: Position of the variable whose layout it has.
        kind: Equal for operands that differ only in their variable: tables are cached by it.
        dims: Its dim for each dim of the variable's root.
        shape: Of the tensor.
        item: Bytes of an element.
        slots: Where the op reads it.
        outputs: Which of its outputs it is.
        is_local: Whether the op must read or write it where it is owned: it is written in place, or
            views a tensor that is.
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
    """Equal ops on equal variables: a term of the sum that is minimised.

    Attributes:
        number: Of the call, see `interning`.
        operands: Tensors that have dims, or may be partial results.
        ops: All of them; their number is the weight of the factor.
        is_local: Whether some tensor must be where it is owned.
    """

    number: int
    operands: tuple[Operand, ...]
    ops: list[OpCall] = field(default_factory=list)
    is_local: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute once what is read thousands of times."""
        self.is_local = any(operand.is_local for operand in self.operands)


@dataclass(frozen=True, slots=True)
class Variable:
    """The layout of one equivalence class of tensors.

    Attributes:
        root: The tensor to whose dims layouts refer.
        dims: Dims of the root that may be cut.
        forms: Distinct (shape, dims) of the members, the root's first.
        is_written: Whether some member is written in place.
        bytes: Of all members together.
        kind: Equal for variables of equal dims, forms, `is_written` and `fixed`: options are
            cached by it.
        fixed: Its fixed layout on all mesh axes; None if it is to be chosen.
    """

    root: str
    dims: tuple[int, ...]
    forms: tuple[tuple[tuple[int, ...], Dims], ...]
    is_written: bool
    bytes: int
    kind: int
    fixed: Layout | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A factor graph: the decisions and their costs.

    Attributes:
        variables: One per class; the first stands for all tensors without dims.
        factors: One per distinct op whose cost depends on them.
        free: Ops that follow their tensors at no cost, such as element-wise ones.
        classes: The equivalence classes of tensors.
        numbers: Position of the variable of each class, by root.
        tensors: Of the graph, by name.
        fixed: Layouts of state that stays where it is; None for none.
    """

    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    free: tuple[OpCall, ...]
    classes: TensorClasses
    numbers: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    fixed: FixedLayouts | None = None

    def layout(self, name: str, layouts: Sequence[tuple[int | None, ...]]) -> tuple[Any, ...]:
        """Return a tensor's own layout.

        Args:
            name: Of the tensor.
            layouts: One per variable.
        """
        dims = self.classes.dims[name]
        chosen = layouts[self.numbers[self.classes.root[name]]]
        return tuple(None if d is None else dims[d] for d in chosen)


def make_problem(
    graph: Graph,
    level: int,
    calls: Sequence[OpCall] | None = None,
    fixed: FixedLayouts | None = None,
    *,
    tied: bool = True,
) -> Problem:
    """Return the problem of a graph. O(tensors + arguments).

    Args:
        graph: The graph.
        level: Of coarsening: `NEEDED`, `TRAINING` or `REPEATED`.
        calls: From `op_calls`, if they are known.
        fixed: Layouts of state that stays where it is; None for none.
        tied: Whether a gradient may share a class with other tensors.

    Raises:
        InfeasibleError: E301, if the step needs other layouts than the fixed ones.
    """
    calls = op_calls(graph) if calls is None else calls
    storage = storage_of(graph)
    classes, groups = coarsened(graph, calls, level, storage, fixed, tied=tied)
    if fixed is not None:
        check_fixed(classes, fixed)
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    roots = [root for root in classes.members if classes.shapes[root]]
    numbers = dict.fromkeys(classes.members, 0) | {root: i for i, root in enumerate(roots, 1)}
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
                operands = _operands(op_call, classes, numbers, tensors, group.local, kinds)
                known[key] = factors.setdefault(
                    (op_call.number, operands), Factor(op_call.number, operands)
                )
        factor = known[key]
        (free if factor is None else factor.ops).extend(group.ops)
    scalars = Variable("", (), (((), ()),), False, 0, -1)
    others = [_variable(root, classes, tensors, storage, kinds) for root in roots]
    variables = (scalars, *others)
    return Problem(
        variables, tuple(factors.values()), tuple(free), classes, numbers, tensors, fixed
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


def _operands(
    op_call: OpCall,
    classes: TensorClasses,
    numbers: Mapping[str, int],
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
            operands.append(Operand(numbers[classes.root[name]], kind, *rest))
    return tuple(operands)


def _variable(
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
    is_written, fixed = not written.isdisjoint(members), classes.fixed.get(root)
    return Variable(
        root,
        dims,
        tuple(forms),
        is_written,
        sum(tensors[name].bytes for name in members if owners[name] == name),
        kinds.setdefault((dims, tuple(forms), is_written, fixed), len(kinds)),
        fixed,
    )

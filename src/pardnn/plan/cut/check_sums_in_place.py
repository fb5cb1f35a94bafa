"""The checker of sums in place: what a device adds into a tensor, nothing else reads afterwards.

It asks for less than the partitioner keeps to: that every other op of the device which reads the
storage has run by then, in the order of the plan, or reads the sum. Sends that are on their way are
those of any write (`plan.check`). O(local ops + tensors).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pardnn.graph.ir import Op, Tensor, alias_of, storage_owners
from pardnn.plan.cut.runs_of_memory import is_run
from pardnn.plan.partitioned_graph import ADD, ADD_IN_PLACE, Partition
from pardnn.plan.plan import Plan


class _Made(NamedTuple):
    op: Op
    tensor: Tensor


def sum_problems(plan: Plan, partition: Partition, calls: Mapping[str, Op]) -> Iterator[str]:
    """Yield what is wrong with sums that are made in the storage of their first term.

    Args:
        plan: A sharded plan.
        partition: Of that plan.
        calls: Ops of the graph by name.
    """
    sums = [op for op in partition.ops if op.kind == ADD_IN_PLACE and _is_new(op, calls)]
    if not sums:
        return
    if not partition.sums_in_place:
        yield f"partition: op {sums[0].name!r:.60} is in place, but sums_in_place is not set"
        return
    made = {tensor.name: _Made(op, tensor) for op in partition.ops for tensor in op.outputs}
    owners = storage_owners(partition.ops)
    position = {name: (device, i) for device, row in enumerate(plan.order)
                for i, name in enumerate(row)}  # fmt: skip
    readers: dict[str | None, list[tuple[str, Op]]] = {}
    for op in partition.ops:
        for name in op.inputs:
            readers.setdefault(owners.get(name), []).append((name, op))
    for op in sums:
        problem = _form_problem(op, made, owners) or _reader_problem(op, made, readers, position)
        if problem is not None:
            yield f"partition: op {op.name!r:.60} adds in place, but {problem}"


def _is_new(op: Op, calls: Mapping[str, Op]) -> bool:
    """Whether a local op is of a sum that is a new tensor in the graph."""
    call = calls.get(op.name.rpartition("@")[0])
    return call is not None and call.kind == ADD and len(op.outputs) == 1


def _form_problem(
    op: Op, made: Mapping[str, _Made], owners: Mapping[str, str | None]
) -> str | None:
    """Return why the first term is no place for the sum."""
    target, args = op.outputs[0].alias_of, (op.arguments or {}).get("args") or [None]
    if target is None or args[0] != {"tensor": target} or op.memory != "reference":
        return "it does not return its first argument"
    owner, term, result = owners.get(target), made[target].tensor, op.outputs[0]
    if owner is None:
        return f"{target!r:.60} has no storage"
    if (term.shape, term.dtype, term.strides) != (result.shape, result.dtype, result.strides):
        return f"{target!r:.60} has another form than the sum"
    shape = term.shape or ()
    if term.bytes != made[owner].tensor.bytes or not is_run(term, term, [(0, n) for n in shape]):
        return f"{target!r:.60} is not all of its storage"
    if made[owner].op.is_source or made[owner].op.memory != "normal":
        return f"{owner!r:.60} outlives it"
    return None


def _reader_problem(
    op: Op,
    made: Mapping[str, _Made],
    readers: Mapping[str | None, list[tuple[str, Op]]],
    position: Mapping[str, tuple[int, int]],
) -> str | None:
    """Return what reads the storage when the sum is in it, and not as the sum.

    Args:
        op: The sum.
        made: Local tensors by name.
        readers: By owner of a storage, tensors in it, each with an op that reads it.
        position: Device and place there of ops; those of other devices read what they received.
    """
    result = op.outputs[0]
    nowhere = (-1, -1)  # `plan.check` tells of that
    device, at = position.get(op.name, nowhere)
    for name, reader in readers.get(_root(result.name, made), []):
        where, when = position.get(reader.name, nowhere)
        is_later = where == device and when > at
        is_second = reader is op and name != result.alias_of
        if (is_later and not _is_of(name, result.name, made)) or is_second:
            return f"{reader.name!r:.60} reads {name!r:.60} in the same storage"
    return None


def _root(name: str, made: Mapping[str, _Made]) -> str:
    while (above := alias_of(*made[name])) is not None:
        name = above
    return name


def _is_of(name: str, result: str, made: Mapping[str, _Made]) -> bool:
    """Whether a tensor is a sum, or a view of it."""
    above: str | None = name
    while above is not None and above != result:
        above = alias_of(*made[above])
    return above is not None

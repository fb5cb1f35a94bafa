"""The checker of sums in place: what a device adds into a tensor, nothing else reads afterwards.

It asks for less than the partitioner keeps to: that every other op of the device which reads the
storage has run by then, in the order of the plan, or reads the sum. Sends that are on their way are
those of any write (`plan.check`). O((local ops + tensors) log).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
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
    is_formed = True
    for op in sums:
        problem = _form_problem(op, made, owners)
        if problem is not None:
            is_formed = False
            yield f"partition: op {op.name!r:.60} adds in place, but {problem}"
    if is_formed:
        yield from _reader_problems(plan, partition, sums, made, owners)


def _is_new(op: Op, calls: Mapping[str, Op]) -> bool:
    """Whether a local op is of a sum that is a new tensor in the graph."""
    call = calls.get(op.name.rpartition("@")[0])
    return call is not None and call.kind == ADD


def _form_problem(
    op: Op, made: Mapping[str, _Made], owners: Mapping[str, str | None]
) -> str | None:
    """Return why the first term is no place for the sum."""
    args = (op.arguments or {}).get("args") or [None]
    if len(op.outputs) != 1:
        return f"it makes {len(op.outputs)} tensors"
    (result,) = op.outputs
    target = result.alias_of
    if target is None or args[0] != {"tensor": target} or op.memory != "reference":
        return "it does not return its first argument"
    owner, term = owners.get(target), made[target].tensor
    assert owner is not None, "a graph has no circles of aliases"
    if (term.shape, term.dtype, term.strides) != (result.shape, result.dtype, result.strides):
        return f"{target!r:.60} has another form than the sum"
    shape = term.shape or ()
    if term.bytes != made[owner].tensor.bytes or not is_run(term, term, [(0, n) for n in shape]):
        return f"{target!r:.60} is not all of its storage"
    if made[owner].op.is_source or made[owner].op.memory != "normal":
        return f"{owner!r:.60} outlives it"
    if any(owners.get(name) == owner for name in op.inputs if name != target):
        return "the other term is in the same storage"
    return None


def _reader_problems(
    plan: Plan,
    partition: Partition,
    sums: Sequence[Op],
    made: Mapping[str, _Made],
    owners: Mapping[str, str | None],
) -> Iterator[str]:
    """Yield what reads a storage when a sum is in it that is not in what it means to read."""
    # Ops of other devices read what they received; `plan.check` tells of those that are nowhere.
    at = {name: (d, i) for d, row in enumerate(plan.order) for i, name in enumerate(row)}
    done: dict[tuple[str | None, int], list[tuple[int, str]]] = {}
    for op in sums:
        device, place = at.get(op.name, (-1, -1))
        done.setdefault((owners[op.outputs[0].name], device), []).append((place, op.name))
    for row in done.values():
        row.sort()
    written = {owner for owner, _ in done}
    depth = _sums_above(made, {op.outputs[0].name for op in sums})
    for op in partition.ops:
        device, place = at.get(op.name, (-1, -1))
        for name in op.inputs:
            if owners.get(name) not in written:
                continue
            row = done.get((owners[name], device), [])
            before = bisect.bisect_left(row, (place, ""))
            if before > depth[name]:
                yield (
                    f"partition: op {row[depth[name]][1]!r:.60} adds in place, but {op.name!r:.60} "
                    f"reads {name!r:.60} in the same storage after it"
                )


def _sums_above(made: Mapping[str, _Made], results: set[str]) -> dict[str, int]:
    """Return how many sums each tensor is of: those among it and what it is a view of."""
    found: dict[str, int] = {}
    for start in made:
        path: list[str] = []
        name: str | None = start
        while name is not None and name not in found:
            path.append(name)
            name = alias_of(*made[name])
        count = 0 if name is None else found[name]
        for each in reversed(path):
            count += each in results
            found[each] = count
    return found

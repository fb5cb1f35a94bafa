"""Sums in place: a device adds into the first term of a sum if nothing else reads it.

Problem: a captured `x + y` is a new tensor, so a device that adds up the gradients of a weight from
all time steps holds the old sum, the gradient and the new sum at once.
Idea: `x.add_(y)` gives the same bits in the storage of x. It is allowed if only the sum reads x: no
other op reads x, x is sent to no device, and the same holds for any tensor that x is a view of.
Complexity: O(local ops + tensors).
Reference: Tofu (EuroSys 2019), section 7.2.
Deviations: any sum, not only those of gradients; order is ignored, so a term with other readers is
left alone even if they all come before the sum.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pardnn.graph.ir import Op, Tensor, alias_of, contiguous_strides
from pardnn.plan.partitioned_graph import ADD, ADD_IN_PLACE
from pardnn.plan.plan import Message
from pardnn.shard.boxes import is_one_run


def with_sums_in_place(ops: Sequence[Op], messages: Sequence[Message]) -> tuple[Op, ...]:
    """Return local ops whose sums are made in their first terms where allowed.

    Args:
        ops: Of all devices.
        messages: Between them.
    """
    sums = [op for op in ops if op.kind == ADD]
    if not sums:
        return tuple(ops)
    reads = Counter(name for op in ops for name in op.inputs)
    reads.update(m.tensor for m in messages)
    made = {tensor.name: _Made(op, tensor) for op in ops for tensor in op.outputs}
    return tuple(
        [_in_place(op) if op.kind == ADD and _may_be(op, reads, made) else op for op in ops]
    )


class _Made(NamedTuple):
    op: Op
    tensor: Tensor


def _may_be(op: Op, reads: Counter[str], made: dict[str, _Made]) -> bool:
    """Whether a sum may be written into its first term."""
    target, (result,) = first_term(op), op.outputs
    if target is None or op.memory != "normal" or result.alias_of is not None:
        return False
    name: str | None = target
    while name is not None:
        by, tensor = made[name]
        if reads[name] != 1 or by.is_source or by.memory == "residual":
            return False
        if name == target and _form(tensor) != _form(result):
            return False
        if not _fills(tensor, result.bytes):
            return False
        name = alias_of(by, tensor)
    return by.kind.startswith(("aten.", "pardnn."))  # a custom call might return what it was given


def first_term(op: Op) -> str | None:
    """Return the tensor that a sum reads first; None if that is a number."""
    first: Any = next(iter((op.arguments or {}).get("args", ())), None)
    return first["tensor"] if isinstance(first, dict) and "tensor" in first else None


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.strides


def _fills(tensor: Tensor, size: int) -> bool:
    """Whether a tensor is dense, and of so many bytes."""
    shape = tensor.shape or ()
    strides = tensor.strides or contiguous_strides(shape)
    return tensor.bytes == size and is_one_run(shape, strides)


def _in_place(op: Op) -> Op:
    (result,) = op.outputs
    made = dataclasses.replace(result, alias_of=first_term(op))
    return dataclasses.replace(op, kind=ADD_IN_PLACE, memory="reference", outputs=(made,))

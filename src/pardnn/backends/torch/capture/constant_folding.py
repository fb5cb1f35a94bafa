"""Values that are the same in every step, because they hang on constants alone.

A causal mask, an index of all pairs: code makes them of literals and sizes, and may then decide
something by them. Such a decision is the same in every step, so it is taken at capture: the calls
behind the value, which the trace has recorded, are run for real. Values that hang on a batch, a
parameter, a buffer, a state or a random number are never known here.

Complexity: O(calls of the trace) for each question, plus the work of the calls behind the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value
from pardnn.backends.torch.ops.codec import constant_value, find_call, flatten_result
from pardnn.graph.ir import SOURCE_KINDS, Op, Tensor

#: What a fake kernel raises where data decides.
DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
#: Their second argument is a list of indices and masks.
INDEXED = frozenset({
    torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor,
    torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
})  # fmt: skip
_CTC = frozenset({torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor})
#: Bytes that the calls behind one value may make: a mask of 4096 x 4096 some times over.
MAX_BYTES = 1 << 28


def constant_content(call: Call) -> torch.Tensor:
    """Return what a constant of the trace holds."""
    (value,) = call.outputs
    assert value.geometry is not None
    shape, _, _, dtype = value.geometry
    output = Tensor(
        name="x",
        bytes=shape.numel() * dtype.itemsize,
        shape=tuple(shape),
        dtype=str(dtype).removeprefix("torch."),
    )
    op = Op(name="x", kind="constant", outputs=(output,), arguments=call.arguments)
    return constant_value(op)


def values_of(values: Sequence[Value], calls: Sequence[Call]) -> list[Any] | None:
    """Return what values hold in every step.

    Args:
        values: Of the trace.
        calls: The trace so far.

    Returns:
        A tensor or number for each; None if one of them may differ from step to step, or takes
        too much to be computed now.
    """
    behind = _calls_behind(values)
    if behind is None:
        return None
    held: dict[Value, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for call in calls:
            if call in behind:
                try:
                    _run(call, held)
                except (RuntimeError, TypeError, ValueError, IndexError):
                    return None  # on a device that is not here, say
    return [held[value] for value in values]


def data_of(value: Value, calls: Sequence[Call]) -> Any:
    """Return what a tensor of the trace holds in every step as numbers, in lists; else None."""
    same = values_of([value], calls)
    with _disable_current_modes():
        return None if same is None else same[0].tolist()


def _calls_behind(values: Sequence[Value]) -> set[Call] | None:
    """Return the calls that make values what they are; None if not constants alone do."""
    stack: list[Call] = []

    def needs(storage: Storage | None, version: int) -> None:
        stack.extend(storage.writes[:version] if storage is not None else ())

    for value in values:
        stack.append(value.call)
        needs(value.storage, value.version)
    found: set[Call] = set()
    made = 0
    while stack:
        call = stack.pop()
        if call in found:
            continue
        if call.random or (call.kind in SOURCE_KINDS and call.kind != "constant"):
            return None
        owned = [v.geometry for v in call.outputs if v.base is None and v.geometry is not None]
        made += sum(shape.numel() * dtype.itemsize for shape, _, _, dtype in owned)
        if made > MAX_BYTES:
            return None
        found.add(call)
        stack.extend(value.call for value in call.inputs)
        for storage, version in call.reads:
            needs(storage, version)
    return found


def _run(call: Call, held: dict[Value, Any]) -> None:
    if call.kind == "constant":
        held[call.outputs[0]] = constant_content(call)
        return

    kwargs = {key: _filled(item, held) for key, item in call.kwargs.items()}
    result = find_call(call.kind)(*_filled(call.args, held), **kwargs)
    made = zip(call.returns, flatten_result(result), strict=False)
    held.update((value, tensor) for value, tensor in made if value is not None)
    changed = [value for value in call.outputs if value not in held]
    held.update((value, held[value.base]) for value in changed if value.base is not None)


def _filled(data: Any, held: dict[Value, Any]) -> Any:
    if isinstance(data, Value):
        return held[data]
    return [_filled(item, held) for item in data] if isinstance(data, list | tuple) else data


def result_of(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    values: Sequence[Value],
    calls: Sequence[Call],
    mode: FakeTensorMode,
) -> Any:
    """Return the fake result of a call whose shape depends on data that every step has.

    Args:
        func: The op.
        args: Its positional arguments, values of the trace inside; it has no others.
        values: The values among them.
        calls: The trace so far.
        mode: Of the fake tensors.

    Returns:
        Fake tensors, or the number that a question is answered with; None if data that may differ
        from step to step decides.
    """
    if func in _CTC:
        return _ctc_result(args, calls)
    same = values_of(values, calls)
    if same is None:
        return None
    held = dict(zip(values, same, strict=True))
    with _disable_current_modes(), torch.no_grad():
        return tree_map_only(torch.Tensor, mode.from_tensor, func(*_filled(args, held)))


def _ctc_result(args: Sequence[Any], calls: Sequence[Call]) -> Any:
    """Losses, and the table over the longest target, whose length is data for torch."""
    odds, lengths = args[0], args[3]
    assert isinstance(odds, Value)
    assert odds.geometry is not None
    if isinstance(lengths, Value):
        lengths = data_of(lengths, calls)
        if lengths is None:
            return None
    (steps, batch, _), dtype = odds.geometry[0], odds.geometry[3]
    table = (batch, steps, 2 * max(lengths, default=0) + 1)
    return tuple(torch.empty(shape, dtype=dtype, device=odds.device) for shape in ((batch,), table))

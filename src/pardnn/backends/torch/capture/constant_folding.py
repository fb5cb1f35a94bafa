"""Constant folding: values that depend on constants alone are computed at capture.

Problem: code makes a causal mask, or an index of all pairs, from literals and sizes, and may then
branch on it or read it. The outcome is the same in every step, so it may be fixed at capture.

Idea: run the calls that produce the value, which the trace has recorded, for real. Values that
depend on a batch, a parameter, a buffer, a state or a random number are never folded.

Complexity: O(calls of the trace) for each value folded, plus the work of the calls behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

#: What fake kernels raise where the result depends on data.
DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
#: Ops whose second argument is a list of indices and masks.
INDEXED = frozenset({
    torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor,
    torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
})  # fmt: skip
_CTC = frozenset({torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor})
#: Bytes that the producers of one value may allocate: some masks of 4096 x 4096.
MAX_BYTES = 1 << 28


def constant_content(call: Call) -> torch.Tensor:
    """Return the tensor that a constant of the trace stands for."""
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


def folded_values(values: Sequence[Value], calls: Sequence[Call]) -> list[Any] | None:
    """Return the constant content of values.

    Args:
        values: Values of the trace.
        calls: The trace so far.

    Returns:
        A tensor or number for each; None if one of them may differ from step to step, or takes
        too much memory to compute now.
    """
    producers = producers_of(values)
    if producers is None:
        return None
    env: dict[Value, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for call in calls:
            if call in producers:
                try:
                    _run_call(call, env)
                except (RuntimeError, TypeError, ValueError, IndexError):
                    return None  # for example, on a device that this machine lacks
    return [env[value] for value in values]


def depends_on_constants(value: Value) -> bool:
    """Whether a value is the same in every step, and small enough to be computed at capture."""
    return producers_of([value]) is not None


def record_again(values: Sequence[Value], calls: Sequence[Call]) -> list[Any]:
    """Repeat the calls that made values from constants, under the active modes.

    Args:
        values: Values of an earlier trace.
        calls: The calls of that trace.

    Returns:
        The results, fake tensors of the trace that is being made.
    """
    producers = producers_of(values)
    assert producers is not None
    env: dict[Value, Any] = {}
    for call in calls:
        if call in producers:
            _run_call(call, env)
    return [env[value] for value in values]


def folded_list(value: Value, calls: Sequence[Call]) -> Any:
    """Return the constant content of a tensor as nested lists of numbers; None if it may differ.

    Args:
        value: The tensor, a value of the trace.
        calls: The trace so far.
    """
    same = folded_values([value], calls)
    with _disable_current_modes():
        return None if same is None else same[0].tolist()


def flags_behind(value: Value) -> set[str]:
    """Return the names of the buffers of one whole number that alone decide a value, if so."""

    def is_flag(call: Call) -> bool:
        shape, *_, dtype = call.outputs[0].geometry or ((), None)
        is_one = call.kind == "buffer" and isinstance(shape, torch.Size) and shape.numel() == 1
        return is_one and not (dtype.is_floating_point or dtype.is_complex)

    producers = producers_of([value], is_flag) or ()
    return {call.name for call in producers if call.kind == "buffer"}


def producers_of(
    values: Sequence[Value], is_allowed: Callable[[Call], bool] = lambda _: False
) -> set[Call] | None:
    """Return all calls that values depend on.

    Args:
        values: The values of the trace.
        is_allowed: Whether a value may depend on a source.

    Returns:
        None if another source or a random call is among them.
    """
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
        is_source = call.kind in SOURCE_KINDS and call.kind != "constant"
        if call.random or (is_source and not is_allowed(call)):
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


def _run_call(call: Call, env: dict[Value, Any]) -> None:
    if call.kind == "constant":
        with _disable_current_modes():
            content = constant_content(call)
        env[call.outputs[0]] = torch.ops.aten.lift_fresh.default(content)
        return
    kwargs = {key: _substituted(item, env) for key, item in call.kwargs.items()}
    result = find_call(call.kind)(*_substituted(call.args, env), **kwargs)
    made = zip(call.returns, flatten_result(result), strict=False)
    env.update((value, tensor) for value, tensor in made if value is not None)
    changed = [value for value in call.outputs if value not in env]
    env.update((value, env[value.base]) for value in changed if value.base is not None)


def _substituted(data: Any, env: dict[Value, Any]) -> Any:
    if isinstance(data, Value):
        return env[data]
    return [_substituted(item, env) for item in data] if isinstance(data, list | tuple) else data


def folded_result(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    values: Sequence[Value],
    calls: Sequence[Call],
    mode: FakeTensorMode,
) -> Any:
    """Return the fake result of a call whose shape depends on data that folds to constants.

    Args:
        func: The op.
        args: Its positional arguments, values of the trace inside; it has no others.
        values: The values among them.
        calls: The trace so far.
        mode: The mode of the fake tensors.

    Returns:
        Fake tensors, or the number that a query returns; None if it depends on data that may
        differ from step to step.
    """
    if func in _CTC:
        return _ctc_result(args, calls)
    same = folded_values(values, calls)
    if same is None:
        return None
    env = dict(zip(values, same, strict=True))
    with _disable_current_modes(), torch.no_grad():
        return tree_map_only(torch.Tensor, mode.from_tensor, func(*_substituted(args, env)))


def _ctc_result(args: Sequence[Any], calls: Sequence[Call]) -> Any:
    """Return losses, and the table over the longest target, whose length is data for torch."""
    log_probs, lengths = args[0], args[3]
    assert isinstance(log_probs, Value)
    assert log_probs.geometry is not None
    if isinstance(lengths, Value):
        lengths = folded_list(lengths, calls)
        if lengths is None:
            return None
    (steps, batch, _), dtype = log_probs.geometry[0], log_probs.geometry[3]
    table = (batch, steps, 2 * max(lengths, default=0) + 1)
    return tuple(
        torch.empty(shape, dtype=dtype, device=log_probs.device) for shape in ((batch,), table)
    )

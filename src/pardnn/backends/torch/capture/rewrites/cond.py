"""`torch.cond` on data: both functions run, and the predicate selects each result.

Problem: a selection sends zeros back through the branch not taken, where zero times infinity is
NaN.

Idea: every outside tensor that needs a gradient passes a gate at the entry of each function. Its
gradient is that of the branch taken, whatever comes back along the other. Tensors that only the
other branch uses get zeros, as in eager `torch.cond`.

Complexity: the time of both functions, a selection for each result and each gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.rewrites.undoing import record
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.backends.torch.capture.tracer import Tracer

#: Python's names of in-place operations, apart from those that end in one underscore.
_WRITES = frozenset({
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__setitem__",
})  # fmt: skip


class _Gate(torch.autograd.Function):
    """A tensor twice, once for each branch."""

    @staticmethod
    def forward(ctx: Any, pred: torch.Tensor, value: torch.Tensor) -> Any:
        """Return two views."""
        ctx.save_for_backward(pred)
        return value.view_as(value), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the branch taken."""
        (pred,) = ctx.saved_tensors
        return None, torch.where(pred, *gradients)


class _Gated(TorchFunctionMode):
    """Puts gates before the outside tensors that calls get.

    Args:
        pred: The predicate, which says which branch is taken.
        way: 0 where it is true, 1 where it is false.
        gates: Gates so far, shared by both ways, by the id of the tensor, with the tensor.
        locator: Finds the user's line.
    """

    def __init__(
        self, pred: torch.Tensor, way: int, gates: dict[int, tuple[torch.Tensor, Any]],
        locator: Locator,
    ) -> None:  # fmt: skip
        super().__init__()
        self._locator = locator
        self._pred, self._way, self._gates = pred, way, gates
        self._made: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}  # of gates

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with gates for tensors from outside."""
        name = getattr(func, "__name__", "")
        if _is_write(name) and isinstance(args[0], torch.Tensor) and id(args[0]) not in self._made:
            raise unsupported.unlike_ways(self._locator.line())
        if name != "__get__":
            args, kwargs = _pytree.tree_map_only(torch.Tensor, self.gated, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for each in _pytree.tree_leaves(result):
            self._made[id(each)] = each
        return result

    def gated(self, value: torch.Tensor) -> torch.Tensor:
        """Return the output of a tensor's gate; the tensor itself if it needs none."""
        is_known = id(value) in self._made or id(value) in self._ends
        if is_known or not (torch.is_grad_enabled() and value.requires_grad):
            return value
        with torch._C.DisableTorchFunction():
            if id(value) not in self._gates:
                self._gates[id(value)] = value, _Gate.apply(self._pred, value)
        gate: torch.Tensor = self._gates[id(value)][1][self._way]
        self._ends[id(gate)] = gate
        return gate


def chosen(
    tracer: Tracer, pred: torch.Tensor, ways: tuple[Callable[..., Any], ...], operands: Any
) -> Any:
    """Return the result of the function that a predicate chooses.

    Args:
        tracer: The tracer of the step.
        pred: A boolean tensor of one element.
        ways: The functions for true and false.
        operands: Their arguments.

    Raises:
        UnsupportedError: E801, if the results are not alike, or a function draws or writes.
    """
    pred = record(tracer, "view", pred, []) if pred.dim() else pred
    gates: dict[int, tuple[torch.Tensor, Any]] = {}
    found, start = [], len(tracer.calls)
    for i, way in enumerate(ways):
        with _Gated(pred, i, gates, tracer.locator) as mode:
            given = _pytree.tree_map_only(torch.Tensor, mode.gated, operands)
            found.append(_pytree.tree_flatten(way(*given)))
    (one, structure), (other, beside) = found
    are_alike = structure == beside and all(map(_alike, one, other))
    if not are_alike or any(map(_does_more, tracer.calls[start:])):
        raise unsupported.unlike_ways(tracer.locator.line())
    leaves = [_choose(pred, *pair) for pair in zip(one, other, strict=True)]
    return _pytree.tree_unflatten(leaves, structure)


def _alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and one == other
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _is_write(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _does_more(call: Call) -> bool:
    """Whether a call would have an effect that eager code has in only one of the branches."""
    return bool(call.random or call.mutated)


def _choose(pred: torch.Tensor, one: Any, other: Any) -> Any:
    return torch.where(pred, one, other) if isinstance(one, torch.Tensor) else one

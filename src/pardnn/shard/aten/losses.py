"""Losses of rows of scores."""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Mean, Node, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten

scored = Opaque("loss")

ALL = slice(None)


def _of_rows(one: Any, reduction: int) -> Any:
    """Describe the losses `one(n)` of rows, their mean or their sum."""
    if reduction == 0:
        return lambda n: one(n)
    reducer = Mean if reduction == 1 else Sum
    return lambda: reducer(lambda n: one(n))


def _gradient(reduction: int, grad: Tensor, tensors: list[Tensor], whole: list[Tensor]) -> Any:
    """Describe the gradient by scores; a mean divides by the number of rows, all of them."""
    if tensors[0].ndim == 1 or reduction == 1:
        return lambda *i: scored(grad, *tensors, *whole)[i]

    def value(n: Any, c: Any) -> Node:
        rows = (t[(n, *[ALL] * (t.ndim - 1))] for t in tensors)
        return scored(grad[n] if grad.ndim else grad[()], *rows, *whole)[c]

    return value


@describe_aten("aten.multi_margin_loss")
def multi_margin_loss(
    self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:  # fmt: skip
    """How far other classes come near the right one."""
    whole = [] if weight is None else [weight]
    if self.ndim < 2:
        return lambda *i: scored(self, target, *whole)[i]
    return _of_rows(lambda n: scored(self[n, ALL], target[n], *whole), reduction)


@describe_aten("aten.multi_margin_loss_backward")
def multi_margin_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, p: Any, margin: Any,
    weight: Tensor | None = None, reduction: int = 1,
) -> Any:  # fmt: skip
    """Gradient by the scores."""
    whole = [] if weight is None else [weight]
    return _gradient(reduction, grad_output, [self, target], whole)


@describe_aten("aten.multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self: Tensor, target: Tensor, reduction: int) -> Any:
    """Losses, and which classes are among the right ones."""
    if self.ndim < 2:
        return lambda *i: scored(self, target)[i], lambda *i: scored(target)[i]
    loss = _of_rows(lambda n: scored(self[n, ALL], target[n, ALL]), reduction)
    return loss, lambda n, c: scored(self[n, ALL], target[n, ALL])[c]


@describe_aten("aten.multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Any:
    """Gradient by the scores."""
    return _gradient(reduction, grad_output, [self, target, is_target], [])

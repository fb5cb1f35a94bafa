"""Operators that do the same for each entry of their lists: `_foreach_*`, and fused updates.

Optimizers call them with `foreach=True` and `fused=True`, torch's default on CUDA. Capture splits
them into calls on one entry each; longer lists have separate loops for every entry.
"""

from __future__ import annotations

from typing import Any

from pardnn.shard.aten.elementwise import same_index
from pardnn.shard.tdl.language import Loops, Max, Opaque, Reducer, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten, describe_strided

apply = Opaque("update")

Tensors = list[Tensor]

_ELEMENTWISE = [
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min",
    "clone", "copy", "cos", "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp",
    "lgamma", "log", "log10", "log1p", "log2", "maximum", "minimum", "mul", "neg", "pow",
    "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh",
    "trunc", "zero",
]  # fmt: skip


def _entry(operand: Any, number: int) -> Any:
    """Return what an operand is for one entry of the lists."""
    return operand[number] if isinstance(operand, list | tuple) else operand


def _looped(self: Tensors, number: int, body: Any) -> Any:
    """Return the lambda of one entry; the entries of longer lists share no loops."""
    if len(self) == 1:
        return body
    names = tuple(f"e{number}i{dim}" for dim in range(self[number].ndim))
    return Loops(names, body)


@describe_strided(*(f"aten._foreach_{name}" for name in _ELEMENTWISE))
def each(self: Tensors, *operands: Any, **more: Any) -> Any:
    """One element-wise operation for each entry; numbers may be given one for each, too."""
    return tuple(
        _looped(self, n, same_index(tensor, *(_entry(operand, n) for operand in operands)))
        for n, tensor in enumerate(self)
    )


@describe_strided("aten._foreach_addcdiv.Tensor", "aten._foreach_addcmul.Tensor")
def each_scaled(self: Tensors, tensor1: Tensors, tensor2: Tensors, scalars: Tensor) -> Any:
    """Numbers that are the elements of one tensor, one for each entry."""

    def body(n: int) -> Any:
        tensors = self[n], tensor1[n], tensor2[n]
        return lambda *i: apply(*(t.broadcast(i) for t in tensors), scalars[n])

    return tuple(_looped(self, n, body(n)) for n in range(len(self)))


@describe_strided("aten._foreach_pow.ScalarAndTensor")
def each_power(self: Any, exponent: Tensors) -> Any:
    """One number to the power of each entry."""
    return tuple(_looped(exponent, n, same_index(t)) for n, t in enumerate(exponent))


@describe_aten("aten._foreach_norm")
def each_norm(self: Tensors, ord: Any = 2, dtype: Any = None) -> Any:
    """Norm of each entry, a tensor without dims."""
    return tuple(_scalar(t) for t in self)


@describe_aten("aten._foreach_max")
def each_max(self: Tensors) -> Any:
    """Greatest element of each entry."""
    return _each_reduced(self, Max)


@describe_aten("aten._foreach_powsum")
def each_powsum(self: Tensors, ord: Any = 2, dtype: Any = None) -> Any:
    """Sum of the powers of each entry's elements."""
    return _each_reduced(self, Sum)


def _scalar(*tensors: Tensor) -> Any:
    return lambda: apply(*tensors)


def _each_reduced(self: Tensors, reducer: Reducer) -> Any:
    if len(self) > 1 or not self[0].ndim:
        return tuple(_scalar(t) for t in self)
    return lambda: reducer(lambda *r: self[0][r], self[0].ndim)


def _updated(
    lists: list[Tensors], counts: Tensors, more: dict[str, Any], read: Tensors | None = None
) -> tuple[Any, ...]:
    """Describe an update of lists: an element depends on those at its index, and on numbers.

    Args:
        lists: Tensors that are written, those of one entry of one shape.
        counts: Tensors without dims, one for each entry, or none.
        more: Hyperparameters, some of them tensors.
        read: Tensors of the same shapes that are read alone.
    """
    numbers = [value for value in more.values() if isinstance(value, Tensor)]

    def body(n: int) -> Any:
        tensors = [listed[n] for listed in (*lists, read or []) if listed]
        return lambda *i: apply(*(t[i] for t in tensors), *counts[n : n + 1], *numbers)

    return tuple(_looped(listed, n, body(n)) for listed in lists for n in range(len(listed)))


def _updated_in_place(
    self: Tensors, grads: Tensors, states: list[Tensors], counts: Tensors, more: dict[str, Any]
) -> tuple[Any, ...]:
    """Describe an update in place, which stores gradients only where it unscales them."""
    if more.get("grad_scale") is None:
        return _updated([self, *states], counts, more, grads)
    return _updated([self, grads, *states], counts, more)


@describe_aten("aten._fused_adam", "aten._fused_adamw")
def fused_adam(
    self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors, state_steps: Tensors, **more: Any,
) -> Any:  # fmt: skip
    """Adam and AdamW; the largest second moments exist only with `amsgrad`."""
    lists = [self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    return _updated(lists, state_steps, more)


@describe_aten("aten._fused_adam_", "aten._fused_adamw_")
def fused_adam_in_place(
    self: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors, state_steps: Tensors, **more: Any,
) -> Any:  # fmt: skip
    """As optimizers call it."""
    states = [exp_avgs, exp_avg_sqs, max_exp_avg_sqs]
    return _updated_in_place(self, grads, states, state_steps, more)


@describe_aten("aten._fused_sgd_")
def fused_sgd_in_place(
    self: Tensors, grads: Tensors, momentum_buffer_list: Tensors, **more: Any
) -> Any:
    """As optimizers call it."""
    return _updated_in_place(self, grads, [momentum_buffer_list], [], more)


@describe_aten("aten._fused_sgd")
def fused_sgd(self: Tensors, grads: Tensors, momentum_buffer_list: Tensors, **more: Any) -> Any:
    """SGD; momentum buffers exist only with `momentum`."""
    return _updated([self, grads, momentum_buffer_list], [], more)


@describe_aten("aten._fused_adagrad")
def fused_adagrad(
    self: Tensors, grads: Tensors, state_sums: Tensors, state_steps: Tensors, **more: Any
) -> Any:
    """Adagrad; this overload says that it writes the counts of steps, too."""
    updated = _updated([self, grads, state_sums], state_steps, more)
    return (*updated, *(_scalar(t) for t in state_steps))


@describe_aten("aten._fused_adagrad_")
def fused_adagrad_in_place(
    self: Tensors, grads: Tensors, state_sums: Tensors, state_steps: Tensors, **more: Any
) -> Any:
    """As optimizers call it."""
    updated = _updated_in_place(self, grads, [state_sums], state_steps, more)
    return (*updated, *(_scalar(t) for t in state_steps))


@describe_aten("aten._fused_adagrad.tensor_lr")
def fused_adagrad_with_tensor(
    self: Tensors, grads: Tensors, state_sums: Tensors, state_steps: Tensors, **more: Any
) -> Any:
    """Adagrad with a learning rate that is a tensor; counts of steps are only read."""
    return _updated([self, grads, state_sums], state_steps, more)


@describe_aten("aten._fused_adagrad_.tensor_lr")
def fused_adagrad_with_tensor_in_place(
    self: Tensors, grads: Tensors, state_sums: Tensors, state_steps: Tensors, **more: Any
) -> Any:
    """As optimizers call it."""
    return _updated_in_place(self, grads, [state_sums], state_steps, more)

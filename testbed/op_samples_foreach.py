"""Samples of what optimizers do with lists of tensors: `_foreach_*` and fused updates."""

from typing import Any

import torch

from testbed.op_draw import Draw, named, sample

UNARY = """abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p
log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc clone zero"""


def one(d: Draw) -> list[torch.Tensor]:
    return [d.f(*d.sizes(d.one(1, 2, 3)))]


def some(d: Draw) -> list[torch.Tensor]:
    """One tensor as capture splits lists, or two of other sizes."""
    return d.one([d.p(6, 7)], [d.p(6, 7), d.p(5)])


def like(d: Draw, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [d.p(*tensor.shape) for tensor in tensors]


sample(*(f"aten._foreach_{name}.default" for name in UNARY.split()))(lambda d: (one(d),))
sample(*(f"aten._foreach_{n}_.default" for n in ("sqrt", "neg", "zero")))(lambda d: (some(d),))

BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
for _name in BINARY.split():
    sample(f"aten._foreach_{_name}.List", f"aten._foreach_{_name}_.List")(
        lambda d: (lambda t: (t, like(d, t)))(some(d))
    )
    sample(f"aten._foreach_{_name}.Scalar")(lambda d: (some(d), 1.5))
    sample(f"aten._foreach_{_name}_.ScalarList")(
        lambda d: (lambda t: (t, [1.5, 2.5][: len(t)]))(some(d))
    )
sample(*(f"aten._foreach_{n}.Tensor" for n in ("add", "mul", "div")))(
    lambda d: (some(d), torch.tensor(1.5, dtype=torch.float64))
)
sample("aten._foreach_copy_.default")(lambda d: (lambda t: (t, like(d, t)))(some(d)))
sample("aten._foreach_pow.ScalarAndTensor")(lambda d: (1.5, some(d)))
sample("aten._foreach_lerp_.Scalar")(lambda d: (lambda t: (t, like(d, t), 0.3))(some(d)))
sample("aten._foreach_lerp.List")(lambda d: (lambda t: (t, like(d, t), like(d, t)))(some(d)))
for _name in ("addcmul", "addcdiv"):
    sample(f"aten._foreach_{_name}_.Scalar")(
        lambda d: (lambda t: (t, like(d, t), like(d, t), 0.5))(some(d))
    )
    sample(f"aten._foreach_{_name}_.ScalarList")(
        lambda d: (lambda t: (t, like(d, t), like(d, t), [0.5, 0.3][: len(t)]))(some(d))
    )
    sample(f"aten._foreach_{_name}.Tensor")(
        lambda d: (lambda t: (t, like(d, t), like(d, t), d.p(len(t))))(some(d))
    )
sample("aten._foreach_max.default")(lambda d: (one(d),))
sample("aten._foreach_powsum.Scalar")(lambda d: (one(d), 2))


def _state(d: Draw, count: int) -> list[list[torch.Tensor]]:
    first = some(d)
    return [first, *(like(d, first) for _ in range(count - 1))]


def _steps(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.tensor(3.0) for _ in tensors]


@sample(*named("_fused_adam_ _fused_adamw_ _fused_adam"))
def fused_adam(d: Draw) -> tuple[Any, ...]:
    amsgrad = d.one(True, False)
    *state, largest = _state(d, 5)
    more = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8,
            "amsgrad": amsgrad, "maximize": False,
            "found_inf": d.one(None, torch.zeros(()))}  # fmt: skip
    return (*state, largest if amsgrad else [], _steps(largest), more)


@sample(*named("_fused_sgd_"))
def fused_sgd(d: Draw) -> tuple[Any, ...]:
    momentum = d.one(0.0, 0.9)
    params, grads, buffers = _state(d, 3)
    more = {"weight_decay": 0.1, "momentum": momentum, "lr": 0.1, "dampening": 0.0,
            "nesterov": False, "maximize": True, "is_first_step": False}  # fmt: skip
    return params, grads, buffers if momentum else [], more


@sample(*named("_fused_adagrad_"))
def fused_adagrad(d: Draw) -> tuple[Any, ...]:
    params, grads, sums = _state(d, 3)
    more = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    return params, grads, sums, _steps(params), more


@sample("aten._fused_adagrad_.tensor_lr")
def fused_adagrad_with_tensor(d: Draw) -> tuple[Any, ...]:
    *lists, more = fused_adagrad(d)
    return (*lists, {**more, "lr": torch.tensor(0.1, dtype=torch.float64)})

"""Where torch computes differently under a trace: derivatives chosen by data, and some values.

Problem: the gradient of a product is `gradient * product / x` where no item is zero, else a product
of all others. torch checks the items, but not under a dispatch mode: there it takes the second
formula, which gives other bits. The gradient of the largest item and the median has other zeros
there, and NaN where a gradient is infinite. Singular values and eigenvalues without gradients come
with vectors there, which gives them other bits, too.

Idea: during a trace, our own kernels replace torch's for autograd. Their
gradients compute both formulas and select. What cannot be computed in this way is refused: a sum of
selected items, whose order depends on their number, and second gradients of two other ops.

Deviation: torch transforms (`torch.func`) never check, so torch's own kernels run there. A gradient
    of a
gradient adds zeros that an eager step does not add: a zero may have another sign.

Complexity: for a product, three times the items that eager steps compute.

Source: `prod_backward`, `evenly_distribute_backward`, `masked_fill_backward`, `cumprod_backward`
and `linalg_det_backward` of torch's FunctionsManual.cpp, `linalg_svdvals` and `linalg_eigvalsh`:
all of torch 2.13 that differ under a mode which does nothing, over the samples of torch's tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from pardnn.backends.torch.capture.refusals.derivatives import other_derivative
from pardnn.backends.torch.capture.tracer import Tracer

_KEYS = ("AutogradCPU", "AutogradCUDA")
_ATEN = torch.ops.aten
_EXTREMES = (_ATEN.max.default, _ATEN.min.default, _ATEN.median.default, _ATEN.nanmedian.default)
_PRODUCTS = (_ATEN.prod.default, _ATEN.prod.dim_int)
_FILLS = (_ATEN.masked_fill.Tensor, _ATEN.masked_fill_.Tensor)
_ONCE = (_ATEN.cumprod.default, _ATEN._linalg_det.default)
_VALUES = (_ATEN.linalg_svdvals.default, _ATEN.linalg_eigvalsh.default)

Kernel = Callable[..., Any]


@contextlib.contextmanager
def derivatives_rewritten(tracer: Tracer) -> Iterator[None]:
    """Put kernels with derivatives of our own in place of torch's while the context is open.

    Args:
        tracer: The tracer of the step that runs in it.
    """
    library = torch.library.Library("aten", "IMPL")
    makers: list[tuple[tuple[Any, ...], Callable[..., Kernel]]] = [
        (_PRODUCTS, _product), (_EXTREMES, _extreme), (_FILLS, _fill), (_ONCE, _once),
        (_VALUES, _values),
    ]  # fmt: skip
    try:
        for ops, maker in makers:
            for op in ops:
                for key in _KEYS:
                    real = torch.library.get_kernel(op, key).call_boxed
                    kernel = _where_torch_looks(real, maker(tracer, op, real))
                    library.impl(op, kernel, key, with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _where_torch_looks(real: Kernel, ours: Kernel) -> Kernel:
    """Return a kernel that is ours where an eager step would read a tensor's content."""

    def kernel(keyset: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_traced = isinstance(first, FakeTensor)
        if not is_traced or torch._C._functorch.maybe_current_level() is not None:
            return real(keyset, first, *args, **kwargs)
        return ours(keyset, first, *args, **kwargs)

    return kernel


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


class _Derived(torch.autograd.Function):
    """One result of one tensor, with a gradient by a formula of ours."""

    @staticmethod
    def forward(ctx: Any, forward: Kernel, formula: Kernel, source: torch.Tensor) -> torch.Tensor:
        """Compute the result below autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = forward(source)
        ctx.formula = formula
        ctx.save_for_backward(source, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of the source."""
        return None, None, ctx.formula(gradients[0], *ctx.saved_tensors)


def _product(tracer: Tracer, op: Any, real: Kernel) -> Kernel:
    def product(
        keyset: Any, source: torch.Tensor, *where: Any, dtype: torch.dtype | None = None
    ) -> Any:
        if not (_needs_gradient(source) and source.dim()):
            return real(keyset, source, *where, dtype=dtype)
        if _has_tangent(source):
            raise other_derivative("prod", tracer.locator.line())
        dim, keepdim = (*where, False)[:2] if where else (None, False)

        def formula(grad: torch.Tensor, source: torch.Tensor, result: torch.Tensor) -> Any:
            if dim is None:
                return _of_whole(grad, source, result)
            if not keepdim:
                grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
            return _of_product(grad, source, result, dim % source.dim())

        typed = source if dtype is None else source.to(dtype)
        return _Derived.apply(lambda x: op(x, *where), formula, typed)

    return product


def _of_whole(grad: torch.Tensor, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the product of all items."""
    found = _of_product(grad, source, result, None)
    if torch.is_grad_enabled():
        return found
    has_several = (source == 0).sum() > 1  # -0.0 and NaN come from the formula
    return torch.where(has_several, torch.zeros_like(found), found)


def _of_product(
    grad: torch.Tensor, source: torch.Tensor, result: torch.Tensor, dim: int | None
) -> torch.Tensor:
    """Select between both formulas; each gets only items that it can handle.

    Args:
        grad: The gradient of the product, with a dim of size 1 for the one that it has gone over.
        source: What is multiplied.
        result: The product, as `grad`.
        dim: The dim that it goes over; None for all.
    """
    has_zero = (source == 0).any()
    divisor, factors = source, source
    if torch.is_grad_enabled():  # its own gradient would otherwise meet 0 * inf
        divisor = torch.where(has_zero, 1, source)
        factors = torch.where(has_zero, source, 1)
    quotient = grad * (result / divisor).conj()
    if dim is None:
        others = _of_others(grad, factors.contiguous().view(-1), 0).view_as(source)
    else:
        others = _of_others(grad, factors, dim)
    return torch.where(has_zero.logical_not(), quotient, others)


def _of_others(grad: torch.Tensor, source: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `grad` times the product of all other items, as torch computes it."""
    size = source.shape[dim]
    if source.numel() == 0 or size == 1:
        return grad.expand_as(source)
    one = torch.ones_like(source.narrow(dim, 0, 1), dtype=grad.dtype)
    before = torch.cat([one, source.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([one, source.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim)
    return grad * (before * after.flip(dim)).conj()


def _extreme(_tracer: Tracer, op: Any, real: Kernel) -> Kernel:
    def extreme(keyset: Any, source: torch.Tensor) -> Any:
        if not _needs_gradient(source) or source.is_cuda:  # CUDA's formula is that of a trace
            return real(keyset, source)
        return _Derived.apply(op, _of_extreme, source)

    return extreme


def _of_extreme(grad: torch.Tensor, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Divide a gradient among the items that are the value."""
    are_nan = source.isnan().logical_and(value.isnan())
    is_value = (source == value).logical_or(are_nan).contiguous()
    return torch.where(is_value, grad / is_value.sum(), grad.new_zeros(source.shape))


def _fill(tracer: Tracer, _op: Any, real: Kernel) -> Kernel:
    def fill(keyset: Any, source: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
        if _needs_gradient(value):
            raise other_derivative("masked_fill", tracer.locator.line())
        return real(keyset, source, mask, value)

    return fill


def _once(tracer: Tracer, op: Any, real: Kernel) -> Kernel:
    name = op._schema.name.removeprefix("aten::").removeprefix("_linalg_")

    def once(keyset: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made, where = real(keyset, source, *args, **kwargs), tracer.locator.line()
        node = (made if isinstance(made, torch.Tensor) else made[0]).grad_fn

        def check(_gradients: Any) -> None:
            if torch.is_grad_enabled():
                raise other_derivative(name, where)

        if node is not None:
            node.register_prehook(check)
        return made

    return once


def _values(_tracer: Tracer, op: Any, real: Kernel) -> Kernel:
    is_svd = op is _VALUES[0]

    def values(keyset: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _needs_gradient(source) or _has_tangent(source):
            return real(keyset, source, *args, **kwargs)
        if is_svd:
            return _ATEN._linalg_svd(source, False, False, **kwargs)[1]
        return _ATEN._linalg_eigh(source, *args, compute_v=False)[0]

    return values

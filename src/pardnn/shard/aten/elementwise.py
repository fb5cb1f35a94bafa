"""Operators whose output element depends on the elements of the inputs at its own index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pardnn.shard.tdl.language import Node, Opaque, Tensor
from pardnn.shard.tdl.registry import describe_strided

apply = Opaque("elementwise")

_UNARY = [
    "abs", "acos", "acosh", "alias", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil",
    "clone", "contiguous", "cos", "cosh", "deg2rad", "detach", "digamma", "erf", "erfc", "erfinv",
    "exp", "exp2", "expm1", "floor", "frac", "hardsigmoid", "hardswish", "isfinite", "isinf",
    "isnan", "leaky_relu", "lgamma", "lift", "lift_fresh", "lift_fresh_copy", "log", "log10",
    "log1p", "log2", "log_sigmoid", "logical_not", "logit", "mish", "nan_to_num", "neg",
    "positive", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign",
    "signbit", "silu", "sin", "sinc", "sinh", "softplus", "sqrt", "square", "tan", "tanh",
    "threshold", "trunc", "zero", "elu", "gelu", "celu", "hardtanh", "hardshrink", "softshrink",
    "_to_copy", "to", "_conj", "conj", "resolve_conj", "resolve_neg",
    "fill", "alias_copy", "angle", "_conj_physical", "conj_physical", "i0", "isneginf", "isposinf",
    "mvlgamma", "rad2deg",
]  # fmt: skip

_SPECIAL = [
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "entr", "erfcx", "i0e", "i1",
    "i1e", "log_ndtr", "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0",
    "modified_bessel_k1", "ndtri", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
    "spherical_bessel_j0", "chebyshev_polynomial_t", "chebyshev_polynomial_u",
    "chebyshev_polynomial_v", "chebyshev_polynomial_w", "hermite_polynomial_h",
    "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
    "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w", "xlog1py", "zeta",
]  # fmt: skip

_SEVERAL = [
    "add", "addcdiv", "addcmul", "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "clamp",
    "clamp_max", "clamp_min", "copy", "copysign", "div", "elu_backward", "eq", "floor_divide",
    "fmax", "fmin", "fmod", "ge", "gelu_backward", "gt", "hardtanh_backward",
    "hardsigmoid_backward", "hardswish_backward", "heaviside", "hypot", "le",
    "leaky_relu_backward", "lerp", "logaddexp", "logaddexp2", "logical_and", "logical_or",
    "logical_xor", "logit_backward", "lt", "masked_fill", "maximum", "minimum", "mish_backward",
    "mul", "native_dropout_backward", "ne", "nextafter", "pow", "remainder", "rsub",
    "_prelu_kernel",
    "sigmoid_backward", "silu_backward", "softplus_backward", "softshrink_backward",
    "hardshrink_backward", "sub", "tanh_backward", "threshold_backward", "true_divide", "where",
    "xlogy", "bitwise_left_shift", "bitwise_right_shift", "gcd", "igamma", "igammac", "lcm",
    "ldexp", "polygamma", "rrelu_with_noise_backward",
]  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def same_index(*operands: Any, **attributes: Any) -> Callable[..., Node]:
    """Return `out[*i] = f(a[*i], b[*i], ...)`, inputs broadcast, for any rank."""
    tensors = list(_tensors([*operands, *attributes.values()]))
    return lambda *i: apply(*(tensor.broadcast(i) for tensor in tensors))


@describe_strided(*(f"aten.{name}" for name in _UNARY))
def unary(self: Tensor, *attributes: Any, **more: Any) -> Any:
    """One input, or one input and numbers that may be tensors of rank 0."""
    return same_index(self, *attributes, **more)


@describe_strided(*(f"aten.special_{name}" for name in _SPECIAL))
@describe_strided(*(f"aten.{name}" for name in _SEVERAL))
def several(*operands: Any, **more: Any) -> Any:
    """Several inputs, broadcast against each other."""
    return same_index(*operands, **more)


@describe_strided(
    "aten.mse_loss_backward", "aten.smooth_l1_loss_backward", "aten.huber_loss_backward",
    "aten.soft_margin_loss_backward",
)  # fmt: skip
def loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int = 1, *more: Any
) -> Any:
    """A mean divides by the number of elements, which a worker does not know."""
    if reduction == 1:
        everything = tuple(slice(None) for _ in range(self.ndim))
        return lambda *i: apply(grad_output.broadcast(i), self[everything], target[everything])[i]
    return same_index(grad_output, self, target)


@describe_strided("aten.log_sigmoid_forward")
def log_sigmoid_forward(self: Tensor) -> Any:
    """Two outputs; the second is a buffer that only CPUs fill."""
    return same_index(self), same_index(self)


@describe_strided("aten.log_sigmoid_backward")
def log_sigmoid_backward(grad_output: Tensor, self: Tensor, buffer: Tensor) -> Any:
    """The buffer is empty where it was not filled."""
    return same_index(grad_output, self, *([buffer] if buffer.shape == self.shape else []))


@describe_strided("aten.binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:  # fmt: skip
    """A mean divides by the number of elements, which a worker does not know."""
    tensors = [t for t in (grad_output, self, target, weight) if t is not None]
    return same_index(*tensors) if reduction != 1 else lambda *i: apply(*tensors)[i]


@describe_strided("aten.frexp")
def frexp(self: Tensor) -> Any:
    """Mantissa and exponent."""
    return same_index(self), same_index(self)


@describe_strided("aten.isin")
def isin(elements: Tensor, test_elements: Any, **more: Any) -> Any:
    """Whether each element is among others."""
    return lambda *i: apply(elements.broadcast(i), test_elements)


@describe_strided("aten.bucketize")
def bucketize(self: Tensor, boundaries: Tensor, **more: Any) -> Any:
    """In which of some ranges each element lies."""
    return lambda *i: apply(self.broadcast(i), boundaries)


@describe_strided("aten._prelu_kernel_backward")
def prelu_backward(grad_output: Tensor, self: Tensor, weight: Tensor) -> Any:
    """Gradients of input and slopes, both of the input's shape."""
    return same_index(grad_output, self, weight), same_index(grad_output, self, weight)


@describe_strided("aten.polar", "aten.complex")
def complex_of(a: Tensor, b: Tensor) -> Any:
    """Complex numbers of real and imaginary parts."""
    return same_index(a, b)

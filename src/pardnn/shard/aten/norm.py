"""Normalisations and their gradients.

Statistics are computed inside one call, so the dims that they cover cannot be cut: layer norms are
cut by rows, batch norms in training by channels, group norms by samples.
"""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Local, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten

normalise = Opaque("normalise")
gradient = Opaque("gradient")

ALL = slice(None)


def channel(tensor: Tensor | None, c: Any) -> list[Any]:
    """Return the element of a channel's parameter, or nothing without a parameter."""
    return [] if tensor is None else [tensor[c]]


def whole(tensor: Tensor | None) -> list[Any]:
    """Return all of a parameter, or nothing without a parameter."""
    return [] if tensor is None else [tensor[(ALL,) * tensor.ndim]]


@describe_aten("aten.native_layer_norm")
def native_layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Any, bias: Any, eps: float
) -> Any:
    """Rows of the trailing dims are normalised; then mean and 1 / deviation of each row."""
    rows, inner = input.ndim - len(normalized_shape), len(normalized_shape)

    def value(*i: Any) -> Any:
        row = input[(*i[:rows], *[ALL] * inner)]
        return normalise(row, *whole(weight), *whole(bias))[i[rows:]]

    return value, value, value


@describe_aten("aten.native_layer_norm_backward")
def native_layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: list[int], mean: Tensor, rstd: Tensor,
    weight: Any, bias: Any, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Gradients of input, weight and bias; the last two are sums over all rows."""
    rows, inner = input.ndim - len(normalized_shape), [ALL] * len(normalized_shape)

    def row(i: Any) -> list[Any]:
        statistics = [tensor[(*i, *inner)] for tensor in (mean, rstd)]
        return [grad_out[(*i, *inner)], input[(*i, *inner)], *statistics]

    def of_input(*i: Any) -> Any:
        return gradient(*row(i[:rows]), *whole(weight), *whole(bias))[i[rows:]]

    def of_weight(*h: Any) -> Any:
        forms = [e for t in (weight, bias) if t is not None for e in whole(t.form)]
        return Sum(lambda *i: gradient(*row(i), *forms)[h], rows)

    made = (of_input, of_weight, of_weight)
    return tuple(f if wanted else None for f, wanted in zip(made, output_mask, strict=True))


@describe_aten("aten._fused_rms_norm")
def fused_rms_norm(input: Tensor, normalized_shape: list[int], weight: Any, eps: Any) -> Any:
    """Rows of the trailing dims are divided by their root mean square."""
    rows, inner = input.ndim - len(normalized_shape), len(normalized_shape)

    def value(*i: Any) -> Any:
        return normalise(input[(*i[:rows], *[ALL] * inner)], *whole(weight))[i[rows:]]

    return value, value


def _batch_norm(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool
) -> Any:
    def parameters(c: Any) -> list[Any]:
        return [e for t in (weight, bias, running_mean, running_var) for e in channel(t, c)]

    spatial = [ALL] * (input.ndim - 2)
    if not training:
        nothing = lambda unused: 0  # noqa: E731  (statistics are empty then)
        return (
            lambda n, c, *x: normalise(input[(n, c, *x)], *parameters(c)), nothing, nothing,
        )  # fmt: skip
    statistic = lambda c: normalise(input[(ALL, c, *spatial)], *parameters(c))  # noqa: E731
    return lambda n, c, *x: statistic(c)[(n, *x)], statistic, statistic


@describe_aten("aten.native_batch_norm", "aten._native_batch_norm_legit")
def native_batch_norm(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Channels are normalised by their statistics, or in evaluation by the running ones."""
    return _batch_norm(input, weight, bias, running_mean, running_var, training)


@describe_aten("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    input: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Without running statistics those of the batch are used, whatever `training` says."""
    return _batch_norm(input, weight, bias, None, None, True)


@describe_aten("aten._native_batch_norm_legit_no_training")
def batch_norm_no_training(
    input: Tensor, weight: Any, bias: Any, running_mean: Tensor, running_var: Tensor,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Channels are normalised by running statistics."""
    return _batch_norm(input, weight, bias, running_mean, running_var, False)


@describe_aten("aten.native_batch_norm_backward")
def native_batch_norm_backward(
    grad_out: Tensor, input: Tensor, weight: Any, running_mean: Any, running_var: Any,
    save_mean: Any, save_invstd: Any, train: bool, eps: float, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Gradients of input, weight and bias of one channel; in evaluation also by samples."""
    spatial = [ALL] * (input.ndim - 2)
    per_channel = (weight, running_mean, running_var, *([save_mean, save_invstd] if train else []))

    def value(c: Any, n: Any = ALL, x: Any = spatial) -> Any:
        elements = [grad_out[(n, c, *x)], input[(n, c, *x)]]
        return gradient(*elements, *(e for t in per_channel for e in channel(t, c)))

    if train:
        made: Any = (lambda n, c, *x: value(c)[(n, *x)], value_of(value), value_of(value))
    else:
        summed = lambda c: Sum(lambda n, *x: value(c, n, x), 1 + len(spatial))  # noqa: E731
        made = (lambda n, c, *x: value(c, n, x), summed, summed)
    return tuple(f if wanted else None for f, wanted in zip(made, output_mask, strict=True))


def value_of(function: Any) -> Any:
    """Return `lambda c: function(c)`: parameters with defaults are no loops."""
    return lambda c: function(c)


@describe_aten("aten.native_group_norm")
def native_group_norm(
    input: Tensor, weight: Any, bias: Any, N: Any, C: Any, HxW: Any, group: int, eps: float
) -> Any:
    """Groups of channels of a sample are normalised; the call counts samples itself."""
    rest = [ALL] * (input.ndim - 1)

    def value(n: Any, *x: Any) -> Any:
        return normalise(input[(n, *rest)], *whole(weight), *whole(bias))[x]

    return Local((value, value, value), N=lambda local: local.inputs["input"][0])


@describe_aten("aten.native_group_norm_backward")
def native_group_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Any, N: Any, C: Any,
    HxW: Any, group: int, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Gradients of input, weight and bias; the last two are sums over the samples."""
    rest = [ALL] * (input.ndim - 1)

    def sample(n: Any) -> list[Any]:
        of_samples = [grad_out[(n, *rest)], input[(n, *rest)], mean[n, ALL], rstd[n, ALL]]
        return [*of_samples, *whole(weight)]

    def of_weight(c: Any) -> Any:
        return Sum(lambda n: gradient(*sample(n))[c])

    made = (lambda n, *x: gradient(*sample(n))[x], of_weight, of_weight)
    listed = tuple(f if wanted else None for f, wanted in zip(made, output_mask, strict=True))
    return Local(listed, N=lambda local: local.inputs["input"][0])

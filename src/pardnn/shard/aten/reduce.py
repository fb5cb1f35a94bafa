"""Reductions over dims, and computations along one dim: scans, sorts, positions of extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pardnn.shard.tdl.interval import Affine
from pardnn.shard.tdl.language import (
    Apply,
    Max,
    Mean,
    Min,
    Node,
    Opaque,
    Prod,
    Reducer,
    Sum,
    Tensor,
)
from pardnn.shard.tdl.registry import describe_aten

along = Opaque("along a dim")
statistic = Opaque("statistic")

Index = tuple[Affine, ...]


def wrapped(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims counted from the front, sorted; None and [] mean all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    listed = (dim,) if isinstance(dim, int) else dim
    return tuple(sorted(d % max(ndim, 1) for d in listed))


def joined(kept: Index, within: Sequence[Any], dims: tuple[int, ...], keepdim: bool) -> Any:
    """Return the index of an input: `within` at `dims`, the indices of the output elsewhere."""
    ndim = len(within) + len(kept) - (len(dims) if keepdim else 0)
    outer = [i for d, i in enumerate(kept) if not (keepdim and d in dims)]
    inner, rest = iter(within), iter(outer)
    return tuple(next(inner) if d in dims else next(rest) for d in range(ndim))


def _over(reducer: Reducer, self: Tensor, dim: Any, keepdim: bool) -> Any:
    dims = wrapped(dim, self.ndim) if self.ndim else ()
    if not dims:
        return lambda *i: along(self.broadcast(i))
    return lambda *i: reducer(lambda *r: self[joined(i, r, dims, keepdim)], len(dims))


@describe_aten("aten.sum", "aten.nansum")
def sum_(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum over some dims, or all."""
    return _over(Sum, self, dim, keepdim)


@describe_aten("aten.mean")
def mean(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Mean over some dims, or all."""
    return _over(Mean, self, dim, keepdim)


@describe_aten("aten.amax", "aten.any", "aten.max.default")
def amax(self: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Maximum over some dims, or all; of booleans: whether any is true."""
    return _over(Max, self, dim, keepdim)


@describe_aten("aten.amin", "aten.all", "aten.min.default")
def amin(self: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Minimum over some dims, or all; of booleans: whether all are true."""
    return _over(Min, self, dim, keepdim)


@describe_aten("aten.prod")
def prod(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Product over one dim, or all."""
    return _over(Prod, self, dim, keepdim)


def _statistic(self: Tensor, dim: Any, keepdim: bool) -> Any:
    """What partial results of one call do not give: only the other dims can be cut."""
    dims = wrapped(dim, self.ndim)
    everything = [slice(None)] * len(dims)
    return lambda *i: statistic(self[joined(i, everything, dims, keepdim)])


@describe_aten("aten.var", "aten.std")
def var(
    self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: Any = None,
) -> Any:  # fmt: skip
    """Variance: the variances of shards do not give that of the whole without the means."""
    return _statistic(self, dim, keepdim)


@describe_aten("aten.var_mean", "aten.std_mean")
def var_mean(
    self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: Any = None,
) -> Any:  # fmt: skip
    """Variance and mean."""
    return _statistic(self, dim, keepdim), _statistic(self, dim, keepdim)


@describe_aten("aten.linalg_vector_norm")
def vector_norm(
    self: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Norm over some dims."""
    return _statistic(self, dim, keepdim)


@describe_aten("aten.norm")
def norm(self: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    """Norm over some dims."""
    return _statistic(self, dim, keepdim)


@describe_aten("aten.argmax", "aten.argmin", "aten.logsumexp")
def argmax(self: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Position of an extreme value: a worker knows only the position in its shard."""
    return _statistic(self, dim, keepdim)


@describe_aten("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.mode", "aten.nanmedian.dim")
def max_dim(self: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """Extreme value and its position."""
    return _statistic(self, dim, keepdim), _statistic(self, dim, keepdim)


@describe_aten("aten.max.other", "aten.min.other")
def max_other(self: Tensor, other: Tensor) -> Any:
    """The larger of two, element by element."""
    return lambda *i: along(self.broadcast(i), other.broadcast(i))


def whole_along(self: Tensor, dim: int, *others: Tensor) -> Any:
    """Return `out[.., j, ..] = f(a[.., :, ..])[j]`: all dims but `dim` can be cut."""
    d = dim % max(self.ndim, 1)

    def value(*i: Affine) -> Node:
        row: Any = (*i[:d], slice(None), *i[d + 1 :])
        return along(*(tensor[row] for tensor in (self, *others)))[i[d : d + 1]]

    return value


def whole_over(dims: Sequence[int], *tensors: Tensor) -> Any:
    """Return `out[i] = f(a[i])`, of tensors of one rank, each whole along `dims`."""

    def value(*i: Affine) -> Node:
        index: Any = tuple(slice(None) if d in dims else e for d, e in enumerate(i))
        return along(*(tensor[index] for tensor in tensors))[tuple(i[d] for d in dims)]

    return value


@describe_aten("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r")
def fourier(self: Tensor, dim: Sequence[int], *more: Any) -> Any:
    """Fourier transforms along some dims; the others can be cut."""
    return whole_over(wrapped(dim, self.ndim), self)


@describe_aten("aten.renorm")
def renorm(self: Tensor, p: Any, dim: int, maxnorm: Any) -> Any:
    """Slices of a dim scaled to a norm, each by itself."""
    return whole_over([d for d in range(self.ndim) if d != dim % self.ndim], self)


@describe_aten("aten.kthvalue")
def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th value in order along a dim, and its position."""
    return _statistic(self, dim, keepdim), _statistic(self, dim, keepdim)


@describe_aten("aten.count_nonzero")
def count_nonzero(self: Tensor, dim: Any = None) -> Any:
    """How many elements are not zero."""
    return _over(Sum, self, dim, False)


@describe_aten("aten.aminmax")
def aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Least and greatest element over one dim, or all."""
    return _over(Min, self, dim, keepdim), _over(Max, self, dim, keepdim)


@describe_aten("aten.histc")
def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """How many elements lie in each of some ranges; by default those of the elements themselves."""
    if min == max:
        return lambda b: along(self)[b]
    return lambda b: Sum(lambda *r: along(self[r])[b], self.ndim)


def _counted(
    self: Tensor, weight: Tensor | None, within: int, edges: Sequence[Tensor], *, can_add: bool
) -> Any:
    """Describe counts of points, or of their weights, in ranges: those of shards add up.

    Args:
        self: Points; the last `within` dims are their coordinates.
        weight: Of each point.
        within: 1 for points, 0 for numbers.
        edges: Of the ranges.
        can_add: Whether ranges are given, and counts are not divided by their total.
    """
    weights = [] if weight is None else [weight]
    if not can_add:
        return lambda *b: along(self, *weights, *edges)[b]

    def one(*r: Affine) -> Apply:
        return along(self[(*r, *[slice(None)] * within)], *(w[r] for w in weights), *edges)

    return lambda *b: Sum(lambda *r: one(*r)[b], self.ndim - within)


@describe_aten("aten._histogramdd_from_bin_cts")
def histogramdd(
    self: Tensor, bins: Sequence[int], *, range: Any = None, weight: Tensor | None = None,
    density: bool = False,
) -> Any:  # fmt: skip
    """How many points lie in each box; by default boxes depend on the points themselves."""
    return _counted(self, weight, 1, [], can_add=range is not None and not density)


@describe_aten("aten._histogramdd_from_bin_tensors")
def histogramdd_of_edges(
    self: Tensor, bins: list[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Any:
    """How many points lie in each box of given edges."""
    return _counted(self, weight, 1, bins, can_add=not density)


@describe_aten("aten.histogram.bin_ct")
def histogram(
    self: Tensor, bins: int = 100, *, range: Any = None, weight: Tensor | None = None,
    density: bool = False,
) -> Any:  # fmt: skip
    """How many numbers lie in each range, and the ranges' edges."""
    given = range is not None
    edges = lambda e: along(*([] if given else [self]))[e]  # noqa: E731
    return _counted(self, weight, 0, [], can_add=given and not density), edges


@describe_aten("aten.histogram.bins_tensor")
def histogram_of_edges(
    self: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> Any:
    """How many numbers lie in each range of given edges, and the edges once more."""
    return _counted(self, weight, 0, [bins], can_add=not density), lambda e: along(bins)[e]


@describe_aten(
    "aten.cumsum", "aten.cumprod", "aten.logcumsumexp", "aten._softmax", "aten._log_softmax"
)
@describe_aten("aten._safe_softmax")
def scan(self: Tensor, dim: int, *more: Any, **attributes: Any) -> Any:
    """Computed along one dim, where each element may depend on all."""
    return whole_along(self, dim)


@describe_aten("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: Any) -> Any:
    """Gradient through a softmax along one dim."""
    return whole_along(grad_output, dim, output)


@describe_aten("aten.sort", "aten.cummax", "aten.cummin")
def sort(self: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """Values and positions along one dim."""
    return whole_along(self, dim), whole_along(self, dim)


@describe_aten("aten.sort.stable")
def sort_stable(
    self: Tensor, *, stable: Any = None, dim: int = -1, descending: bool = False
) -> Any:
    """Values and positions along one dim."""
    return whole_along(self, dim), whole_along(self, dim)


@describe_aten("aten.topk")
def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest values along one dim, and their positions."""
    return whole_along(self, dim), whole_along(self, dim)


@describe_aten("aten.mse_loss", "aten.l1_loss", "aten.soft_margin_loss")
def mse_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Any:
    """Differences, one by one, their mean or their sum."""
    return _loss([self, target], max(self, target, key=lambda t: t.ndim).ndim, reduction)


@describe_aten("aten.smooth_l1_loss", "aten.huber_loss")
def smooth_l1_loss(self: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Any:
    """Differences, one by one, their mean or their sum."""
    return _loss([self, target], self.ndim, reduction)


@describe_aten("aten.binary_cross_entropy_with_logits", "aten.binary_cross_entropy")
def binary_cross_entropy(
    self: Tensor, target: Tensor, weight: Tensor | None = None, *more: Any
) -> Any:
    """Cross entropies, one by one, their mean or their sum."""
    tensors = [t for t in (self, target, weight, *more) if isinstance(t, Tensor)]
    return _loss(tensors, self.ndim, next((n for n in more if isinstance(n, int)), 1))


def _loss(tensors: list[Tensor], ndim: int, reduction: int) -> Any:
    largest = max((t.shape for t in tensors if t.ndim == ndim), key=math.prod)

    def element(*i: Affine) -> Node:
        return statistic(*(t[i] if t.shape == largest else t.broadcast(i) for t in tensors))

    if reduction == 0:
        return element
    reducer = Mean if reduction == 1 else Sum
    return lambda: reducer(element, ndim)

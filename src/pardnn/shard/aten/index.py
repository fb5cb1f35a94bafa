"""Data-dependent indexing: which element is read depends on an index tensor.

The indexed dim is read whole; the others, and the positions of the index tensor, can be cut.
"""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Local, Node, Opaque, Reducer, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten

pick = Opaque("pick")
put = Opaque("put")

ALL = slice(None)

#: Sum of the weighted losses over the sum of the weights.
Quotient = Reducer("quotient", by=1)


@describe_aten("aten.embedding")
def embedding(weight: Tensor, indices: Tensor, *attributes: Any) -> Any:
    """Rows of a table."""
    return lambda *i: pick(weight[:, i[-1]], indices[i[:-1]])


@describe_aten("aten.embedding_dense_backward")
def embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:  # fmt: skip
    """Gradients added up by row of the table; scaling by frequency needs all indices at once."""
    places = [ALL] * indices.ndim
    if scale_grad_by_freq:
        return lambda v, h: put(grad_output[(*places, h)], indices[tuple(places)])[v]
    return lambda v, h: Sum(lambda *i: put(grad_output[(*i, h)], indices[i])[v], indices.ndim)


@describe_aten("aten._embedding_bag")
def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False,
    mode: int = 0, sparse: bool = False, per_sample_weights: Tensor | None = None, *more: Any,
) -> Any:  # fmt: skip
    """Sums of rows; bags are given by offsets, so only the columns of the table can be cut."""
    at = [indices[(ALL,) * indices.ndim], offsets[:], *_weights(per_sample_weights)]
    result = lambda b, h: pick(weight[:, h], *at)[b]  # noqa: E731
    whole = lambda *i: pick(*at)[i]  # noqa: E731
    return result, whole, whole, result if mode == 2 else whole


@describe_aten("aten._embedding_bag_backward")
def embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor,
    maximum_indices: Tensor, num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool,
    per_sample_weights: Tensor | None, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Gradients of bags added up by row of the table, whose columns can be cut."""
    whole = [indices, offsets, offset2bag, bag_size, *_weights(per_sample_weights)]
    return _of_columns(grad, maximum_indices, whole, mode)


@describe_aten("aten._embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor,
    num_weights: int, scale_grad_by_freq: bool, mode: int, per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    """The same, where each index knows its bag."""
    whole = [indices, offset2bag, bag_size, *_weights(per_sample_weights)]
    return _of_columns(grad, maximum_indices, whole, mode)


def _of_columns(grad: Tensor, positions: Tensor, whole: list[Any], mode: int) -> Any:
    """Describe a gradient of a table; maxima (mode 2) were taken column by column."""

    def value(v: Any, h: Any) -> Node:
        taken = positions[:, h] if mode == 2 else positions
        return put(grad[:, h], taken, *whole)[v]

    return value


@describe_aten("aten._embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor,
    mode: int, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Gradient by the weight of each index: its row times its bag's gradient."""
    at = [indices, offsets, offset2bag]
    return lambda i: Sum(lambda h: put(grad[:, h], weight[:, h], *at)[i])


@describe_aten("aten.gather")
def gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """`out[.., j, ..] = self[.., index[.., j, ..], ..]`."""
    d = dim % max(self.ndim, 1)
    if self.ndim == 0 or index.ndim == 0:
        return lambda *i: pick(self[(ALL,) * self.ndim], index[(ALL,) * index.ndim])[i]
    return lambda *i: pick(self[(*i[:d], ALL, *i[d + 1 :])], index[i])


@describe_aten("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(self: Tensor, dim: int, index: Tensor, *values: Any, **more: Any) -> Any:
    """Values written at the positions of one dim that an index tensor names."""
    d = dim % max(self.ndim, 1)
    sources = [index, *(value for value in (*values, *more.values()) if isinstance(value, Tensor))]
    tensors = [t for t in sources if t.ndim == self.ndim]

    def value(*i: Any) -> Node:
        row = (*i[:d], ALL, *i[d + 1 :])
        return put(self[row], *(t.clipped[row] for t in tensors))[i[d : d + 1]]

    return value


@describe_aten("aten.index_select")
def index_select(self: Tensor, dim: int, index: Tensor) -> Any:
    """Slices of a dim that an index tensor names."""
    d = dim % max(self.ndim, 1)
    if self.ndim == 0 or index.ndim == 0:
        return lambda *i: pick(self[(ALL,) * self.ndim], index[(ALL,) * index.ndim])[i]
    return lambda *i: pick(self[(*i[:d], ALL, *i[d + 1 :])], index[i[d]])


@describe_aten("aten.take")
def take(self: Tensor, index: Tensor) -> Any:
    """Elements named by their position in the whole tensor."""
    return lambda *i: pick(self, index[i])


@describe_aten("aten.searchsorted")
def searchsorted(sorted_sequence: Tensor, self: Any, *, sorter: Any = None, **more: Any) -> Any:
    """Where elements belong in sorted rows, or in one row for all."""
    sequences = [sorted_sequence] if sorter is None else [sorted_sequence, sorter]
    if not isinstance(self, Tensor):
        return lambda *i: pick(*sequences)
    if sorted_sequence.ndim == 1:
        return lambda *i: pick(*sequences, self[i])
    return lambda *i: pick(*(t[(*i[:-1], ALL)] for t in sequences), self[i])


@describe_aten("aten.index_fill")
def index_fill(self: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """Slices of a dim filled with one value."""
    d = dim % max(self.ndim, 1)
    fills = [value] if isinstance(value, Tensor) else []
    if not self.ndim:
        return lambda: put(self, index, *fills)
    return lambda *i: put(self[(*i[:d], ALL, *i[d + 1 :])], index, *fills)[i[d]]


@describe_aten("aten.index_copy", "aten.index_reduce")
def index_copy(
    self: Tensor, dim: int, index: Tensor, source: Tensor, *more: Any, **named: Any
) -> Any:
    """Slices replaced, or reduced, at the places of a dim that an index tensor names."""
    return index_add(self, dim, index, source)


@describe_aten("aten.segment_reduce")
def segment_reduce(data: Tensor, reduce: str, *, axis: int = 0, **more: Any) -> Any:
    """Runs of the first dim reduced, given by lengths or offsets."""
    ends = [t for t in more.values() if isinstance(t, Tensor)]
    if axis:
        return lambda *i: pick(data, *ends)[i]
    return lambda s, *i: pick(data[(ALL, *i)], *ends)[s]


@describe_aten("aten._segment_reduce_backward")
def segment_reduce_backward(
    grad: Tensor, output: Tensor, data: Tensor, reduce: str, *, axis: int = 0, **more: Any
) -> Any:
    """Gradient of `segment_reduce`."""
    ends = [t for t in more.values() if isinstance(t, Tensor)]
    if axis:
        return lambda *i: pick(grad, output, data, *ends)[i]
    return lambda s, *i: pick(*(t[(ALL, *i)] for t in (grad, output, data)), *ends)[s]


@describe_aten("aten.index_add")
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Any:
    """Slices added at the places of a dim that an index tensor names."""
    d = dim % max(self.ndim, 1)

    def value(*i: Any) -> Node:
        row = (*i[:d], ALL, *i[d + 1 :])
        return put(self[row], source[row], index[(ALL,) * index.ndim])[i[d]]

    return value if self.ndim else lambda: put(self[()])


class Indexed:
    """Where the dims of `self[indices]` come from, by NumPy's rule."""

    def __init__(self, self_: Tensor, indices: list[Tensor | None]) -> None:
        self.ndim = self_.ndim
        self.tensors = [index for index in indices if index is not None]
        self.dims = [d for d, index in enumerate(indices) if index is not None]
        self.free = [d for d in range(self.ndim) if d not in self.dims]
        self.rank = max((index.ndim for index in self.tensors), default=0)
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1)) if self.dims else True
        self.start = self.dims[0] if adjacent and self.dims else 0
        masks = {"bool", "uint8"} & {index.dtype for index in self.tensors}
        self.is_plain = bool(self.dims) and not masks

    def places(self, i: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indices of the result that stand for places of the index tensors."""
        return i[self.start : self.start + self.rank]

    def rows(self, i: tuple[Any, ...]) -> tuple[Any, ...]:
        """Index of the elements read for them: indexed dims whole."""
        rest = iter((*i[: self.start], *i[self.start + self.rank :]))
        return tuple(ALL if d in self.dims else next(rest) for d in range(self.ndim))

    def target(self, i: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return which elements of `self`, and which values, element `i` of a sum depends on."""
        row = tuple(ALL if d in self.dims else e for d, e in enumerate(i))
        free = [i[d] for d in self.free]
        return row, (*free[: self.start], *[ALL] * self.rank, *free[self.start :])


@describe_aten("aten.index")
def index(self: Tensor, indices: list[Tensor | None]) -> Any:
    """Elements named by one index tensor per indexed dim; with masks the shape depends on data."""
    at = Indexed(self, indices)
    everything = (ALL,) * self.ndim
    if not at.is_plain:
        return lambda *i: pick(self[everything])[i]
    return lambda *i: pick(self[at.rows(i)], *(t.broadcast(at.places(i)) for t in at.tensors))


@describe_aten("aten.index_put", "aten._unsafe_index_put")
def index_put(
    self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    """Elements named by index tensors are replaced, or added to: the other dims can be cut.

    A single mask selects where to replace, if the value is the same everywhere.
    """
    at = Indexed(self, indices)
    if len(at.tensors) == 1 and at.dims == [0] and not at.is_plain:
        (mask,) = at.tensors
        if values.ndim <= self.ndim - mask.ndim:
            return lambda *i: put(self[i], mask[i[: mask.ndim]], values.broadcast(i[mask.ndim :]))
    if not at.is_plain:
        return lambda *i: put(self[(ALL,) * self.ndim])[i]

    def value(*i: Any) -> Node:
        row, placed = at.target(i)
        wholes = (t[(ALL,) * t.ndim] for t in at.tensors)
        return put(self[row], values.broadcast(placed), *wholes)[tuple(i[d] for d in at.dims)]

    return value


@describe_aten("aten._unsafe_masked_index")
def masked_index(self: Tensor, mask: Tensor, indices: list[Tensor | None], fill: Any) -> Any:
    """Elements named by index tensors where a mask is set, one number elsewhere."""
    at = Indexed(self, indices)

    def value(*i: Any) -> Node:
        named = (t.broadcast(at.places(i)) for t in at.tensors)
        return pick(self[at.rows(i)], mask.broadcast(i), *named)

    return value


@describe_aten("aten._unsafe_masked_index_put_accumulate")
def masked_index_put(
    self: Tensor, mask: Tensor, indices: list[Tensor | None], values: Tensor
) -> Any:
    """Values added at the places that index tensors name, where a mask is set."""
    at = Indexed(self, indices)

    def value(*i: Any) -> Node:
        row, placed = at.target(i)
        wholes = (t[(ALL,) * t.ndim] for t in at.tensors)
        parts = (values.broadcast(placed), mask.broadcast(placed))
        return put(self[row], *parts, *wholes)[tuple(i[d] for d in at.dims)]

    return value


def _weights(weight: Tensor | None) -> list[Any]:
    return [] if weight is None else [weight[:]]


@describe_aten("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Any:
    """Loss, and the sum of the weights that a mean divides by.

    Partial results add up; the mean is the quotient of the two sums.
    """
    if self.ndim == 1:
        everything = lambda *i: pick(self[:], target[(ALL,) * target.ndim])[i]  # noqa: E731
        return everything, everything
    one = lambda n, *x: pick(self[(n, ALL, *x)], target[(n, *x)], *_weights(weight))  # noqa: E731
    if reduction == 0:
        return one, lambda: 0
    total = lambda: Sum(one, self.ndim - 1)  # noqa: E731
    loss = (lambda: Quotient(one, self.ndim - 1)) if reduction == 1 else total
    return Local((loss, total), reduction=2)


@describe_aten("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    ignore_index: int, total_weight: Tensor,
) -> Any:  # fmt: skip
    """Gradient by the scores; the divisor of a mean is an input."""
    if self.ndim == 1:
        return lambda c: pick(self[:], target[(ALL,) * target.ndim])[c]

    def value(n: Any, c: Any, *x: Any) -> Node:
        element = pick(self[(n, ALL, *x)], target[(n, *x)], *_weights(weight))
        scale = grad_output.broadcast((n, *x)) if grad_output.ndim else grad_output[()]
        return pick(element, scale, total_weight[()])[c]

    return value

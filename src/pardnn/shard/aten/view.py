"""Views and copies of views: the same elements at other positions.

Merging and splitting dims is affine in the common factors of both shapes. The cut is along the
leading factor of each group of dims; shards along any other are not boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pardnn.shard.tdl.language import KEEP, At, Local, Loops, Node, Opaque, Tensor
from pardnn.shard.tdl.registry import describe_strided

taken = Opaque("view")

ALL = slice(None)
Group = tuple[list[int], list[int]]


def groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """Match dims of two shapes: the smallest runs of dims, by number, with the same elements."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    found: list[Group] = []
    while left and right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        a, b = before[ins[0]], after[outs[0]]
        while a != b and (left if a < b else right):
            if a < b:
                ins.append(left.pop(0))
                a *= before[ins[-1]]
            else:
                outs.append(right.pop(0))
                b *= after[outs[-1]]
        found.append((ins, outs))
    return found


def _index(
    dims: Sequence[int], shape: Sequence[int], loop: Any, lead: int, index: list[Any]
) -> None:
    """Enter where step `loop` of `lead` steps along a group of dims lies."""
    run = shape[dims[0]] // lead
    index[dims[0]] = loop if run == 1 else slice(loop * run, loop * run + run)


@describe_strided(
    "aten.view",
    "aten._unsafe_view",
    "aten.reshape",
    "aten._reshape_alias",
    "aten.view_copy",
    is_exact=True,
)
def view(self: Tensor, size: Sequence[int], *strides: Any) -> Any:
    """The same elements in the same order in another shape."""
    before = self.shape
    known = math.prod(n for n in size if n != -1)
    after = [math.prod(before) // max(known, 1) if n == -1 else n for n in size]
    if 0 in before:
        return lambda *i: taken(self[(ALL,) * self.ndim])[i]
    found = groups(before, after)
    leads = [math.gcd(before[ins[0]], after[outs[0]]) for ins, outs in found]
    # By the last dim, which stays where it is when the leading one is cut down to a single slice.
    names = tuple(f"g{outs[-1]}" for _, outs in found)

    def place(*g: Any) -> At:
        read: list[Any] = [ALL] * len(before)
        written: list[Any] = [ALL] * len(after)
        for loop, lead, (ins, outs) in zip(g, leads, found, strict=True):
            _index(ins, before, loop, lead, read)
            _index(outs, after, loop, lead, written)
        return At(tuple(written), taken(self[tuple(read)]))

    loops = Loops(names, place, dict(zip(names, leads, strict=True)))
    return Local(loops, size=lambda local: list(local.outputs[0]))


@describe_strided("aten.view.dtype")
def view_dtype(self: Tensor, dtype: Any) -> Any:
    """Bytes read as another dtype; the last dim may change its size."""
    return lambda *i: taken(self[(*i[:-1], ALL)])[i[-1:]] if i else taken(self[()])


@describe_strided("aten.expand", "aten.expand_copy", "aten.broadcast_to")
def expand(self: Tensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    """Broadcast to a shape."""
    return Local(lambda *i: taken(self.broadcast(i)), size=lambda local: list(local.outputs[0]))


@describe_strided("aten.permute", "aten.permute_copy")
def permute(self: Tensor, dims: Sequence[int]) -> Any:
    """Dims in another order."""
    order = [d % self.ndim for d in dims]
    return lambda *i: taken(self[tuple(i[order.index(d)] for d in range(self.ndim))])


@describe_strided("aten.transpose", "aten.transpose_copy", "aten.swapaxes")
def transpose(self: Tensor, dim0: int, dim1: int) -> Any:
    """Two dims change places."""
    order = list(range(self.ndim))
    if order:
        a, b = dim0 % self.ndim, dim1 % self.ndim
        order[a], order[b] = order[b], order[a]
    return permute(self, order)


@describe_strided("aten.t", "aten.t_copy", "aten.numpy_T")
def t(self: Tensor) -> Any:
    """A matrix transposed; vectors stay."""
    return permute(self, list(range(self.ndim))[::-1])


@describe_strided("aten.unsqueeze", "aten.unsqueeze_copy")
def unsqueeze(self: Tensor, dim: int) -> Any:
    """One more dim, of size 1."""
    d = dim % (self.ndim + 1)
    return lambda *i: taken(self[(*i[:d], *i[d + 1 :])])


def _squeezed(self: Tensor, dims: Sequence[int]) -> Any:
    """A shard of one slice would lose its dim, so dims that are named and longer stay whole."""
    named = {d % self.ndim for d in dims} if self.ndim else set()
    gone = {d for d in named if self.shape[d] == 1}

    def value(*i: Any) -> Node:
        rest = iter(i)
        index = [ALL if d in gone else next(rest) for d in range(self.ndim)]
        stay = tuple(index[d] for d in named - gone)
        return taken(self[tuple(ALL if d in named else e for d, e in enumerate(index))])[stay]

    return value


@describe_strided("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.dim")
def squeeze(self: Tensor, dim: int | Sequence[int]) -> Any:
    """Without the named dims of size 1."""
    return _squeezed(self, [dim] if isinstance(dim, int) else dim)


@describe_strided("aten.squeeze", "aten.squeeze_copy")
def squeeze_all(self: Tensor) -> Any:
    """Without all dims of size 1."""
    gone = [d for d in range(self.ndim) if self.shape[d] == 1]
    everything = (ALL,) * self.ndim
    return squeeze(self, gone) if len(gone) == self.ndim else lambda *i: taken(self[everything])[i]


@describe_strided("aten.slice")
def slice_(self: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Every `step`-th element of a dim from `start` on."""
    d, size = dim % self.ndim, self.shape[dim]
    begin = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)

    def value(*i: Any) -> Node:
        return taken(self[(*i[:d], i[d] * step + begin, *i[d + 1 :])])

    name = f"i{d}"
    return Local(
        value,
        start=lambda local: 0 if local.cuts(name) else KEEP,
        end=lambda local: local.inputs["self"][d] if local.cuts(name) else KEEP,
    )


@describe_strided("aten.narrow", "aten.narrow_copy")
def narrow(self: Tensor, dim: int, start: int, length: int) -> Any:
    """A run of a dim."""
    d = dim % self.ndim
    return lambda *i: taken(self[(*i[:d], ALL, *i[d + 1 :])])[i[d]]


@describe_strided("aten.slice_backward")
def slice_backward(
    grad_output: Tensor, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    """The gradient in its place, zeros elsewhere."""
    d = dim % len(input_sizes)
    name, sizes = f"i{d}", lambda local: list(local.outputs[0])
    begin = max(start + input_sizes[d], 0) if start < 0 else min(start, input_sizes[d])
    if step != 1:
        return Local(
            lambda *i: taken(grad_output[(*i[:d], ALL, *i[d + 1 :])])[i[d]], input_sizes=sizes
        )
    return Local(
        lambda *i: taken(grad_output.padded(0)[(*i[:d], i[d] - begin, *i[d + 1 :])]),
        input_sizes=sizes,
        start=lambda local: 0 if local.cuts(name) else KEEP,
        end=lambda local: local.outputs[0][d] if local.cuts(name) else KEEP,
    )


@describe_strided("aten.select")
def select(self: Tensor, dim: int, index: int) -> Any:
    """One slice of a dim."""
    d = dim % self.ndim
    return lambda *i: taken(self[(*i[:d], ALL, *i[d:])])


@describe_strided("aten.select_backward")
def select_backward(grad_output: Tensor, input_sizes: Sequence[int], dim: int, index: int) -> Any:
    """The gradient in its slice, zeros elsewhere."""
    d = dim % len(input_sizes)
    return Local(
        lambda *i: taken(grad_output[(*i[:d], *i[d + 1 :])])[i[d]],
        input_sizes=lambda local: list(local.outputs[0]),
    )


@describe_strided("aten.select_scatter")
def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Any:
    """One slice of a dim replaced."""
    d = dim % self.ndim
    return lambda *i: taken(self[(*i[:d], ALL, *i[d + 1 :])], src[(*i[:d], *i[d + 1 :])])[i[d]]


@describe_strided("aten.slice_scatter")
def slice_scatter(
    self: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """A run of a dim replaced."""
    d = dim % self.ndim

    def value(*i: Any) -> Node:
        row = (*i[:d], ALL, *i[d + 1 :])
        return taken(self[row], src[row])[i[d]]

    return value


def _parts(self: Tensor, count: int, dim: int) -> Any:
    d = dim % self.ndim
    value = lambda *i: taken(self[(*i[:d], ALL, *i[d + 1 :])])[i[d]]  # noqa: E731
    return (value,) * count


@describe_strided("aten.split_with_sizes", "aten.split_with_sizes_copy")
def split_with_sizes(self: Tensor, split_sizes: Sequence[int], dim: int = 0) -> Any:
    """Runs of a dim; a shard of that dim would hold some of them whole and others not at all."""
    return _parts(self, len(split_sizes), dim)


@describe_strided("aten.split", "aten.split_copy", "aten.unsafe_split")
def split(self: Tensor, split_size: int, dim: int = 0) -> Any:
    """Runs of a dim of equal size."""
    return _parts(self, max(1, -(-self.shape[dim] // max(split_size, 1))), dim)


@describe_strided("aten.unbind", "aten.unbind_copy")
def unbind(self: Tensor, dim: int = 0) -> Any:
    """All slices of a dim."""
    return (select(self, dim, 0),) * self.shape[dim]


@describe_strided("aten.cat")
def cat(tensors: list[Tensor], dim: int = 0) -> Any:
    """Tensors one after the other along a dim; each worker takes the part in its range."""
    held = [tensor for tensor in tensors if tensor.ndim == max(t.ndim for t in tensors)]
    d = dim % held[0].ndim
    starts = [sum(t.shape[d] for t in held[:n]) for n in range(len(held))]

    def value(*i: Any) -> Node:
        places = ((*i[:d], i[d] - start, *i[d + 1 :]) for start in starts)
        return taken(*(t.clipped[place] for t, place in zip(held, places, strict=True)))

    return value


@describe_strided("aten.stack")
def stack(tensors: list[Tensor], dim: int = 0) -> Any:
    """Tensors along a new dim."""
    d = dim % (tensors[0].ndim + 1)
    return lambda *i: taken(*(t[(*i[:d], *i[d + 1 :])] for t in tensors))[i[d]]


@describe_strided("aten.flip")
def flip(self: Tensor, dims: Sequence[int]) -> Any:
    """Some dims reversed."""
    flipped = {d % self.ndim for d in dims} if self.ndim else set()
    last = [size - 1 for size in self.shape]
    return lambda *i: taken(
        self[tuple(last[d] - e if d in flipped else e for d, e in enumerate(i))]
    )


@describe_strided("aten.repeat")
def repeat(self: Tensor, repeats: Sequence[int]) -> Any:
    """Dims repeated; only dims that are not repeated can be cut."""
    new = len(repeats) - self.ndim

    def value(*i: Any) -> Node:
        own = tuple(e if n == 1 else ALL for e, n in zip(i[new:], repeats[new:], strict=True))
        again = [e for e, n in zip(i, repeats, strict=True) if n != 1]
        return taken(self[own])[tuple(again)]

    return value


@describe_strided("aten.diagonal", "aten.diagonal_copy")
def diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Elements whose indices in two dims differ by `offset`; they become the last dim."""
    a, b = dim1 % self.ndim, dim2 % self.ndim
    name = f"i{self.ndim - 2}"

    def value(*i: Any) -> Node:
        rest = iter(i[:-1])
        diagonal_of = {a: i[-1] + max(-offset, 0), b: i[-1] + max(offset, 0)}
        return taken(
            self[
                tuple(diagonal_of[d] if d in diagonal_of else next(rest) for d in range(self.ndim))
            ]
        )

    return Local(value, offset=lambda local: 0 if local.cuts(name) else KEEP)


@describe_strided("aten.unfold", "aten.unfold_copy")
def unfold(self: Tensor, dimension: int, size: int, step: int) -> Any:
    """Windows of a dim; their elements become the last dim."""
    if not self.ndim:
        return lambda i: taken(self[()])[i]
    d = dimension % self.ndim

    def value(*i: Any) -> Node:
        window = slice(i[d] * step, i[d] * step + size)
        return taken(self[(*i[:d], window, *i[d + 1 : -1])])[i[-1:]]

    return value


@describe_strided("aten.roll")
def roll(self: Tensor, shifts: Any, dims: Any = ()) -> Any:
    """Dims rotated."""
    listed = [dims] if isinstance(dims, int) else list(dims)
    turned = {d % self.ndim for d in listed} or set(range(self.ndim))
    return lambda *i: taken(self[tuple(ALL if d in turned else e for d, e in enumerate(i))])[
        tuple(i[d] for d in turned)
    ]


@describe_strided("aten.tril", "aten.triu")
def tril(self: Tensor, diagonal: int = 0) -> Any:
    """Zeros on one side of the diagonal of each matrix; a shard of it has another diagonal."""
    return Local(
        lambda *i: taken(self[i]),
        diagonal=lambda local: (
            diagonal + (local.begin(f"i{self.ndim - 2}") - local.begin(f"i{self.ndim - 1}"))
        ),
    )

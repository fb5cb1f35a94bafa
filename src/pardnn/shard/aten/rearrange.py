"""Elements moved by operators that are not views: shuffles, diagonals, windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pardnn.shard.aten.reduce import whole_over
from pardnn.shard.tdl.language import At, Local, Loops, Node, Opaque, Tensor
from pardnn.shard.tdl.registry import describe_aten, describe_strided

moved = Opaque("moved")

ALL = slice(None)


def _pixels(self: Tensor, factor: int, *, shuffles: bool) -> Any:
    """Blocks of channels at one place are blocks of places of one channel, and back."""
    lead = self.ndim - 3
    names = (*(f"b{n}" for n in range(lead)), "c", "y", "x")

    def place(*i: Any) -> At:
        *b, c, y, x = i
        channels = slice(c * factor**2, c * factor**2 + factor**2)
        deep: Any = (*b, channels, y, x)
        rows, columns = (slice(e * factor, e * factor + factor) for e in (y, x))
        wide: Any = (*b, c, rows, columns)
        return At(wide, moved(self[deep])) if shuffles else At(deep, moved(self[wide]))

    return Loops(names, place)


@describe_aten("aten.pixel_shuffle")
def pixel_shuffle(self: Tensor, upscale_factor: int) -> Any:
    """Channels become positions."""
    return _pixels(self, upscale_factor, shuffles=True)


@describe_aten("aten.pixel_unshuffle")
def pixel_unshuffle(self: Tensor, downscale_factor: int) -> Any:
    """Positions become channels."""
    return _pixels(self, downscale_factor, shuffles=False)


@describe_aten("aten.channel_shuffle")
def channel_shuffle(self: Tensor, groups: int) -> Any:
    """Channels of groups take turns."""
    return whole_over([1], self)


@describe_aten("aten.rot90")
def rot90(self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Planes are rotated."""
    a, b = (d % self.ndim for d in dims)

    def value(*i: Any) -> Node:
        return moved(self[tuple(ALL if d in (a, b) else e for d, e in enumerate(i))])[i[a], i[b]]

    return value


@describe_strided("aten.view_as_real")
def view_as_real(self: Tensor) -> Any:
    """Real and imaginary part become a dim, the last."""
    return lambda *i: moved(self[i[:-1]])[i[-1]]


@describe_strided("aten.view_as_complex")
def view_as_complex(self: Tensor) -> Any:
    """The last dim becomes real and imaginary part."""
    return lambda *i: moved(self[(*i, ALL)])


def _diagonals(self: Tensor, ndim: int, dim1: int, dim2: int, *others: Tensor) -> Any:
    """Describe matrices in two dims made of the last dim of `self`, and of others of their rank."""
    a, b = dim1 % ndim, dim2 % ndim

    def value(*i: Any) -> Node:
        rest = tuple(e for d, e in enumerate(i) if d not in (a, b))
        whole = tuple(ALL if d in (a, b) else e for d, e in enumerate(i))
        return moved(self[(*rest, ALL)], *(t[whole] for t in others))[i[a], i[b]]

    return value


@describe_aten("aten.diag_embed")
def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Rows become the diagonals of matrices."""
    return _diagonals(self, self.ndim + 1, dim1, dim2)


@describe_aten("aten.diagonal_backward")
def diagonal_backward(
    grad_output: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Any:
    """The gradient on the diagonal, zeros elsewhere."""
    value = _diagonals(grad_output, len(input_sizes), dim1, dim2)
    return Local(value, input_sizes=lambda local: list(local.outputs[0]))


@describe_aten("aten.diagonal_scatter")
def diagonal_scatter(
    self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    """Diagonals replaced."""
    return _diagonals(src, self.ndim, dim1, dim2, self)


@describe_aten("aten.unfold_backward")
def unfold_backward(
    grad_in: Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Any:
    """Windows of a dim are added up where they overlap."""
    d = dim % max(len(input_sizes), 1)
    return Local(
        lambda *i: moved(grad_in[(*i[:d], ALL, *i[d + 1 :], ALL)])[i[d : d + 1]],
        input_sizes=lambda local: list(local.outputs[0]),
    )

"""Pooling, padding, resampling: windows without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pardnn.shard.aten.conv import per_dim
from pardnn.shard.tdl.language import KEEP, At, Local, Loops, Node, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten

pool = Opaque("pool")

ALL = slice(None)


def plane(self: Tensor, space: int, *others: Tensor) -> Any:
    """Return `out[b, c, x..] = f(a[b, c, :..])[x..]`: samples and channels can be cut."""
    leading = self.ndim - space

    def value(*i: Any) -> Node:
        parts = (t[(*i[:leading], *[ALL] * space)] for t in (self, *others))
        return pool(*parts)[i[leading:]]

    return value


def _pooled(
    self: Tensor, space: int, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    counts_padding: bool,
) -> Any:  # fmt: skip
    """Averages; space is cut with a halo where every window has the same number of elements."""
    kernel = per_dim(kernel_size, space)
    steps = per_dim(stride, space) if stride not in (None, []) else kernel
    pads = per_dim(padding, space)
    if ceil_mode or (any(pads) and not counts_padding):
        return plane(self, space)
    leading, data = self.ndim - space, self.padded(0)

    def value(*i: Any) -> Node:
        starts = [x * s - p for x, s, p in zip(i[leading:], steps, pads, strict=True)]
        windows = [slice(a, a + n) for a, n in zip(starts, kernel, strict=True)]
        return pool(data[(*i[:leading], *windows)])

    def local_padding(local: Any) -> Any:
        cut = [local.cuts(f"i{leading + d}") for d in range(space)]
        return [0 if c else p for c, p in zip(cut, pads, strict=True)] if any(cut) else KEEP

    return Local(value, padding=local_padding)


@describe_aten("aten.avg_pool1d")
def avg_pool1d(
    self: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:  # fmt: skip
    """Averages over windows of one dim."""
    return _pooled(self, 1, kernel_size, stride, padding, ceil_mode, count_include_pad)


@describe_aten("aten.avg_pool2d")
def avg_pool2d(
    self: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> Any:  # fmt: skip
    """Averages over windows of two dims."""
    counts = count_include_pad or divisor_override is not None
    return _pooled(self, 2, kernel_size, stride, padding, ceil_mode, counts)


@describe_aten("aten.avg_pool3d")
def avg_pool3d(
    self: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> Any:  # fmt: skip
    """Averages over windows of three dims."""
    counts = count_include_pad or divisor_override is not None
    return _pooled(self, 3, kernel_size, stride, padding, ceil_mode, counts)


@describe_aten("aten.avg_pool2d_backward", "aten.max_pool2d_with_indices_backward")
@describe_aten("aten._adaptive_avg_pool2d_backward", "aten.adaptive_max_pool2d_backward")
@describe_aten("aten.reflection_pad2d_backward", "aten.replication_pad2d_backward")
@describe_aten("aten.fractional_max_pool2d_backward")
def pool2d_backward(grad_output: Tensor, self: Tensor, *attributes: Any) -> Any:
    """Gradient of a pooling: planes are independent."""
    indices = [value for value in attributes if isinstance(value, Tensor)]
    return plane(grad_output, 2, self, *indices)


@describe_aten("aten.avg_pool3d_backward", "aten.max_pool3d_with_indices_backward")
@describe_aten("aten._adaptive_avg_pool3d_backward", "aten.adaptive_max_pool3d_backward")
@describe_aten("aten.reflection_pad3d_backward", "aten.replication_pad3d_backward")
@describe_aten("aten.fractional_max_pool3d_backward")
def pool3d_backward(grad_output: Tensor, self: Tensor, *attributes: Any) -> Any:
    """The same in three dims."""
    indices = [value for value in attributes if isinstance(value, Tensor)]
    return plane(grad_output, 3, self, *indices)


@describe_aten("aten.reflection_pad1d_backward", "aten.replication_pad1d_backward")
def pad1d_backward(grad_output: Tensor, self: Tensor, padding: Any) -> Any:
    """Gradient of a padding in one dim."""
    return plane(grad_output, 1, self)


def _fractional(self: Tensor, space: int, random_samples: Tensor) -> Any:
    def value(*i: Any) -> Node:
        lead = i[: self.ndim - space]
        sample = random_samples[(*([ALL] * (2 - len(lead))), *lead, ALL)]
        return pool(self[(*lead, *[ALL] * space)], sample)[i[len(lead) :]]

    return value, value


@describe_aten("aten.fractional_max_pool2d")
def fractional_max_pool2d(
    self: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor
) -> Any:
    """Maxima over windows at random places, and their positions."""
    return _fractional(self, 2, random_samples)


@describe_aten("aten.fractional_max_pool3d")
def fractional_max_pool3d(
    self: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor
) -> Any:
    """The same in three dims."""
    return _fractional(self, 3, random_samples)


@describe_aten("aten.max_unpool2d")
def max_unpool2d(self: Tensor, indices: Tensor, output_size: Any) -> Any:
    """Maxima put back at their positions in the plane."""
    return plane(self, 2, indices)


@describe_aten("aten.max_unpool3d")
def max_unpool3d(self: Tensor, indices: Tensor, *sizes: Any) -> Any:
    """The same in three dims."""
    return plane(self, 3, indices)


@describe_aten("aten.max_pool2d_with_indices", "aten.adaptive_max_pool2d")
def max_pool2d_with_indices(self: Tensor, *attributes: Any) -> Any:
    """Maxima, and their positions in the plane, which a shard of the plane does not know."""
    return plane(self, 2), plane(self, 2)


@describe_aten("aten.max_pool3d_with_indices", "aten.adaptive_max_pool3d")
def max_pool3d_with_indices(self: Tensor, *attributes: Any) -> Any:
    """Maxima, and their positions in the volume."""
    return plane(self, 3), plane(self, 3)


@describe_aten("aten._adaptive_avg_pool2d", "aten.reflection_pad2d", "aten.replication_pad2d")
def plane2d(self: Tensor, *attributes: Any) -> Any:
    """Windows of varying size, or borders that depend on the plane: planes are independent."""
    return plane(self, 2)


@describe_aten("aten.adaptive_avg_pool1d", "aten.reflection_pad1d", "aten.replication_pad1d")
def plane1d(self: Tensor, *attributes: Any) -> Any:
    """The same in one dim."""
    return plane(self, 1)


@describe_aten("aten._adaptive_avg_pool3d", "aten.reflection_pad3d", "aten.replication_pad3d")
def plane3d(self: Tensor, *attributes: Any) -> Any:
    """The same in three dims."""
    return plane(self, 3)


@describe_aten("aten._upsample_nearest_exact2d", "aten._upsample_bilinear2d_aa")
@describe_aten("aten._upsample_bicubic2d_aa")
@describe_aten("aten.upsample_nearest2d", "aten.upsample_bilinear2d", "aten.upsample_bicubic2d")
def upsample2d(input: Tensor, *attributes: Any, **more: Any) -> Any:
    """Resampling of planes."""
    return plane(input, 2)


@describe_aten("aten._upsample_nearest_exact1d")
@describe_aten("aten.upsample_nearest1d", "aten.upsample_linear1d")
def upsample1d(input: Tensor, *attributes: Any, **more: Any) -> Any:
    """Resampling of rows."""
    return plane(input, 1)


@describe_aten("aten._upsample_nearest_exact3d")
@describe_aten("aten.upsample_nearest3d", "aten.upsample_trilinear3d")
def upsample3d(input: Tensor, *attributes: Any, **more: Any) -> Any:
    """Resampling of volumes."""
    return plane(input, 3)


@describe_aten(*(f"aten._upsample_nearest_exact{n}d_backward" for n in (1, 2, 3)))
@describe_aten(*(f"aten._upsample_{n}2d_aa_backward" for n in ("bilinear", "bicubic")))
@describe_aten(*(f"aten.upsample_{n}_backward" for n in ("nearest1d", "linear1d")))
@describe_aten(*(f"aten.upsample_{n}_backward" for n in ("nearest2d", "bilinear2d", "bicubic2d")))
@describe_aten(*(f"aten.upsample_{n}_backward" for n in ("nearest3d", "trilinear3d")))
def upsample_backward(
    grad_output: Tensor, output_size: list[int], input_size: list[int], *attributes: Any
) -> Any:
    """Gradient of a resampling: planes are independent, and the call states their number."""
    value = plane(grad_output, grad_output.ndim - 2)
    return Local(value, input_size=lambda local: list(local.outputs[0]))


@describe_aten("aten.glu")
def glu(self: Tensor, dim: int = -1) -> Any:
    """One half of a dim gates the other: that dim stays whole."""
    at = dim % self.ndim
    return lambda *i: pool(self[(*i[:at], ALL, *i[at + 1 :])])[i[at]]


@describe_aten("aten.glu_backward")
def glu_backward(grad_output: Tensor, self: Tensor, dim: int) -> Any:
    """Gradient of `glu`."""
    at = dim % self.ndim

    def value(*i: Any) -> Node:
        where = (*i[:at], ALL, *i[at + 1 :])
        return pool(grad_output[where], self[where])[i[at]]

    return value


@describe_aten("aten.grid_sampler_2d")
def grid_sampler_2d(input: Tensor, grid: Tensor, *modes: Any) -> Any:
    """Sampling of planes at given positions: the positions of the grid can be cut."""
    return lambda b, c, y, x: pool(input[b, c, :, :], grid[b, y, x, :])


@describe_aten("aten.grid_sampler_3d")
def grid_sampler_3d(input: Tensor, grid: Tensor, *modes: Any) -> Any:
    """Sampling of volumes at given places."""
    return lambda b, c, z, y, x: pool(input[b, c, :, :, :], grid[b, z, y, x, :])


@describe_aten("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def grid_sampler_backward(
    grad_output: Tensor, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int,
    align_corners: bool, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Gradients of planes (sums over positions) and of positions (sums over channels)."""
    space = [ALL] * (input.ndim - 2)

    def value(b: Any, c: Any, p: Any) -> Any:
        return pool(grad_output[(b, c, *p)], input[(b, c, *space)], grid[(b, *p, ALL)])

    of_input = lambda b, c, *x: Sum(lambda *p: value(b, c, p)[x], len(space))  # noqa: E731
    names = ("b", *(f"p{n}" for n in range(len(space))), "k")
    of_grid = Loops(names, lambda b, *p: Sum(lambda c: value(b, c, p[:-1])[p[-1]]))
    return tuple(f if m else None for f, m in zip((of_input, of_grid), output_mask, strict=True))


def _blocks(c: Any, kernel_size: Sequence[int]) -> slice:
    """Return where the windows' elements of channel `c` lie among rows."""
    size = math.prod(kernel_size)
    return slice(c * size, c * size + size)


@describe_aten("aten.col2im")
def col2im(self: Tensor, output_size: list[int], kernel_size: list[int], *windows: Any) -> Any:
    """Windows are added up into planes, those of each channel into its own plane."""
    lead = self.ndim - 2

    def value(*i: Any) -> Node:
        read = (*i[:lead], _blocks(i[lead], kernel_size), ALL)
        return pool(self[read])[i[lead + 1 :]]

    return value


@describe_aten("aten.im2col")
def im2col(self: Tensor, kernel_size: list[int], *windows: Any) -> Any:
    """Windows of planes side by side, those of each channel in separate rows."""
    names = ("b", "c")[4 - self.ndim :]

    def place(*i: Any) -> At:
        return At((*i[:-1], _blocks(i[-1], kernel_size), ALL), pool(self[(*i, ALL, ALL)]))

    return Loops(names, place)


@describe_aten("aten.constant_pad_nd")
def constant_pad_nd(self: Tensor, pad: Sequence[int], value: Any = 0) -> Any:
    """Dims are padded from the last one on, two numbers each; negative ones crop."""
    before = [0] * self.ndim
    for n in range(len(pad) // 2):
        before[self.ndim - 1 - n] = pad[2 * n]
    is_plain = isinstance(value, int | float)
    data = self.padded(float(value)) if is_plain else self

    def local_pad(local: Any) -> Any:
        cut = [n for n in range(len(pad) // 2) if local.cuts(f"i{self.ndim - 1 - n}")]
        return [0 if n // 2 in cut else size for n, size in enumerate(pad)] if cut else KEEP

    def shifted(*i: Any) -> Any:
        return pool(data[tuple(index - n for index, n in zip(i, before, strict=True))])

    everything = (ALL,) * self.ndim
    return Local(shifted, pad=local_pad) if is_plain else lambda *i: pool(self[everything])[i]

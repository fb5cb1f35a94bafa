"""New tensors whose content depends only on indices."""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Local, Opaque, Tensor
from pardnn.shard.tdl.registry import describe_aten

made = Opaque("made")


def of_size() -> Local:
    """Return a tensor of the same value everywhere."""
    return Local(lambda *i: made(), size=lambda local: list(local.outputs[0]))


@describe_aten("aten.zeros", "aten.ones")
def zeros(size: list[int], **more: Any) -> Any:
    """One value everywhere."""
    return of_size()


@describe_aten("aten.full")
def full(size: list[int], fill_value: Any, **more: Any) -> Any:
    """One value everywhere."""
    return of_size()


@describe_aten("aten.new_zeros", "aten.new_ones")
def new_zeros(self: Tensor, size: list[int], **more: Any) -> Any:
    """The dtype comes from a tensor of which nothing is read."""
    return of_size()


@describe_aten("aten.new_full")
def new_full(self: Tensor, size: list[int], fill_value: Any, **more: Any) -> Any:
    """The dtype comes from a tensor of which nothing is read."""
    return of_size()


@describe_aten("aten.empty", is_random=True)
def empty(size: list[int], **more: Any) -> Any:
    """Content that means nothing."""
    return of_size()


@describe_aten("aten.new_empty", is_random=True)
def new_empty(self: Tensor, size: list[int], **more: Any) -> Any:
    """Content that means nothing."""
    return of_size()


@describe_aten("aten.empty_strided", "aten.empty_permuted", is_random=True)
def empty_strided(size: list[int], stride: list[int], **more: Any) -> Any:
    """A shard would have other strides, so it is made whole."""
    return lambda *i: made()[i]


@describe_aten("aten.new_empty_strided", is_random=True)
def new_empty_strided(self: Tensor, size: list[int], stride: list[int], **more: Any) -> Any:
    """A shard would have other strides, so it is made whole."""
    return lambda *i: made()[i]


@describe_aten("aten.empty_like", is_random=True)
def empty_like(self: Tensor, **more: Any) -> Any:
    """Content that means nothing, in the shape of a tensor."""
    return lambda *i: made(self.form[i])


@describe_aten("aten.zeros_like", "aten.ones_like", "aten.full_like")
def zeros_like(self: Tensor, *value: Any, **more: Any) -> Any:
    """One value, in the shape of a tensor."""
    return lambda *i: made(self.form[i])


@describe_aten("aten.scalar_tensor")
def scalar_tensor(s: Any, **more: Any) -> Any:
    """One number."""
    return lambda: made()


@describe_aten("aten.arange")
def arange(end: Any, **more: Any) -> Any:
    """Counts from 0; the call has no argument for where a shard begins."""
    return lambda i: made()[i]


@describe_aten("aten.arange.start", "aten.arange.start_step")
def arange_start(start: Any, end: Any, step: Any = 1, **more: Any) -> Any:
    """Counts from `start` in steps."""
    if not all(isinstance(value, int) for value in (start, end, step)):
        return lambda i: made()[i]  # rounding decides how many floats there are
    return Local(
        lambda i: made(),
        start=lambda local: start + local.begin("i") * step,
        end=lambda local: start + (local.begin("i") + local.extent("i")) * step,
    )

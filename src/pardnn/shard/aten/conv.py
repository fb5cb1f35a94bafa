"""Convolutions and their gradients, in any number of spatial dims, with groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pardnn.shard.tdl.language import KEEP, At, Local, Loops, Node, Once, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten

first = Opaque("groups")


def per_dim(value: int | Sequence[int], count: int) -> list[int]:
    """Return one number for each of `count` spatial dims."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed


def unpadded(padding: list[int]) -> Callable[..., Any]:
    """Return the local padding: none along cut spatial dims, as regions contain it."""

    def local_padding(local: Any) -> Any:
        cut = [local.cuts(f"x{d}", f"dx{d}") for d in range(len(padding))]
        return [0 if c else p for c, p in zip(cut, padding, strict=True)] if any(cut) else KEEP

    return local_padding


class Window:
    """Where output position `x` and filter position `dx` meet in the input."""

    def __init__(self, count: int, stride: Any, padding: Any, dilation: Any) -> None:
        self.space = count
        self.stride, self.padding, self.dilation = (
            per_dim(value, count) for value in (stride, padding, dilation)
        )

    def __call__(self, x: Sequence[Any], dx: Sequence[Any]) -> list[Any]:
        """Return the input position of each spatial dim."""
        terms = zip(x, self.stride, dx, self.dilation, self.padding, strict=True)
        return [x * s + dx * d - p for x, s, dx, d, p in terms]


@describe_aten("aten.convolution", "aten._convolution")
def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, *flags: bool,
) -> Any:  # fmt: skip
    """Convolution, or with `transposed` the gradient of one by its input."""
    space = weight.ndim - 2
    at = Window(space, stride, padding, dilation)
    if transposed:
        return _transposed(input, weight, bias, at, groups)
    if groups > 1:
        return _grouped(input, weight, bias, at, groups)
    data = input.padded(0)

    def value(b: Any, co: Any, *x: Any) -> Node:
        total = Sum(lambda ci, *dx: data[(b, ci, *at(x, dx))] * weight[(co, ci, *dx)], 1 + space)
        return total if bias is None else total + Once(bias[co], {"bias": None})

    return Local(value, padding=unpadded(at.padding))


def _grouped(input: Tensor, weight: Tensor, bias: Tensor | None, at: Window, groups: int) -> Local:
    """Channels are cut by whole groups."""
    data, outs, ins, space = input.padded(0), weight.shape[0] // groups, weight.shape[1], at.space

    def value(b: Any, g: Any, *x: Any) -> At:
        read, made = (slice(g * n, g * n + n) for n in (ins, outs))

        def product(*dx: Any) -> Node:
            filters = weight[(made, slice(None), *dx)]
            return first(data[(b, read, *at(x, dx))], filters)

        total = Sum(product, space)
        added = total if bias is None else total + Once(bias[made], {"bias": None})
        return At((b, made, *x), added)

    return Local(
        Loops(("b", "g", *numbered("x", space)), value, {"g": groups}),
        padding=unpadded(at.padding),
        groups=lambda local: local.extent("g"),
    )


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Return the names that `lambda *name` gives its variables."""
    return tuple(f"{name}{n}" for n in range(count))


def _transposed(input: Tensor, weight: Tensor, bias: Tensor | None, at: Window, groups: int) -> Any:
    """Space is not cut: the call crops its output by the padding at both ends."""
    everything = [slice(None)] * at.space

    def opaque(b: Any, *y: Any) -> Node:
        data, filters = input[(b, slice(None), *everything)], weight[:, :, *everything]
        return first(data, filters, *([] if bias is None else [bias[:]]))[y]

    def value(b: Any, co: Any, *y: Any) -> Node:
        total = Sum(lambda ci: first(input[(b, ci, *everything)], weight[(ci, co, *everything)])[y])
        return total if bias is None else total + Once(bias[co], {"bias": None})

    return value if groups == 1 else opaque


@describe_aten("aten.convolution_backward")
def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Gradients of input, filters and bias."""
    space = weight.ndim - 2
    at = Window(space, stride, padding, dilation)
    if transposed or groups > 1:
        return _opaque_backward(grad_output, input, weight, output_mask)
    data = input.padded(0)

    def of_input(b: Any, ci: Any) -> Node:
        def spread(co: Any, *xs: Any) -> At:
            x, dx = xs[:space], xs[space:]
            value = grad_output[(b, co, *x)] * weight[(co, ci, *dx)]
            return At((b, ci, *at(x, dx)), first(value, data.form[(b, ci, *at(x, dx))]))

        return Sum(Loops(("co", *numbered("x", space), *numbered("dx", space)), spread))

    def of_weight(co: Any, ci: Any, *dx: Any) -> Node:
        form = weight.form[(co, ci, *dx)]
        return Sum(
            lambda b, *x: first(grad_output[(b, co, *x)], data[(b, ci, *at(x, dx))], form),
            1 + space,
        )

    def of_bias(co: Any) -> Node:
        return Sum(lambda b, *x: grad_output[(b, co, *x)], 1 + space)

    made = (of_input, of_weight, of_bias)
    return Local(
        tuple(f if wanted else None for f, wanted in zip(made, output_mask, strict=True)),
        padding=unpadded(at.padding),
        bias_sizes=lambda local: KEEP if not local.cuts("co") else [local.extent("co")],
    )


def _opaque_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, output_mask: list[bool]
) -> Any:
    """Groups, and transposed convolutions: cut by samples alone."""
    rest = [slice(None)] * (input.ndim - 1)
    filters = weight[(slice(None),) * weight.ndim]

    def sample(b: Any) -> Any:
        return first(grad_output[(b, *rest)], input[(b, *rest)], filters)

    made = (
        lambda b, *x: sample(b)[x],
        lambda *w: Sum(lambda b: sample(b)[w]),
        lambda co: Sum(lambda b: sample(b)[co]),
    )
    return tuple(f if wanted else None for f, wanted in zip(made, output_mask, strict=True))

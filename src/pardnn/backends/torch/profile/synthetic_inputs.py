"""Synthetic inputs of a call: right shapes, dtypes and strides, and values that it accepts.

Floats are in [0.5, 1): no op gets a logarithm of zero, a probability above one, or, after dozens of
in-place repetitions, a denormal number, each of which would change the time. Integers are random if
it is known what they index, because random rows cost more than a single one; otherwise they are
zero, which is a valid index of anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pardnn.cost.call import Call, bare_name, call_of
from pardnn.cost.host_link import is_host_copy
from pardnn.errors import UnsupportedError
from pardnn.graph.ir import Graph, Op, Tensor, contiguous_strides, storage_owners

_PATTERN = 1 << 16
_HOST_VALUES: Mapping[str, Any] = {"host.int": 1, "host.float": 0.5, "host.bool": True}


def _rows(position: int, dim: int) -> Callable[[Call], int | None]:
    """Return what bounds indices into a dim of the tensor argument at that position."""

    def bound(call: Call) -> int | None:
        tensor = call.tensor(position)
        shape = tensor.shape if tensor is not None else None
        return shape[dim] if shape else None

    return bound


def _along(call: Call) -> int | None:
    tensor, dim = call.tensor(0), call.literal(1, "dim", None)
    if tensor is None or not tensor.shape or not isinstance(dim, int):
        return None
    return tensor.shape[dim]


def _plane(call: Call) -> int | None:
    tensor = call.tensor(1)
    return math.prod(tensor.shape[-2:]) if tensor is not None and tensor.shape else None


def _smallest_dim(call: Call) -> int | None:
    tensor = call.tensor(0)
    return min(tensor.shape) if tensor is not None and tensor.shape else None


def _classes(call: Call, position: int) -> int | None:
    tensor = call.tensor(position)
    if tensor is None or not tensor.shape:
        return None
    return tensor.shape[1] if len(tensor.shape) > 1 else tensor.shape[0]


#: What bounds the integer inputs of a call.
_BOUNDS: Mapping[str, Callable[[Call], int | None]] = {
    "embedding": _rows(0, 0),
    "embedding_dense_backward": lambda call: call.literal(2, "num_weights", None),
    "nll_loss_forward": lambda call: _classes(call, 0),
    "nll_loss_backward": lambda call: _classes(call, 1),
    "nll_loss2d_forward": lambda call: _classes(call, 0),
    "nll_loss2d_backward": lambda call: _classes(call, 1),
    "max_pool2d_with_indices_backward": _plane,
    "index": _smallest_dim,
    "index_put": _smallest_dim,
    "index_put_": _smallest_dim,
    "_index_put_impl_": _smallest_dim,
    **dict.fromkeys(
        ("gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_",
         "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        _along,
    ),
}  # fmt: skip

_DIVISIONS = frozenset({"div", "div_", "floor_divide", "remainder", "fmod"})


def synthetic_inputs(op: Op, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Return a value for each input of the op, under its name.

    Args:
        op: The op.
        tensors: The graph's tensors by name.
        device: The device of the values.

    Raises:
        UnsupportedError: E801, if an input's shape or dtype is unknown.
    """
    call = call_of(op, tensors)
    generator = torch.Generator(device).manual_seed(0)
    bound = _BOUNDS.get(call.name, lambda _: None)(call)
    low = 1 if call.name in _DIVISIONS else 0
    values = {
        tensor.name: made_up(tensor, range(low, max(bound or low + 1, low + 1)), generator)
        for tensor in call.inputs
    }
    if is_host_copy(op) and device.type != "cpu":
        values[op.inputs[0]] = values[op.inputs[0]].cpu().pin_memory()
    return values


def index_bounds(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the upper bound of the integers of each tensor that calls use as indices.

    Args:
        graph: The graph.
        tensors: Its tensors by name.

    Returns:
        The bound, exclusive, by the owner of the storage: views of indices are indices. Tensors
        that no call is known to bound are absent.
    """
    owners = storage_owners(graph.ops)
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.is_source or bare_name(op.kind) not in _BOUNDS:
            continue
        call = call_of(op, tensors)
        bound = _BOUNDS[call.name](call)
        for name in op.inputs if bound is not None else ():
            owner = owners[name]
            if owner is not None and (tensors[name].dtype or "").startswith("int"):
                found[owner] = min(bound or 1, found.get(owner, bound or 1))
    return found


def made_up(tensor: Tensor, integers: range, generator: torch.Generator) -> Any:
    """Return a value with a tensor's shape, dtype and strides.

    Args:
        tensor: A tensor of the graph.
        integers: Range of the values, if they are integers.
        generator: The generator that draws the values; the result is on its device.

    Raises:
        UnsupportedError: E801, if its shape or dtype is unknown.
    """
    if tensor.dtype in _HOST_VALUES:
        return _HOST_VALUES[tensor.dtype]
    dtype = getattr(torch, tensor.dtype or "", None)
    if tensor.shape is None or not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"tensor {tensor.name!r:.80} has no known shape and dtype")
    strides = tensor.strides or contiguous_strides(tensor.shape)
    reach = [(n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)]
    extent = 1 + sum(reach) if 0 not in tensor.shape else 0
    return _filled(extent, dtype, integers, generator).as_strided(tensor.shape, strides)


def _filled(
    extent: int, dtype: torch.dtype, integers: range, generator: torch.Generator
) -> torch.Tensor:
    """Return a flat tensor that repeats a short random pattern: drawing all of it is slow."""
    size = max(min(extent, _PATTERN), 1)
    device = generator.device
    if dtype == torch.bool:
        pattern = torch.rand(size, generator=generator, device=device) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        pattern = (0.5 + torch.rand(size, generator=generator, device=device) / 2).to(dtype)
    else:
        ends = (integers.start, integers.stop)
        pattern = torch.randint(*ends, (size,), generator=generator, device=device).to(dtype)
    flat = torch.empty(extent, dtype=dtype, device=device)
    whole = extent - extent % size
    flat[:whole].view(-1, size).copy_(pattern)
    flat[whole:].copy_(pattern[: extent - whole])
    return flat

"""What a message carries: the bytes of one tensor, and how they are laid out.

A tensor travels as the dense bytes of its storage and arrives with the strides that it was sent
with, because layout changes the bits of convolutions and sums. A view with gaps or overlaps is
copied first, into the dense layout with the same order of strides that `torch.clone` would choose;
nothing else is ever copied. Host scalars travel as eight bytes.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pardnn.errors import MismatchError, RankError, UnsupportedError, shown
from pardnn.graph.ir import Graph, Tensor
from pardnn.plan.plan import Message

#: dtype of a host scalar -> (dtype that travels, Python type).
HOST_TYPES: dict[str, tuple[torch.dtype, type]] = {
    "host.int": (torch.int64, int),
    "host.float": (torch.float64, float),
    "host.bool": (torch.int64, bool),
}


class Wire(NamedTuple):
    """One message in full, as both of its ends must see it.

    Attributes:
        number: Its place in the global order of messages.
        tensor: Name of the tensor.
        source: Rank that sends.
        target: Rank that receives.
        bytes: Its size.
        dtype: Name of the element type, or of the host scalar's type.
        shape: Sizes of the dims.
        strides: Dense, in elements; how the tensor arrives.
        op: The op that makes it on the sending rank.
        reader: The op before which it must have arrived on the receiving rank.
    """

    number: int
    tensor: str
    source: int
    target: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    op: str
    reader: str

    @property
    def is_scalar(self) -> bool:
        """Whether it is a number of the host."""
        return self.dtype in HOST_TYPES

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of what travels."""
        return _torch_dtype(self.dtype)


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    return HOST_TYPES[name][0] if name in HOST_TYPES else getattr(torch, name)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a gapless copy that keeps the order of strides, as `clone` does."""
    looked_at = torch.empty_strided(tuple(shape), tuple(strides), device="meta")
    return tuple(torch.empty_like(looked_at).stride())


def make_wires(
    graph: Graph, messages: Sequence[Message], readers: Sequence[str]
) -> tuple[Wire, ...]:
    """Return what each message carries.

    Args:
        graph: The graph.
        messages: In their global order.
        readers: For each, the receiver's op that reads it first.

    Raises:
        UnsupportedError: E821, if the graph does not know the shape or type of a sent tensor.
    """
    made_by = {tensor.name: (tensor, op.name) for op in graph.ops for tensor in op.outputs}
    wires: list[Wire] = []
    for number, (message, reader) in enumerate(zip(messages, readers, strict=True)):
        tensor, op = made_by[message.tensor]
        shape, strides, size = _layout(tensor)
        wires.append(
            Wire(number, tensor.name, message.source, message.target, size, tensor.dtype or "",
                 shape, strides, op, reader)
        )  # fmt: skip
    return tuple(wires)


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if tensor.dtype in HOST_TYPES:
        return (), (), 8
    dtype = getattr(torch, tensor.dtype or "", None)
    if tensor.shape is None or not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"tensor {shown(tensor.name)} must go to another device, but the graph does not say "
            f"its shape ({tensor.shape}) and type ({tensor.dtype}).\nCapture the step again.",
            code="E821",
        )
    contiguous = torch.empty(tensor.shape, device="meta").stride()
    strides = dense_strides(tensor.shape, tensor.strides or contiguous)
    return tensor.shape, strides, math.prod(tensor.shape) * dtype.itemsize


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, in the order of its storage, without a copy."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def memory_of(tensor: torch.Tensor, num_bytes: int) -> memoryview:
    """Return the bytes of a dense tensor of the host; it must be kept while they are used."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr()))


def dense(wire: Wire, value: Any, device: torch.device) -> torch.Tensor:
    """Return the tensor to send, `value` itself where it is dense.

    Raises:
        RankError: E604, if `value` is not what the message was announced to carry.
    """
    if wire.is_scalar:
        return torch.tensor([value], dtype=wire.torch_dtype, device=device)
    if value.shape != wire.shape or value.dtype != wire.torch_dtype:
        raise RankError(
            f"op {shown(wire.op)} made {shown(wire.tensor)} as {value.dtype} "
            f"{list(value.shape)}; captured was {wire.dtype} {list(wire.shape)}.\n"
            "The op depends on more than the shapes of its inputs; capture the step again.",
            code="E604",
            details={"op": wire.op, "tensor": wire.tensor},
        )
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if value.stride() != wire.strides:
        value = empty_like_sent(wire, value.device).copy_(value)
    return value


def empty_like_sent(wire: Wire, device: torch.device) -> torch.Tensor:
    """Return the buffer in which a tensor arrives."""
    return torch.empty_strided(wire.shape, wire.strides, dtype=wire.torch_dtype, device=device)


def received(wire: Wire, buffer: torch.Tensor) -> Any:
    """Return the value that has arrived in `buffer`: the tensor itself, or a Python number."""
    return HOST_TYPES[wire.dtype][1](buffer.item()) if wire.is_scalar else buffer


def wire_text(wire: Wire) -> str:
    """Return `message 3: 'h' f32[8, 32], 1024 bytes, rank 0 to 1`."""
    what = f"{wire.dtype}{list(wire.shape)} strides {list(wire.strides)}"
    ends = f"rank {wire.source} to {wire.target}"
    return f"message {wire.number}: {shown(wire.tensor)} {what}, {wire.bytes} bytes, {ends}"


def first_difference(mine: Wire, theirs: Wire) -> str:
    """Name the first field in which two ends of one message differ."""
    for field, a, b in zip(Wire._fields, mine, theirs, strict=True):
        if a != b:
            return f"{field} is {_text(a)} here and {_text(b)} there"
    raise MismatchError("the two ends of the message agree")


def _text(value: Any) -> str:
    return shown(value) if isinstance(value, str) else str(value)

"""The wire format: which bytes a message carries, and the spec of a message that both ends hold.

A tensor travels as the bytes of its storage, from its first element to its last, and arrives with
the strides that it was captured with: they change the bits of convolutions, sums and vectorised
functions. So neither end makes a copy; a slice travels with its gaps, an expanded tensor without
repetitions. Host scalars travel as eight bytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.devices import elements_of, strides_of
from pardnn.errors import MismatchError, RankError, UnsupportedError, shown
from pardnn.graph.ir import Graph, Tensor
from pardnn.plan.plan import Message

#: dtype of a host scalar -> (dtype that travels, Python type).
HOST_TYPES: dict[str, tuple[torch.dtype, type]] = {
    "host.int": (torch.int64, int),
    "host.float": (torch.float64, float),
    "host.bool": (torch.int64, bool),
}


class MessageSpec(NamedTuple):
    """One message in full, as its sender and its receiver must both describe it.

    Attributes:
        number: Position in the global order of messages; also the message's tag.
        tensor: Name of the tensor.
        source: Rank that sends.
        target: Rank that receives.
        bytes: Size of the payload.
        dtype: Name of the element type, or of the host scalar's type.
        shape: Size of each dim.
        strides: The strides of the tensor that arrives, in elements.
        producer: The op of the sending rank that makes the tensor.
        consumer: The op of the receiving rank that reads it first.
        misaligned_bytes: The payload's, before its first element: see `Tensor.misaligned_bytes`.
    """

    number: int
    tensor: str
    source: int
    target: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    producer: str
    consumer: str
    misaligned_bytes: int = 0

    @property
    def is_scalar(self) -> bool:
        """Whether the payload is a host scalar."""
        return self.dtype in HOST_TYPES

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of the payload."""
        return _torch_dtype(self.dtype)


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    return HOST_TYPES[name][0] if name in HOST_TYPES else getattr(torch, name)


def message_specs(
    graph: Graph, messages: Sequence[Message], consumers: Sequence[str]
) -> tuple[MessageSpec, ...]:
    """Return the spec of each message.

    Args:
        graph: The planned graph.
        messages: The messages in their global order.
        consumers: The first consumer of each message on its receiver, by name.

    Raises:
        UnsupportedError: E821, if the graph does not know the shape or type of a sent tensor.
    """
    producers = {tensor.name: (tensor, op.name) for op in graph.ops for tensor in op.outputs}
    specs: list[MessageSpec] = []
    for number, (message, consumer) in enumerate(zip(messages, consumers, strict=True)):
        tensor, producer = producers[message.tensor]
        shape, strides, size = _layout(tensor)
        # A message in another tensor already has its place, and the bytes ahead are not its own.
        ahead = tensor.misaligned_bytes if size and message.into is None else 0
        specs.append(
            MessageSpec(
                number=number,
                tensor=tensor.name,
                source=message.source,
                target=message.target,
                bytes=size + ahead,
                dtype=tensor.dtype or "",
                shape=shape,
                strides=strides,
                producer=producer,
                consumer=consumer,
                misaligned_bytes=ahead,
            )
        )
    return tuple(specs)


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and bytes of what travels."""
    if tensor.dtype in HOST_TYPES:
        return (), (), 8
    dtype = getattr(torch, tensor.dtype or "", None)
    if tensor.shape is None or not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"tensor {shown(tensor.name)} must go to another device, but the graph does not say "
            f"its shape ({tensor.shape}) and type ({tensor.dtype}).\nCapture the step again.",
            code="E821",
        )
    strides = strides_of(tensor)
    if tensor.misaligned_bytes % dtype.itemsize:
        raise UnsupportedError(
            f"tensor {shown(tensor.name)} of type {tensor.dtype} cannot begin "
            f"{tensor.misaligned_bytes} bytes behind an aligned one.\nCapture the step again.",
            code="E821",
        )
    return tensor.shape, strides, span_elements(tensor.shape, strides) * dtype.itemsize


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, including those in gaps."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def byte_view(tensor: torch.Tensor, ahead: int = 0) -> torch.Tensor:
    """Return the bytes of a tensor, in the order of its storage, without a copy.

    Args:
        tensor: The tensor.
        ahead: Bytes of its storage before its first element, returned with them.
    """
    elements = elements_of(tensor)
    if ahead:
        more = ahead // tensor.itemsize
        start = tensor.storage_offset() - more
        elements = elements.as_strided((len(elements) + more,), (1,), start)
    return elements.view(torch.uint8)


def memory_of(tensor: torch.Tensor, num_bytes: int, ahead: int = 0) -> memoryview:
    """Return the bytes of a host tensor, as `byte_view`; the caller keeps it alive."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr() - ahead))


def payload_of(spec: MessageSpec, value: Any, device: torch.device) -> torch.Tensor:
    """Return the tensor to send: `value` itself.

    Args:
        spec: The message.
        value: A tensor, or a Python number for a host scalar.
        device: The device of the payload of a host scalar.

    Raises:
        RankError: E604, if shape, type or strides of `value` are not those of the spec, or it is a
            whole number of more than 64 bits.
    """
    if spec.is_scalar:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise _too_large(spec, value)
        return torch.tensor([value], dtype=spec.torch_dtype, device=device)
    if value.shape != spec.shape or value.dtype != spec.torch_dtype:
        made = f"{value.dtype} {list(value.shape)}; captured: {spec.dtype} {list(spec.shape)}"
        raise _made_otherwise(spec, made, "The op depends on more than the shapes of its inputs")
    if not has_strides(value, spec.strides):
        made = f"strides {list(value.stride())}; captured: {list(spec.strides)}"
        raise _made_otherwise(spec, made, "Its readers elsewhere would compute different last bits")
    return sendable(value, spec.misaligned_bytes)


def _made_otherwise(spec: MessageSpec, made: str, why: str) -> RankError:
    return RankError(
        f"op {shown(spec.producer)} made {shown(spec.tensor)} as {made}.\n"
        f"{why}; capture the step again, with the torch and on the kind of device that runs it.",
        code="E604",
        details={"op": spec.producer, "tensor": spec.tensor},
    )


def _too_large(spec: MessageSpec, value: int) -> RankError:
    return RankError(
        f"the whole number {shown(spec.tensor)} has {value.bit_length()} bits, and ranks send each "
        "other at most 64.\nThe step counts with it, and several ranks read it. Count outside of "
        "the step, where the step only\nreads the number: in an attribute or an argument that you "
        "set between two calls.",
        code="E604",
        details={"op": spec.producer, "tensor": spec.tensor},
    )


def has_strides(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; for dims of size 1, or no elements, they are ignored."""
    return value.stride() == strides or all(
        n == 1 or one == other or not value.numel()
        for n, one, other in zip(value.shape, value.stride(), strides, strict=True)
    )


def laid_out(value: Any, strides: Sequence[int]) -> Any:
    """Return a tensor with these strides: itself if it has them, else a copy.

    Args:
        value: A tensor; anything else, or one of another number of dims, is returned as it is.
        strides: The strides in elements; repeated elements are written once.
    """
    if not isinstance(value, torch.Tensor) or value.dim() != len(strides):
        return value
    if has_strides(value, strides):
        return value
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    write_once(made, value)
    return made


def write_once(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor into another one of its shape, whose repeated elements are written once."""
    for dim, stride in enumerate(place.stride()):
        if stride == 0 and place.shape[dim] > 1:
            place, value = place.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    place.copy_(value)


def sendable(value: torch.Tensor, ahead: int) -> torch.Tensor:
    """Return a tensor whose values are in memory, with `ahead` bytes of its storage before it.

    It is `value` itself, unless that is lazily conjugated or negated, or at another position in its
    storage than at capture; then it is a copy with the same strides.
    """
    if value.is_conj() or value.is_neg():
        made = elements_of(value).resolve_conj().resolve_neg()
        value = made.as_strided(value.shape, value.stride(), 0)
    if not ahead or value.storage_offset() * value.itemsize >= ahead:
        return value
    made = misaligned_buffer(value.shape, value.stride(), value.dtype, value.device, ahead)
    elements_of(made).copy_(elements_of(value))
    return made


def receive_buffer(spec: MessageSpec, device: torch.device) -> torch.Tensor:
    """Return a new buffer for the message to arrive in."""
    if spec.misaligned_bytes:
        dtype, ahead = spec.torch_dtype, spec.misaligned_bytes
        return misaligned_buffer(spec.shape, spec.strides, dtype, device, ahead)
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=device)


def misaligned_buffer(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: Any, ahead: int
) -> torch.Tensor:
    """Return a tensor that begins `ahead` bytes after the beginning of its storage."""
    start = ahead // dtype.itemsize
    flat = torch.empty(start + span_elements(shape, strides), dtype=dtype, device=device)
    return flat.as_strided(shape, strides, start)


def received(spec: MessageSpec, buffer: torch.Tensor) -> Any:
    """Return the content of `buffer` that has arrived: a tensor, or a Python number."""
    return HOST_TYPES[spec.dtype][1](buffer.item()) if spec.is_scalar else buffer


def spec_text(spec: MessageSpec) -> str:
    """Return `message 3: 'h' f32[8, 32], 1024 bytes, rank 0 to 1`."""
    what = f"{spec.dtype}{list(spec.shape)} strides {list(spec.strides)}"
    ends = f"rank {spec.source} to {spec.target}"
    return f"message {spec.number}: {shown(spec.tensor)} {what}, {spec.bytes} bytes, {ends}"


def first_difference(mine: MessageSpec, theirs: MessageSpec) -> str:
    """Name the first field in which two specs of one message differ.

    Raises:
        MismatchError: If they do not differ.
    """
    for field, a, b in zip(MessageSpec._fields, mine, theirs, strict=True):
        if a != b:
            return f"{field} is {_text(a)} here and {_text(b)} there"
    raise MismatchError("the two specs of the message agree")


def _text(value: Any) -> str:
    return shown(value) if isinstance(value, str) else str(value)

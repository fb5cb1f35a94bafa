"""Helpers that generated code calls besides torch: their text is copied to the top of each program.

Messages go over the existing process group. A message carries the bytes of a tensor from its first
element to its last; its number is its tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.wire_format import byte_view, has_strides, sendable

#: Messages in flight, by number, each with what must live until it has arrived or left.
pending: dict[int, tuple[Any, torch.Tensor]] = {}


def send(number: int, value: torch.Tensor, to: int, strides: Sequence[int], ahead: int = 0) -> None:
    """Begin to send a tensor to another rank, which expects these strides.

    Args:
        number: The number of the message.
        value: The tensor, which must not change before `wait(number)`.
        to: The rank.
        strides: The strides in elements, as they were captured.
        ahead: Bytes of its storage that are sent before its first element, which is not aligned.
    """
    if not has_strides(value, tuple(strides)):
        # Readers of other strides would compute other last bits.
        raise RuntimeError(f"message {number} has strides {value.stride()}, captured: {strides}")
    payload = byte_view(sendable(value, ahead), ahead)
    pending[number] = dist.isend(payload, to, tag=number), payload


def receive(number: int, into: torch.Tensor, source: int, ahead: int = 0) -> None:
    """Begin to receive a tensor from another rank.

    Args:
        number: The number of the message.
        into: Its destination, which is valid after `wait(number)`.
        source: The rank.
        ahead: See `send`.
    """
    pending[number] = dist.irecv(byte_view(into, ahead), source, tag=number), into


def wait(number: int) -> None:
    """Wait until a message has arrived, or has left."""
    work, _payload = pending.pop(number)
    work.wait()


def copy_unless_there(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor to its destination, unless it was received there."""
    if place.data_ptr() != value.data_ptr():
        place.copy_(value)

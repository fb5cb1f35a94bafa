"""Host memory for state that is on its device only while ops use it (`plan.rewritten`).

With a GPU it is pinned. A CPU rank has it in a shared anonymous mapping, because `RLIMIT_DATA`,
which limits the rank's memory, counts only private memory.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch

from pardnn.backends.torch.devices import empty_tensor, strides_of
from pardnn.graph.ir import Op, Tensor, span_bytes

#: Mappings by address. A tensor holds its mapping, so an entry lives as long as the tensor.
_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def host_tensor(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in the memory of a device's host, of a graph tensor's shape and type.

    Args:
        tensor: A tensor of at least one byte. The values are not set.
        device: The device of the rank.
    """
    dtype = getattr(torch, tensor.dtype or "float32")
    if device.type != "cpu":
        flat = torch.empty(span_bytes(tensor), dtype=torch.uint8, pin_memory=True)
    else:
        mapping = mmap.mmap(-1, span_bytes(tensor))
        flat = torch.frombuffer(mapping, dtype=torch.uint8)
        _mappings[flat.data_ptr()] = mapping
    made = torch.empty(0, dtype=dtype)
    return made.set_(flat.untyped_storage(), 0, tensor.shape or (), strides_of(tensor))


def is_on_host(value: torch.Tensor) -> bool:
    """Whether a tensor is in memory that `host_tensor` allocated."""
    if value.device.type != "cpu":
        return False
    return value.untyped_storage().data_ptr() in _mappings or value.is_pinned()


def on_host(value: torch.Tensor, op: Op, device: torch.device) -> torch.Tensor:
    """Return the value of a source op in host memory, where it may already be."""
    if is_on_host(value):
        return value
    return host_tensor(op.outputs[0], device).copy_(value.detach())


def where_it_lies(value: torch.Tensor, op: Op, device: torch.device) -> torch.Tensor:
    """Return the value of a source op where its op wants it: in host memory, or out of it."""
    if op.memory == "host":
        return on_host(value, op, device)
    if is_on_host(value) and value.dim():
        return empty_tensor(op.outputs[0], device).copy_(value.detach())
    return value


def new_state(op: Op, device: torch.device, fill: Any) -> torch.Tensor:
    """Return a state that does not exist yet, where its op wants it.

    Args:
        op: The source.
        device: The device of the rank.
        fill: The number in each element.
    """
    (output,) = op.outputs
    if op.memory == "host":
        return host_tensor(output, device).fill_(fill)
    # Optimizers count their steps on the host.
    return empty_tensor(output, device if output.shape else torch.device("cpu")).fill_(fill)

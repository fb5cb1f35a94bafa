"""The devices that torch sees, and tensors as memory on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from pardnn.cost.host import memory_bytes
from pardnn.graph.ir import Tensor


def this_device() -> str:
    """Return the device that ranks run on: "cuda" if there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def rank_memory_bytes(num_ranks: int | None = None) -> int:
    """Return the memory that each rank of this machine may use if no limit is given.

    That is all of a GPU's memory, or an equal share of the host's per rank of this machine.

    Args:
        num_ranks: The number of ranks on this machine; None for torchrun's.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return memory_bytes() // (num_ranks or max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def visible_devices() -> list[str]:
    """Return a line per device, with its memory."""
    found = [
        f"cuda:{i} {torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory / (1 << 30):.1f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    return [*found, f"cpu {torch.backends.cpu.get_cpu_capability()}"]


def empty_tensor(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor of a graph tensor's shape, strides and type."""
    dtype = getattr(torch, tensor.dtype or "float32")
    return torch.empty_strided(tensor.shape or (), strides_of(tensor), dtype=dtype, device=device)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a graph tensor, in elements."""
    return tensor.strides or torch.empty(tensor.shape or (), device="meta").stride()


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last, as a vector, without a copy."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((1 + sum(steps) if tensor.numel() else 0,), (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content of a tensor as a vector of bytes, in the memory of a contiguous one."""
    return elements_of(tensor.detach().contiguous()).view(torch.uint8)


def memory_uses(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory is referred to, by views and NumPy arrays, too."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def plain(value: Any, device: torch.device | None = None) -> Any:
    """Return a tensor detached and on the device, without a copy if it is already there.

    A subclass (`Parameter`) would take the slow path into each op. Captured sources begin at their
    storage's first element, from which `as_strided` counts; so does the result, also if the tensor
    is a slice of a larger one. Other values stay as they are.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.storage_offset():
        value = _with_own_storage(value)
    return value if device is None or value.device == device else value.to(device)


def _with_own_storage(value: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor whose storage holds nothing else."""
    begin = value.storage_offset() * value.itemsize
    end = begin + elements_of(value).nbytes
    storage = value.untyped_storage()[begin:end]
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(storage, 0, value.shape, value.stride())


def one_element(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with a shape but only one element, NaN or 0 for integers."""
    fill = float("nan") if dtype.is_floating_point else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(tuple(shape))

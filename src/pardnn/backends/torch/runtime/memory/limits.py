"""Memory limits that the operating system or the device's allocator enforces.

On CPUs, `RLIMIT_DATA` counts private writable memory. The limit is added to what the process holds
once everything is imported and connected, plus an allowance for memory other than tensors. This
requires that freed tensors go back to the system (`ops.host_allocator`). On CUDA the caching
allocator has a limit per process.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.ops.host_allocator import (
    HEAP_GROWTH,
    SMALL_BYTES,
    allocated_bytes,
    heap_end,
    is_pinned,
    keep_blocks,
    keep_small_blocks,
)

#: Bytes for memory other than tensors: kernels' scratch, late caches, waste of the heap.
ALLOWANCE_BYTES = 48 << 20
_OUT_OF_MEMORY = (
    "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc",
    "could not create a memory object", "could not create a primitive",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _OUT_OF_MEMORY)


def data_bytes() -> int:
    """Return the private writable bytes of this process, which `RLIMIT_DATA` counts (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) << 10


def choose_heap(small_peak: int, large_peak: int, limit_bytes: int | None) -> bool:
    """Let small blocks stay in the heap if the limit has room for its waste; return whether.

    Half of the allowance is for this waste: the heap must never end a plan that fits.

    Args:
        small_peak: Most bytes of small blocks that are live at once.
        large_peak: The same for all other blocks.
        limit_bytes: The limit for tensors; None without limit.
    """
    most = large_peak + HEAP_GROWTH * small_peak
    has_room = limit_bytes is None or most <= limit_bytes + ALLOWANCE_BYTES // 2
    keep_small_blocks(has_room)
    return has_room


class HeapGuard:
    """Lets freed blocks stay in the heap while this process' limit has room for it.

    Pages of a heap count until the process ends, and blocks of all sizes, with kernels' scratch
    between them, waste without bound: among random steps, one took 15 times what it held, and more
    with each step. So the size of the heap is checked at each step and before each op of large
    blocks. If there is no more room, such blocks go back to the system again, except those that fit
    a gap of the heap. Room is left for what may then come: everything that a step makes at once, as
    much again as the current op has made in the heap, and the allowance.
    """

    def __init__(self) -> None:
        self._end: int | None = None

    def begin(self, made_bytes: int | None) -> None:
        """Choose whether a step's blocks stay.

        Args:
            made_bytes: Most bytes that are live at once of the blocks that it makes without a fixed
                place. None: its ops are not watched, and blocks stay only without a limit.
        """
        bound, _ = resource.getrlimit(resource.RLIMIT_DATA)
        self._end = None
        if is_pinned() and bound == resource.RLIM_INFINITY:
            keep_blocks(True)
        elif is_pinned():
            needed = None if made_bytes is None else 2 * made_bytes + ALLOWANCE_BYTES
            room = -1 if needed is None else bound - data_bytes() - needed
            keep_blocks(room >= 0)
            self._end = heap_end() + room if room >= 0 else None

    def watched(self, call: Callable[[Any], None], block_bytes: int) -> Callable[[Any], None]:
        """Return a call that checks the heap first.

        Args:
            call: Runs an op.
            block_bytes: The size of its largest tensor: small ones are not worth a look.
        """
        if block_bytes < SMALL_BYTES:
            return call

        def looked(env: Any) -> None:
            if self._end is not None and heap_end() > self._end:
                keep_blocks(False)
                self._end = None
            call(env)

        return looked


class KernelCode:
    """Raises this process' limit by what kernels map for themselves in a graph's first step.

    That is code that they generate, and stacks of threads: 64 MiB for the 52 convolutions of a
    MobileNet and their gradients, more than the allowance. It stays, so later steps are not
    watched.
    """

    def __init__(self) -> None:
        self._mapped = _mapped_by_others()

    def count(self) -> None:
        """Raise the limit by what has been mapped since the last count."""
        bound, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if bound == resource.RLIM_INFINITY or self._mapped is None:
            return
        now = _mapped_by_others() or 0
        if now > self._mapped:
            resource.setrlimit(resource.RLIMIT_DATA, (bound + now - self._mapped, hard))
            self._mapped = now


def _mapped_by_others() -> int | None:
    """Return the bytes that are not the allocator's; a rank's arena, among them, stays as it is."""
    allocated = allocated_bytes()
    return None if allocated is None else data_bytes() - allocated


def set_limit(limit_bytes: int, device: torch.device) -> str:
    """Limit the memory of this process from now on; return what was set, in words.

    Args:
        limit_bytes: Bytes of tensors.
        device: The device of this rank.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return f"allocator limit {limit_bytes} bytes on {device}"
    baseline = data_bytes()
    bound = baseline + limit_bytes + ALLOWANCE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    return (
        f"the system stops it beyond {bound >> 20} MiB (RLIMIT_DATA): {baseline >> 20} held at the "
        f"start + {limit_bytes >> 20} limit + {ALLOWANCE_BYTES >> 20} allowance, and "
        "code that kernels generate"
    )


def set_limit_beside(limit_bytes: int | None, held_bytes: int, device: torch.device) -> bool:
    """Limit the memory of this process beyond what it already holds; return whether it is limited.

    Args:
        limit_bytes: Bytes of tensors; None without limit.
        held_bytes: How many of these it already holds.
        device: The device of this rank.
    """
    if limit_bytes is not None:
        counts_held = device.type == "cuda"  # its allocator counts from the start of the process
        set_limit(limit_bytes - (0 if counts_held else held_bytes), device)
    return limit_bytes is not None


def lift_limit() -> None:
    """Remove the CPU limit, so that a failure can be reported."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def warm_up(device: torch.device) -> None:
    """Load what torch loads late, so that it counts towards the baseline, not the limit."""
    with torch.enable_grad():
        x = torch.ones(2, 4, 8, 8, device=device, requires_grad=True)
        weight = torch.ones(4, 4, 3, 3, device=device, requires_grad=True)
        y = torch.nn.functional.conv2d(x, weight, padding=1)
        y = torch.nn.functional.batch_norm(y, None, None, training=True).relu()
        y = torch.nn.functional.layer_norm(y.flatten(2), (64,)) @ torch.ones(64, 16, device=device)
        loss = torch.nn.functional.cross_entropy(y.flatten(1), torch.zeros(2, dtype=torch.long,
                                                 device=device))  # fmt: skip
        loss.backward()
    big = torch.ones(256, 256, device=device)
    torch.mm(big, big)
    torch.bmm(big[None], big[None])
    torch.nn.functional.scaled_dot_product_attention(big[None, None], big[None, None],
                                                     big[None, None])  # fmt: skip

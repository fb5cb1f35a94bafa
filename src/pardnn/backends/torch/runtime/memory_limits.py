"""Memory limits that the operating system or the device's allocator enforces.

On CPU, `RLIMIT_DATA` counts private writable memory. The limit is set on top of what the process
holds once everything is imported and connected, plus an allowance for what is not tensors. Freed
tensors have to go back to the system for that (`ops.host_allocator`), but for those at fixed
places: storages that the plan frees within the step, of ops that can write into memory that they
are given (`ops.out_forms`), share pages that the rank keeps from step to step (`arena`). On CUDA
the caching allocator has a limit per process.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.arena import Arena, Layout
from pardnn.backends.torch.devices import strides_of
from pardnn.backends.torch.ops.host_allocator import (
    GROWN_BYTES,
    HEAP_GROWTH,
    SMALL_BYTES,
    heap_end,
    is_pinned,
    keep_blocks,
    keep_small_blocks,
)
from pardnn.backends.torch.ops.out_forms import bind_into, may_have_place
from pardnn.backends.torch.runtime.program import Program
from pardnn.graph.ir import Op
from pardnn.plan.places import choose_places
from pardnn.plan.plan import plan_arrays

Call = Callable[[dict[str, Any]], None]
#: Bytes for what is not tensors: kernels' scratch, code and caches loaded late, threads' stacks.
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
    """Leave small blocks in the heap where the limit has room for what it wastes; return whether.

    Half of the allowance is for that: the heap may never be why a plan that fits ends.

    Args:
        small_peak: Most bytes of small blocks that are live at once.
        large_peak: Likewise of all others.
        limit_bytes: Of tensors; None without limit.
    """
    most = large_peak + HEAP_GROWTH * small_peak
    has_room = limit_bytes is None or most <= limit_bytes + ALLOWANCE_BYTES // 2
    keep_small_blocks(has_room)
    return has_room


def choose_memory(
    program: Program, rank: int, limit_bytes: int | None, device: torch.device, *,
    has_places: bool = True,
) -> Layout:  # fmt: skip
    """Choose what of a rank's memory stays with it when tensors are freed; tell the allocator.

    Args:
        program: What runs.
        rank: The rank.
        limit_bytes: Of its tensors; None without limit.
        device: Of the rank: only on a CPU tensors have places.
        has_places: Whether they may have.
    """
    graph = program.graph
    made = [(op, tensor) for op in graph.ops for tensor in op.outputs]
    may = has_places and device.type == "cpu"
    movable = [number for number, (op, _) in enumerate(made) if may and may_have_place(op)]
    arrays = plan_arrays(graph, program.plan)

    def choose(growth: float, beyond: int) -> Layout:
        room = None if limit_bytes is None else limit_bytes + beyond
        found = choose_places(
            graph, arrays, rank, movable, small_bytes=SMALL_BYTES, growth=growth, room=room
        )
        large = found.large_peak + found.bytes
        has_room = choose_heap(found.small_peak, large, limit_bytes)
        others = int(found.large_peak + growth * found.small_peak)
        most = None if room is None else max(room - others, found.bytes)
        places = tuple((made[number][1], at) for number, at in found.offsets.items())
        return Layout(found.bytes, most, places, found.made_peak, has_room)

    layout = choose(HEAP_GROWTH, ALLOWANCE_BYTES // 2)
    return layout if layout.has_room else choose(1.0, 0)._replace(has_room=False)


def placed(op: Op, call: Call, device: torch.device, arena: Arena) -> Call:
    """Return a call that writes into the op's place if the arena has one.

    Args:
        op: The op.
        call: What runs otherwise.
        device: Of the rank.
        arena: Of the rank.
    """
    if device.type != "cpu" or not may_have_place(op):
        return call
    (output,) = op.outputs
    name, shape, strides = output.name, output.shape or (), strides_of(output)
    # A view that is new at each call: an op may change the geometry of its tensor in place.
    write = bind_into(op, device, lambda: arena.places[name].as_strided(shape, strides))

    def run(env: dict[str, Any]) -> None:
        (write if name in arena.places else call)(env)

    return run


class HeapGuard:
    """Lets freed blocks stay in the heap while this process' limit has room for it.

    Pages of a heap count until the process ends, and blocks of all sizes, with kernels' scratch
    between them, waste without a bound: of random steps one took 15 times what it held, and more
    with each step. So the heap is asked how large it is at each step and before each op of large
    blocks. Beyond its end, such blocks go back to the system again; those that fit a gap of the
    heap still take that. What may then come is left free: all that a step makes at once, once more
    for what the op in hand has made in the heap, and a block of scratch.
    """

    def __init__(self) -> None:
        self._end: int | None = None

    def begin(self, made_bytes: int | None) -> None:
        """Choose for a step.

        Args:
            made_bytes: Most bytes that are live at once of the blocks that it makes without a fixed
                place. None: its ops are not watched, and blocks stay without a limit alone.
        """
        bound, _ = resource.getrlimit(resource.RLIMIT_DATA)
        self._end = None
        if is_pinned() and bound == resource.RLIM_INFINITY:
            keep_blocks(True)
        elif is_pinned():
            needed = None if made_bytes is None else 2 * made_bytes + GROWN_BYTES
            room = -1 if needed is None else bound - data_bytes() - needed
            keep_blocks(room >= 0)
            self._end = heap_end() + room if room >= 0 else None

    def watched(self, call: Callable[[Any], None], block_bytes: int) -> Callable[[Any], None]:
        """Return a call that looks at the heap first.

        Args:
            call: Runs an op.
            block_bytes: Of its largest tensor: small ones are not worth a look.
        """
        if block_bytes < SMALL_BYTES:
            return call

        def looked(env: Any) -> None:
            if self._end is not None and heap_end() > self._end:
                keep_blocks(False)
                self._end = None
            call(env)

        return looked


def set_limit(limit_bytes: int, device: torch.device) -> str:
    """Limit what this process may hold from now on; return what was set, for people.

    Args:
        limit_bytes: Bytes of tensors.
        device: Of this rank.
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
        f"start + {limit_bytes >> 20} limit + {ALLOWANCE_BYTES >> 20} allowance"
    )


def set_limit_beside(limit_bytes: int | None, held_bytes: int, device: torch.device) -> bool:
    """Limit what this process may hold besides what it holds; return whether there is a limit.

    Args:
        limit_bytes: Bytes of tensors; None without limit.
        held_bytes: Of those, what it holds by now.
        device: Of this rank.
    """
    if limit_bytes is not None:
        counts_held = device.type == "cuda"  # its allocator counts from the start of the process
        set_limit(limit_bytes - (0 if counts_held else held_bytes), device)
    return limit_bytes is not None


def lift_limit() -> None:
    """Take the CPU limit away again, so that a failure can be told."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def warm_up(device: torch.device) -> None:
    """Load what torch loads late, so that it counts to the baseline and not to the limit."""
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

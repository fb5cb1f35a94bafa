"""A rank's memory: which tensors have fixed places, and how much of the heap stays.

A place is for a storage that the plan frees within the step and that belongs to a message or to an
op that can write into given memory (`ops.out_forms`). Instead of fresh pages from the system, it
uses the rank's arena, which is kept from step to step (`arena`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pardnn.backends.torch.arena import Arena, Layout
from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.backends.torch.devices import strides_of
from pardnn.backends.torch.ops.host_allocator import HEAP_GROWTH, SMALL_BYTES
from pardnn.backends.torch.ops.out_forms import (
    bind_into,
    is_worth_a_place,
    may_have_place,
)
from pardnn.backends.torch.runtime.memory.limits import ALLOWANCE_BYTES, choose_heap
from pardnn.backends.torch.runtime.program import Program
from pardnn.graph.ir import Op
from pardnn.plan.places import choose_places
from pardnn.plan.plan import plan_arrays

Call = Callable[[dict[str, Any]], None]


def choose_memory(
    program: Program, rank: int, limit_bytes: int | None, device: torch.device, *,
    has_places: bool = True,
) -> Layout:  # fmt: skip
    """Choose how much memory a rank keeps when tensors are freed, and tell the allocator.

    Args:
        program: What runs.
        rank: The rank.
        limit_bytes: The limit for its tensors; None without limit.
        device: The device of the rank: only on a CPU tensors have places.
        has_places: Whether tensors may have places.
    """
    graph = program.graph
    made = [(op, tensor) for op in graph.ops for tensor in op.outputs]
    may = has_places and device.type == "cpu"
    arrive = {
        spec.tensor for spec in program.specs if spec.target == rank and _may_have_place(spec)
    }
    movable = [
        number
        for number, (op, tensor) in enumerate(made)
        if may and (tensor.name in arrive or may_have_place(op))
    ]
    arrays = plan_arrays(graph, program.plan)

    def choose(growth: float) -> Layout:
        found = choose_places(
            graph, arrays, rank, movable, small_bytes=SMALL_BYTES, growth=growth,
            spare_bytes=ALLOWANCE_BYTES // 2, room=limit_bytes,
        )  # fmt: skip
        has_room = choose_heap(found.small_peak, found.large_peak + found.bytes, limit_bytes)
        most = None
        if limit_bytes is not None:
            free = limit_bytes - found.needed(growth, ALLOWANCE_BYTES // 2)
            most = found.bytes + max(free, 0)
        places = tuple((made[number][1], at) for number, at in found.offsets.items())
        return Layout(found.bytes, most, places, found.made_peak, has_room)

    layout = choose(HEAP_GROWTH)
    return layout if layout.has_room else choose(1.0)._replace(has_room=False)


def placed(op: Op, call: Call, device: torch.device, arena: Arena) -> Call:
    """Return a call that writes into the op's place if the arena has one.

    Args:
        op: The op.
        call: The call that runs otherwise.
        device: The device of the rank.
        arena: The arena of the rank.
    """
    if device.type != "cpu" or not may_have_place(op):
        return call
    (output,) = op.outputs
    name, shape, strides = output.name, output.shape or (), strides_of(output)
    # A new view at each call, since an op may change the geometry of its tensor in place.
    write = bind_into(op, device, lambda: arena.places[name].as_strided(shape, strides))

    def run(env: dict[str, Any]) -> None:
        (write if name in arena.places else call)(env)

    return run


def placed_arrival(
    spec: MessageSpec, allocate: Callable[[MessageSpec, torch.Tensor | None], Any], arena: Arena
) -> Call:
    """Return a call that makes the buffer of a message, in its place if the arena has one.

    Args:
        spec: The message.
        allocate: `Channel.allocate`.
        arena: The arena of the rank.
    """
    name, shape, strides = spec.tensor, spec.shape, spec.strides

    def run(env: dict[str, Any]) -> None:
        place = arena.places.get(name)
        env[name] = allocate(spec, None if place is None else place.as_strided(shape, strides))

    return run


def _may_have_place(spec: MessageSpec) -> bool:
    return is_worth_a_place(spec.bytes) and not (spec.is_scalar or spec.misaligned_bytes)

"""Peak memory of a plan, from the order alone (semantics of a step).

No clock: for each op in a device's order, allocate the receive buffers posted before it (but for
messages that are received into a tensor that is there already), its workspace and its own outputs;
then release the workspace and every storage whose last use on the device has passed and which no
message holds. The peak is the same number in the checker, the judge, the runtime's prediction and
the limit. `sim.peak` is the kernel for planners; tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pardnn.graph.csr import RESIDUAL
from pardnn.graph.ir import Graph
from pardnn.plan.plan import PlanArrays, order_rows


class Storage(NamedTuple):
    """A block of memory on one device during one step.

    Attributes:
        tensor: The tensor that owns it, or that it is a received copy of.
        bytes: Its size; 0 for a copy that is received into another storage.
        allocated: Position in the device's order; -1 if residual.
        released: Position after whose op it is released; -1 if not in this step.
        message: Number of the message that delivered it; -1 if it was computed here.
    """

    tensor: int
    bytes: int
    allocated: int
    released: int
    message: int


def device_storages(graph: Graph, plan: PlanArrays) -> list[list[Storage]]:
    """Return the storages of each device, in the order in which they are allocated.

    O(ops + tensors + edges + messages).
    """
    a = graph.arrays
    rows = order_rows(plan)
    position = {op: i for row in rows for i, op in enumerate(row)}
    place = plan.place.tolist()
    received: list[list[tuple[int, int]]] = [[] for _ in rows]  # (tensor, message), by device
    tensors: list[int] = plan.message_tensor.tolist()
    targets: list[int] = plan.message_target.tolist()
    for number, target in enumerate(targets):
        received[target].append((tensors[number], number))
    producer, alias = a.tensor_op.tolist(), a.tensor_alias.tolist()

    def owner(tensor: int, device: int) -> int:
        """Follow aliases while they lead to a tensor computed on this device."""
        while place[producer[tensor]] == device and alias[tensor] >= 0:
            tensor = alias[tensor]
        return tensor

    last_use: dict[tuple[int, int], int] = {}  # (owning tensor, device) -> position

    def use(tensor: int, device: int, at: int) -> None:
        key = (owner(tensor, device), device)
        last_use[key] = max(last_use.get(key, -1), at)

    for device, row in enumerate(rows):
        for at, op in enumerate(row):
            for tensor in a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]].tolist():
                use(tensor, device, at)
            for tensor in range(a.output_ptr[op], a.output_ptr[op + 1]):
                use(tensor, device, at)
    never = len(place)  # after every position
    for tensor, source, hold in _sends(plan):
        use(tensor, source, never if hold < 0 else position[hold])
    return [
        list(_storages(graph, plan, device, row, position, received[device], last_use))
        for device, row in enumerate(rows)
    ]


def _sends(plan: PlanArrays) -> Iterator[tuple[int, int, int]]:
    """Yield tensor, sender and the op until which it is held, of each message."""
    columns = (plan.message_tensor, plan.message_source, plan.message_hold)
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _storages(
    graph: Graph,
    plan: PlanArrays,
    device: int,
    row: list[int],
    position: dict[int, int],
    received: list[tuple[int, int]],
    last_use: dict[tuple[int, int], int],
) -> Iterator[Storage]:
    a = graph.arrays
    sizes = a.tensor_bytes
    placed = plan.message_into >= 0
    for tensor, number in received:
        post = position[int(plan.message_post[number])]
        end = max(last_use.get((tensor, device), -1), post)
        released = -1 if end >= len(row) else end  # a view of the copy may be sent on
        is_new = not (len(placed) and placed[number])
        yield Storage(tensor, int(sizes[tensor]) * is_new, post, released, number)
    for at, op in enumerate(row):
        for tensor in range(a.output_ptr[op], a.output_ptr[op + 1]):
            if a.tensor_alias[tensor] >= 0:
                continue
            residual = a.memory[op] == RESIDUAL
            end = last_use[tensor, device]
            released = -1 if residual or end >= len(row) else end
            yield Storage(tensor, int(sizes[tensor]), -1 if residual else at, released, -1)


def memory_curves(graph: Graph, plan: PlanArrays) -> list[list[int]]:
    """Return, per device, the bytes held while each op of its order runs."""
    curves: list[list[int]] = []
    workspace = graph.arrays.workspace
    for row, storages in zip(order_rows(plan), device_storages(graph, plan), strict=True):
        change = [0] * (len(row) + 1)
        held = 0
        for storage in storages:
            if storage.allocated < 0:
                held += storage.bytes
                continue
            change[storage.allocated] += storage.bytes
            if storage.released >= 0:
                change[storage.released + 1] -= storage.bytes
        curve: list[int] = []
        for at, op in enumerate(row):
            held += change[at]
            curve.append(held + int(workspace[op]))
        curves.append(curve)
    return curves


def peak_bytes(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return the largest number of bytes that each device ever holds; 0 for an idle one."""
    return [max(curve, default=0) for curve in memory_curves(graph, plan)]

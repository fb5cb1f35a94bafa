"""Peak memory of a plan, from the order alone (semantics of a step).

No clock: for each op in a device's order, allocate the receive buffers posted before it (but for
messages that are received into a tensor that is there already), its workspace and its own outputs;
then release the workspace and every storage whose last use on the device has passed and which no
message holds. The peak is the same number in the checker, the simulator, the runtime's prediction
and the limit. `sim.peak` is the kernel for planners; tests hold the two equal. Numpy only: ranks
use this, and must not load a compiler.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays, owners_of
from pardnn.graph.ir import Graph
from pardnn.plan.plan import PlanArrays, positions


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


class Storages(NamedTuple):
    """All storages of a step: the fields of `Storage` as columns, and the device of each.

    Those of one device are in a row, received copies first, else as they are allocated.
    """

    device: Int64[ndarray, " s"]
    tensor: Int64[ndarray, " s"]
    bytes: Int64[ndarray, " s"]
    allocated: Int64[ndarray, " s"]
    released: Int64[ndarray, " s"]
    message: Int64[ndarray, " s"]


def device_storages(graph: Graph, plan: PlanArrays) -> list[list[Storage]]:
    """Return `all_storages` as objects: one list per device, received copies first."""
    found = all_storages(graph, plan)
    ends = np.searchsorted(found.device, np.arange(plan.num_devices + 1)).tolist()
    rows = list(map(Storage, *(column.tolist() for column in found[1:])))
    return [rows[begin:end] for begin, end in itertools.pairwise(ends)]


def storage_roots(arrays: GraphArrays, plan: PlanArrays) -> Int64[ndarray, " t"]:
    """Return whose storage each tensor has on the device that computes it.

    That is a tensor that is computed there, or t + i for the received copy of tensor i: a view of
    what was received is a view of the copy. O(t log of the longest chain of views).
    """
    alias, t = arrays.tensor_alias, arrays.num_tensors
    home = plan.place[arrays.tensor_op]
    is_remote = home[alias] != home
    own_or_copy = np.where(alias < 0, -1, alias + t * is_remote)
    return owners_of(np.concatenate([own_or_copy, np.full(t, -1)]))[:t]


def all_storages(graph: Graph, plan: PlanArrays) -> Storages:
    """Return the storages of every device. O((ops + tensors + edges + messages) log)."""
    a = graph.arrays
    position, last = positions(plan), _last_uses(graph.arrays, plan)
    home = plan.place[a.tensor_op]
    own = np.flatnonzero(a.tensor_alias < 0)
    own = own[np.lexsort((own, position[a.tensor_op[own]], home[own]))]
    is_residual = a.memory[a.tensor_op[own]] == RESIDUAL
    made = np.where(is_residual, -1, position[a.tensor_op[own]])
    numbers = np.argsort(plan.message_target, kind="stable")
    post = position[plan.message_post[numbers]]
    ends = np.maximum(last[a.num_tensors + numbers], post)
    sizes = a.tensor_bytes[plan.message_tensor[numbers]]
    if len(plan.message_into):
        sizes = np.where(plan.message_into[numbers] >= 0, 0, sizes)
    device = np.concatenate([plan.message_target[numbers], home[own]])
    length = np.diff(plan.order_ptr)[device]
    released = np.concatenate([ends, np.where(is_residual, a.num_ops, last[own])])
    by_device = np.argsort(device, kind="stable")
    columns = (
        device,
        np.concatenate([plan.message_tensor[numbers], own]),
        np.concatenate([sizes, a.tensor_bytes[own]]),
        np.concatenate([post, made]),
        np.where(released >= length, -1, released),  # a view of a copy may be sent on
        np.concatenate([numbers, np.full(len(own), -1)]),
    )
    return Storages(*(column[by_device].astype(np.int64) for column in columns))


def _last_uses(a: GraphArrays, plan: PlanArrays) -> Int64[ndarray, " s"]:
    """Return the position of the last use of each storage, n if it is held to the end.

    Storage i < t is that of tensor i where it is computed; t + i is the copy of message i.
    """
    n, t, k = a.num_ops, a.num_tensors, max(plan.num_devices, 1)
    position, roots = positions(plan), storage_roots(a, plan)
    home = plan.place[a.tensor_op]
    consumers = np.repeat(np.arange(n), np.diff(a.input_ptr))
    held = np.where(plan.message_hold < 0, n, position[plan.message_hold])
    tensor = np.concatenate([a.input_tensor, np.arange(t), plan.message_tensor])
    device = np.concatenate([plan.place[consumers], home, plan.message_source])
    at = np.concatenate([position[consumers], position[a.tensor_op], held])
    root = np.where(home[tensor] == device, roots[tensor], t + tensor)
    last = np.full(t + len(plan.message_tensor), -1, dtype=np.int64)
    is_own = root < t
    np.maximum.at(last, root[is_own], at[is_own])
    copies = (root[~is_own] - t) * k + device[~is_own]
    delivered, which = np.unique(plan.message_tensor * k + plan.message_target, return_inverse=True)
    if not len(delivered):
        return last
    row = np.minimum(np.searchsorted(delivered, copies), len(delivered) - 1)
    is_there = delivered[row] == copies
    used = np.full(len(delivered), -1, dtype=np.int64)
    np.maximum.at(used, row[is_there], at[~is_own][is_there])
    last[t:] = used[which.reshape(-1)]
    return last


def memory_profiles(graph: Graph, plan: PlanArrays) -> list[list[int]]:
    """Return, per device, the bytes live while each op of its order runs.

    Args:
        graph: The graph that the plan places.
        plan: A plan.
    """
    found = all_storages(graph, plan)
    is_there = found.allocated < 0
    first = plan.order_ptr[found.device]
    change = np.zeros(graph.arrays.num_ops + 1, dtype=np.int64)
    np.add.at(change, (first + found.allocated)[~is_there], found.bytes[~is_there])
    is_freed = ~is_there & (found.released >= 0)
    length = np.diff(plan.order_ptr)[found.device]
    is_freed &= found.released + 1 < length  # else with the next device's first op
    np.subtract.at(change, (first + found.released + 1)[is_freed], found.bytes[is_freed])
    residual = _residual(found, plan.num_devices)
    workspace = graph.arrays.workspace[plan.order_op]
    return [
        (held + np.cumsum(change[begin:end]) + workspace[begin:end]).tolist()
        for held, begin, end in zip(
            residual, plan.order_ptr[:-1].tolist(), plan.order_ptr[1:].tolist(),
            strict=True,
        )
    ]  # fmt: skip


def made_peaks(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return per device the most bytes that it holds at once of what the step makes.

    Args:
        graph: The graph that the plan places.
        plan: A plan.
    """
    there = _residual(all_storages(graph, plan), plan.num_devices)
    peaks = peak_bytes(graph, plan)
    return [max(0, peak - held) for peak, held in zip(peaks, there, strict=True)]


def _residual(found: Storages, num_devices: int) -> list[int]:
    """Return the bytes that are there before the step on each device."""
    is_there = found.allocated < 0
    residual = np.zeros(num_devices, dtype=np.int64)
    np.add.at(residual, found.device[is_there], found.bytes[is_there])
    return residual.tolist()


def peak_bytes(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return the largest number of bytes that each device ever holds; 0 for an idle one.

    Args:
        graph: The graph that the plan places.
        plan: A plan.
    """
    return [max(profile, default=0) for profile in memory_profiles(graph, plan)]

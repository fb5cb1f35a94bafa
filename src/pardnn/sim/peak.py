"""Memory of a plan as a kernel: live ranges of storages, live bytes, peaks, lower bounds.

The twin of `plan.memory` for planners: the same definition (semantics of a step), for millions of
ops. A storage is live from the op that makes it to its last use on that device, a received copy
from its `post_before`, a sent tensor until its `hold_until`. O((edges + messages) devices) at
worst.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.jit import helper, kernel
from pardnn.plan.plan import PlanArrays
from pardnn.sim.timeline import Timeline


def peaks(arrays: GraphArrays, plan: PlanArrays) -> Int64[ndarray, " k"]:
    """Return the largest number of bytes that each device ever holds; 0 for an idle one."""
    live = live_bytes(arrays, plan)
    ends = zip(plan.order_ptr[:-1], plan.order_ptr[1:], strict=True)
    return np.array([live[begin:end].max(initial=0) for begin, end in ends], dtype=np.int64)


def one_device_peak(arrays: GraphArrays) -> int:
    """Return the bytes that one device holds at its peak, running the step as it was written."""
    # A copy is writable, as every other plan's: the kernels are not compiled once more.
    order, none = arrays.topological.copy(), np.empty(0, dtype=np.int64)
    ends = np.array([0, len(order)], dtype=np.int64)
    plan = PlanArrays(np.zeros(len(order), dtype=np.int64), ends, order, *[none] * 5)
    return int(peaks(arrays, plan)[0])


def memory_over_time(
    arrays: GraphArrays, plan: PlanArrays, timeline: Timeline, device: int
) -> tuple[Float64[ndarray, " p"], Int64[ndarray, " p"]]:
    """Return a device's memory over simulated time, for people: limits bind the order alone.

    Args:
        arrays: The graph.
        plan: The plan.
        timeline: Its simulation.
        device: The device.

    Returns:
        Start times in seconds of the device's ops, and the bytes that it holds while each runs.
        The maximum of the second is the device's peak.
    """
    row = slice(plan.order_ptr[device], plan.order_ptr[device + 1])
    return timeline.start[plan.order_op[row]], np.asarray(live_bytes(arrays, plan)[row])


def residual_bytes(
    arrays: GraphArrays, of: Int64[ndarray, " n"] | None = None
) -> Int64[ndarray, " g"]:
    """Return the bytes of each group that live across steps, on the device where it is.

    Args:
        arrays: The graph.
        of: Number of each op in what is summed up instead; the op itself for bytes per op.
    """
    number = arrays.group if of is None else of
    own = (arrays.memory[arrays.tensor_op] == RESIDUAL) & (arrays.tensor_alias < 0)
    size = np.zeros(int(number.max()) + 1, dtype=np.int64)
    np.add.at(size, number[arrays.tensor_op[own]], arrays.tensor_bytes[own])
    return size


def least_bytes(
    arrays: GraphArrays, num_devices: int, group: Int64[ndarray, " n"] | None = None
) -> int:
    """Return bytes that some device must hold in every plan: a lower bound on equal limits.

    The op that needs most at once; all residual bytes spread evenly; the residual bytes of the
    largest group.

    Args:
        arrays: The graph.
        num_devices: Number of devices.
        group: Co-location group of each op; None: every op may be alone.
    """
    residual = residual_bytes(arrays, np.arange(arrays.num_ops) if group is None else group)
    spread = -(-int(residual.sum()) // num_devices)
    return max(int(op_needs(arrays).max()), int(residual.max()), spread)


def op_needs(arrays: GraphArrays) -> Int64[ndarray, " n"]:
    """Return the bytes that must be on one device while each op runs, whatever the plan.

    Its inputs, outputs and workspace; of tensors that share a storage, the largest.
    """
    needs = np.zeros(arrays.num_ops, dtype=np.int64)
    _needs_kernel(arrays, needs)
    return needs


def live_bytes(
    arrays: GraphArrays,
    plan: PlanArrays,
    ranges: tuple[Int64[ndarray, " s"], Int64[ndarray, " s"]] | None = None,
) -> Int64[ndarray, " n"]:
    """Return the bytes held on an op's device while it runs, in the order of `plan.order_op`.

    Args:
        arrays: The graph.
        plan: The plan.
        ranges: From `live_ranges`, if they are known.
    """
    allocated, released = ranges or live_ranges(arrays, plan)
    live = np.zeros(arrays.num_ops, dtype=np.int64)
    _live_bytes_kernel(arrays, plan, allocated, released, live)
    return live


def live_ranges(
    arrays: GraphArrays,
    plan: PlanArrays,
    rows: tuple[Int64[ndarray, " m"], Int64[ndarray, " p"]] | None = None,
) -> tuple[Int64[ndarray, " s"], Int64[ndarray, " s"]]:
    """Return where storages are allocated and released, as positions in `plan.order_op`.

    Storage i < t is that of tensor i where it is computed; t + i is the copy that message i
    delivers. A storage is allocated before the op at its position runs and released after the op
    at its position has run. Residual storages are allocated at -1; a storage that is not released
    in this step has a release of n. Tensors that own no storage have n and -1.

    Args:
        arrays: The graph.
        plan: The plan.
        rows: From `messages_by_tensor`, if they are known.
    """
    n, t, m = arrays.num_ops, arrays.num_tensors, len(plan.message_tensor)
    allocated = np.full(t + m, n, dtype=np.int64)
    released = np.full(t + m, -1, dtype=np.int64)
    rows = rows or messages_by_tensor(arrays, plan)
    _live_ranges_kernel(arrays, plan, *rows, allocated, released)
    return allocated, released


def messages_by_tensor(
    arrays: GraphArrays, plan: PlanArrays
) -> tuple[Int64[ndarray, " m"], Int64[ndarray, " p"]]:
    """Return messages sorted by tensor, and where those of each tensor begin."""
    by_tensor = np.argsort(plan.message_tensor, kind="stable").astype(np.int64)
    counts = np.bincount(plan.message_tensor, minlength=arrays.num_tensors)
    return by_tensor, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@helper
def received(
    plan: PlanArrays,
    by_tensor: Int64[ndarray, " m"],
    tensor_ptr: Int64[ndarray, " p"],
    tensor: int,
    device: int,
) -> int:
    """Return the message that brings a tensor to a device; -1 if there is none. O(devices).

    Args:
        plan: The plan.
        by_tensor: From `messages_by_tensor`.
        tensor_ptr: From `messages_by_tensor`.
        tensor: The tensor.
        device: The device.
    """
    for i in range(tensor_ptr[tensor], tensor_ptr[tensor + 1]):
        if plan.message_target[by_tensor[i]] == device:
            return by_tensor[i]
    return -1


@kernel
def home_storages(
    a: GraphArrays,
    plan: PlanArrays,
    by_tensor: Int64[ndarray, " m"],
    tensor_ptr: Int64[ndarray, " p"],
) -> Int64[ndarray, " t"]:
    """Return the storage of each tensor on the device that computes it, as in `live_ranges`.

    A view of a received copy lies in the copy, so this is not `tensor_owner`. O(tensors devices):
    in topological order, so long chains of aliases are walked once.

    Args:
        a: The graph.
        plan: The plan.
        by_tensor: From `messages_by_tensor`.
        tensor_ptr: From `messages_by_tensor`.
    """
    storage = np.arange(len(a.tensor_op))
    for op in a.topological:
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            alias = a.tensor_alias[t]
            if alias < 0:
                continue
            if plan.place[a.tensor_op[alias]] == plan.place[op]:
                storage[t] = storage[alias]
            else:
                message = received(plan, by_tensor, tensor_ptr, alias, plan.place[op])
                storage[t] = len(a.tensor_op) + message if message >= 0 else alias
    return storage


@kernel
def _live_ranges_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    by_tensor: Int64[ndarray, " m"],
    tensor_ptr: Int64[ndarray, " p"],
    allocated: Int64[ndarray, " s"],
    released: Int64[ndarray, " s"],
) -> None:
    n, num_tensors = len(plan.place), len(a.tensor_op)
    position = np.empty(n, dtype=np.int64)
    for p in range(n):
        op = plan.order_op[p]
        position[op] = p
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            if a.tensor_alias[t] < 0:
                allocated[t] = -1 if a.memory[op] == RESIDUAL else p
                released[t] = n if a.memory[op] == RESIDUAL else p
    for i in range(len(plan.message_tensor)):
        allocated[num_tensors + i] = position[plan.message_post[i]]
        released[num_tensors + i] = position[plan.message_post[i]]
    storage = home_storages(a, plan, by_tensor, tensor_ptr)
    for op in range(n):
        d, p = plan.place[op], position[op]
        for i in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[i]
            s = storage[t]
            if plan.place[a.tensor_op[t]] != d:
                s = num_tensors + received(plan, by_tensor, tensor_ptr, t, d)
            released[s] = max(released[s], p)
    for i in range(len(plan.message_tensor)):
        s = storage[plan.message_tensor[i]]
        hold = plan.message_hold[i]
        released[s] = max(released[s], n if hold < 0 else position[hold])


@kernel
def _live_bytes_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    allocated: Int64[ndarray, " s"],
    released: Int64[ndarray, " s"],
    live: Int64[ndarray, " n"],
) -> None:
    n, num_tensors, k = len(plan.place), len(a.tensor_op), len(plan.order_ptr) - 1
    gained, lost = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    residual, into = np.zeros(k, dtype=np.int64), plan.message_into
    for s in range(len(allocated)):
        tensor = s if s < num_tensors else plan.message_tensor[s - num_tensors]
        size = a.tensor_bytes[tensor]
        if s >= num_tensors and len(into) > 0 and into[s - num_tensors] >= 0:
            size = 0  # received into a storage that is there already
        if allocated[s] < 0:
            residual[plan.place[a.tensor_op[tensor]]] += size
        elif allocated[s] < n:
            gained[allocated[s]] += size
            lost[released[s]] += size
    for d in range(k):
        now = residual[d]
        for p in range(plan.order_ptr[d], plan.order_ptr[d + 1]):
            now += gained[p]
            live[p] = now + a.workspace[plan.order_op[p]]
            now -= lost[p]


@kernel
def _needs_kernel(a: GraphArrays, needs: Int64[ndarray, " n"]) -> None:
    seen = np.full(len(a.tensor_op), -1, dtype=np.int64)
    counted = np.zeros(len(a.tensor_op), dtype=np.int64)
    for op in range(len(needs)):
        total = a.workspace[op]
        inputs = a.input_ptr[op + 1] - a.input_ptr[op]
        outputs = a.output_ptr[op + 1] - a.output_ptr[op]
        for i in range(inputs + outputs):
            t = a.input_tensor[a.input_ptr[op] + i] if i < inputs else a.output_ptr[op] + i - inputs
            owner = a.tensor_owner[t]
            # A view may have been received as its own bytes, so the smaller of the two counts.
            size = min(a.tensor_bytes[t], a.tensor_bytes[owner])
            if seen[owner] != op:
                seen[owner], counted[owner] = op, 0
            if size > counted[owner]:
                total += size - counted[owner]
                counted[owner] = size
        needs[op] = total

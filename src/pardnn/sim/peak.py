"""Peak memory of a plan as a kernel: the twin of `plan.memory` for planners.

Same definition (semantics of a step), for millions of ops. O((edges + messages) devices) at worst.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.jit import helper, kernel
from pardnn.plan.plan import PlanArrays


def peaks(arrays: GraphArrays, plan: PlanArrays) -> Int64[ndarray, " k"]:
    """Return the largest number of bytes that each device ever holds; 0 for an idle one."""
    held = held_bytes(arrays, plan)
    ends = zip(plan.order_ptr[:-1], plan.order_ptr[1:], strict=True)
    return np.array([held[begin:end].max(initial=0) for begin, end in ends], dtype=np.int64)


def one_device_peak(arrays: GraphArrays) -> int:
    """Return the bytes that one device holds at its peak, running the step as it was written."""
    # A copy is writable, as every other plan's: the kernels are not compiled once more.
    order, none = arrays.topological.copy(), np.empty(0, dtype=np.int64)
    ends = np.array([0, len(order)], dtype=np.int64)
    plan = PlanArrays(np.zeros(len(order), dtype=np.int64), ends, order, *[none] * 5)
    return int(peaks(arrays, plan)[0])


def held_bytes(
    arrays: GraphArrays,
    plan: PlanArrays,
    lives: tuple[Int64[ndarray, " s"], Int64[ndarray, " s"]] | None = None,
) -> Int64[ndarray, " n"]:
    """Return the bytes held on an op's device while it runs, in the order of `plan.order_op`.

    Args:
        arrays: The graph.
        plan: The plan.
        lives: From `storage_lives`, if they are known.
    """
    allocated, released = lives or storage_lives(arrays, plan)
    held = np.zeros(arrays.num_ops, dtype=np.int64)
    _held_kernel(arrays, plan, allocated, released, held)
    return held


def storage_lives(
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
        rows: From `tensor_rows`, if they are known.
    """
    n, t, m = arrays.num_ops, arrays.num_tensors, len(plan.message_tensor)
    allocated = np.full(t + m, n, dtype=np.int64)
    released = np.full(t + m, -1, dtype=np.int64)
    rows = rows or tensor_rows(arrays, plan)
    _lives_kernel(arrays, plan, *rows, allocated, released)
    return allocated, released


def tensor_rows(
    arrays: GraphArrays, plan: PlanArrays
) -> tuple[Int64[ndarray, " m"], Int64[ndarray, " p"]]:
    """Return messages sorted by tensor, and where those of each tensor begin."""
    by_tensor = np.argsort(plan.message_tensor, kind="stable").astype(np.int64)
    counts = np.bincount(plan.message_tensor, minlength=arrays.num_tensors)
    return by_tensor, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


@helper
def received(
    plan: PlanArrays, by_tensor: ndarray, tensor_ptr: ndarray, tensor: int, device: int
) -> int:
    """Return the message that brings a tensor to a device; -1 if there is none. O(devices)."""
    for i in range(tensor_ptr[tensor], tensor_ptr[tensor + 1]):
        if plan.message_target[by_tensor[i]] == device:
            return by_tensor[i]
    return -1


@kernel
def home_storages(
    a: GraphArrays, plan: PlanArrays, by_tensor: ndarray, tensor_ptr: ndarray
) -> ndarray:
    """Return the storage of each tensor on the device that computes it, as in `storage_lives`.

    O(tensors devices): in topological order, so long chains of aliases are walked once.
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
def _lives_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    by_tensor: ndarray,
    tensor_ptr: ndarray,
    allocated: ndarray,
    released: ndarray,
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
        for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
            released[storage[t]] = max(released[storage[t]], p)
    for i in range(len(plan.message_tensor)):
        s = storage[plan.message_tensor[i]]
        hold = plan.message_hold[i]
        released[s] = max(released[s], n if hold < 0 else position[hold])


@kernel
def _held_kernel(
    a: GraphArrays, plan: PlanArrays, allocated: ndarray, released: ndarray, held: ndarray
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
            held[p] = now + a.workspace[plan.order_op[p]]
            now -= lost[p]

"""Which tensors a placement sends where: one transfer per (tensor, destination device)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays, op_edges
from pardnn.kernels.jit import kernel
from pardnn.sim.machine import Machine


class Transfers(NamedTuple):
    """Messages of a placement, ordered by tensor and, within one, by first consumer's number.

    Attributes:
        tensor: What each message carries.
        target: The device that receives it.
        of_tensor: Messages of tensor i are `of_tensor[i]:of_tensor[i + 1]`.
        consumer_ptr: `consumer[consumer_ptr[i]:consumer_ptr[i + 1]]` are those of message i.
        consumer: Ops of the target that read it.
    """

    tensor: Int64[ndarray, " m"]
    target: Int64[ndarray, " m"]
    of_tensor: Int64[ndarray, " t+1"]
    consumer_ptr: Int64[ndarray, " m+1"]
    consumer: Int64[ndarray, " r"]


def transfers_of(arrays: GraphArrays, place: Int64[ndarray, " n"], num_devices: int) -> Transfers:
    """Return the transfers that a placement causes. O(edges).

    Args:
        arrays: The graph.
        place: Device of each op.
        num_devices: Number of devices.
    """
    return transfers_of_edges(
        arrays.consumer_ptr, arrays.consumer_op, arrays.tensor_op, place, num_devices
    )


def missing_link(
    arrays: GraphArrays, machine: Machine, place: Int64[ndarray, " n"]
) -> tuple[int, int] | None:
    """Return the first two ops between which a placement needs a link that there is not; or None.

    Args:
        arrays: The graph.
        machine: Its links; infinite latency means none.
        place: Device of each op.
    """
    if bool(np.isfinite(machine.latency).all()):
        return None
    pairs = op_edges(arrays)
    missing = np.isinf(machine.latency[place[pairs[:, 0]], place[pairs[:, 1]]])
    if not missing.any():
        return None
    before, after = pairs[int(missing.argmax())].tolist()
    return before, after


def transfers_of_edges(
    consumer_ptr: Int64[ndarray, " p"],
    consumer_op: Int64[ndarray, " e"],
    tensor_op: Int64[ndarray, " t"],
    place: Int64[ndarray, " n"],
    num_devices: int,
) -> Transfers:
    """Return the transfers of a graph of which only its edges are known. O(edges).

    Args:
        consumer_ptr: As in `GraphArrays`.
        consumer_op: As in `GraphArrays`.
        tensor_op: As in `GraphArrays`.
        place: Device of each op.
        num_devices: Number of devices.
    """
    edges = len(consumer_op)
    message = np.empty(edges, dtype=np.int64)
    tensor, target = np.empty(edges, dtype=np.int64), np.empty(edges, dtype=np.int64)
    of_tensor = np.zeros(len(tensor_op) + 1, dtype=np.int64)
    place = np.array(place, dtype=np.int64)
    count = _number_kernel(
        consumer_ptr, consumer_op, tensor_op, place, num_devices, message, tensor, target,
        of_tensor,
    )  # fmt: skip
    ends = np.zeros(count + 1, dtype=np.int64)
    remote = message >= 0
    np.cumsum(np.bincount(message[remote], minlength=count), out=ends[1:])
    consumer = np.empty(int(ends[-1]), dtype=np.int64)
    _consumers_kernel(consumer_op, message, ends[:-1].copy(), consumer)
    return Transfers(tensor[:count].copy(), target[:count].copy(), of_tensor, ends, consumer)


@kernel
def _number_kernel(
    consumer_ptr: Int64[ndarray, " p"],
    consumer_op: Int64[ndarray, " e"],
    tensor_op: Int64[ndarray, " t"],
    place: Int64[ndarray, " n"],
    num_devices: int,
    message: Int64[ndarray, " e"],
    tensor: Int64[ndarray, " e"],
    target: Int64[ndarray, " e"],
    of_tensor: Int64[ndarray, " p"],
) -> int:
    """Number the messages; `message` is filled for each consumer edge, -1 within a device."""
    last_tensor = np.full(num_devices, -1, dtype=np.int64)
    number = np.empty(num_devices, dtype=np.int64)
    count = 0
    for t in range(len(tensor_op)):
        home = place[tensor_op[t]]
        for edge in range(consumer_ptr[t], consumer_ptr[t + 1]):
            device = place[consumer_op[edge]]
            if device == home:
                message[edge] = -1
                continue
            if last_tensor[device] != t:
                last_tensor[device] = t
                number[device] = count
                tensor[count] = t
                target[count] = device
                count += 1
            message[edge] = number[device]
        of_tensor[t + 1] = count
    return count


@kernel
def _consumers_kernel(
    consumer_op: Int64[ndarray, " e"],
    message: Int64[ndarray, " e"],
    at: Int64[ndarray, " m"],
    consumer: Int64[ndarray, " r"],
) -> None:
    """Fill the consumers of each message; `at` says where those of the next message begin."""
    for edge in range(len(message)):
        if message[edge] >= 0:
            consumer[at[message[edge]]] = consumer_op[edge]
            at[message[edge]] += 1

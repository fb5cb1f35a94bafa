"""Which tensors a placement sends where: one transfer per (tensor, destination device)."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays


class Transfers(NamedTuple):
    """Messages of a placement, ordered by tensor and, within one, by first reader's number."""

    tensor: Int64[ndarray, " m"]
    target: Int64[ndarray, " m"]
    of_tensor: Int64[ndarray, " t+1"]  # messages of tensor i are of_tensor[i]:of_tensor[i + 1]
    reader_ptr: Int64[ndarray, " m+1"]
    reader: Int64[ndarray, " r"]  # ops of the target that read it
    local: Int64[ndarray, " e"]  # per consumer edge: 1 if producer and reader share a device


def transfers_of(arrays: GraphArrays, place: Int64[ndarray, " n"], num_devices: int) -> Transfers:
    """Return the transfers that `place` (device of each op) causes. O(edges)."""
    edges = len(arrays.consumer_op)
    message = np.empty(edges, dtype=np.int64)
    tensor, target, of_tensor = (
        np.empty(edges, dtype=np.int64),
        np.empty(edges, dtype=np.int64),
        np.zeros(arrays.num_tensors + 1, dtype=np.int64),
    )
    count = _number_kernel(arrays, place, num_devices, message, tensor, target, of_tensor)
    remote = np.flatnonzero(message >= 0)
    by_message = remote[np.argsort(message[remote], kind="stable")]
    counts = np.bincount(message[remote], minlength=count)
    return Transfers(
        tensor=tensor[:count].copy(),
        target=target[:count].copy(),
        of_tensor=of_tensor,
        reader_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        reader=np.ascontiguousarray(arrays.consumer_op[by_message]),
        local=(message < 0).astype(np.int64),
    )


@numba.njit(cache=True)
def _number_kernel(
    a: GraphArrays,
    place: ndarray,
    num_devices: int,
    message: ndarray,
    tensor: ndarray,
    target: ndarray,
    of_tensor: ndarray,
) -> int:
    last_tensor = np.full(num_devices, -1, dtype=np.int64)
    number = np.empty(num_devices, dtype=np.int64)
    count = 0
    for t in range(len(a.tensor_op)):
        home = place[a.tensor_op[t]]
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            device = place[a.consumer_op[edge]]
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

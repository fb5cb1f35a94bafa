"""The emulator: engines that choose the next op while they run (ParDNN, step 2).

One op at a time per device; an op is ready when all its inputs have arrived; transfers overlap
compute and start as soon as the tensor exists. Among ready ops a device takes the smallest key:

- `fifo`: by ready time, then number (TensorFlow's rule, thesis 4.1.2);
- `priority`: a key per op given by the caller, such as minus the bottom level ("EST first").

All events of one instant are handled before any device chooses. O((ops + edges) log ops).
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import numba
import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.sim.heap import heap_pop, heap_push
from pardnn.sim.machine import Machine
from pardnn.sim.timeline import Timeline
from pardnn.sim.transfers import Transfers, transfers_of


def emulate(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    key: Float64[ndarray, " n"] | None = None,
) -> Timeline:
    """Run a placement under a dynamic scheduler.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, one that can run it.
        key: Smallest first among ready ops; None for `fifo`.

    Returns:
        The timeline; it is complete, since the graph has no cycle.
    """
    n = arrays.num_ops
    place = np.ascontiguousarray(place, dtype=np.int64)
    transfers = transfers_of(arrays, place, machine.num_devices)
    m = len(transfers.tensor)
    start, finish = np.full(n, np.nan), np.full(n, np.nan)
    sent, arrived = np.full(m, np.nan), np.full(m, np.nan)
    dispatch = np.full(n, -1, dtype=np.int64)
    keys = np.empty(0) if key is None else np.ascontiguousarray(key, dtype=np.float64)
    _emulate_kernel(arrays, machine, transfers, place, keys, start, finish, dispatch, sent, arrived)
    return Timeline(
        start=start,
        finish=finish,
        dispatch=dispatch,
        message_tensor=transfers.tensor,
        message_source=place[arrays.tensor_op[transfers.tensor]],
        message_target=transfers.target,
        message_start=sent,
        message_finish=arrived,
    )


@numba.njit(cache=True)
def _emulate_kernel(
    a: GraphArrays,
    machine: Machine,
    transfers: Transfers,
    place: ndarray,
    keys: ndarray,
    start: ndarray,
    finish: ndarray,
    dispatch: ndarray,
    sent: ndarray,
    arrived: ndarray,
) -> None:
    n, m, k = len(place), len(transfers.tensor), len(machine.device_class)
    missing = np.empty(n, dtype=np.int64)
    # Events: ops finish (id < n), messages arrive (< n + m), order edges arrive (>= n + m).
    event_key = np.empty(n + m + len(a.before_op) + 1)
    event_id = np.empty(n + m + len(a.before_op) + 1, dtype=np.int64)
    events = 0
    # One heap of ready ops per device, side by side.
    base = np.zeros(k + 1, dtype=np.int64)
    for op in range(n):
        base[place[op] + 1] += 1
        missing[op] = a.input_ptr[op + 1] - a.input_ptr[op] + a.after_ptr[op + 1] - a.after_ptr[op]
    base = np.cumsum(base)
    ready_key, ready_id = np.empty(n), np.empty(n, dtype=np.int64)
    ready = np.zeros(k, dtype=np.int64)
    idle = np.ones(k, dtype=np.bool_)
    link_free = np.zeros((k, k))
    for op in range(n):
        if missing[op] == 0:
            _make_ready(op, 0.0, place, keys, base, ready_key, ready_id, ready)
    now, count = 0.0, 0
    while True:
        for d in range(k):
            if idle[d] and ready[d] > 0:
                op = ready_id[base[d]]
                view_key, view_id = (
                    ready_key[base[d] : base[d + 1]],
                    ready_id[base[d] : base[d + 1]],
                )
                ready[d] = heap_pop(view_key, view_id, ready[d])
                idle[d] = False
                start[op] = now
                finish[op] = now + machine.seconds[machine.device_class[d], op]
                dispatch[op] = count
                count += 1
                events = heap_push(event_key, event_id, events, finish[op], op)
        if events == 0:
            break
        now = event_key[0]
        while events > 0 and event_key[0] == now:
            event = event_id[0]
            events = heap_pop(event_key, event_id, events)
            if event < n:
                idle[place[event]] = True
                events = _finish_op(
                    event, now, a, machine, transfers, place, missing, link_free, sent, arrived,
                    keys, base, ready_key, ready_id, ready, event_key, event_id, events,
                )  # fmt: skip
            elif event < n + m:
                for i in range(
                    transfers.reader_ptr[event - n], transfers.reader_ptr[event - n + 1]
                ):
                    op = transfers.reader[i]
                    missing[op] -= 1
                    if missing[op] == 0:
                        _make_ready(op, now, place, keys, base, ready_key, ready_id, ready)
            else:
                op = a.before_op[event - n - m]
                missing[op] -= 1
                if missing[op] == 0:
                    _make_ready(op, now, place, keys, base, ready_key, ready_id, ready)


@numba.njit(cache=True)
def _make_ready(
    op: int,
    now: float,
    place: ndarray,
    keys: ndarray,
    base: ndarray,
    ready_key: ndarray,
    ready_id: ndarray,
    ready: ndarray,
) -> None:
    d = place[op]
    key = keys[op] if len(keys) > 0 else now
    ready[d] = heap_push(
        ready_key[base[d] : base[d + 1]], ready_id[base[d] : base[d + 1]], ready[d], key, op
    )


@numba.njit(cache=True)
def _finish_op(
    op: int,
    now: float,
    a: GraphArrays,
    machine: Machine,
    transfers: Transfers,
    place: ndarray,
    missing: ndarray,
    link_free: ndarray,
    sent: ndarray,
    arrived: ndarray,
    keys: ndarray,
    base: ndarray,
    ready_key: ndarray,
    ready_id: ndarray,
    ready: ndarray,
    event_key: ndarray,
    event_id: ndarray,
    events: int,
) -> int:
    n, m = len(place), len(transfers.tensor)
    d = place[op]
    for t in range(a.output_ptr[op], a.output_ptr[op + 1]):
        for edge in range(a.consumer_ptr[t], a.consumer_ptr[t + 1]):
            if transfers.local[edge] == 1:
                reader = a.consumer_op[edge]
                missing[reader] -= 1
                if missing[reader] == 0:
                    _make_ready(reader, now, place, keys, base, ready_key, ready_id, ready)
        for i in range(transfers.of_tensor[t], transfers.of_tensor[t + 1]):
            q = transfers.target[i]
            begin = now
            if machine.serial == 1:
                begin = max(now, link_free[d, q])
            sent[i] = begin
            arrived[i] = begin + (
                machine.latency[d, q] + a.tensor_bytes[t] / machine.bandwidth[d, q]
            )
            link_free[d, q] = arrived[i]
            events = heap_push(event_key, event_id, events, arrived[i], n + i)
    for i in range(a.before_ptr[op], a.before_ptr[op + 1]):
        later = a.before_op[i]
        q = place[later]
        if q != d:
            at = now + machine.latency[d, q]
            events = heap_push(event_key, event_id, events, at, n + m + i)
        else:
            missing[later] -= 1
            if missing[later] == 0:
                _make_ready(later, now, place, keys, base, ready_key, ready_id, ready)
    return events

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

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.heap import heap_pop, heap_push
from pardnn.kernels.jit import kernel
from pardnn.sim.adjacency import Adjacency, successor_edges
from pardnn.sim.levels import placed_seconds
from pardnn.sim.machine import Machine
from pardnn.sim.timeline import Timeline
from pardnn.sim.transfers import transfers_of


def emulate(
    arrays: GraphArrays,
    machine: Machine,
    place: Int64[ndarray, " n"],
    key: Float64[ndarray, " n"] | None = None,
    adjacency: Adjacency | None = None,
) -> Timeline:
    """Run a placement under a dynamic scheduler.

    Args:
        arrays: The graph.
        machine: Durations and links.
        place: Device of each op, one that can run it.
        key: Smallest first among ready ops; None for `fifo`.
        adjacency: The graph's edges, if they are known.

    Returns:
        The timeline; it is complete, since the graph has no cycle.
    """
    n, k = arrays.num_ops, machine.num_devices
    place = np.array(place, dtype=np.int64)
    successors = adjacency.successors if adjacency else successor_edges(arrays)
    transfers = transfers_of(arrays, place, k)
    source, target = place[arrays.tensor_op[transfers.tensor]], transfers.target
    m = len(target)
    sizes = arrays.tensor_bytes[transfers.tensor]
    delay = machine.latency[source, target] + sizes / machine.bandwidth[source, target]
    start, finish = np.full(n, np.nan), np.full(n, np.nan)
    sent, arrived = np.full(m, np.nan), np.full(m, np.nan)
    dispatch = np.full(n, -1, dtype=np.int64)
    missing = np.diff(arrays.input_ptr) + np.diff(arrays.after_ptr)
    released = np.flatnonzero(missing == 0)
    missing[released] = 1
    _emulate_kernel(
        successors.ptr, successors.edge, place, placed_seconds(machine, place),
        np.empty(0) if key is None else np.array(key, dtype=np.float64),
        missing, released, np.concatenate([[0], np.cumsum(np.bincount(place, minlength=k))]),
        machine.latency,
        transfers.of_tensor[arrays.output_ptr], transfers.consumer_ptr, transfers.consumer, delay,
        source * k + target if machine.serial else np.empty(0, dtype=np.int64),
        start, finish, dispatch, sent, arrived,
    )  # fmt: skip
    return Timeline(
        start=start,
        finish=finish,
        dispatch=dispatch,
        message_tensor=transfers.tensor,
        message_source=source,
        message_target=target,
        message_start=sent,
        message_finish=arrived,
    )


@kernel
def _emulate_kernel(
    successor_ptr: Int64[ndarray, " p"],
    successor: Int64[ndarray, "x 3"],
    place: Int64[ndarray, " n"],
    seconds: Float64[ndarray, " n"],
    keys: Float64[ndarray, " h"],
    missing: Int64[ndarray, " n"],
    sources: Int64[ndarray, " s"],
    base: Int64[ndarray, " k1"],
    latency: Float64[ndarray, "k k"],
    message_ptr: Int64[ndarray, " p"],
    consumer_ptr: Int64[ndarray, " m1"],
    consumer: Int64[ndarray, " r"],
    delay: Float64[ndarray, " m"],
    link: Int64[ndarray, " l"],
    start: Float64[ndarray, " n"],
    finish: Float64[ndarray, " n"],
    dispatch: Int64[ndarray, " n"],
    sent: Float64[ndarray, " m"],
    arrived: Float64[ndarray, " m"],
) -> None:
    n, m, k = len(place), len(sent), len(latency)
    # Events: ops finish (id < n), messages arrive (< n + m), order edges arrive (>= n + m).
    event_key = np.empty(k + m + len(successor) + 1)
    event_id = np.empty(len(event_key), dtype=np.int64)
    ready_key, ready_id = np.empty(n), np.empty(n, dtype=np.int64)  # a heap per device
    ready, idle = np.zeros(k, dtype=np.int64), np.ones(k, dtype=np.bool_)
    link_free = np.zeros(k * k)
    # Ops for which an event has just come, once per tensor.
    released = np.empty(n + len(successor), dtype=np.int64)
    for i in range(len(sources)):
        released[i] = sources[i]
    events, now, count, size = np.int64(0), 0.0, 0, len(sources)  # a literal compiles heaps twice
    while True:
        for i in range(size):
            op = released[i]
            missing[op] -= 1
            if missing[op] == 0:
                a, b = base[place[op]], base[place[op] + 1]
                key = keys[op] if len(keys) > 0 else now
                ready[place[op]] = heap_push(
                    ready_key[a:b], ready_id[a:b], ready[place[op]], key, op
                )
        if events == 0 or event_key[0] != now:
            for d in range(k):
                if idle[d] and ready[d] > 0:
                    op = ready_id[base[d]]
                    a, b = base[d], base[d + 1]
                    ready[d] = heap_pop(ready_key[a:b], ready_id[a:b], ready[d])
                    idle[d], start[op], dispatch[op] = False, now, count
                    finish[op] = now + seconds[op]
                    count += 1
                    events = heap_push(event_key, event_id, events, finish[op], op)
        if events == 0:
            break
        now, event, size = event_key[0], event_id[0], 0
        events = heap_pop(event_key, event_id, events)
        if event >= n + m:
            released[0], size = successor[event - n - m, 0], 1
        elif event >= n:
            for i in range(consumer_ptr[event - n], consumer_ptr[event - n + 1]):
                released[size] = consumer[i]
                size += 1
        else:
            d = place[event]
            idle[d] = True
            for e in range(successor_ptr[event], successor_ptr[event + 1]):
                q = place[successor[e, 0]]
                if q == d:
                    released[size] = successor[e, 0]
                    size += 1
                elif successor[e, 1] < 0:
                    at = now + latency[d, q]
                    events = heap_push(event_key, event_id, events, at, n + m + e)
            for i in range(message_ptr[event], message_ptr[event + 1]):
                sent[i] = now
                if len(link) > 0:
                    sent[i] = max(now, link_free[link[i]])
                    link_free[link[i]] = sent[i] + delay[i]
                arrived[i] = sent[i] + delay[i]
                events = heap_push(event_key, event_id, events, arrived[i], n + i)

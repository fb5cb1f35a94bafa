"""Memory under a dynamic scheduler: what devices hold along emulated time (ParDNN, Eq. 4.3).

`plan.memory` proves the peak of a plan's own order, whatever the clock does. An engine with its own
scheduler (`sim.dynamic`) runs the ops of a placement in another order, at times that the clock
decides; this is the peak of that run. On each device: residual storages; workspace and outputs
from an op's start; each storage until the last op that reads it there has finished and its
transfers have ended; a received copy from the start of its transfer.

At one instant, what ops that began earlier held is released first, then transfers that start take
their buffers, then ops start. O((ops + edges + messages) log).

Deviations from Eq. 4.3: workspaces count, and a sender holds a tensor until it has left.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.plan.memory import storage_roots
from pardnn.plan.plan import PlanArrays
from pardnn.sim.timeline import Timeline


def policy_peaks(
    arrays: GraphArrays, place: Int64[ndarray, " n"], num_devices: int, timeline: Timeline
) -> Int64[ndarray, " k"]:
    """Return the largest number of bytes that each device holds at any time of an emulation.

    Args:
        arrays: The graph.
        place: Device of each op.
        num_devices: Number of devices.
        timeline: From `sim.dynamic.emulate` with this placement.
    """
    a, n, m = arrays, arrays.num_ops, len(timeline.message_tensor)
    rank = _ranks(timeline)
    starts, finishes, leaves, arrives = np.split(rank, np.cumsum([n, n, m]))
    begin, end = _live_ranges(a, place, num_devices, timeline, starts, finishes, leaves, arrives)
    own = np.flatnonzero(a.tensor_alias < 0)
    home = place[a.tensor_op]
    stays = a.memory[a.tensor_op[own]] == RESIDUAL
    peak = np.zeros(num_devices, dtype=np.int64)
    np.add.at(peak, home[own[stays]], a.tensor_bytes[own[stays]])
    own = own[~stays]
    works, received = np.flatnonzero(a.workspace > 0), a.num_tensors + np.arange(m)
    size = [a.tensor_bytes[own], a.tensor_bytes[timeline.message_tensor], a.workspace[works]]
    device = np.concatenate([home[own], timeline.message_target, place[works]])
    first = np.concatenate([begin[own], begin[received], starts[works]])
    last = np.concatenate([end[own], end[received], finishes[works]])
    changes = np.concatenate([*size, *(-each for each in size)])
    order = np.lexsort((np.concatenate([first, last]), np.tile(device, 2)))
    held, of = np.cumsum(changes[order]), np.tile(device, 2)[order]
    # What is taken is given back, so the sum over each device before is 0.
    most = np.zeros(num_devices, dtype=np.int64)
    np.maximum.at(most, of, held)
    return peak + most


def _ranks(timeline: Timeline) -> Int64[ndarray, " x"]:
    """Return the rank of every start, finish, departure and arrival among all of them."""
    n, m = len(timeline.start), len(timeline.message_tensor)
    times = np.concatenate(
        [timeline.start, timeline.finish, timeline.message_start, timeline.message_finish]
    )
    at_once = timeline.message_finish <= timeline.message_start
    kind = np.concatenate([
        np.full(n, 2), np.where(timeline.finish <= timeline.start, 2, 0),
        np.full(m, 1), np.where(at_once, 1, 0),
    ])  # fmt: skip
    turns, number = 2 * timeline.dispatch, 2 * np.arange(m)
    turn = np.concatenate([turns, turns + 1, number, number + 1])
    rank = np.empty(len(times), dtype=np.int64)
    rank[np.lexsort((turn, kind, times))] = np.arange(len(times))
    return rank


def _live_ranges(
    a: GraphArrays,
    place: Int64[ndarray, " n"],
    num_devices: int,
    timeline: Timeline,
    starts: Int64[ndarray, " n"],
    finishes: Int64[ndarray, " n"],
    leaves: Int64[ndarray, " m"],
    arrives: Int64[ndarray, " m"],
) -> tuple[Int64[ndarray, " s"], Int64[ndarray, " s"]]:
    """Return when storages are taken and given back: those of tensors, then received copies."""
    t, nothing = a.num_tensors, np.empty(0, dtype=np.int64)
    roots = storage_roots(a, PlanArrays(place, *[nothing] * 7))
    home = place[a.tensor_op]
    consumers = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    tensor = np.concatenate([a.input_tensor, np.arange(t), timeline.message_tensor])
    device = np.concatenate([place[consumers], home, timeline.message_source])
    at = np.concatenate([finishes[consumers], finishes[a.tensor_op], arrives])
    root = np.where(home[tensor] == device, roots[tensor], t + tensor)
    begin = np.concatenate([starts[a.tensor_op], leaves])
    end = np.concatenate([finishes[a.tensor_op], arrives])
    is_own = root < t
    np.maximum.at(end, root[is_own], at[is_own])
    if len(leaves) == 0:
        return begin, end
    sent = timeline.message_tensor * num_devices + timeline.message_target
    by_key = np.argsort(sent, kind="stable")
    copies = (root[~is_own] - t) * num_devices + device[~is_own]
    which = by_key[np.minimum(np.searchsorted(sent[by_key], copies), len(sent) - 1)]
    assert bool((sent[which] == copies).all()), "a tensor that is read where it never arrives"
    np.maximum.at(end, t + which, at[~is_own])
    return begin, end

"""The storages that a placement makes devices hold, as a table: which ops and messages use each.

For every storage on every device, computed there or received, it lists the ops that make, read or
view it, and the messages that carry it away. With it, the bytes held along any order can be
followed op by op, without a plan. Residual storages, which are always held, are only summed.
`reserve_of` says what one order needs.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.kernels.segment_tree import range_max
from pardnn.place.ordering.schedule import first_reaching, free_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import home_storages, messages_by_tensor, received
from pardnn.sim.transfers import transfers_of


class Reserve(NamedTuple):
    """The memory that the reference order needs.

    Attributes:
        position: Of each op in the lists of the devices, one after the other.
        ptr: Where each device's list begins.
        op: The op at each position.
        first: Position of each storage's first use.
        bound: Position until which the sender holds the tensor of each message.
        limit: Bytes of each device; more where the reference order itself needs more.
        top: The segment tree of bytes held at each position.
        add: The same.
    """

    position: Int64[ndarray, " n"]
    ptr: Int64[ndarray, " p"]
    op: Int64[ndarray, " n"]
    first: Int64[ndarray, " s"]
    last: Int64[ndarray, " s"]
    bound: Int64[ndarray, " m"]
    limit: Int64[ndarray, " k"]
    top: Int64[ndarray, " 2z"]
    add: Int64[ndarray, " 2z"]


class Storages(NamedTuple):
    """Storages of a placement that take bytes and are not residual, numbered.

    `x_ptr[i]:x_ptr[i + 1]` is the slice of `x` that belongs to i.

    Attributes:
        bytes: Of each storage.
        device: Where it is.
        resident: Residual bytes of each device.
        use_ptr: Of each op, into `use`.
        use: Storages that an op makes, reads or views on its device.
        user_ptr: Of each storage, into `user`.
        user: The ops that use it.
        send_ptr: Of each storage, into `send`.
        send: Messages that carry it away.
        sent: Of each message, the storage that it carries; -1 if it is not in the table.
        reader_ptr: Of each message, into `reader`.
        reader: Ops of the receiving device that read it.
        read_ptr: Of each op, into `read`.
        read: Messages that an op reads.
    """

    bytes: Int64[ndarray, " s"]
    device: Int64[ndarray, " s"]
    resident: Int64[ndarray, " k"]
    use_ptr: Int64[ndarray, " n+1"]
    use: Int64[ndarray, " u"]
    user_ptr: Int64[ndarray, " s+1"]
    user: Int64[ndarray, " u"]
    send_ptr: Int64[ndarray, " s+1"]
    send: Int64[ndarray, " x"]
    sent: Int64[ndarray, " m"]
    reader_ptr: Int64[ndarray, " m+1"]
    reader: Int64[ndarray, " r"]
    read_ptr: Int64[ndarray, " n+1"]
    read: Int64[ndarray, " r"]


def storages_of(arrays: GraphArrays, place: Int64[ndarray, " n"], num_devices: int) -> Storages:
    """Return the storages of a placement. O(ops + edges devices).

    Args:
        arrays: The graph.
        place: Device of each op.
        num_devices: Number of devices.
    """
    a, n, num_tensors = arrays, arrays.num_ops, arrays.num_tensors
    transfers = transfers_of(a, place, num_devices)
    plan = free_plan(a, num_devices, place, np.arange(n))
    rows = messages_by_tensor(a, plan)
    home = home_storages(a, plan, *rows)
    tensor = np.concatenate([np.arange(num_tensors), transfers.tensor])
    size = a.tensor_bytes[tensor]
    device = np.concatenate([plan.place[a.tensor_op], transfers.target])
    stays = np.zeros(len(tensor), dtype=np.bool_)
    stays[:num_tensors] = (a.memory[a.tensor_op] == RESIDUAL) & (a.tensor_alias < 0)
    resident = np.zeros(num_devices, dtype=np.int64)
    np.add.at(resident, device[stays], size[stays])
    user, storage = _uses(a, plan, rows, home)
    used = np.zeros(len(tensor), dtype=np.bool_)
    used[storage] = True
    kept = used & ~stays & (size > 0)
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    here = number[storage] >= 0
    user, storage = user[here], number[storage[here]]
    sent = number[home[transfers.tensor]]
    carried = np.flatnonzero(sent >= 0)
    consumer = transfers.consumer
    message = np.repeat(np.arange(len(sent)), np.diff(transfers.consumer_ptr))
    count = int(kept.sum())
    return Storages(
        size[kept],
        device[kept].astype(np.int64),
        resident,
        *_rows(user, storage, n),
        *_rows(storage, user, count),
        *_rows(sent[carried], carried, count),
        sent,
        transfers.consumer_ptr,
        consumer,
        *_rows(consumer, message, n),
    )


def _rows(
    key: Int64[ndarray, " e"], value: Int64[ndarray, " e"], num_rows: int
) -> tuple[Int64[ndarray, " p"], Int64[ndarray, " e"]]:
    """Return values by key, and where those of each key begin."""
    ptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(key, minlength=num_rows), out=ptr[1:])
    return ptr, value[np.argsort(key, kind="stable")].astype(np.int64)


def _uses(
    a: GraphArrays,
    plan: PlanArrays,
    rows: tuple[Int64[ndarray, " m"], Int64[ndarray, " p"]],
    home: Int64[ndarray, " t"],
) -> tuple[Int64[ndarray, " u"], Int64[ndarray, " u"]]:
    """Return pairs of an op and a storage that it uses, numbered as in `live_ranges`."""
    reads = np.empty(len(a.input_tensor), dtype=np.int64)
    _reads_kernel(a, plan, *rows, home, reads)
    reader = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    op, storage = np.concatenate([a.tensor_op, reader]), np.concatenate([home, reads])
    width = a.num_tensors + len(plan.message_tensor)
    pairs = np.unique(op * width + storage)
    return pairs // width, pairs % width


@kernel
def _reads_kernel(
    a: GraphArrays,
    plan: PlanArrays,
    by_tensor: Int64[ndarray, " m"],
    tensor_ptr: Int64[ndarray, " p"],
    home: Int64[ndarray, " t"],
    reads: Int64[ndarray, " e"],
) -> None:
    for op in range(len(plan.place)):
        d = plan.place[op]
        for i in range(a.input_ptr[op], a.input_ptr[op + 1]):
            t = a.input_tensor[i]
            reads[i] = home[t]
            if plan.place[a.tensor_op[t]] != d:
                reads[i] = len(a.tensor_op) + received(plan, by_tensor, tensor_ptr, t, d)


def reserve_of(
    arrays: GraphArrays,
    storages: Storages,
    place: Int64[ndarray, " n"],
    reference: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
) -> Reserve:
    """Return the memory that a reference order needs.

    Args:
        arrays: The graph.
        storages: Of the placement.
        place: Device of each op.
        reference: Position of each op in a topological order of all ops.
        capacity: Usable bytes per device.
    """
    k = len(capacity)
    op = np.lexsort((reference, place)).astype(np.int64)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=k))]).astype(np.int64)
    position = np.empty(len(op), dtype=np.int64)
    position[op] = np.arange(len(op))
    count = len(storages.bytes)
    first, last = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    bound = np.full(len(storages.sent), -1, dtype=np.int64)
    live = arrays.workspace[op] + storages.resident[place[op]]
    _live_kernel(storages, position, ptr, op, reference, first, last, bound, live)
    limit = capacity.copy()
    for d in range(k):
        limit[d] = max(limit[d], live[ptr[d] : ptr[d + 1]].max(initial=0))
    tree = range_max(live)
    return Reserve(position, ptr, op, first, last, bound, limit, tree.top, tree.add)


@kernel
def _live_kernel(
    s: Storages,
    position: Int64[ndarray, " n"],
    ptr: Int64[ndarray, " p"],
    op: Int64[ndarray, " n"],
    reference: Int64[ndarray, " n"],
    first: Int64[ndarray, " s"],
    last: Int64[ndarray, " s"],
    bound: Int64[ndarray, " m"],
    live: Int64[ndarray, " n"],
) -> None:
    n = len(op)
    turn = np.empty(n, dtype=np.int64)
    for p in range(n):
        turn[p] = reference[op[p]]
    for m in range(len(bound)):
        if s.sent[m] < 0:
            continue
        d = s.device[s.sent[m]]
        reads = n
        for i in range(s.reader_ptr[m], s.reader_ptr[m + 1]):
            reads = min(reads, reference[s.reader[i]])
        bound[m] = first_reaching(turn, ptr[d], ptr[d + 1], reads) - 1
    change = np.zeros(n + 1, dtype=np.int64)
    for x in range(len(first)):
        first[x], last[x] = n, -1
        for i in range(s.user_ptr[x], s.user_ptr[x + 1]):
            first[x] = min(first[x], position[s.user[i]])
            last[x] = max(last[x], position[s.user[i]])
        for i in range(s.send_ptr[x], s.send_ptr[x + 1]):
            last[x] = max(last[x], bound[s.send[i]])
        change[first[x]] += s.bytes[x]
        change[last[x] + 1] -= s.bytes[x]
    held = 0
    for p in range(n):
        held += change[p]
        live[p] += held

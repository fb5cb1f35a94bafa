"""Every plan of a tiny graph: whether any of them fits into memory (ours).

If heuristics find no plan, this searches exhaustively: placements of the groups, orders, and for
each message the ops before which it is posted and until which it is held. So for a tiny graph a
refusal is a proof. The search is depth first over what ranks can do next and visits every state
once; up to `MAX_OPS` ops, `MAX_PLACEMENTS` placements and `MAX_STATES` states it takes a second or
two.

A state consists of the ops that ran, the messages that arrived, those that their senders have
released, the devices that have *reached* their next op, and the room that each had during its last
op. A device that has reached an op may post receives for it without needing memory for them during
earlier ops. A device that still waits after an op, for sends that are held until it, may have
posted before that op, if it had room: this is how two full devices exchange tensors. A sender that
waits for nothing continues at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL, GraphArrays
from pardnn.place.ordering.memory_bounded import limits
from pardnn.plan.plan import PlanArrays
from pardnn.sim.machine import Machine
from pardnn.sim.peak import residual_bytes
from pardnn.sim.transfers import missing_link, transfers_of

#: Above these, nothing is searched.
MAX_OPS, MAX_PLACEMENTS = 12, 4096
#: States looked at, all placements together, before the search is given up.
MAX_STATES = 40_000


class Searched(NamedTuple):
    """What a search found.

    Attributes:
        plan: A plan that fits; None if none was found.
        is_complete: Whether all plans were looked at, if none was found.
    """

    plan: PlanArrays | None
    is_complete: bool


class _Storage(NamedTuple):
    """A block of memory on one device; ops and messages are bits.

    Attributes:
        bytes: Its size.
        made: The op that makes it; 0 if it is there from the start, or received.
        message: The message that brings it; 0 if it is made here.
        users: Ops that make, read or view it here.
        sends: Messages that carry it away.
        stays: Whether it is never released.
    """

    bytes: int
    made: int
    message: int
    users: int
    sends: int
    stays: bool


class _Step(NamedTuple):
    """One placement, for the walk: by op or by message, bits of the others."""

    device: list[int]
    needs: list[int]
    reads: list[int]
    blocked_by: list[int]
    workspace: list[int]
    storages: list[list[_Storage]]
    made_by: list[int]
    source: list[int]
    target: list[int]
    size: list[int]
    from_device: list[int]
    to_device: list[int]
    capacity: list[int]


class _State(NamedTuple):
    ran: int
    arrived: int
    gone: int
    reached: int
    room: tuple[int, ...]


def searched_plan(
    arrays: GraphArrays,
    capacities: Sequence[int | None],
    overwrites: Int64[ndarray, "w 2"],
    placements: Sequence[Int64[ndarray, " n"]] | None,
) -> Searched:
    """Search all plans of some placements of a tiny graph for one that fits.

    Args:
        arrays: The graph.
        capacities: Usable bytes of each device; None is unlimited.
        overwrites: From `first_overwrites`.
        placements: From `all_placements`, or a single one.
    """
    if arrays.num_ops > MAX_OPS or placements is None:
        return Searched(None, False)
    capacity, left = limits(capacities).tolist(), MAX_STATES
    for place in placements:
        step = _step_of(arrays, place, overwrites, capacity)
        found, left = _walk(step, left)
        if found is not None:
            return Searched(_plan_of(arrays, place, step, found), True)
        if left <= 0:
            return Searched(None, False)
    return Searched(None, True)


def all_placements(
    arrays: GraphArrays,
    machine: Machine,
    capacities: Sequence[int | None],
    runs: Bool[ndarray, "g k"],
) -> list[Int64[ndarray, " n"]] | None:
    """Return all placements whose residual bytes fit and whose links exist, balanced ones first.

    Args:
        arrays: The graph, with closed groups.
        machine: Which links there are, and how long ops take.
        capacities: Usable bytes of each device; None is unlimited.
        runs: Whether a device can run a group.

    Returns:
        Of placements that differ only by permuting equal devices, one; None if there are too
        many.
    """
    num_groups, k = runs.shape
    if arrays.num_ops > MAX_OPS or float(k) ** num_groups > MAX_PLACEMENTS:
        return None
    alike = _are_alike(machine, capacities)
    residual, capacity = residual_bytes(arrays), limits(capacities)
    found: list[tuple[float, Int64[ndarray, " n"]]] = []
    for devices in itertools.product(range(k), repeat=num_groups):
        of = np.array(devices, dtype=np.int64)
        renamed = alike and any(d > max(devices[:i], default=-1) + 1 for i, d in enumerate(devices))
        if renamed or not runs[np.arange(num_groups), of].all():
            continue
        if (np.bincount(of, weights=residual, minlength=k) > capacity).any():
            continue
        place = of[arrays.group]
        if missing_link(arrays, machine, place) is None:
            seconds = machine.seconds[machine.device_class[place], np.arange(arrays.num_ops)]
            load = np.bincount(place, weights=seconds, minlength=k)
            found.append((float(load.max()), place))
    return [place for _, place in sorted(found, key=lambda each: each[0])]


def _are_alike(machine: Machine, capacities: Sequence[int | None]) -> bool:
    apart = ~np.eye(machine.num_devices, dtype=bool)
    links = np.stack([machine.latency[apart], machine.bandwidth[apart]])
    return (
        len(set(capacities)) == 1
        and len(machine.seconds) == 1
        and bool((links == links[:, :1]).all())
    )


#: A tensor, and a device on which it is made or received.
_Key = tuple[int, int]


def _step_of(
    a: GraphArrays,
    place: Int64[ndarray, " n"],
    overwrites: Int64[ndarray, "w 2"],
    capacity: list[int],
) -> _Step:
    sent = transfers_of(a, place, len(capacity))
    tensors, target = sent.tensor.tolist(), sent.target.tolist()
    message = {key: m for m, key in enumerate(zip(tensors, target, strict=True))}
    made_by = a.tensor_op[sent.tensor].tolist()
    source = place[made_by].tolist()
    blocked_by = [0] * a.num_ops
    for owner, writer in overwrites.tolist():
        for m, t in enumerate(tensors):
            is_here = a.tensor_owner[t] == owner and source[m] == place[writer]
            if is_here and made_by[m] != writer:
                blocked_by[writer] |= 1 << m
    reads, needs = [0] * a.num_ops, [0] * a.num_ops
    for op in range(a.num_ops):
        for t in a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]].tolist():
            m = message.get((t, int(place[op])), -1)
            reads[op] |= 1 << m if m >= 0 else 0
            needs[op] |= 1 << int(a.tensor_op[t])
        for other in a.after_op[a.after_ptr[op] : a.after_ptr[op + 1]].tolist():
            needs[op] |= 1 << other
    devices = range(len(capacity))
    return _Step(
        device=place.tolist(),
        needs=needs,
        reads=reads,
        blocked_by=blocked_by,
        workspace=a.workspace.tolist(),
        storages=_storages(a, place, message, len(capacity)),
        made_by=made_by,
        source=source,
        target=target,
        size=a.tensor_bytes[sent.tensor].tolist(),
        from_device=[sum(1 << m for m, d in enumerate(source) if d == p) for p in devices],
        to_device=[sum(1 << m for m, d in enumerate(target) if d == p) for p in devices],
        capacity=capacity,
    )


def _storages(
    a: GraphArrays, place: Int64[ndarray, " n"], message: dict[_Key, int], num_devices: int
) -> list[list[_Storage]]:
    """Return the storages of each device; `message` has the number of each that is sent."""

    def root(t: int, d: int) -> _Key:
        while place[a.tensor_op[t]] == d and a.tensor_alias[t] >= 0:
            t = int(a.tensor_alias[t])
        return t, d

    users: dict[_Key, int] = {}
    sends: dict[_Key, int] = {}
    for op, d in enumerate(place.tolist()):
        inputs = a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()
        for t in [*inputs, *range(a.output_ptr[op], a.output_ptr[op + 1])]:
            users[root(t, d)] = users.get(root(t, d), 0) | 1 << op
    for (t, _), m in message.items():
        key = root(t, int(place[a.tensor_op[t]]))
        sends[key] = sends.get(key, 0) | 1 << m
    storages: list[list[_Storage]] = [[] for _ in range(num_devices)]
    for (t, d), bits in users.items():
        producer, m = int(a.tensor_op[t]), message.get((t, d), -1)
        stays = m < 0 and bool(a.memory[producer] == RESIDUAL)
        storages[d].append(
            _Storage(
                bytes=int(a.tensor_bytes[t]),
                made=0 if stays or m >= 0 else 1 << producer,
                message=1 << m if m >= 0 else 0,
                users=bits,
                sends=sends.get((t, d), 0),
                stays=stays,
            )
        )
    return storages


def _live_bytes(s: _Step, state: _State, op: int) -> int:
    total, ran = s.workspace[op], state.ran | 1 << op
    for storage in s.storages[s.device[op]]:
        exists = storage.made & ran or storage.message & state.arrived
        needed = storage.users & ~state.ran or storage.sends & ~state.gone
        total += storage.bytes if storage.stays or (exists and needed) else 0
    return total


#: What a walk does: an op runs (0), a message arrives (1), a device goes on to its next op (2).
_Move = tuple[int, int, _State]
_RUN, _ARRIVE, _REACH = 0, 1, 2


def _moves(s: _Step, state: _State) -> Iterator[_Move]:
    """Yield what can happen next; where a device waits for nothing, only that it goes on."""
    made = sum(1 << m for m, op in enumerate(s.made_by) if state.ran >> op & 1)
    for d in range(len(s.capacity)):
        waits = s.from_device[d] & made & ~state.arrived
        reached = state._replace(
            reached=state.reached | 1 << d,
            gone=state.gone | (state.arrived & s.from_device[d]),
            room=(*state.room[:d], 0, *state.room[d + 1 :]),
        )
        if not state.reached >> d & 1:
            yield _REACH, d, reached
            if not waits:
                return
    for m, d in enumerate(s.target):
        if not made >> m & 1 or state.arrived >> m & 1:
            continue
        there = state._replace(arrived=state.arrived | 1 << m)
        if state.reached >> d & 1:
            yield _ARRIVE, m, there
        elif state.room[d] >= s.size[m]:
            room = (*state.room[:d], state.room[d] - s.size[m], *state.room[d + 1 :])
            yield _ARRIVE, m, there._replace(room=room)
    for op, d in enumerate(s.device):
        if state.ran >> op & 1 or not state.reached >> d & 1 or s.needs[op] & ~state.ran:
            continue
        if s.reads[op] & ~state.arrived or s.blocked_by[op] & made & ~state.gone:
            continue
        room = s.capacity[d] - _live_bytes(s, state, op)
        if room >= 0:
            to_come = s.to_device[d] & ~state.arrived
            most = sum(size for m, size in enumerate(s.size) if to_come >> m & 1)
            rooms = (*state.room[:d], min(room, most), *state.room[d + 1 :])
            yield (
                _RUN,
                op,
                state._replace(
                    ran=state.ran | 1 << op, reached=state.reached & ~(1 << d), room=rooms
                ),
            )


def _walk(s: _Step, left: int) -> tuple[list[_Move] | None, int]:
    """Return the moves of a walk that runs every op, and the states that are left to look at."""
    everything, k = (1 << len(s.device)) - 1, len(s.capacity)
    start = _State(0, 0, 0, (1 << k) - 1, (0,) * k)
    seen, path, todo = {start}, [], [_moves(s, start)]
    while todo and left > 0:
        move = next(todo[-1], None)
        if move is None:
            todo.pop()
            if path:
                path.pop()
            continue
        if move[2] in seen:
            continue
        seen.add(move[2])
        left -= 1
        path.append(move)
        todo.append(_moves(s, move[2]))
        if move[2].ran == everything:
            return path, left
    return None, left


def _plan_of(
    a: GraphArrays, place: Int64[ndarray, " n"], s: _Step, walk: list[_Move]
) -> PlanArrays:
    """Return the plan of a walk: posts before the op that a device has reached, or the last one."""
    k, m = len(s.capacity), len(s.made_by)
    order: list[list[int]] = [[] for _ in range(k)]
    post, hold = np.full(m, -1, dtype=np.int64), np.full(m, -1, dtype=np.int64)
    arrivals: list[int] = []
    reached = (1 << k) - 1
    gone = 0
    for kind, number, state in walk:
        if kind == _ARRIVE:
            d = s.target[number]
            arrivals.append(number)
            if not reached >> d & 1:
                post[number] = order[d][-1]
        elif kind == _RUN:
            d = s.device[number]
            order[d].append(number)
            waiting = [i for i in arrivals if s.target[i] == d and post[i] < 0]
            post[waiting] = number
        else:
            let_go = [i for i in arrivals if s.source[i] == number and not gone >> i & 1]
            hold[let_go] = order[number][-1]
        reached, gone = state.reached, state.gone
    sent = transfers_of(a, place, k)
    turn = np.array(arrivals, dtype=np.int64)
    return PlanArrays(
        place=np.array(place, dtype=np.int64),
        order_ptr=np.cumsum([0, *map(len, order)], dtype=np.int64),
        order_op=np.array([op for row in order for op in row], dtype=np.int64),
        message_tensor=sent.tensor[turn],
        message_source=np.array(s.source, dtype=np.int64)[turn],
        message_target=sent.target[turn],
        message_post=post[turn],
        message_hold=hold[turn],
    )

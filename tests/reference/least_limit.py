"""The least limit at which any plan fits, by exhaustion: a certificate for refusals.

Written from the definition of a step (`docs/concepts.md`, "Memory is order-only"), with none of the
planner's ideas: every placement of the groups, every order of each device, every op before which a
receive is posted and every op after which a send is waited for, as one walk over what ranks do. A
device is *waiting* after an op (for sends that are held until it) or has *reached* its next op,
before which receives are posted; a message goes once its tensor exists and its receiver has reached
the op before which it is posted. What a walk can never finish, the ranks' run could not either.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pardnn.graph.ir import Graph, writes


class _Storage(NamedTuple):
    device: int
    bytes: int
    stays: bool
    producer: int  # an op; -1 for a received copy
    message: int  # of a received copy
    users: int  # bits of ops
    sends: int  # bits of messages


class _State(NamedTuple):
    ran: int
    posted: int
    reached_posts: int  # posted messages whose slot was reached
    arrived: int
    released: int
    reached: int  # bits of devices


class _Step(NamedTuple):
    graph: Graph
    place: Sequence[int]
    needs: list[int]  # bits of ops that come before each op
    reads: list[int]  # bits of messages that each op reads
    made_by: list[int]  # op of each message
    source: list[int]
    target: list[int]
    storages: list[_Storage]
    blocks: list[int]  # bits of messages that must have left before each op runs


def least_limit(
    graph: Graph,
    groups: Sequence[int],
    num_devices: int = 2,
    pins: Mapping[int, int] = MappingProxyType({}),
) -> int:
    """Return the least limit, in bytes and the same for all devices, at which some plan fits.

    `pins` has the device of groups that can be on no other; without any, devices are alike.
    """
    names, best = sorted(set(groups)), 1 << 60
    for devices in itertools.product(range(num_devices), repeat=len(names)):
        if not pins and any(d > max(devices[:i], default=-1) + 1 for i, d in enumerate(devices)):
            continue  # the same with devices renamed
        device = dict(zip(names, devices, strict=True))
        if all(device[group] == pinned for group, pinned in pins.items()):
            best = min(best, least_peak(graph, [device[group] for group in groups], best))
    return best


def least_peak(graph: Graph, place: Sequence[int], below: int = 1 << 60) -> int:
    """Return the least peak of a placement over all orders, posts and holds; `below` if no less."""
    step, everything = _step_of(graph, place), (1 << len(graph.ops)) - 1
    start = _State(0, 0, 0, 0, 0, 0)
    heap, seen = [(0, start)], set()
    while heap:
        peak, state = heapq.heappop(heap)
        if peak >= below:
            return below
        if state.ran == everything:
            return peak
        if state in seen:
            continue
        seen.add(state)
        for needed, following in _moves(step, state):
            if following not in seen:
                heapq.heappush(heap, (max(peak, needed), following))
    raise AssertionError("a placement whose ops can run in no order")


def _step_of(graph: Graph, place: Sequence[int]) -> _Step:
    number = {op.name: i for i, op in enumerate(graph.ops)}
    producer = {t.name: (i, t) for i, op in enumerate(graph.ops) for t in op.outputs}
    messages: dict[tuple[str, int], int] = {}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            if place[producer[name][0]] != place[i]:
                messages.setdefault((name, place[i]), len(messages))

    def root(name: str, d: int) -> tuple[str, int]:
        i, tensor = producer[name]
        return root(tensor.alias_of, d) if place[i] == d and tensor.alias_of else (name, d)

    def owner(name: str) -> str:
        base = producer[name][1].alias_of
        return owner(base) if base else name

    users: dict[tuple[str, int], int] = {}
    for i, op in enumerate(graph.ops):
        for name in [*op.inputs, *(t.name for t in op.outputs)]:
            key = root(name, place[i])
            users[key] = users.get(key, 0) | 1 << i
    sends: dict[tuple[str, int], int] = {}
    for (name, _), m in messages.items():
        key = root(name, place[producer[name][0]])
        sends[key] = sends.get(key, 0) | 1 << m
    storages = [
        _Storage(
            device=d,
            bytes=producer[name][1].bytes,
            stays=graph.ops[producer[name][0]].memory == "residual" and (name, d) not in messages,
            producer=-1 if (name, d) in messages else producer[name][0],
            message=messages.get((name, d), -1),
            users=bits,
            sends=sends.get((name, d), 0),
        )
        for (name, d), bits in users.items()
    ]
    blocks = []
    for i, op in enumerate(graph.ops):
        written = {owner(name) for name in writes(op)}
        late = [m for (name, _), m in messages.items()
                if owner(name) in written and place[producer[name][0]] == place[i]
                and producer[name][0] != i]  # fmt: skip
        blocks.append(sum(1 << m for m in late))
    return _Step(
        graph=graph,
        place=place,
        needs=[
            sum(1 << j for j in {producer[name][0] for name in op.inputs}
                | {number[name] for name in op.after})
            for op in graph.ops
        ],
        reads=[
            sum(1 << messages[name, place[i]] for name in dict.fromkeys(op.inputs)
                if (name, place[i]) in messages)
            for i, op in enumerate(graph.ops)
        ],
        made_by=[producer[name][0] for name, _ in messages],
        source=[place[producer[name][0]] for name, _ in messages],
        target=[d for _, d in messages],
        storages=storages,
        blocks=blocks,
    )  # fmt: skip


def _moves(s: _Step, state: _State) -> Iterator[tuple[int, _State]]:
    """Yield each next state, and the bytes that a device holds while an op runs on the way."""
    for m, op in enumerate(s.made_by):
        bit = 1 << m
        if not state.posted & bit and not state.reached >> s.target[m] & 1:
            yield 0, state._replace(posted=state.posted | bit)
        if state.reached_posts & bit and not state.arrived & bit and state.ran >> op & 1:
            yield 0, state._replace(arrived=state.arrived | bit)
    for d in set(s.place):
        if not state.reached >> d & 1:
            mine = sum(1 << m for m in range(len(s.source)) if s.source[m] == d)
            here = sum(1 << m for m in range(len(s.target)) if s.target[m] == d)
            yield (
                0,
                state._replace(
                    reached=state.reached | 1 << d,
                    released=state.released | (state.arrived & mine),
                    reached_posts=state.reached_posts | (state.posted & here),
                ),
            )
    for i, d in enumerate(s.place):
        can = not state.ran >> i & 1 and state.reached >> d & 1 and not s.needs[i] & ~state.ran
        made = sum(1 << m for m, op in enumerate(s.made_by) if state.ran >> op & 1)
        if can and not s.reads[i] & ~state.arrived and not s.blocks[i] & made & ~state.released:
            yield (
                _live_bytes(s, state, i),
                state._replace(ran=state.ran | 1 << i, reached=state.reached & ~(1 << d)),
            )


def _live_bytes(s: _Step, state: _State, op: int) -> int:
    total = s.graph.ops[op].workspace
    for storage in s.storages:
        if storage.device != s.place[op]:
            continue
        exists = (
            bool((state.ran | 1 << op) >> storage.producer & 1)
            if storage.producer >= 0
            else bool(state.posted >> storage.message & 1)
        )
        needed = bool(storage.users & ~state.ran or storage.sends & ~state.released)
        total += storage.bytes if storage.stays or (exists and needed) else 0
    return total

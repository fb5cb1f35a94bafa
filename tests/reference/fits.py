"""Whether any plan at all fits, by exhaustion: for a handful of ops."""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pardnn.graph.ir import Graph


def some_plan_fits(
    graph: Graph,
    groups: Sequence[int],
    capacities: Sequence[int],
    pins: Mapping[int, int] = MappingProxyType({}),
) -> bool:
    """Search all placements, all orders and all instants at which messages can be sent.

    `pins` has the device of groups that can be on no other.
    """
    names = sorted(set(groups))
    for devices in itertools.product(range(len(capacities)), repeat=len(names)):
        device = dict(zip(names, devices, strict=True))
        if any(device[group] != pinned for group, pinned in pins.items()):
            continue
        if _order_fits(graph, [device[group] for group in groups], capacities):
            return True
    return False


def _order_fits(graph: Graph, place: Sequence[int], capacities: Sequence[int]) -> bool:
    """Walk over (ops that ran, messages that were sent): both fix what every device holds."""
    producer = {t.name: (i, t) for i, op in enumerate(graph.ops) for t in op.outputs}
    number = {op.name: i for i, op in enumerate(graph.ops)}

    def storage(name: str, d: int) -> tuple[str, int]:
        """The storage that holds a tensor on a device: its owner's, or a received copy's."""
        producer_op, tensor = producer[name]
        if place[producer_op] == d and tensor.alias_of is not None:
            return storage(tensor.alias_of, d)
        return name, d

    uses: dict[tuple[str, int], set[int]] = {}
    messages: dict[tuple[str, int], set[int]] = {}
    for i, op in enumerate(graph.ops):
        d = place[i]
        for name in op.inputs:
            uses.setdefault(storage(name, d), set()).add(i)
            if place[producer[name][0]] != d:
                messages.setdefault((name, d), set()).add(i)
        for tensor in op.outputs:
            uses.setdefault(storage(tensor.name, d), set()).add(i)
    keys = list(messages)
    needs = [
        {producer[name][0] for name in op.inputs} | {number[name] for name in op.after}
        for op in graph.ops
    ]

    def live_bytes(ran: frozenset[int], sent: frozenset[int], op: int) -> int:
        d, total = place[op], graph.ops[op].workspace
        for (name, home), users in uses.items():
            if home != d:
                continue
            producer_op, tensor = producer[name]
            if place[producer_op] != d:
                alive = keys.index((name, d)) in sent and bool(users - ran)
            elif graph.ops[producer_op].memory == "residual":
                alive = True
            else:
                waiting = any(
                    storage(key[0], d) == (name, d) and i not in sent
                    for i, key in enumerate(keys)
                    if place[producer[key[0]][0]] == d
                )
                exists = producer_op in ran or producer_op == op
                alive = exists and (bool(users - ran) or waiting)
            total += tensor.bytes if alive else 0
        return total

    seen = set()
    stack = [(frozenset(), frozenset())]
    while stack:
        ran, sent = state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        if len(ran) == len(graph.ops):
            return True
        for i, (name, _) in enumerate(keys):
            if i not in sent and producer[name][0] in ran:
                stack.append((ran, sent | {i}))
        for op in range(len(graph.ops)):
            if op in ran or needs[op] - ran:
                continue
            arrived = all(i in sent for i, (name, d) in enumerate(keys) if op in messages[name, d])
            if arrived and live_bytes(ran, sent, op) <= capacities[place[op]]:
                stack.append((ran | {op}, sent))
    return False

"""A naive simulator: repeats one rule until nothing moves, a clock step at a time."""

from collections.abc import Sequence

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.sim.machine import Machine


def finish_times(graph: Graph, machine: Machine, plan: Plan) -> dict[str, float] | None:
    """When each op of a plan finishes, links independent; None if the plan deadlocks.

    Fixed point of the plan's events: an op is reached when the one before it in its list has
    finished and the sends held until that one have left; a message leaves when its tensor exists
    and its receiver has reached `post_before`.
    """
    place = plan.placement
    before = {row[i]: row[i - 1] for row in plan.order for i in range(1, len(row))}
    producer = {t.name: op.name for op in graph.ops for t in op.outputs}
    size = {t.name: t.bytes for op in graph.ops for t in op.outputs}
    seconds = {
        op.name: float(machine.seconds[machine.device_class[place[op.name]], i])
        for i, op in enumerate(graph.ops)
    }
    reached: dict[str, float] = {}
    finish: dict[str, float] = {}
    arrived: dict[tuple[str, int], float] = {}
    moved = True
    while moved:
        moved = False
        for op in graph.ops:
            name, d = op.name, place[op.name]
            if name not in reached:
                gate = [0.0]
                last = before.get(name)
                if last is not None:
                    held = [m for m in plan.messages if m.hold_until == last]
                    gate = [finish.get(last, np.nan)]
                    gate += [arrived.get((m.tensor, m.target), np.nan) for m in held]
                if not np.isnan(gate).any():
                    reached[name] = max(gate)
                    moved = True
            if name in reached and name not in finish:
                ready = [reached[name]]
                for tensor in op.inputs:
                    producer_op = producer[tensor]
                    if place[producer_op] == d:
                        ready.append(finish.get(producer_op, np.nan))
                    else:
                        ready.append(arrived.get((tensor, d), np.nan))
                for predecessor in op.after:
                    comm = machine.latency[place[predecessor], d]
                    ready.append(finish.get(predecessor, np.nan) + comm)
                if not np.isnan(ready).any():
                    finish[name] = max(ready) + seconds[name]
                    moved = True
        for m in plan.messages:
            key = (m.tensor, m.target)
            producer_op = producer[m.tensor]
            if key not in arrived and producer_op in finish and m.post_before in reached:
                comm = machine.latency[m.source, m.target]
                comm += size[m.tensor] / machine.bandwidth[m.source, m.target]
                arrived[key] = max(finish[producer_op], reached[m.post_before]) + comm
                moved = True
    return finish if len(finish) == len(graph.ops) else None


def emulated_finish(
    graph: Graph, machine: Machine, place: Sequence[int], key: Sequence[float] | None
) -> list[float]:
    """When each op finishes if every device takes, among ready ops, the smallest key.

    Without keys: by the time at which the op became ready, then number. Links are independent.
    """
    producer = {t.name: i for i, op in enumerate(graph.ops) for t in op.outputs}
    size = {t.name: t.bytes for op in graph.ops for t in op.outputs}
    number = {op.name: i for i, op in enumerate(graph.ops)}
    n = len(graph.ops)
    finish = [np.nan] * n
    free = [0.0] * machine.num_devices

    def ready_at(i: int) -> float:
        d, times = place[i], [0.0]
        for tensor in graph.ops[i].inputs:
            p = place[producer[tensor]]
            comm = 0.0
            if p != d:
                comm = machine.latency[p, d] + size[tensor] / machine.bandwidth[p, d]
            times.append(finish[producer[tensor]] + comm)
        for predecessor in graph.ops[i].after:
            j = number[predecessor]
            times.append(finish[j] + machine.latency[place[j], d])
        return float(np.max(times))  # NaN while something is missing

    for _ in range(n):
        starts = {}
        for i in range(n):
            if np.isnan(finish[i]) and not np.isnan(ready_at(i)):
                starts[i] = max(ready_at(i), free[place[i]])
        now = min(starts.values())

        def key_of(i: int) -> tuple[float, int]:
            return (ready_at(i) if key is None else key[i]), i

        # At one instant an op of no duration may make another one ready: smallest device first.
        first = min(place[i] for i in starts if starts[i] == now)
        op = min((i for i in starts if starts[i] == now and place[i] == first), key=key_of)
        finish[op] = now + machine.seconds[machine.device_class[first], op]
        free[first] = finish[op]
    return finish

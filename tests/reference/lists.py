"""A naive simulator of lists and of engines that choose: at each moment, whatever may begin begins.

It scans everything at every moment. Links are independent or serial: first to be possible, first
served. Written from the rules of a step's semantics; it shares no code with `pardnn.sim`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.sim.machine import Machine


class Times(NamedTuple):
    """Seconds, by name of the op, and by tensor and target of the message."""

    start: dict[str, float]
    finish: dict[str, float]
    sent: dict[tuple[str, int], float]
    arrived: dict[tuple[str, int], float]


def _delays(graph: Graph, machine: Machine, place: Sequence[int]) -> tuple[dict, dict, dict]:
    device = {op.name: d for op, d in zip(graph.ops, place, strict=True)}
    maker = {t.name: op.name for op in graph.ops for t in op.outputs}
    seconds = {
        op.name: float(machine.seconds[machine.device_class[device[op.name]], i])
        for i, op in enumerate(graph.ops)
    }
    size = {t.name: t.bytes for op in graph.ops for t in op.outputs}
    delay = {
        (t, d): float(machine.latency[device[maker[t]], d])
        + size[t] / float(machine.bandwidth[device[maker[t]], d])
        for t in maker
        for d in range(machine.num_devices)
        if d != device[maker[t]]
    }
    return maker, seconds, delay


def run_lists(graph: Graph, machine: Machine, plan: Plan, ready: Sequence[float] = ()) -> Times:
    """What a plan's own lists do; devices begin at `ready`."""
    place = [plan.placement[op.name] for op in graph.ops]
    maker, seconds, delay = _delays(graph, machine, place)
    ops = {op.name: op for op in graph.ops}
    found = Times({}, {}, {}, {})
    free: dict[tuple[int, int], float] = {}
    reached: set[str] = set()
    begins = list(ready) or [0.0] * machine.num_devices
    moments = {0.0, *begins}
    now = -1.0
    while later := [t for t in moments if t > now]:
        now = min(later)
        done = {name for name, t in found.finish.items() if t <= now}
        here = {key for key, t in found.arrived.items() if t <= now}
        for d, row in enumerate(plan.order):
            for before, name in zip((None, *row), row, strict=False):
                held = [m for m in plan.messages if before and m.hold_until == before]
                is_free = before is None or before in done
                if now < begins[d] or not is_free:
                    break
                if any((m.tensor, m.target) not in here for m in held):
                    break
                reached.add(name)
        for name in reached - found.start.keys():
            op, d = ops[name], plan.placement[name]
            waits = [
                maker[t] in done if plan.placement[maker[t]] == d else (t, d) in here
                for t in op.inputs
            ]
            for other in op.after:
                away = plan.placement[other] != d
                lag = float(machine.latency[plan.placement[other], d]) if away else 0.0
                waits.append(other in done and found.finish[other] + lag <= now)
            if all(waits):
                found.start[name], found.finish[name] = now, now + seconds[name]
        for m in plan.messages:
            key, link = (m.tensor, m.target), (m.source, m.target)
            if key not in found.sent and maker[m.tensor] in done and m.post_before in reached:
                at = max(now, free.get(link, 0.0)) if machine.serial else now
                found.sent[key], found.arrived[key] = at, at + delay[key]
                free[link] = at + delay[key]
        moments |= {*found.finish.values(), *found.arrived.values()}
        moments |= {
            found.finish[other] + float(machine.latency[plan.placement[other], d])
            for name, d in plan.placement.items()
            for other in ops[name].after
            if other in found.finish and plan.placement[other] != d
        }
    return found


def emulate(
    graph: Graph, machine: Machine, place: Sequence[int], key: Sequence[float] | None
) -> Times:
    """What engines do that take, among ready ops, the smallest key; else the first to be ready."""
    maker, seconds, delay = _delays(graph, machine, place)
    found = Times({}, {}, {}, {})
    ready: dict[str, float] = {}
    free: dict[tuple[int, int], float] = {}
    device = {op.name: d for op, d in zip(graph.ops, place, strict=True)}
    moments, now = {0.0}, -1.0
    while later := [t for t in moments if t > now]:
        now = min(later)
        done = {name for name, t in found.finish.items() if t <= now}
        here = {each for each, t in found.arrived.items() if t <= now}
        for op in graph.ops:  # a tensor leaves for each device that reads it when it exists
            for t in op.inputs:
                each, link = (t, device[op.name]), (device[maker[t]], device[op.name])
                if link[0] != link[1] and maker[t] in done and each not in found.sent:
                    at = max(now, free.get(link, 0.0)) if machine.serial else now
                    found.sent[each], found.arrived[each] = at, at + delay[each]
                    free[link] = at + delay[each]
        for op in graph.ops:
            d = device[op.name]
            lags = {o: float(machine.latency[device[o], d]) * (device[o] != d) for o in op.after}
            waits = [maker[t] in done if device[maker[t]] == d else (t, d) in here
                     for t in op.inputs]  # fmt: skip
            waits += [o in done and found.finish[o] + lag <= now for o, lag in lags.items()]
            if all(waits):
                ready.setdefault(op.name, now)
        for d in range(machine.num_devices):
            mine = [i for i, op in enumerate(graph.ops) if device[op.name] == d]
            names = [graph.ops[i].name for i in mine]
            if any(found.start.get(n, now + 1) <= now < found.finish[n] for n in names
                   if n in found.finish):  # fmt: skip
                continue
            waiting = [i for i in mine if graph.ops[i].name in ready.keys() - found.start.keys()]
            if waiting:
                first = min(waiting, key=lambda i: (
                    ready[graph.ops[i].name] if key is None else key[i], i))  # fmt: skip
                name = graph.ops[first].name
                found.start[name], found.finish[name] = now, now + seconds[name]
        moments |= {*found.finish.values(), *found.arrived.values()}
        for op in graph.ops:
            d = device[op.name]
            moments |= {
                found.finish[o] + float(machine.latency[device[o], d])
                for o in op.after
                if o in found.finish and device[o] != d
            }
    return found

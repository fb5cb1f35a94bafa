"""Second calls for a placed step: each device decides by itself which ops to call again.

A second call runs on the device of the first one and is only read there; what another device reads
is sent once. So each device is a step of its own, in which a received copy is made by an op that
may not be called again, and a held send is one more reader, until which the tensor is kept.

A tensor that one device reads may be overwritten later by another, which then waits until second
calls have read it; a device that made those calls later still would wait for itself. So calls
follow one order of all events in which the plan can run: none is put before an op that its device
reaches after the write in that order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, storage_owners, writes
from pardnn.place.recompute.calls import second_calls
from pardnn.place.recompute.problem import RECEIVE, SEND, nodes_of
from pardnn.place.recompute.retention import cost_of, empty_schedule
from pardnn.place.recompute.search import WORK, retention
from pardnn.plan.lower import event_times
from pardnn.plan.plan import Plan, plan_arrays
from pardnn.plan.rewritten.recompute import SecondCall, topological_positions


def recomputed_plan(
    graph: Graph,
    plan: Plan,
    seconds: Float64[np.ndarray, "k n"],
    capacities: Sequence[int | None],
    *,
    seed: int = 0,
    work: int = WORK,
) -> Plan:
    """Return a plan with second calls of ops, so that every device fits.

    If none was found for a device, it gets the calls that need the fewest bytes.

    Args:
        graph: The graph.
        plan: A valid plan for it, memory aside.
        seconds: Of each op on each device.
        capacities: Usable bytes of each device; None for unlimited.
        seed: Of the search.
        work: Of the search, see `retention`.
    """
    number = {op.name: i for i, op in enumerate(graph.ops)}
    calls: list[SecondCall] = []
    placement = dict(plan.placement)
    order: list[tuple[str, ...]] = []
    devices = [device_graph(graph, plan, device) for device in range(len(capacities))]
    lasts = _last_places(graph, plan, devices)
    for device, capacity in enumerate(capacities):
        local = devices[device]
        own = np.array([seconds[device, number[op.name]] if op.name in number else 0.0
                        for op in local.ops])  # fmt: skip
        rows = np.arange(len(local.ops))
        nodes = nodes_of(local, rows, np.where(np.isfinite(own), own, 0.0))
        nodes = nodes._replace(latest=np.minimum(nodes.latest, lasts[device]))
        limit = 2**62 if capacity is None else capacity
        found = retention(nodes, limit, seed=seed, work=work)
        schedule = empty_schedule(nodes)
        cost_of(nodes, found[0], limit, schedule)
        made, names = second_calls(local, rows, nodes, found[0], schedule)
        calls += made
        placement.update({call.name: device for call in made})
        order.append(tuple(name for name in names if name in placement))
    return dataclasses.replace(
        plan, placement=placement, order=tuple(order), recompute=tuple(calls) or None
    )


def _last_places(
    graph: Graph, plan: Plan, devices: Sequence[Graph]
) -> list[Int64[np.ndarray, " n"]]:
    """Return, per device and op of its graph, the last op before which it may be called again.

    Args:
        graph: The graph.
        plan: A valid plan for it, memory aside.
        devices: The graph of each device, from `device_graph`.
    """
    lasts = [np.full(len(local.ops), len(local.ops), dtype=np.int64) for local in devices]
    overwritten = _overwritten_elsewhere(graph, plan)
    if not overwritten:
        return lasts
    runs, reached = event_times(graph, plan_arrays(graph, plan))
    number = {op.name: i for i, op in enumerate(graph.ops)}
    for local, last in zip(devices, lasts, strict=True):
        places = [i for i, op in enumerate(local.ops) if op.name in number]  # the others: messages
        moments = reached[[number[local.ops[i].name] for i in places]]
        for i in places:
            if writers := overwritten.get(local.ops[i].name):
                written = min(runs[number[name]] for name in writers)
                last[i] = ([-1, *places])[np.searchsorted(moments, written)]
    return lasts


def _overwritten_elsewhere(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """Return the ops whose inputs other devices overwrite later, each with those that write."""
    owners = storage_owners(graph.ops)
    writers: dict[str | None, list[str]] = {}
    for op in graph.ops:
        for owner in {owners[name]: None for name in writes(op)}:
            writers.setdefault(owner, []).append(op.name)
    position, place = topological_positions(graph), plan.placement
    found: dict[str, list[str]] = {}
    for op in graph.ops:
        for owner in {owners[name]: None for name in op.inputs}:
            for writer in writers.get(owner, ()):
                if place[writer] != place[op.name] and position[writer] > position[op.name]:
                    found.setdefault(op.name, []).append(writer)
    return found


def device_graph(graph: Graph, plan: Plan, device: int) -> Graph:
    """Return the ops of a device, in their order, as a graph of its own.

    Args:
        graph: The graph.
        plan: A valid plan for it, memory aside.
        device: Which device.
    """
    ops = {op.name: op for op in graph.ops}
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    here = plan.order[device]
    received: dict[str, list[Op]] = {}
    held: dict[str, list[Op]] = {}
    last = here[-1] if here else ""
    for i, message in enumerate(plan.messages):
        if message.target == device:
            copy = dataclasses.replace(tensors[message.tensor], alias_of=message.into)
            into = () if message.into is None else (message.into,)
            made = Op(name=f"receive:{i}", kind=RECEIVE, inputs=into, outputs=(copy,))
            received.setdefault(message.post_before, []).append(made)
        elif message.source == device:
            reader = Op(name=f"send:{i}", kind=SEND, inputs=(message.tensor,))
            held.setdefault(message.hold_until or last, []).append(reader)
    own = set(here)
    found: list[Op] = []
    for name in here:
        op = ops[name]
        after = tuple(other for other in op.after if other in own)
        local = dataclasses.replace(op, after=after, group=None)
        found += [*received.get(name, ()), local, *held.get(name, ())]
    return build_graph(graph.name, found or [Op(name="send:none", kind=SEND)])

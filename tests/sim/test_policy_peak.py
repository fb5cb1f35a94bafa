"""Peaks along emulated times: by hand, by a twin that counts references, and on one device."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.sim.dynamic import emulate
from pardnn.sim.peak import peaks
from pardnn.sim.policy_peak import policy_peaks
from pardnn.sim.timeline import Timeline
from tests.place.machines import cluster_of, machine_for, random_place
from tests.strategies import graphs


def three_pairs() -> Graph:
    """Three sources of 10 bytes, each read by an op that makes 1; a last op reads these."""
    ops = [
        Op(name=f"{kind}{i}", kind="input" if kind == "s" else "aten.mm.default",
           inputs=() if kind == "s" else (f"s{i}.out",),
           outputs=(Tensor(name=f"{kind}{i}.out", bytes=10 if kind == "s" else 1),),
           seconds={"accelerator": 1.0})
        for i in range(3) for kind in "sc"
    ]  # fmt: skip
    last = Op(name="end", kind="aten.mm.default", inputs=tuple(f"c{i}.out" for i in range(3)),
              seconds={"accelerator": 1.0})  # fmt: skip
    return build_graph("three pairs", [*ops, last])


def test_first_come_first_served_holds_all_sources() -> None:
    graph, place = three_pairs(), np.zeros(7, dtype=np.int64)
    machine = machine_for(graph, cluster_of(1))
    timeline = emulate(graph.arrays, machine, place)
    assert policy_peaks(graph.arrays, place, 1, timeline).tolist() == [31]
    in_turn = emulate(graph.arrays, machine, place, np.arange(7.0))
    assert policy_peaks(graph.arrays, place, 1, in_turn).tolist() == [13]


def counted(graph: Graph, place: list[int], num_devices: int, timeline: Timeline) -> list[int]:
    """Peaks by reference counts, event by event."""
    producer = {t.name: (i, t) for i, op in enumerate(graph.ops) for t in op.outputs}
    tensors = list(producer)

    def storage(name: str, d: int) -> tuple[str, int]:
        i, tensor = producer[name]
        return storage(tensor.alias_of, d) if place[i] == d and tensor.alias_of else (name, d)

    users: dict[tuple[str, int], int] = {}
    sends = [
        (storage(tensors[t], int(s)), (tensors[t], int(d)))
        for t, s, d in zip(timeline.message_tensor, timeline.message_source,
                           timeline.message_target, strict=True)
    ]  # fmt: skip
    touched = [
        {storage(name, place[i]) for name in [*op.inputs, *(t.name for t in op.outputs)]}
        for i, op in enumerate(graph.ops)
    ]
    for keys in [*touched, *({source, copy} for source, copy in sends)]:
        for key in keys:
            users[key] = users.get(key, 0) + 1
    events = []
    for i in range(len(graph.ops)):
        start, finish, turn = timeline.start[i], timeline.finish[i], int(timeline.dispatch[i])
        events.append((start, 2, 2 * turn, "start", i))
        events.append((finish, 2 if finish <= start else 0, 2 * turn + 1, "finish", i))
    for m in range(len(sends)):
        sent, arrived = timeline.message_start[m], timeline.message_finish[m]
        events.append((sent, 1, 2 * m, "send", m))
        events.append((arrived, 1 if arrived <= sent else 0, 2 * m + 1, "arrive", m))
    held = dict.fromkeys(users, 0)
    live = [0] * num_devices
    for i, op in enumerate(graph.ops):
        if op.memory == "residual":
            live[place[i]] += sum(t.bytes for t in op.outputs if not t.alias_of)
    peak = list(live)

    def let_go(keys) -> None:
        for key in keys:
            users[key] -= 1
            if users[key] == 0:
                live[key[1]] -= held[key]

    for _, _, _, kind, number in sorted(events):
        if kind == "start":
            op, d = graph.ops[number], place[number]
            live[d] += op.workspace
            for t in op.outputs:
                if not t.alias_of and op.memory != "residual":
                    held[t.name, d] = t.bytes
                    live[d] += t.bytes
                    assert users[t.name, d] > 0
        elif kind == "finish":
            live[place[number]] -= graph.ops[number].workspace
            let_go(touched[number])
        elif kind == "send":
            name, d = sends[number][1]
            held[name, d] = producer[name][1].bytes
            live[d] += held[name, d]
        else:
            let_go(sends[number])
        peak = [max(a, b) for a, b in zip(peak, live, strict=True)]
    return peak


@given(graph=graphs(max_ops=14), num_devices=st.integers(1, 3), seed=st.integers(0, 9))
def test_peaks_are_those_of_counted_references(graph: Graph, num_devices: int, seed: int) -> None:
    machine = machine_for(graph, cluster_of(num_devices, latency=0.25 * (seed % 2)))
    place = random_place(graph, num_devices, seed)
    timeline = emulate(graph.arrays, machine, place)
    found = policy_peaks(graph.arrays, place, num_devices, timeline)
    assert found.tolist() == counted(graph, place.tolist(), num_devices, timeline)


@given(graph=graphs(max_ops=14))
def test_on_one_device_it_is_the_peak_of_the_order(graph: Graph) -> None:
    machine, place = machine_for(graph, cluster_of(1)), np.zeros(len(graph.ops), dtype=np.int64)
    timeline = emulate(graph.arrays, machine, place)
    plan = ordered_plan(graph.arrays, 1, place, timeline, first_overwrites(graph))
    found = policy_peaks(graph.arrays, place, 1, timeline)
    assert found.tolist() == peaks(graph.arrays, plan).tolist()

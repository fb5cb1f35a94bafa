"""Plans that tests of the page draw; names are what an attacker would write."""

from __future__ import annotations

import dataclasses

from pardnn.api.planning import plan as make_plan
from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.plan import Plan

#: Each would run, or end the element that it stands in, were it taken for markup or code.
HOSTILE = (
    "</script><script>window.PWNED=1</script>",
    "<img src=x onerror=window.PWNED=1>",
    "');window.PWNED=1;//",
    "]]><svg onload=window.PWNED=1>",
    "line\u2028window.PWNED=1\u2029",
    "javascript:window.PWNED=1",
)
LAYERS = len(HOSTILE)


def hostile_step() -> Graph:
    """A step of a few layers: forward, backward, weight gradient and update of each."""
    forward, backward, update = [], [], []
    given = [_op("x", "input", (), module=None)]
    before, after = "x", f"{HOSTILE[-1]}{LAYERS - 1}"
    for i, name in enumerate(HOSTILE):
        weight, made = f"w{i}", f"{name}{i}"
        given.append(dataclasses.replace(_op(weight, "parameter", ()), memory="residual"))
        forward.append(_op(made, "call", (before, weight), module=f"net.{i}{name}"))
        above = f"d{i + 1}" if i + 1 < LAYERS else after
        gradient = _op(f"d{i}", "call", (above, made), module=f"net.{i}{name}", of=made)
        of_weight = _op(f"g{i}", "call", (f"d{i}",), module=f"net.{i}{name}", of=made)
        backward[:0] = [gradient, of_weight]
        changed = dataclasses.replace(_tensor(f"u{i}"), alias_of=weight)
        one = _op(f"u{i}", "add_", (weight, f"g{i}"), module=None)
        update.append(dataclasses.replace(one, outputs=(changed,), memory="reference",
                                          group=weight, after=(made,)))  # fmt: skip
        given[-1] = dataclasses.replace(given[-1], group=weight)
        before = made
    return build_graph(HOSTILE[0], [*given, *forward, *backward, *update])


def _tensor(name: str) -> Tensor:
    return Tensor(name=name, bytes=256, shape=(64,), dtype="float32")


def _op(
    name: str, kind: str, inputs: tuple[str, ...], *, module: str | None = "", of: str | None = None
) -> Op:
    is_call = kind not in ("input", "parameter")
    return Op(
        name=name, kind=kind, inputs=inputs, outputs=(_tensor(name),),
        seconds={"accelerator": 1e-3} if is_call else None, module=module or None,
        source=f"{HOSTILE[1]}.py:7" if is_call else None, backward_of=of, workspace=64 * is_call,
    )  # fmt: skip


def planned(
    graph: Graph, devices: int = 2, *, algorithm: str = "round-robin", memory: str | None = None
) -> Plan:
    """A plan on devices with hostile names."""
    cluster = Cluster.uniform(devices, memory=memory, bandwidth=1e9, latency=1e-4)
    named = tuple(
        dataclasses.replace(device, name=f"{HOSTILE[i % LAYERS]}{i}")
        for i, device in enumerate(cluster.devices)
    )
    cluster = dataclasses.replace(cluster, devices=named)
    return make_plan(graph, cluster, algorithm=algorithm, reserve=0.0)

"""Consecutive steps as one ordinary graph: each op once per step, each device's list in a row."""

import dataclasses

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op
from pardnn.plan.plan import Plan
from pardnn.sim.machine import Machine


def unrolled(graph: Graph, plan: Plan, steps: int) -> tuple[Graph, Plan]:
    """Return the graph of so many steps and its plan; what is sent last is held to a step's end."""

    def named(name: str | None, step: int) -> str | None:
        return None if name is None else f"{name}#{step}"

    def copy(op: Op, step: int) -> Op:
        def each(names):
            return tuple(f"{name}#{step}" for name in names)

        outputs = tuple(
            dataclasses.replace(t, name=f"{t.name}#{step}", alias_of=named(t.alias_of, step))
            for t in op.outputs
        )
        return dataclasses.replace(
            op, name=f"{op.name}#{step}", inputs=each(op.inputs), after=each(op.after),
            outputs=outputs, group=named(op.group, step),
        )  # fmt: skip

    numbers = range(steps)
    messages = [
        dataclasses.replace(
            m, tensor=f"{m.tensor}#{i}", post_before=f"{m.post_before}#{i}",
            hold_until=f"{m.hold_until or plan.order[m.source][-1]}#{i}",
        )
        for i in numbers
        for m in plan.messages
    ]  # fmt: skip
    return build_graph(graph.name, [copy(op, i) for i in numbers for op in graph.ops]), Plan(
        placement={f"{name}#{i}": d for i in numbers for name, d in plan.placement.items()},
        order=tuple(tuple(f"{name}#{i}" for i in numbers for name in row) for row in plan.order),
        messages=tuple(messages),
    )


def unrolled_machine(machine: Machine, steps: int) -> Machine:
    """Return the machine for the ops of so many steps."""
    return machine._replace(seconds=np.tile(machine.seconds, steps))

"""What every rank derives from graph and plan before it has anything of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pardnn.backends.torch.comm.wire_format import Wire, make_wires
from pardnn.graph.ir import LOSS_KIND, Graph, Op
from pardnn.plan.lower import Lowered, first_uses, lower
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph


class Program:
    """A plan for a graph, lowered.

    Attributes:
        whole: The graph of the step.
        graph: The graph whose ops the plan places: the same, or its partitioned form.
        plan: Valid for it.
        sources: Sources of the step, by the names of their values.
        lowered: Messages in their global order and the actions of each rank.
        wires: What each message carries; after them, the loss to every other rank.
        loss: The op that marks the loss; None if the graph has none.
        peaks: Predicted peak bytes of each rank.
    """

    def __init__(self, graph: Graph, plan: Plan, lowered: Lowered | None = None) -> None:
        self.whole = graph
        self.graph = graph = planned_graph(graph, plan)
        self.plan = plan
        self.lowered = lowered or lower(graph, plan)
        self.tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
        self.ops = {op.name: op for op in graph.ops}
        self.sources = {op.outputs[0].name: op for op in self.whole.ops if op.is_source}
        self.loss = next((op for op in graph.ops if op.kind == LOSS_KIND), None)
        self.peaks = peak_bytes(graph, plan_arrays(graph, plan))
        readers = _readers(graph, plan, self.lowered)
        self.wires = make_wires(graph, self.lowered.messages, readers)
        self.loss_wires = tuple(self._loss_wires())

    def _loss_wires(self) -> Iterator[Wire]:
        if self.loss is None:
            return
        home = self.plan.placement[self.loss.name]
        tensor = self.tensors[self.loss.inputs[0]]
        number = len(self.wires)
        for target in range(self.plan.num_devices):
            if target != home:
                dtype = tensor.dtype or "float32"
                size = tensor.bytes
                yield Wire(number, tensor.name, home, target, size, dtype, tensor.shape or (),
                           tuple(tensor.strides or torch.empty(tensor.shape or ()).stride()),
                           self.loss.name, "the loss")  # fmt: skip
                number += 1

    def residents(self, rank: int) -> list[Op]:
        """Ops of a rank whose values outlive the step and must be given to it."""
        return [
            self.ops[name]
            for name in self.plan.order[rank]
            if self.ops[name].kind in ("parameter", "buffer", "state")
        ]

    def inputs(self) -> list[Op]:
        """Ops of the whole graph whose values are given anew at every step, to every rank."""
        return [op for op in self.whole.ops if op.kind == "input"]


def _readers(graph: Graph, plan: Plan, lowered: Lowered) -> list[str]:
    uses = first_uses(graph, plan_arrays(graph, plan))
    names = {
        (message.tensor, message.target): graph.ops[use].name
        for message, use in zip(plan.messages, uses, strict=True)
    }
    return [names[message.tensor, message.target] for message in lowered.messages]

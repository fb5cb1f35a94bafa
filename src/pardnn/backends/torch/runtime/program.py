"""The program: what every rank derives, alike, from graph and plan."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pardnn.backends.torch.comm.wire_format import MessageSpec, dense_strides, message_specs
from pardnn.graph.ir import LOSS_KIND, Graph, Op
from pardnn.plan.lower import Lowered, first_uses, lower
from pardnn.plan.memory import peak_bytes
from pardnn.plan.partitioned_graph import check_batch_is_read_only, written_inputs
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.plan.state_layout import STATE_KINDS, state_layout


class Program:
    """A plan for a graph, lowered.

    Attributes:
        whole: The graph of the step.
        graph: The graph whose ops the plan places: `whole`, or its partitioned form.
        plan: Valid for `graph`.
        lowered: Messages in their global order and the actions of each rank.
        tensors: Tensors of `graph` by name.
        ops: Ops of `graph` by name.
        sources: Source ops of `whole`, by the names of their values.
        loss: The op that marks the loss; None if the graph has none.
        peaks: Predicted peak bytes of each rank.
        specs: Of the messages in `lowered`.
        result_specs: Of the messages after the last action, numbered on: they bring the loss, and
            the batch tensors that the step writes, to every other rank.
        written: Batch tensors that the step writes in place.
        state: Where each parameter, buffer and optimizer state lives.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.whole = graph
        self.graph = graph = planned_graph(graph, plan)
        self.plan = plan
        arrays = plan_arrays(graph, plan)
        self.lowered = lower(graph, plan, arrays)
        self.tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
        self.ops = {op.name: op for op in graph.ops}
        self.sources = {op.outputs[0].name: op for op in self.whole.ops if op.is_source}
        self.loss = next((op for op in graph.ops if op.kind == LOSS_KIND), None)
        self.peaks = peak_bytes(graph, arrays)
        consumers = _first_consumers(graph, plan, arrays, self.lowered)
        self.specs = message_specs(graph, self.lowered.messages, consumers)
        self.written = written_inputs(self.whole)
        self.state = state_layout(self.whole, plan)
        if plan.partition is not None:
            check_batch_is_read_only(self.whole)
        self.result_specs = tuple(self._result_specs())

    def _result_specs(self) -> Iterator[MessageSpec]:
        results = [] if self.loss is None else [(self.loss, self.tensors[self.loss.inputs[0]])]
        results += [(self.ops[name], self.ops[name].outputs[0]) for name in self.written]
        number = len(self.specs)
        for op, tensor in results:
            home, shape = self.plan.placement[op.name], tensor.shape or ()
            strides = tensor.strides or torch.empty(shape, device="meta").stride()
            for target in range(self.plan.num_devices):
                if target == home:
                    continue
                yield MessageSpec(
                    number=number,
                    tensor=tensor.name,
                    source=home,
                    target=target,
                    bytes=tensor.bytes,
                    dtype=tensor.dtype or "float32",
                    shape=shape,
                    strides=dense_strides(shape, strides),
                    producer=op.name,
                    consumer="the step's result",
                )
                number += 1

    def residents(self, rank: int) -> list[Op]:
        """Return the ops of a rank whose values outlive the step and must be given to it."""
        return [
            self.ops[name] for name in self.plan.order[rank] if self.ops[name].kind in STATE_KINDS
        ]

    def inputs(self) -> list[Op]:
        """Return the ops of the whole graph whose values every rank is given at every step."""
        return [op for op in self.whole.ops if op.kind == "input"]


def _first_consumers(graph: Graph, plan: Plan, arrays: PlanArrays, lowered: Lowered) -> list[str]:
    """Return for each lowered message the receiver's op that reads it first."""
    uses = first_uses(graph, arrays)
    names = {
        (message.tensor, message.target): graph.ops[use].name
        for message, use in zip(plan.messages, uses, strict=True)
    }
    return [names[message.tensor, message.target] for message in lowered.messages]

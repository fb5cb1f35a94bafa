"""The program: what every rank derives in the same way from graph and plan."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pardnn.backends.torch.comm.wire_format import MessageSpec, message_specs
from pardnn.backends.torch.devices import strides_of
from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Graph, Op, Tensor, span_bytes
from pardnn.plan.lower import Lowered, first_uses, lower
from pardnn.plan.memory import made_peaks, peak_bytes
from pardnn.plan.partitioned_graph import check_batch_is_read_only, written_inputs
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.plan.state_layout import STATE_KINDS, Shard, kept_shards, state_layout


class Program:
    """A plan for a graph, lowered.

    Attributes:
        whole: The graph of the step.
        graph: The graph whose ops the plan places: `whole`, or its partitioned form.
        plan: Valid for `graph`.
        lowered: Messages in their global order and the actions of each rank.
        tensors: Tensors of `graph` by name.
        ops: Ops of `graph` by name.
        producers: Name of the op that makes each tensor of `graph`.
        sources: Source ops of `whole`, by the names of their values.
        loss: The op that marks the loss, which an evaluation does not have; None if the graph has
            no such op.
        peaks: Predicted peak bytes of each rank.
        made_peaks: The peak of what the step makes, for each rank.
        specs: The specs of the messages in `lowered`.
        result: Structure of what the step returns (`runtime.results`); None for the loss alone.
        effects: What the step prints, logs and checks (`runtime.effects`).
        kept_tensors: Tensors of `whole` that the step returns or that its effects need, by name.
        kept: Per tensor of that structure its shards, which live until the end of the step.
        result_specs: The specs of the messages after the last action, numbered on: they bring the
            loss, what else the step returns, and the batch tensors that it writes, to every other
            rank.
        written: Batch tensors that the step writes in place.
        state: Where each parameter, buffer and optimizer state is.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.whole = graph
        self.graph = graph = planned_graph(graph, plan)
        self.plan = plan
        arrays = plan_arrays(graph, plan)
        self.lowered = lower(graph, plan, arrays)
        self.tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
        self.ops = {op.name: op for op in graph.ops}
        self.producers = {t.name: op.name for op in graph.ops for t in op.outputs}
        self.sources = {op.outputs[0].name: op for op in self.whole.ops if op.is_source}
        self.loss = graph.loss_op
        self.peaks = peak_bytes(graph, arrays)
        self.made_peaks = made_peaks(graph, arrays)
        consumers = _first_consumers(graph, plan, arrays, self.lowered)
        self.specs = message_specs(graph, self.lowered.messages, consumers)
        self.written = written_inputs(self.whole)
        self.state = state_layout(self.whole, plan)
        self._beside: dict[int, list[str]] = {}
        marked = (self.loss.arguments or {}) if self.loss else {}
        self.result, self.effects = marked.get("result"), marked.get("effects", [])
        named = kept_names([self.result, self.effects])
        made = {t.name: (op, t) for op in self.whole.ops for t in op.outputs if t.name in named}
        self.kept = {name: kept_shards(*made[name], plan) for name in sorted(made)}
        self.kept_tensors = {name: tensor for name, (_, tensor) in made.items()}
        self._check_kept()
        if not plan.keeps_bits:
            check_batch_is_read_only(self.whole)
        self.result_specs = tuple(self._result_specs())

    def _check_kept(self) -> None:
        for shard in (shard for shards in self.kept.values() for shard in shards):
            if self.ops[self.producers[shard.tensor]].memory != "residual":
                raise InvalidPlanError(
                    f"the step returns {shown(shard.tensor)}, but the plan frees it on device "
                    f"{shard.device} before the step ends"
                )

    def _result_specs(self) -> Iterator[MessageSpec]:
        ends = self._result_ends()
        for number, (tensor, source, target) in enumerate(ends, len(self.specs)):
            shape = tensor.shape or ()
            yield MessageSpec(
                number=number,
                tensor=tensor.name,
                source=source,
                target=target,
                bytes=span_bytes(tensor),
                dtype=tensor.dtype or "float32",
                shape=shape,
                strides=strides_of(tensor),
                producer=self.producers[tensor.name],
                consumer="the step's result",
                misaligned_bytes=tensor.misaligned_bytes,
            )

    def _result_ends(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield each tensor that is sent after the step, with its source and target."""
        ranks = range(self.plan.num_devices)
        if self.loss is not None and self.loss.inputs:
            home = self.plan.placement[self.loss.name]
            loss = self.tensors[self.loss.inputs[0]]
            yield from ((loss, home, rank) for rank in ranks if rank != home)
        for name in self.written:
            home = self.plan.placement[name]
            yield from ((self.ops[name].outputs[0], home, rank) for rank in ranks if rank != home)
        for shards in self.kept.values():
            # Of several replicas, the first sends.
            for first in {shard.box: shard for shard in reversed(shards)}.values():
                holders = {shard.device for shard in shards if shard.box == first.box}
                tensor = self.tensors[first.tensor]
                yield from ((tensor, first.device, rank) for rank in ranks if rank not in holders)

    def residents(self, rank: int) -> list[Op]:
        """Return the ops of a rank whose values outlive the step and must be given to it."""
        placed = (*self.plan.order[rank], *self._beside.get(rank, ()))
        return [self.ops[name] for name in placed if self.ops[name].kind in STATE_KINDS]

    def beside(self, others: Iterable[tuple[Op, Sequence[tuple[Shard, Op]]]]) -> Program:
        """Return this program with additional state, which none of its ops reads.

        Args:
            others: Sources that are in no graph, each with its shards and their ops.
        """
        made = copy.copy(self)
        made.sources, made.state, made.ops = {**self.sources}, {**self.state}, {**self.ops}
        made._beside = {rank: [*names] for rank, names in self._beside.items()}
        for source, shards in others:
            made.sources[source.outputs[0].name] = source
            made.state[source.name] = tuple(shard for shard, _ in shards)
            made.ops |= {op.name: op for _, op in shards}
            for shard, op in shards:
                made._beside.setdefault(shard.device, []).append(op.name)
        return made

    def largest_bytes(self, op: Op) -> int:
        """Return the bytes of the largest tensor that an op takes or makes."""
        taken = (self.tensors[name] for name in op.inputs)
        return max((tensor.bytes for tensor in (*taken, *op.outputs)), default=0)

    def inputs(self) -> list[Op]:
        """Return the ops of the whole graph whose values every rank gets at every step."""
        return [op for op in self.whole.ops if op.kind == "input"]


def kept_names(structure: Any) -> set[str]:
    """Return the tensors that the structure of a result names."""
    found: set[str] = set()
    stack = [structure]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict) and "kept" in item:
            found.add(item["kept"])
        elif isinstance(item, dict):
            stack += item.values()
    return found


def _first_consumers(graph: Graph, plan: Plan, arrays: PlanArrays, lowered: Lowered) -> list[str]:
    """Return for each lowered message the receiver's op that reads it first."""
    uses = first_uses(graph, arrays)
    names = {
        (message.tensor, message.target): graph.ops[use].name
        for message, use in zip(plan.messages, uses, strict=True)
    }
    return [names[message.tensor, message.target] for message in lowered.messages]

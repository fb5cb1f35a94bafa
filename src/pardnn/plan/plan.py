"""The plan: the whole decision, as data.

Planners write it, the simulator and the runtime read it, and none of the three knows the others. It
fixes where every op runs, in which order on each device, and for every message where in each
rank's list the receive buffer is allocated and the sent tensor released. So its peak memory is
known without a clock (`plan.memory`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import STRICT, Cluster
from pardnn.errors import MismatchError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.plan.constraints import Constraint
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.pieces import Pieces
from pardnn.plan.rewritten.offload import graph_with_host
from pardnn.plan.rewritten.recompute import SecondCall, graph_with_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor sent from one device to another; a tensor goes to a device at most once.

    Attributes:
        tensor: Its name.
        source: Index of the sending device.
        target: Index of the receiving device.
        post_before: The receiver's op before which the buffer is allocated and the irecv posted.
        hold_until: The sender's op after which it waits for its isend and may free the tensor;
            None: the tensor is held until the end of the step.
        into: The receiver's tensor into which it is received in place, without a buffer of its
            own: an output of a `pardnn.fetch` (`plan.partitioned_graph`). None: into a new buffer.
    """

    __pydantic_config__ = STRICT

    tensor: str
    source: int
    target: int
    post_before: str
    hold_until: str | None = None
    into: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the planner expects; bytes are exact, the time is a simulation.

    Attributes:
        makespan_s: Of one step, simulated.
        peak_bytes: Of each device.
        transfer_bytes: Sent in all.
        costs: Where the seconds of ops come from, see `cost.costs.Costs`; None if not stated.
    """

    __pydantic_config__ = STRICT

    makespan_s: float
    peak_bytes: tuple[int, ...]
    transfer_bytes: int
    costs: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How an algorithm compared with the one that won.

    Attributes:
        algorithm: Its name; before it the part of a search that it was run in.
        makespan_s: Simulated, in seconds; None if it made no plan.
        why: Why it made none; None if it made one.
    """

    __pydantic_config__ = STRICT

    algorithm: str
    makespan_s: float | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A decision for one graph.

    Attributes:
        placement: Device index of each op.
        order: Op names of each device, in the order in which it runs them.
        messages: Every tensor that crosses devices, in the total order that the planner proposes;
            `plan.lower` keeps this order where it cannot deadlock.
        graph_fingerprint: Of the graph it was made for.
        op_digests: Eight hex digits per op of `placement`, or tensor of `partition.sharding`, or
            op of `pieces` and what it is a piece of (0 if that is none of the graph), joined, to
            tell what changed.
        versions: Of pardnn and what it was captured with.
        partition: The partitioned graph, if tensors and ops are sharded; placement, order and
            messages then are of its ops. None if every op runs on one device.
        pieces: The cut graph, if the batch is in pieces; placement, order and messages then are of
            its ops, or of those of the partition, which then is of this graph.
        offload: Optimizer states that live on the host (`plan.rewritten`), in the graph's order;
            placement, order and messages then are of the graph with their copies. None if all
            live on devices.
        recompute: Ops that are called once more (`plan.rewritten.recompute`); placement, order and
            messages then are of the graph with these calls. None if every op runs once.
        constraints: The constraints it has to meet, which the checker proves; None if none.
        cluster: What it was made for; None in a plan written by hand.
        algorithm: The algorithm that won.
        objective: What it minimised.
        seed: Of the planner.
        reserve: Fraction of each device's memory that stays unused.
        predicted: What the planner expects.
        notes: What a reader should know about this plan.
        tried: What was tried, in this order, before local search improved the best.
        checksum: SHA-256 over everything else; a damaged file is refused.
    """

    __pydantic_config__ = STRICT

    format: Literal["pardnn.plan/1"] = "pardnn.plan/1"
    placement: Mapping[str, int]
    order: tuple[tuple[str, ...], ...]
    messages: tuple[Message, ...] = ()
    partition: Partition | None = None
    pieces: Pieces | None = None
    offload: tuple[str, ...] | None = None
    recompute: tuple[SecondCall, ...] | None = None
    constraints: tuple[Constraint, ...] | None = None
    graph_fingerprint: str | None = None
    op_digests: str | None = None
    versions: Mapping[str, str] | None = None
    cluster: Cluster | None = None
    algorithm: str | None = None
    objective: Literal["seconds", "period", "bytes"] = "seconds"
    seed: int = 0
    reserve: float = 0.0
    predicted: Predicted | None = None
    notes: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    checksum: str | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.order)

    @property
    def keeps_bits(self) -> bool:
        """Whether every op runs whole, so that no sum is added up in another order."""
        return self.partition is None and self.pieces is None


def planned_graph(graph: Graph, plan: Plan) -> Graph:
    """Return the graph whose ops a plan places: in pieces, with host copies and second calls.

    Raises:
        FileError: E402, if the ops are no valid graph.
        InvalidPlanError: E410, if a second call is of no op.
    """
    once = called_once(graph, plan)
    return once if plan.recompute is None else graph_with_calls(once, plan.recompute)


def called_once(graph: Graph, plan: Plan) -> Graph:
    """Return the graph that a plan places, without second calls of its ops."""
    cut = on_devices(graph, plan)
    return cut if plan.offload is None else graph_with_host(cut, plan.offload)


def on_devices(graph: Graph, plan: Plan) -> Graph:
    """Return the graph that a plan places, without second calls and with all state on devices."""
    partition = plan.partition
    return graph_in_pieces(graph, plan) if partition is None else _built(graph.name, partition)


def graph_in_pieces(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with its batch in a plan's pieces; itself if it is whole."""
    return graph if plan.pieces is None else _built(graph.name, plan.pieces)


@functools.lru_cache(maxsize=2)
def _built(name: str, cut: Partition | Pieces) -> Graph:
    return build_graph(name, cut.ops)


_NOWHERE = np.zeros(0, dtype=np.int64)


class PlanArrays(NamedTuple):
    """A plan as arrays, ops and tensors by their number in the graph."""

    place: Int64[ndarray, " n"]
    order_ptr: Int64[ndarray, " k+1"]
    order_op: Int64[ndarray, " n"]
    message_tensor: Int64[ndarray, " m"]
    message_source: Int64[ndarray, " m"]
    message_target: Int64[ndarray, " m"]
    message_post: Int64[ndarray, " m"]  # an op of the target
    message_hold: Int64[ndarray, " m"]  # an op of the source, -1 for the end of the step
    message_into: Int64[ndarray, " m"] = _NOWHERE  # a tensor, -1: a new buffer; empty: all are new

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.order_ptr) - 1


def order_rows(arrays: PlanArrays) -> list[list[int]]:
    """Return the ops of each device in their order."""
    return [row.tolist() for row in np.split(arrays.order_op, arrays.order_ptr[1:-1])]


def positions(arrays: PlanArrays) -> Int64[ndarray, " n"]:
    """Return where each op stands in the order of its device."""
    found = np.empty(len(arrays.place), dtype=np.int64)
    first = np.repeat(arrays.order_ptr[:-1], np.diff(arrays.order_ptr))
    found[arrays.order_op] = np.arange(len(arrays.order_op)) - first
    return found


def plan_arrays(graph: Graph, plan: Plan) -> PlanArrays:
    """Return the plan by numbers.

    Raises:
        MismatchError: E503, if the plan names an op or tensor that the graph does not have.
    """
    op_id, tensor_id = graph.op_numbers, graph.tensor_numbers
    try:
        return PlanArrays(
            place=_column(map(plan.placement.__getitem__, op_id)),
            order_ptr=np.cumsum([0, *(len(row) for row in plan.order)], dtype=np.int64),
            order_op=_column(map(op_id.__getitem__, itertools.chain.from_iterable(plan.order))),
            message_tensor=_column(tensor_id[m.tensor] for m in plan.messages),
            message_source=_column(m.source for m in plan.messages),
            message_target=_column(m.target for m in plan.messages),
            message_post=_column(op_id[m.post_before] for m in plan.messages),
            message_hold=_column(
                -1 if m.hold_until is None else op_id[m.hold_until] for m in plan.messages
            ),
            message_into=_column(-1 if m.into is None else tensor_id[m.into] for m in plan.messages)
            if plan.partition is not None
            else _NOWHERE,
        )
    except KeyError as error:
        raise MismatchError(
            f"plan and graph do not belong together: {error.args[0]!r:.80} is not in both.\n"
            "Plan this graph again.",
            code="E503",
        ) from None


def _column(values: Iterable[int]) -> ndarray:
    return np.array(list(values), dtype=np.int64)


def plan_from_arrays(graph: Graph, arrays: PlanArrays) -> Plan:
    """Return the plan by names, without metadata; the inverse of `plan_arrays` without `into`."""
    ops = [op.name for op in graph.ops]
    tensors = [tensor.name for op in graph.ops for tensor in op.outputs]
    rows: list[list[int]] = np.stack(arrays[3:8], axis=1).tolist()
    return Plan(
        placement=dict(zip(ops, arrays.place.tolist(), strict=True)),
        order=tuple(tuple(ops[i] for i in row) for row in order_rows(arrays)),
        messages=tuple(
            Message(
                tensor=tensors[tensor],
                source=source,
                target=target,
                post_before=ops[post],
                hold_until=None if hold < 0 else ops[hold],
            )
            for tensor, source, target, post, hold in rows
        ),
    )

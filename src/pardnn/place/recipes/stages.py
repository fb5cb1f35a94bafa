"""Stages of a training step: balanced contiguous blocks of layers, and all ops that belong to them.

Problem: cut a step into p stages of equal work that send each other little.
Idea: forward ops form a chain (`chain`). Each counts the work of all ops that belong to it: its
gradients, and the update of its parameters. One dynamic program minimises the work of the busiest
block, including what it sends to the next; a second one finds, among all cuts that are nearly as
good, the one that sends least. Then backward ops go to the stage of their forward op, a parameter
to the stage with most of its work, and states, the update and the sum of its gradient go with the
parameter.
Complexity: O(edges + stages x boundaries^2 / stages), with a number of boundaries that does not
grow with the ops.
Reference: PipeDream (SOSP 2019), section 3.1, for the first program.
Deviations: boundaries are chosen from many equal parts of the work, in each the one with least
traffic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.recipes.chain import forward_chain
from pardnn.place.recipes.phases import BACKWARD, FORWARD, SOURCE, UPDATE, WEIGHT, Phases

#: Boundaries that are looked at, per stage.
BOUNDARIES = 48
#: A busiest stage may do so much more than it must, if stages send less to each other then.
SLACK = 0.02


class Stages(NamedTuple):
    """Where each op of a step belongs.

    Attributes:
        stage: Of each op, from 0 on.
        phase: Of each op, see `phases`.
        count: Number of stages.
    """

    stage: Int64[ndarray, " n"]
    phase: Int64[ndarray, " n"]
    count: int


def stages_of(
    graph: Graph,
    p: Phases,
    seconds: Float64[ndarray, " n"],
    num_stages: int,
    *,
    byte_seconds: float = 0.0,
    memory: float = 0.0,
) -> Stages:
    """Return balanced stages of a step.

    Args:
        graph: A captured step; its batch is whole.
        p: Its phases.
        seconds: Of each op.
        num_stages: At least 1.
        byte_seconds: Seconds per byte of the slowest link; 0 counts no traffic.
        memory: From 0 (stages of equal time) to 1 (stages that hold equal bytes).
    """
    users = _users(graph, p, seconds)
    lead = _leads(graph, p, users)
    work = np.bincount(np.maximum(lead, 0), weights=seconds * (lead >= 0), minlength=len(lead))
    position = forward_chain(graph, p, work, num_stages)
    held = np.bincount(
        np.maximum(lead, 0), weights=_owned_bytes(graph) * (lead >= 0), minlength=len(lead)
    )
    weight = (1 - memory) * work / max(work.sum(), 1e-300) + memory * held / max(held.sum(), 1e-300)
    length = int(position.max(initial=-1)) + 1
    at = np.where(position >= 0, position, 0)
    row = np.bincount(at, weights=weight * (position >= 0), minlength=max(length, 1))
    sent = _crossing_bytes(graph, position, len(row)) * 2 * byte_seconds / max(work.sum(), 1e-300)
    block = _blocks(row, sent * (1 - memory), num_stages)
    stage = np.where(position >= 0, block[at], -1)
    _place_the_rest(graph, p, users, stage)
    return Stages(stage, p.phase, num_stages)


def _users(graph: Graph, p: Phases, seconds: ndarray) -> Int64[ndarray, " n"]:
    """Return, of each parameter, the forward op that works most with it; -1 for other ops."""
    pull = np.bincount(
        np.maximum(p.forward, 0), weights=seconds * (p.forward >= 0), minlength=len(seconds)
    )
    pull += np.where(p.phase == FORWARD, seconds, 0.0)
    best = np.full(len(seconds), -1, dtype=np.int64)
    for parameter, op in enumerate(graph.ops):
        if op.kind not in ("parameter", "buffer"):
            continue
        stack, seen = [parameter], {parameter}
        while stack:
            for reader in p.readers[stack.pop()]:
                if reader in seen or p.phase[reader] != FORWARD:
                    continue
                seen.add(reader)
                if best[parameter] < 0 or pull[reader] > pull[best[parameter]]:
                    best[parameter] = reader
                if pull[reader] == 0:  # a view: who reads that?
                    stack.append(reader)
    return best


def _leads(graph: Graph, p: Phases, users: ndarray) -> Int64[ndarray, " n"]:
    """Return the forward op that each op belongs to; -1 if none was found."""
    lead = np.where(p.phase == FORWARD, np.arange(len(users)), users)
    for op in graph.arrays.topological.tolist():
        if p.phase[op] in (BACKWARD, WEIGHT):
            of = int(p.forward[op])
            if of < 0:
                read = [int(lead[i]) for i in p.reads[op] if lead[i] >= 0]
                saved = [i for i in read if p.phase[i] == FORWARD]
                of = max(saved or read, default=-1)
            lead[op] = lead[of] if of >= 0 else -1
    for op, owner in _parameters_of_the_update(graph, p).items():
        lead[op] = users[owner]
    return lead


def _parameters_of_the_update(graph: Graph, p: Phases) -> dict[int, int]:
    """Return the parameter that an op of the update, or a state, belongs to.

    Those that are joined by tensors of the parameter's own shape belong to it.
    """
    found: dict[int, int] = {}
    shapes = [{tensor.shape for tensor in op.outputs} for op in graph.ops]
    is_part = (p.phase == UPDATE) | np.array([op.kind == "state" for op in graph.ops], dtype=bool)
    for parameter, op in enumerate(graph.ops):
        if op.kind != "parameter":
            continue
        shape, stack = op.outputs[0].shape, [parameter]
        while stack:
            now = stack.pop()
            for other in (*p.readers[now], *(p.reads[now] if now != parameter else ())):
                if is_part[other] and other not in found and shape in shapes[other]:
                    found[other] = parameter
                    stack.append(other)
    return found


def _owned_bytes(graph: Graph) -> Float64[ndarray, " n"]:
    """Return the bytes of the storages that each op makes."""
    a = graph.arrays
    owned = np.where(a.tensor_alias < 0, a.tensor_bytes, 0).astype(np.float64)
    return np.bincount(a.tensor_op, weights=owned, minlength=a.num_ops)


def _crossing_bytes(graph: Graph, position: ndarray, length: int) -> Float64[ndarray, " b"]:
    """Return the bytes that forward ops before each position make for those from it on.

    A parameter that is read on both sides counts, too.
    """
    a, change = graph.arrays, np.zeros(length + 1)
    ends: dict[int, tuple[int, int]] = {}
    for tensor in range(a.num_tensors):
        made = int(position[a.tensor_op[tensor]])
        read = a.consumer_op[a.consumer_ptr[tensor] : a.consumer_ptr[tensor + 1]]
        at = position[read]
        if graph.ops[a.tensor_op[tensor]].kind == "parameter":
            made = int(at[at >= 0].min(initial=length))
        if made < 0:
            continue
        last = int(at.max(initial=-1))
        first, until = ends.get(int(a.tensor_owner[tensor]), (made, -1))
        ends[int(a.tensor_owner[tensor])] = min(first, made), max(until, last)
    for owner, (first, until) in ends.items():
        if until > first:
            change[first + 1] += a.tensor_bytes[owner]
            change[until + 1] -= a.tensor_bytes[owner]
    return np.cumsum(change)


def _blocks(row: Float64[ndarray, " c"], sent: ndarray, count: int) -> Int64[ndarray, " c"]:
    """Return the block of each position of a row: `count` contiguous ones, balanced.

    Args:
        row: Weight of each position.
        sent: Of a boundary before each position, and after the last.
        count: How many.
    """
    ends = _candidates(row, sent, count)
    total = np.concatenate([[0.0], np.cumsum(row)])[ends]
    cost = total[None, :] - total[:, None] + np.where(ends == len(row), 0.0, sent[ends])[None, :]
    cost[np.tril_indices(len(ends), -1)] = np.inf  # an empty block costs what it sends on
    most = [cost[0]]
    for _ in range(count - 1):
        most.append(np.maximum(most[-1][:, None], cost).min(axis=0))
    limit = most[-1][-1] * (1 + SLACK)
    traffic = np.where(ends == len(row), 0.0, sent[ends])
    is_allowed = cost <= limit
    least = np.where(is_allowed, traffic[None, :], np.inf)
    sums, before = [least[0]], list[ndarray]()
    for _ in range(count - 1):
        each = sums[-1][:, None] + least
        before.append(each.argmin(axis=0))
        sums.append(each.min(axis=0))
    cuts, end = list[int](), len(ends) - 1
    for previous in reversed(before):
        end = int(previous[end])
        cuts.append(int(ends[end]))
    return np.searchsorted(np.array(cuts[::-1]), np.arange(len(row)), side="right")


def _candidates(row: ndarray, sent: ndarray, count: int) -> Int64[ndarray, " e"]:
    """Return where blocks may end: of each equal part of the work, where least is sent."""
    parts = BOUNDARIES * count
    ends = np.arange(1, len(row))
    part = np.minimum(np.cumsum(row)[:-1] / max(row.sum(), 1e-300) * parts, parts - 1).astype(int)
    order = np.lexsort((ends, sent[1:-1], part))
    first = np.unique(part[order], return_index=True)[1]
    return np.concatenate([[0], ends[order][first], [len(row)]]).astype(np.int64)


def _place_the_rest(graph: Graph, p: Phases, users: ndarray, stage: Int64[ndarray, " n"]) -> None:
    """Fill in the stages of all ops but forward ones."""
    stage[users >= 0] = stage[users[users >= 0]]
    of_parameter = _parameters_of_the_update(graph, p)
    for op, parameter in of_parameter.items():
        stage[op] = stage[parameter]
    order = graph.arrays.topological.tolist()
    _place_backward(order, p, stage, of_parameter)
    _place_what_is_left(graph, p, stage)


def _place_backward(
    order: list[int], p: Phases, stage: Int64[ndarray, " n"], of_parameter: dict[int, int]
) -> None:
    """Fill in the stages of the backward pass.

    Args:
        order: Ops in topological order.
        p: The phase of each op, and what it reads.
        stage: Of each op.
        of_parameter: The parameter that an op of the update belongs to.
    """
    for op in order:
        if p.phase[op] in (BACKWARD, WEIGHT):
            saved = [stage[i] for i in p.reads[op] if p.phase[i] in (FORWARD, SOURCE)]
            above = [stage[i] for i in p.reads[op] if p.phase[i] in (BACKWARD, WEIGHT)]
            if len(above) > 1 and not saved:  # a sum of gradients: of what all its readers read
                stage[op] = min(above)
            elif p.forward[op] >= 0:
                stage[op] = stage[p.forward[op]]
            else:
                stage[op] = max(saved, default=min(above, default=stage.max(initial=0)))
    for op in order:  # what adds up the gradient of a parameter that several stages read
        if p.phase[op] == WEIGHT and len(set(stage[p.reads[op]].tolist())) > 1:
            owners = {of_parameter[i] for i in p.readers[op] if i in of_parameter}
            if len(owners) == 1 and all(p.phase[i] == WEIGHT for i in p.reads[op]):
                stage[op] = stage[owners.pop()]


def _place_what_is_left(graph: Graph, p: Phases, stage: Int64[ndarray, " n"]) -> None:
    """Put ops without a stage beside the largest value that they read, or their first reader."""
    a, order = graph.arrays, graph.arrays.topological.tolist()
    size = np.bincount(a.tensor_op, weights=a.tensor_bytes, minlength=a.num_ops)
    for op in order:
        if stage[op] < 0 and p.phase[op] != SOURCE:
            near = [i for i in p.reads[op] if stage[i] >= 0]
            stage[op] = stage[max(near, key=lambda i: size[i])] if near else -1
    for op in reversed(order):
        if stage[op] < 0:
            stage[op] = next((stage[i] for i in p.readers[op] if stage[i] >= 0), 0)

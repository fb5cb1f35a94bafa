"""The phase of each op of a step: forward, input gradient, weight gradient or update.

Problem: schedules consist of passes of stages; a captured step is a list of ops.
Idea: capture records of which forward op an op is the gradient (`backward_of`). Forward is
everything that leads to such an op or to the loss; the backward pass is the ops with a forward op,
and those that they read from and that are not forward; the rest is the update, which runs once. A
weight gradient is an op of the backward pass that no other layer's gradient needs: zero-bubble
schedules delay it.
Complexity: O(ops + edges).
Reference: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), for B and W.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import LOSS_KIND, Graph

#: What an op belongs to; `SOURCE` for values that are there before the step.
FORWARD, BACKWARD, WEIGHT, UPDATE, SOURCE = range(5)


class Phases(NamedTuple):
    """What each op of a step belongs to.

    Attributes:
        phase: `FORWARD` and so on.
        forward: The op whose gradient each op of the backward pass computes; -1 for others.
        reads: Ops that make what each op reads.
        readers: Ops that read what each op makes.
    """

    phase: Int64[ndarray, " n"]
    forward: Int64[ndarray, " n"]
    reads: list[list[int]]
    readers: list[list[int]]


def phases_of(graph: Graph, batched: Collection[str] | None = None) -> Phases:
    """Return what each op belongs to.

    Args:
        graph: A captured step; its batch is whole.
        batched: Tensors that are in pieces of the batch, if it is cut: a gradient that is not among
            them is a weight's.
    """
    a, n = graph.arrays, len(graph.ops)
    number = graph.op_numbers
    forward = np.array([number.get(op.backward_of or "", -1) for op in graph.ops], dtype=np.int64)
    makers: list[int] = a.tensor_op[a.input_tensor].tolist()
    ends: list[int] = a.input_ptr.tolist()
    reads = [
        list(dict.fromkeys(makers[i:j])) if j - i > 1 else makers[i:j]
        for i, j in itertools.pairwise(ends)
    ]
    readers: list[list[int]] = [[] for _ in range(n)]
    for i, row in enumerate(reads):
        for source in row:
            readers[source].append(i)
    phase = [SOURCE if op.is_source else UPDATE for op in graph.ops]
    labelled = np.flatnonzero(forward >= 0).tolist()
    for i in labelled:
        phase[i] = BACKWARD
    changes = _change_a_parameter(graph)
    is_fixed = [of == SOURCE or i in changes for i, of in enumerate(phase)]
    loss = [i for i, op in enumerate(graph.ops) if op.kind == LOSS_KIND]
    made = [op for i in loss for op in reads[i]]
    targets = [i for i in np.unique(forward[labelled]).tolist() if phase[i] == UPDATE]
    _take(phase, FORWARD, [*made, *targets, *loss], reads, is_fixed)
    _take(phase, BACKWARD, [op for i in labelled for op in reads[i]], reads, is_fixed)
    for op in a.topological.tolist():  # what is computed beside the loss, such as an accuracy
        if phase[op] == UPDATE and not is_fixed[op]:
            of = {phase[i] for i in reads[op]}
            if FORWARD in of and of <= {FORWARD, SOURCE}:
                phase[op] = FORWARD
    found = Phases(np.array(phase, dtype=np.int64), forward, reads, readers)
    found.phase[_weight_gradients(graph, found, batched)] = WEIGHT
    return found


def _change_a_parameter(graph: Graph) -> set[int]:
    """Return the ops that write a parameter or a state of the optimizer in place."""
    a, tensor = graph.arrays, graph.tensor_numbers
    made = [op.kind in ("parameter", "state") for op in graph.ops]
    home = a.tensor_op[a.tensor_owner].tolist()
    return {i for i, names in graph.overwrites if any(made[home[tensor[name]]] for name in names)}


def _take(
    phase: list[int],
    name: int,
    stack: list[int],
    reads: list[list[int]],
    is_fixed: list[bool],
) -> None:
    """Give a phase to ops and to all that they need, as far as that has none."""
    while stack:
        op = stack.pop()
        if phase[op] == UPDATE and not is_fixed[op]:
            phase[op] = name
            stack += reads[op]


def _weight_gradients(graph: Graph, p: Phases, batched: Collection[str] | None) -> list[int]:
    """Return the ops of gradients that only weights need, from the end of the step."""
    of_batch: list[bool] = depends_on_input(graph, p).tolist()
    phase: list[int] = p.phase.tolist()
    forward: list[int] = p.forward.tolist()
    found: list[int] = []
    for op in reversed(graph.arrays.topological.tolist()):
        if phase[op] != BACKWARD:
            continue
        needed = [i for i in p.readers[op] if phase[i] in (BACKWARD, WEIGHT)]
        if any(phase[i] == BACKWARD for i in needed):
            continue
        names = [tensor.name for tensor in graph.ops[op].outputs]
        is_partial = batched is not None and not any(name in batched for name in names)
        of = forward[op]
        is_one_layers = all(
            forward[i] == of
            or not (of_batch[of] and of_batch[forward[i]] and min(of, forward[i]) >= 0)
            for i in needed
        )
        if is_partial or is_one_layers:
            phase[op] = WEIGHT
            found.append(op)
    return found


def depends_on_input(graph: Graph, p: Phases) -> ndarray:
    """Return whether each op depends on inputs of the step, not on weights and sizes alone."""
    found = [op.kind == "input" and bool(op.outputs[0].shape) for op in graph.ops]
    stack = [op for op, is_given in enumerate(found) if is_given]
    while stack:
        for reader in p.readers[stack.pop()]:
            if not found[reader]:
                found[reader] = True
                stack.append(reader)
    return np.array(found, dtype=bool)

"""Renumbering: ops numbered as list scheduling visits them, so that neighbours are close in memory.

A planner visits ops by priority, while a file may hold them in any order: at a million ops most of
the time was spent waiting for memory, because ops visited in turn were far apart in it. Numbered by
decreasing bottom level, which is a topological order, ops that are visited together are close in
memory: a pass of list scheduling takes half the time. O((ops + edges) + ops log ops), once per
plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.sorting import inverse_permutation, stable_order
from pardnn.plan.plan import PlanArrays
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine


class Renumbering(NamedTuple):
    """New numbers for the ops and tensors of a graph.

    Attributes:
        op: Number in the graph of each op here.
        tensor: Number in the graph of each tensor here.
        op_here: Number here of each op of the graph.
        tensor_here: Number here of each tensor of the graph.
    """

    op: Int64[ndarray, " n"]
    tensor: Int64[ndarray, " t"]
    op_here: Int64[ndarray, " n"]
    tensor_here: Int64[ndarray, " t"]


def renumbering_by_priority(arrays: GraphArrays, machine: Machine) -> Renumbering:
    """Return the ops by decreasing bottom level, and their tensors in that order.

    Args:
        arrays: The graph.
        machine: Durations and links.
    """
    key = -bottom_levels(arrays, machine)
    op = arrays.topological[stable_order(key[arrays.topological])]
    tensor, _ = _rows(arrays.output_ptr, op)
    return Renumbering(op, tensor, inverse_permutation(op), inverse_permutation(tensor))


def renumbered(arrays: GraphArrays, renumbering: Renumbering) -> GraphArrays:
    """Return the graph renumbered; `topological` is still the file's order.

    Args:
        arrays: The graph.
        renumbering: The new numbers.
    """
    a, op, tensor = arrays, renumbering.op, renumbering.tensor
    outputs, output_ptr = _rows(a.output_ptr, op)
    inputs, input_ptr = _rows(a.input_ptr, op)
    after, after_ptr = _rows(a.after_ptr, op)
    before, before_ptr = _rows(a.before_ptr, op)
    consumers, consumer_ptr = _rows(a.consumer_ptr, tensor)
    alias = a.tensor_alias[tensor]
    made = GraphArrays(
        output_ptr=output_ptr,
        input_ptr=input_ptr,
        input_tensor=renumbering.tensor_here[a.input_tensor[inputs]],
        after_ptr=after_ptr,
        after_op=renumbering.op_here[a.after_op[after]],
        before_ptr=before_ptr,
        before_op=renumbering.op_here[a.before_op[before]],
        consumer_ptr=consumer_ptr,
        consumer_op=renumbering.op_here[a.consumer_op[consumers]],
        tensor_op=renumbering.op_here[a.tensor_op[outputs]],
        tensor_bytes=a.tensor_bytes[tensor],
        tensor_alias=np.where(alias >= 0, renumbering.tensor_here[alias], -1),
        tensor_owner=renumbering.tensor_here[a.tensor_owner[tensor]],
        workspace=a.workspace[op],
        memory=a.memory[op],
        group=a.group[op],
        topological=renumbering.op_here[a.topological],
    )
    for array in made:
        array.setflags(write=False)
    return made


def renumbered_overwrites(
    overwrites: Int64[ndarray, "w 2"], renumbering: Renumbering
) -> Int64[ndarray, "w 2"]:
    """Return (owning tensor, op) pairs renumbered, sorted as `first_overwrites` does."""
    tensor, op = renumbering.tensor_here[overwrites[:, 0]], renumbering.op_here[overwrites[:, 1]]
    turn = np.lexsort((op, tensor))
    return np.ascontiguousarray(np.stack([tensor[turn], op[turn]], axis=1))


def original_plan(plan: PlanArrays, renumbering: Renumbering) -> PlanArrays:
    """Return a plan in the graph's own numbers."""
    hold = renumbering.op[plan.message_hold]
    return plan._replace(
        place=plan.place[renumbering.op_here],
        order_op=renumbering.op[plan.order_op],
        message_tensor=renumbering.tensor[plan.message_tensor],
        message_post=renumbering.op[plan.message_post],
        message_hold=np.where(plan.message_hold >= 0, hold, -1),
    )


def _rows(
    ptr: Int64[ndarray, " p"], turn: Int64[ndarray, " r"]
) -> tuple[Int64[ndarray, " x"], Int64[ndarray, " p"]]:
    """Return positions in compressed sparse rows whose rows are reordered, and where rows begin."""
    lengths = np.diff(ptr)[turn]
    begins = np.zeros(len(ptr), dtype=np.int64)
    np.cumsum(lengths, out=begins[1:])
    return np.arange(begins[-1]) + np.repeat(ptr[:-1][turn] - begins[:-1], lengths), begins

"""Memory of a sharding, estimated before there is a plan.

Idea: tensors that outlive the step always count, others if they are live at the peak of the step on
one device; each counts with the largest fraction that a device owns. Fetched regions and the order
of the plan are not known here: its exact peak decides whether a plan fits.
Complexity: O(tensors + inputs) for the weights, O(variables) per estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout
from pardnn.shard.partition.mesh_strategies import owned_array
from pardnn.shard.search.box_volumes import volumes
from pardnn.shard.search.cost_tables import State
from pardnn.shard.search.problem import Problem, Variable

#: Times the memory of a sharding on the mesh, up to which one on a mesh of one axis has as much:
#: sizes that do not divide come out a little differently, tensors that stay whole do not.
SAME_MEMORY = 1.05


def memory_weights(graph: Graph, problem: Problem) -> dict[str, float]:
    """Return the bytes of each variable that are live at the peak of the step, by root.

    Tensors that outlive the step always count; others if they are live at the peak of the graph in
    its own order on one device.
    """
    arrays = graph.arrays
    position = np.empty(arrays.num_ops, dtype=np.int64)
    position[arrays.topological] = np.arange(arrays.num_ops)
    born = position[arrays.tensor_op]
    last = born.copy()
    consumer = np.repeat(np.arange(arrays.num_ops), np.diff(arrays.input_ptr))
    np.maximum.at(last, arrays.input_tensor, position[consumer])
    owner = arrays.tensor_owner
    np.maximum.at(last, owner, last.copy())
    owns = (owner == np.arange(arrays.num_tensors)) & (arrays.tensor_bytes > 0)
    stays = arrays.memory[arrays.tensor_op] == 1
    change = np.zeros(arrays.num_ops + 1)
    brief = owns & ~stays
    np.add.at(change, born[brief], arrays.tensor_bytes[brief])
    np.add.at(change, last[brief] + 1, -arrays.tensor_bytes[brief])
    moment = int(np.cumsum(change).argmax())
    counted = owns & (stays | ((born <= moment) & (last >= moment)))
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    found: dict[str, float] = {}
    for number in np.flatnonzero(counted).tolist():
        root = problem.classes.root[names[number]]
        found[root] = found.get(root, 0.0) + float(arrays.tensor_bytes[number])
    return found


def largest_share(variable: Variable, layout: Layout, axis_sizes: tuple[int, ...]) -> float:
    """Return the largest fraction of a tensor that a device owns.

    Args:
        variable: Of the tensor's class.
        layout: One of its options.
        axis_sizes: Devices along each mesh axis.
    """
    shape = variable.forms[0][0]
    owned = owned_array(shape, layout, axis_sizes)
    assert owned is not None
    return float(volumes(owned).max()) / max(1, math.prod(shape))


def peak_estimate(
    problem: Problem, weights: Mapping[str, float], state: State, axis_sizes: tuple[int, ...]
) -> float:
    """Estimate the peak memory of the fullest device, in bytes.

    Args:
        problem: The coarse graph.
        weights: Bytes of each variable that count, by root.
        state: The layouts.
        axis_sizes: Devices along each mesh axis.
    """
    return sum(
        weight * largest_share(variable, layout, axis_sizes)
        for variable, layout in zip(problem.variables, state.layouts, strict=True)
        if (weight := weights.get(variable.root, 0.0))
    )


def owned_estimate(problem: Problem, state: State, axis_sizes: tuple[int, ...]) -> float:
    """Return the bytes that the fullest device owns of all tensors, whenever they are live.

    Args:
        problem: The coarse graph.
        state: The layouts.
        axis_sizes: Devices along each mesh axis.
    """
    weights = {variable.root: float(variable.bytes) for variable in problem.variables}
    return peak_estimate(problem, weights, state, axis_sizes)

"""What storages of a graph are for, in the words of tables and reports."""

from __future__ import annotations

import numpy as np

from pardnn.graph.csr import RESIDUAL
from pardnn.graph.ir import FROM_HOST, Graph, writes

_OF_SOURCE = {
    "parameter": "parameters", "buffer": "parameters", "constant": "parameters",
    "state": "optimizer", FROM_HOST: "optimizer",
}  # fmt: skip


def storage_kinds(graph: Graph) -> list[str]:
    """Return what the storage of each tensor is for.

    Returns:
        Per tensor "parameters", "optimizer", "gradients" or "activations". O(ops + edges).
    """
    a = graph.arrays
    of_op = [_OF_SOURCE.get(op.kind, "activations") for op in graph.ops]
    found: list[str] = [of_op[op] for op in a.tensor_op.tolist()]
    for tensor in _gradients(graph):
        if found[tensor] == "activations":
            found[tensor] = "gradients"
    return found


def _gradients(graph: Graph) -> set[int]:
    """Return the tensors of the backward pass that an update of a residual storage reads.

    An update writes the storage in place; the tensors are owners of storages.
    """
    a = graph.arrays
    is_residual = a.memory[a.tensor_op] == RESIDUAL
    holds = is_residual[a.tensor_owner[a.input_tensor]]
    consumer = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    found: set[int] = set()
    for number in map(int, np.unique(consumer[holds])):
        op = graph.ops[number]
        written = writes(op)
        if not written:
            continue
        row = slice(a.input_ptr[number], a.input_ptr[number + 1])
        read = a.tensor_owner[a.input_tensor[row]].tolist()
        owner: dict[str, int] = dict(zip(dict.fromkeys(op.inputs), read, strict=True))
        if any(is_residual[owner[name]] for name in written if name in owner):
            found |= {
                each
                for each in owner.values()
                if not is_residual[each]
                and graph.ops[int(a.tensor_op[each])].backward_of is not None
            }
    return found

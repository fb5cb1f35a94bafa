"""Numbers 0 in a batch to which the step adds tensors: `meter.sum += loss.detach()`.

The graph was captured while such a number was in the place, and reads a tensor there. A call that
finds 0 puts a tensor of zeros in its place, as the step itself would leave a tensor there.

Complexity: O(objects of the batch) per call, if there are such places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import decode
from pardnn.backends.torch.user_step.held_numbers import is_zero, named_places
from pardnn.backends.torch.user_step.object_graph import walk_value
from pardnn.graph.ir import Graph


class BatchZeros:
    """The places in a batch that may hold the number 0 instead of a tensor.

    Args:
        graph: The graph of the step.
        device: Where the tensors are made.

    Attributes:
        names: The names of their sources.
    """

    def __init__(self, graph: Graph, device: torch.device) -> None:
        states = {op.name for op in graph.ops if op.kind in ("buffer", "state")}
        self._zeros = {
            name: torch.zeros(shape, dtype=decode(dtype, device), device=device)
            for name, dtype, shape in graph.step_notes.get("zeros", ())
            if name not in states
        }
        self.names = frozenset(self._zeros)

    def put(self, batch: Sequence[tuple[str, Any]]) -> None:
        """Put tensors of zeros into the places that hold the number 0.

        Args:
            batch: Name and value of each argument that is neither model nor optimizer.
        """
        for name, value in batch if self.names else ():
            for path, slot, held in named_places(walk_value(value, name)):
                if path in self.names and is_zero(held):
                    slot.set(self._zeros[path].clone())

"""The interface of an objective: requests for cost tables of strategies by layouts.

`objective_bytes` and `objective_seconds` implement it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.plan.mesh import Layout
from pardnn.shard.partition.mesh_strategies import MeshStrategies
from pardnn.shard.search.problem import Factor, Operand, Variable


def fetches(
    strategies: MeshStrategies, operand: Operand
) -> Iterator[tuple[Int64[ndarray, "s n rank 2"], Bool[ndarray, " s"] | None]]:
    """Yield the regions of an operand that strategies need, one per slot at which an op reads it.

    A region that is needed at two slots is fetched once, and is yielded once.

    Yields:
        The regions by strategy and device, and which strategies fetch them: None for all.
    """
    known: list[tuple[ndarray, ndarray]] = []
    for slot in operand.slots if operand.shape else ():
        read = strategies.read(slot)
        if not any(read):
            continue
        regions = strategies.region(slot)
        new = np.array(read)
        if len(operand.slots) > 1:
            for other, there in known:
                new &= ~(there & (regions == other).all(axis=(1, 2, 3)))
            known.append((regions, np.array(read)))
        yield regions, None if new.all() else new


class TableRequest(NamedTuple):
    """A requested cost table: strategies of an op by layouts of one of its tensors.

    Attributes:
        operand: A tensor of an op.
        strategies: Of the op.
        owned: What each of n devices owns of the tensor, in l layouts.
        axis_sizes: Devices along each mesh axis.
    """

    operand: Operand
    strategies: MeshStrategies
    owned: Int64[ndarray, "l n rank 2"]
    axis_sizes: tuple[int, ...]


def not_local(request: TableRequest) -> Bool[ndarray, "s l"]:
    """Return for each strategy and layout whether a tensor is not local to the op."""
    operand, strategies, owned, _ = request
    wrong = np.zeros((len(strategies), len(owned)), dtype=bool)
    dims = [strategies.dim_slices.inputs[slot] for slot in operand.slots]
    for output in operand.outputs:
        result = strategies.dim_slices.outputs[output]
        if result is not None:
            dims.append(result)
            wrong |= np.array([any(flags[output]) for flags in strategies.reduced])[:, None]
    for box in dims:
        wrong |= (owned[None] != strategies.unclipped[:, None, :, box]).any(axis=(2, 3, 4))
    return wrong


@runtime_checkable
class Objective(Protocol):
    """The objective: a sum of communication and computation over ops, and of layout costs."""

    @property
    def may_replicate(self) -> bool:
        """Whether tensors and ops may stay whole although they could be cut."""
        ...

    @property
    def are_axes_alike(self) -> bool:
        """Whether mesh axes with the same number of devices are interchangeable."""
        ...

    def communication(self, requests: Sequence[TableRequest]) -> list[Float64[ndarray, "s l"]]:
        """Cost of fetching and combining operands, for each strategy and layout."""
        ...

    def computation(self, factor: Factor, strategies: MeshStrategies) -> Float64[ndarray, " s"]:
        """Cost of computing one op of a factor, for each strategy."""
        ...

    def layout_cost(
        self, variable: Variable, layouts: Sequence[Layout], axis_sizes: tuple[int, ...]
    ) -> Any:
        """Cost of a variable's tensors apart from ops, for each layout.

        Args:
            variable: Of the coarse graph.
            layouts: A dim, or None, per mesh axis.
            axis_sizes: Of the mesh axes.
        """
        ...

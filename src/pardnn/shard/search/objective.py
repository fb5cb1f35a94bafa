"""What is asked about ways to compute one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.shard.partition.mesh_strategies import MeshStrategies
from pardnn.shard.search.problem import Operand


def fetches(
    strategies: MeshStrategies, operand: Operand
) -> Iterator[tuple[ndarray, ndarray | None]]:
    """Yield what ways need at each slot of a tensor, and which: None for all of them.

    A region that is needed at two slots is yielded once.
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
    """Which table is asked for.

    Attributes:
        operand: A tensor of an op.
        strategies: To compute the op.
        owned: What each of n devices owns of the tensor, in l layouts.
        axis_sizes: Devices along each mesh axis.
    """

    operand: Operand
    strategies: MeshStrategies
    owned: Int64[ndarray, "l n rank 2"]
    axis_sizes: tuple[int, ...]


def not_local(request: TableRequest) -> ndarray:
    """Return for each way and layout whether a tensor is not just where the op works on it."""
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

"""What is asked about ways to compute one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.shard.partition.mesh_strategies import Ways
from pardnn.shard.search.problem import Use


def fetches(ways: Ways, use: Use) -> Iterator[tuple[ndarray, ndarray | None]]:
    """Yield what ways need at each slot of a tensor, and which: None for all of them.

    A region that is needed at two slots is yielded once.
    """
    known: list[tuple[ndarray, ndarray]] = []
    for slot in use.slots if use.shape else ():
        read = ways.read(slot)
        if not any(read):
            continue
        regions = ways.region(slot)
        new = np.array(read)
        if len(use.slots) > 1:
            for other, there in known:
                new &= ~(there & (regions == other).all(axis=(1, 2, 3)))
            known.append((regions, np.array(read)))
        yield regions, None if new.all() else new


class Request(NamedTuple):
    """Which table is asked for.

    Attributes:
        use: A tensor of an op.
        ways: To compute the op.
        owned: What each of n devices owns of the tensor, in l layouts.
        parts: Devices along each mesh axis.
    """

    use: Use
    ways: Ways
    owned: Int64[ndarray, "l n rank 2"]
    parts: tuple[int, ...]


def misplaced(request: Request) -> ndarray:
    """Return for each way and layout whether a tensor is not just where the op works on it."""
    use, ways, owned, _ = request
    wrong = np.zeros((len(ways), len(owned)), dtype=bool)
    dims = [ways.form.slots[slot] for slot in use.slots]
    for output in use.outputs:
        share = ways.form.outputs[output]
        if share is not None:
            dims.append(share)
            wrong |= np.array([any(flags[output]) for flags in ways.reduced])[:, None]
    for box in dims:
        wrong |= (owned[None] != ways.raw[:, None, :, box]).any(axis=(2, 3, 4))
    return wrong

"""Families: ops whose results share memory, and are kept or recomputed together.

A view, and an op that writes it in place, cost almost nothing and hold the storage that they view.
So the search has one variable per family, not one per op.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.place.recompute.problem import FREELY, NEVER, Nodes


class Families(NamedTuple):
    """Families that may be made again, and the tensors whose bytes that frees."""

    member_ptr: Int64[ndarray, " f+1"]
    member: Int64[ndarray, " m"]  # ops that may be called again freely
    seconds: Float64[ndarray, " f"]
    tensor: Int64[ndarray, " r"]  # with bytes of their own, by the op that makes them
    maker: Int64[ndarray, " r"]
    family: Int64[ndarray, " r"]

    @property
    def num_families(self) -> int:
        """Number of families."""
        return len(self.seconds)


def families_of(nodes: Nodes) -> Families:
    """Return the families of ops whose results may be made again."""
    n = nodes.num_ops
    number = list(range(n))

    def root(op: int) -> int:
        while number[op] != op:
            number[op] = number[number[op]]
            op = number[op]
        return op

    makers = np.repeat(np.arange(n), np.diff(nodes.output_ptr))
    readers = np.repeat(nodes.use_op, np.diff(nodes.view_ptr))
    used = np.repeat(np.arange(len(nodes.num_bytes)), np.diff(nodes.use_ptr))
    of = np.repeat(used, np.diff(nodes.view_ptr))
    for maker, reader in zip(makers[of].tolist(), readers.tolist(), strict=True):
        if nodes.again[maker] != NEVER and nodes.again[reader] != NEVER:
            one, other = sorted((root(maker), root(reader)))
            number[other] = one
    roots = np.array([root(op) for op in range(n)], dtype=np.int64)
    sized = np.flatnonzero((nodes.num_bytes > 0) & (nodes.again[makers] != NEVER))
    found = np.unique(roots[makers[sized]])
    rows = [np.flatnonzero((roots == f) & (nodes.again == FREELY)) for f in found]
    seconds = [nodes.seconds[roots == f].sum() for f in found]
    return Families(
        member_ptr=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        member=np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64),
        seconds=np.array(seconds, dtype=np.float64),
        tensor=sized.astype(np.int64),
        maker=makers[sized].astype(np.int64),
        family=np.searchsorted(found, roots[makers[sized]]).astype(np.int64),
    )

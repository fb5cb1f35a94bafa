"""The order of one piece after the other: what a loop over microbatches does, with least memory.

An op of a piece comes with its piece, or with the first piece that cannot do without it: labels
that all pieces wait for come with the first. An op that is there once, and that no piece waits for
(sums of gradients, the update), comes as soon as what it reads is there.
"""

from __future__ import annotations

import heapq

import numpy as np
from jaxtyping import Int64
from numpy import ndarray


def piece_by_piece(
    pairs: Int64[ndarray, "pairs 2"],
    piece: Int64[ndarray, " n"],
    order: Int64[ndarray, " n"],
) -> Int64[ndarray, " n"]:
    """Return the ops one piece after the other. O(edges log ops).

    Args:
        pairs: Of each edge, an op and one that waits for it.
        piece: Of each op; -1 for one that is there once.
        order: A topological order, which settles ties.
    """
    n, none = len(piece), len(piece)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    ptr: list[int] = np.searchsorted(pairs[:, 0], np.arange(n + 1)).tolist()
    after: list[int] = pairs[:, 1].tolist()
    given: list[int] = order.tolist()
    place, turn = [0] * n, [none if own < 0 else own for own in map(int, piece.tolist())]
    for position, op in enumerate(given):
        place[op] = position
    for op in reversed(given):
        for x in after[ptr[op] : ptr[op + 1]]:
            turn[op] = min(turn[op], turn[x])
    missing: list[int] = np.bincount(pairs[:, 1], minlength=n).tolist()
    ready = [(turn[op], place[op], op) for op in range(n) if missing[op] == 0]
    heapq.heapify(ready)
    found = np.empty(n, dtype=np.int64)
    for count in range(n):
        now, _, op = heapq.heappop(ready)
        found[count] = op
        for x in after[ptr[op] : ptr[op + 1]]:
            missing[x] -= 1
            if missing[x] == 0:
                heapq.heappush(ready, (now if turn[x] == none else turn[x], place[x], x))
    return found

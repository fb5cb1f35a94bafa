"""Who sends how much to whom: traffic of one tensor of one op between the devices of a mesh.

Where several devices hold the same elements they share the sending evenly. Partial results for
which there are several owners are added up once, in shares, and the sums exchanged: a
reduce-scatter and an all-gather, as in an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.shard.cost import clipped, group_numbers, overlaps, volumes
from pardnn.shard.cutting import Cutting
from pardnn.shard.problem import Use


def same_boxes(boxes: Int64[ndarray, "*b n rank 2"]) -> ndarray:
    """Return for each pair of devices whether their boxes are equal."""
    return (boxes[..., :, None, :, :] == boxes[..., None, :, :, :]).all(axis=(-1, -2))


def traffic(
    use: Use,
    ways: Sequence[Cutting],
    owned: Int64[ndarray, "l n rank 2"],
    parts: tuple[int, ...],
) -> Float64[ndarray, "a l n n"]:
    """Return elements by way, layout, receiver and sender."""
    n = owned.shape[1]
    total = np.zeros((len(ways), len(owned), n, n))
    alike = same_boxes(owned)
    copies = alike.sum(axis=-1)
    known: list[tuple[ndarray, ndarray]] = []
    for slot in use.slots if use.shape else ():
        read = np.array([way.contents.get(slot, False) for way in ways])
        if not read.any():
            continue
        regions = clipped(np.stack([way.regions[slot] for way in ways]), use.shape)
        new = read.copy()
        for other, there in known:
            new &= ~(there & (regions == other).all(axis=(1, 2, 3)))
        known.append((regions, read))
        common = volumes(overlaps(regions[:, None, :, None], owned[None, :, None, :]))
        sent = np.where(alike[None], 0, common) / copies[None, :, None, :]
        total += np.where(new[:, None, None, None], sent, 0)
    for output in use.outputs:
        for number, way in enumerate(ways):
            share = way.shares[output]
            if share is not None:
                inside = clipped(share, use.shape)
                total[number] += _results(inside, way.reduced[output], parts, owned, copies, alike)
    return total


def _results(
    share: ndarray,
    reduced: Sequence[bool],
    parts: tuple[int, ...],
    owned: ndarray,
    copies: ndarray,
    alike: ndarray,
) -> ndarray:
    """Return elements by layout, receiver and sender that results need to reach their owners."""
    group = group_numbers(reduced, parts)
    is_own = group[:, None] == group[None, :]
    same = same_boxes(share) & is_own
    held = same.sum(axis=-1)
    common = volumes(overlaps(owned[:, :, None], share[None, None]))
    mine = volumes(overlaps(overlaps(owned, share[None])[:, :, None], share[None, None]))
    exchanged = np.where(same[None], 0, common - mine)
    sent = np.where(is_own[None], exchanged, common) / held[None, None, :]
    if not any(reduced):
        return sent
    gathered = np.where(alike, volumes(owned)[:, :, None] / copies[:, :, None], 0.0)
    gathered *= 1 - np.eye(len(share))
    return sent / copies[:, :, None] + gathered

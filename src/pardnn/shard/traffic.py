"""Who sends how much to whom: traffic of one tensor of one op between the devices of a mesh.

Where several devices hold the same elements they share the sending evenly. Partial results for
which there are several owners are added up once, in shares, and the sums exchanged: a
reduce-scatter and an all-gather, as in an all-reduce.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.shard.cost import common_volumes, group_numbers, overlaps, volumes
from pardnn.shard.cutting import Ways
from pardnn.shard.problem import Use
from pardnn.shard.ways import fetches


def same_boxes(boxes: Int64[ndarray, "*b n rank 2"]) -> ndarray:
    """Return for each pair of devices whether their boxes are equal."""
    return (boxes[..., :, None, :, :] == boxes[..., None, :, :, :]).all(axis=(-1, -2))


def traffic(
    use: Use,
    ways: Ways,
    owned: Int64[ndarray, "l n rank 2"],
    parts: tuple[int, ...],
) -> Float64[ndarray, "a l n n"]:
    """Return elements by way, layout, receiver and sender."""
    n = owned.shape[1]
    total = np.zeros((len(ways), len(owned), n, n))
    alike = same_boxes(owned)
    copies = alike.sum(axis=-1)
    for regions, new in fetches(ways, use):
        common = common_volumes(regions[:, None, :, None], owned[None, :, None, :])
        sent = np.where(alike[None], 0, common) / copies[None, :, None, :]
        total += sent if new is None else np.where(new[:, None, None, None], sent, 0)
    for output in use.outputs:
        shares = ways.share(output)
        if shares is not None:
            for number, flags in enumerate(ways.reduced):
                share = shares[number]
                total[number] += _results(share, flags[output], parts, owned, copies, alike)
    return total


def _results(
    share: ndarray,
    reduced: tuple[bool, ...],
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
    common = common_volumes(owned[:, :, None], share[None, None])
    mine = common_volumes(overlaps(owned, share[None])[:, :, None], share[None, None])
    exchanged = np.where(same[None], 0, common - mine)
    sent = np.where(is_own[None], exchanged, common) / held[None, None, :]
    if not any(reduced):
        return sent
    gathered = np.where(alike, volumes(owned)[:, :, None] / copies[:, :, None], 0.0)
    gathered *= 1 - np.eye(len(share))
    return sent / copies[:, :, None] + gathered

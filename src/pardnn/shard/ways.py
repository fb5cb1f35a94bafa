"""Ways to compute one op as arrays, and what is asked about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.shard.cutting import Cutting, whole
from pardnn.shard.leaves import Axes
from pardnn.shard.problem import Use


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways to compute one op, as arrays.

    Attributes:
        axes: Of each way.
        cuttings: Of each way, at least one, all of one form.
        sizes: Of all dims of all tensors, side by side.
    """

    axes: Sequence[Axes]
    cuttings: Sequence[Cutting]
    sizes: Int64[ndarray, " dims"]

    def __len__(self) -> int:
        """Return their number."""
        return len(self.cuttings)

    @cached_property
    def boxes(self) -> Int64[ndarray, "a n dims 2"]:
        """What devices need and make, without what sticks out of the tensors."""
        stacked = np.array([way.boxes for way in self.cuttings])
        return np.minimum(np.maximum(stacked, 0), self.sizes[:, None])

    def region(self, slot: str) -> Int64[ndarray, "a n rank 2"]:
        """Return what devices need of an input."""
        return self.boxes[:, :, self.cuttings[0].form.slots[slot]]

    def share(self, output: int) -> Int64[ndarray, "a n rank 2"] | None:
        """Return what the devices' results are of the whole; None: not computed."""
        dims = self.cuttings[0].form.outputs[output]
        return None if dims is None else self.boxes[:, :, dims]

    def read(self, slot: str) -> list[bool]:
        """Return for each way whether values of an input are read."""
        return [way.contents.get(slot, False) for way in self.cuttings]

    def fetches(self, use: Use) -> Iterator[tuple[ndarray, ndarray | None]]:
        """Yield what ways need at each slot of a tensor, and which: None for all of them.

        A region that is needed at two slots is yielded once.
        """
        known: list[tuple[ndarray, ndarray]] = []
        for slot in use.slots if use.shape else ():
            read = self.read(slot)
            if not any(read):
                continue
            regions = self.region(slot)
            new = np.array(read)
            if len(use.slots) > 1:
                for other, there in known:
                    new &= ~(there & (regions == other).all(axis=(1, 2, 3)))
                known.append((regions, np.array(read)))
            yield regions, None if new.all() else new


def ways_of(number: int, found: Sequence[tuple[Axes, Cutting]]) -> Ways:
    """Return ways to compute an interned call."""
    sizes = whole(number).boxes[0, :, 1]
    return Ways([axes for axes, _ in found], [cutting for _, cutting in found], sizes)


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
    for number, way in enumerate(ways.cuttings):
        boxes = [way.region(slot) for slot in use.slots if slot in way.form.slots]
        for output in use.outputs:
            share = way.share(output)
            if share is not None:
                boxes.append(share)
                wrong[number] |= any(way.reduced[output])
        for box in boxes:
            wrong[number] |= (owned != box[None]).any(axis=(1, 2, 3))
    return wrong

"""The objective `bytes`: exact communication volume, every tensor cut as often as it can be.

Idea: the search requests thousands of small tables of a few shapes; those of one shape are computed
together, in one pass of array arithmetic.
Complexity: O(strategies x layouts x devices) per table, x devices where results are partial.
Reference: Tofu (EuroSys 2019), section 5, "Optimization goal": the total communication cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.plan.mesh import Layout
from pardnn.shard.partition.mesh_strategies import MeshStrategies
from pardnn.shard.search.box_volumes import (
    common_volumes,
    group_numbers,
    partial_volumes,
    volumes,
)
from pardnn.shard.search.memory_estimate import largest_share
from pardnn.shard.search.objective import TableRequest, fetches
from pardnn.shard.search.problem import Factor, Variable

#: Numbers that are worked on at a time: 8 MiB.
_AT_ONCE = 1 << 20


@dataclass
class BytesObjective:
    """Bytes that all devices receive from others.

    Attributes:
        weights: Bytes of a variable that count against memory, by root.
        price: Bytes of traffic that one of these bytes is worth on the fullest device.
        scale: If a price is set, the bytes that an op fetches of a tensor count (1 + fetched /
            scale) times: many small regions are held one after the other, a large one at once.
    """

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    price: float = 0.0
    scale: float = 1.0
    may_replicate: bool = False
    are_axes_alike: bool = True

    def communication(self, requests: Sequence[TableRequest]) -> list[Float64[ndarray, "s l"]]:
        """Bytes, summed over devices."""
        pairs = zip(elements(requests), requests, strict=True)
        found = [f.astype(np.float64) * r.operand.item for f, r in pairs]
        return [f * (1 + f / self.scale) for f in found] if self.price else found

    def computation(self, factor: Factor, strategies: MeshStrategies) -> Float64[ndarray, " s"]:
        """Nothing: computation moves no bytes."""
        return np.zeros(len(strategies))

    def layout_cost(
        self, variable: Variable, layouts: Sequence[Layout], axis_sizes: tuple[int, ...]
    ) -> Any:
        """The price of a variable's memory: owned tensors move no bytes.

        Args:
            variable: Of the coarse graph.
            layouts: A dim, or None, per mesh axis.
            axis_sizes: Of the mesh axes.
        """
        cost = self.price * self.weights.get(variable.root, 0.0)
        if not cost:
            return np.zeros(len(layouts))
        return cost * np.array([largest_share(variable, o, axis_sizes) for o in layouts])


def elements(requests: Sequence[TableRequest]) -> list[Int64[ndarray, "s l"]]:
    """Return the elements that devices receive, for each request by strategy and layout."""
    totals = [np.zeros((len(r.strategies), len(r.owned)), dtype=np.int64) for r in requests]
    plain: dict[Any, list[tuple[int, ndarray, ndarray | None]]] = {}
    partial: dict[Any, list[tuple[int, int, ndarray, ndarray]]] = {}
    for number, (operand, strategies, owned, axis_sizes) in enumerate(requests):
        for regions, new in fetches(strategies, operand):
            key = (regions.shape, owned.shape, True)
            plain.setdefault(key, []).append((number, regions, new))
        for output in operand.outputs:
            results = strategies.result(output)
            if results is None:
                continue
            key = (results.shape, owned.shape, False)
            plain.setdefault(key, []).append((number, results, None))
            for strategy, flags in enumerate(strategies.reduced):
                if any(flags[output]):
                    group = group_numbers(flags[output], axis_sizes)
                    partial.setdefault(owned.shape, []).append(
                        (number, strategy, results[strategy], group)
                    )
    for (_, _, is_input), rows in plain.items():
        _add_missing(requests, rows, is_input, totals)
    for rows in partial.values():
        _add_partial(requests, rows, totals)
    return totals


def _add_missing(
    requests: Sequence[TableRequest],
    rows: list[tuple[int, ndarray, ndarray | None]],
    is_input: bool,
    totals: list[ndarray],
) -> None:
    """Add what devices need less what they own, or of outputs what they own less what they make."""
    first, boxes, _ = rows[0]
    for some in _batches(rows, boxes.size * len(requests[first].owned)):
        boxes = np.array([row[1] for row in some])
        owned = np.array([requests[row[0]].owned for row in some])
        common = common_volumes(boxes[:, :, None], owned[:, None]).sum(axis=-1)
        whole = volumes(boxes if is_input else owned).sum(axis=-1)
        missing = (whole[:, :, None] if is_input else whole[:, None]) - common
        for (number, _, new), values in zip(some, missing, strict=True):
            totals[number] += values if new is None else np.where(new[:, None], values, 0)


def _add_partial(
    requests: Sequence[TableRequest],
    rows: list[tuple[int, int, ndarray, ndarray]],
    totals: list[ndarray],
) -> None:
    """Add the partial results that others hold, less the results that were counted as missing."""
    first, _, result, _ = rows[0]
    for some in _batches(rows, requests[first].owned.size * len(result)):
        owned = np.array([requests[row[0]].owned for row in some])
        results, groups = np.array([row[2] for row in some]), np.array([row[3] for row in some])
        found = partial_volumes(results, groups, owned) - volumes(owned).sum(axis=-1)
        for (number, strategy, _, _), values in zip(some, found, strict=True):
            totals[number][strategy] += values


def _batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    """Yield rows, as many at a time as may be worked on together."""
    step = max(1, _AT_ONCE // max(size, 1))
    waiting = iter(rows)
    while some := list(itertools.islice(waiting, step)):
        yield some

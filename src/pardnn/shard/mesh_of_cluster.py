"""The mesh over the devices of a cluster."""

from __future__ import annotations

import itertools
import math

from pardnn.cluster import Cluster
from pardnn.plan.mesh import Mesh, make_mesh


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors of a number, the largest first; of 1 itself."""
    found: list[int] = [1] if number == 1 else []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(reversed(found))


def mesh_of(cluster: Cluster) -> Mesh:
    """Return a mesh over a cluster: its prime factors, the slowest links on the first axes.

    Of all orders of the factors, the one is taken whose groups of neighbours have the fastest links
    inside, summed over the levels; if all are equal, the largest factor comes first.
    """
    factors = prime_factors(cluster.num_devices)
    bandwidth = cluster.arrays.bandwidth

    def slowest(size: int) -> float:
        return min(
            float(bandwidth[i : i + size, i : i + size].min())
            for i in range(0, len(bandwidth), size)
        )

    def speed(order: tuple[int, ...]) -> float:
        return sum(slowest(math.prod(order[axis:])) for axis in range(1, len(order)))

    orders = sorted(set(itertools.permutations(factors)), reverse=True)
    return make_mesh(max(orders, key=speed))

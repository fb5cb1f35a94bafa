"""How long collectives of k ranks take whose messages take alpha + m / bandwidth seconds each.

As of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19, 2005, and, for the ring all-reduce, Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", JPDC 69, 2009. The time of the additions is
left out.
"""

from __future__ import annotations

from pardnn.cost.links import message_seconds


def all_gather_seconds(
    num_bytes: float | int, k: int, *, bandwidth: float, latency: float
) -> float:
    """Seconds of a ring all-gather after which each of k ranks holds `num_bytes`.

    Args:
        num_bytes: That each rank holds afterwards.
        k: Number of ranks.
        bandwidth: Of the link, bytes/s.
        latency: Of the link, seconds.
    """
    return (k - 1) * message_seconds(num_bytes / k, bandwidth=bandwidth, latency=latency)


def ring_all_reduce_seconds(
    num_bytes: float | int, k: int, *, bandwidth: float, latency: float
) -> float:
    """Seconds of a reduce-scatter and an all-gather: best for long messages.

    Args:
        num_bytes: That each rank holds.
        k: Number of ranks.
        bandwidth: Of the link, bytes/s.
        latency: Of the link, seconds.
    """
    return 2 * all_gather_seconds(num_bytes, k, bandwidth=bandwidth, latency=latency)


def tree_all_reduce_seconds(
    num_bytes: float | int, k: int, *, bandwidth: float, latency: float
) -> float:
    """Seconds of a binomial reduce and a binomial broadcast: best for short messages.

    Args:
        num_bytes: That each rank holds.
        k: Number of ranks.
        bandwidth: Of the link, bytes/s.
        latency: Of the link, seconds.
    """
    return 2 * broadcast_seconds(num_bytes, k, bandwidth=bandwidth, latency=latency)


def all_reduce_seconds(
    num_bytes: float | int, k: int, *, bandwidth: float, latency: float
) -> float:
    """Seconds of the faster of the two all-reduces, which is what libraries choose.

    Args:
        num_bytes: That each rank holds.
        k: Number of ranks.
        bandwidth: Of the link, bytes/s.
        latency: Of the link, seconds.
    """
    return min(
        algorithm(num_bytes, k, bandwidth=bandwidth, latency=latency)
        for algorithm in (ring_all_reduce_seconds, tree_all_reduce_seconds)
    )


def broadcast_seconds(num_bytes: float | int, k: int, *, bandwidth: float, latency: float) -> float:
    """Seconds of a binomial broadcast of `num_bytes` to k ranks.

    Args:
        num_bytes: That each rank holds afterwards.
        k: Number of ranks.
        bandwidth: Of the link, bytes/s.
        latency: Of the link, seconds.
    """
    rounds = (k - 1).bit_length()
    return rounds * message_seconds(num_bytes, bandwidth=bandwidth, latency=latency)

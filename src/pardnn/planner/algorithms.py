"""The algorithms by name, and which of them `auto` tries."""

from __future__ import annotations

import importlib.util

from pardnn.errors import UsageError

#: Name of each algorithm: (module, function); imported when it is first used.
ALGORITHMS: dict[str, tuple[str, str]] = {
    "pardnn": ("pardnn.place.pardnn", "place_pardnn"),
    "single": ("pardnn.place.baselines.single", "place_single"),
    "round-robin": ("pardnn.place.baselines.round_robin", "place_round_robin"),
    "heft": ("pardnn.place.baselines.heft", "place_heft"),
    "layer-round-robin": ("pardnn.place.baselines.layer_round_robin", "place_layer_round_robin"),
    "contiguous": ("pardnn.place.baselines.contiguous", "place_contiguous"),
    "linear-clustering": ("pardnn.place.baselines.linear_clustering", "place_linear_clustering"),
    "m-topo": ("pardnn.place.baselines.m_topo", "place_m_topo"),
    "m-etf": ("pardnn.place.baselines.m_etf", "place_m_etf"),
    "m-sct": ("pardnn.place.baselines.m_sct", "place_m_sct"),
    "metis": ("pardnn.place.baselines.metis", "place_metis"),
    "exact": ("pardnn.place.baselines.exact", "place_exact"),
}

#: Those that cut every op over all devices, on captured graphs: (module, function).
SHARDED: dict[str, tuple[str, str]] = {
    "tofu": ("pardnn.shard.search.tofu", "search"),
    "allrow-greedy": ("pardnn.shard.search.baselines", "allrow_greedy"),
    "spartan": ("pardnn.shard.search.baselines", "spartan"),
    "equal-chop": ("pardnn.shard.search.baselines", "equal_chop"),
    "icml18": ("pardnn.shard.search.baselines", "icml18"),
    "data-parallel": ("pardnn.shard.search.baselines", "data_parallel"),
}

#: Those that ask a solver in a child process, which may not be installed.
SOLVED = frozenset({"m-sct", "metis", "exact"})

#: Names for the best of many. `auto` also considers cutting every op (`tofu`), which adds sums up
#: in another order; with `auto-whole` each op runs on one device and losses keep every bit.
BEST, BEST_WHOLE = "auto", "auto-whole"

#: What `auto` tries, the most promising first: all that need no solver, the last five only where
#: they are cheap.
AUTO = ("pardnn", "heft", "contiguous", "single")
AUTO_SMALL = (*AUTO, "m-etf", "linear-clustering", "round-robin", "m-topo", "layer-round-robin")
#: Ops up to which `auto` tries `AUTO_SMALL` and polishes the best two plans.
SMALL_OPS = 50_000
#: Solvers that `auto` asks last, where they are installed: up to so many ops, by which module.
#: Their plans are not polished: what is installed makes a difference only where they are best.
RIVALS = {"metis": (SMALL_OPS, "pymetis"), "m-sct": (5_000, "highspy")}


def check_algorithm(name: str) -> None:
    """Raise if there is no such algorithm.

    Raises:
        UsageError: E210, listing the algorithms.
    """
    if name not in (BEST, BEST_WHOLE, *ALGORITHMS, *SHARDED):
        known = ", ".join([BEST, BEST_WHOLE, *ALGORITHMS, *SHARDED])
        raise UsageError(f"no algorithm {name!r:.40}; there are {known}", code="E210")


def algorithms_to_try(algorithm: str, num_ops: int) -> tuple[str, ...]:
    """Return what an algorithm's name stands for, on a graph of this size."""
    if algorithm not in (BEST, BEST_WHOLE):
        return (algorithm,)
    return AUTO_SMALL if num_ops <= SMALL_OPS else AUTO


def rivals_to_ask(algorithm: str, num_ops: int) -> tuple[str, ...]:
    """Return which solvers are asked once the best plans are polished."""
    if algorithm not in (BEST, BEST_WHOLE):
        return ()
    return tuple(
        name
        for name, (most_ops, module) in RIVALS.items()
        if num_ops <= most_ops and importlib.util.find_spec(module) is not None
    )


def is_polished(algorithm: str, num_ops: int) -> bool:
    """Return whether the best plans of `algorithm` are polished, on a graph of this size."""
    return algorithm in (BEST, BEST_WHOLE) and num_ops <= SMALL_OPS

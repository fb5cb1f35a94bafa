"""The algorithms by name, and which of them `auto` tries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

from pardnn.errors import UsageError, did_you_mean
from pardnn.place.baselines.acyclic import place_acyclic
from pardnn.place.baselines.contiguous import place_contiguous
from pardnn.place.baselines.exact import place_exact
from pardnn.place.baselines.heft import place_heft
from pardnn.place.baselines.layer_round_robin import place_layer_round_robin
from pardnn.place.baselines.linear_clustering import place_linear_clustering
from pardnn.place.baselines.m_etf import place_m_etf
from pardnn.place.baselines.m_sct import place_m_sct
from pardnn.place.baselines.m_topo import place_m_topo
from pardnn.place.baselines.metis import place_metis
from pardnn.place.baselines.modulo import place_modulo
from pardnn.place.baselines.owners import place_owners
from pardnn.place.baselines.round_robin import place_round_robin
from pardnn.place.baselines.single import place_single
from pardnn.place.decision import Decision
from pardnn.place.pardnn import place_pardnn
from pardnn.place.recipes.schedules import SCHEDULES
from pardnn.place.thesis.steps import place_thesis
from pardnn.shard.recipes.data_parallel import data_parallel
from pardnn.shard.recipes.megatron import megatron
from pardnn.shard.recipes.product import PRODUCTS
from pardnn.shard.recipes.zero import zero_1, zero_2
from pardnn.shard.search import baselines, tofu
from pardnn.shard.sharding import Sharding

#: Those that give each op one device: called with a graph, a machine, capacities and a seed.
ALGORITHMS: Mapping[str, Callable[..., Decision]] = {
    "pardnn": place_pardnn,
    "pardnn-thesis": place_thesis,
    "single": place_single,
    "round-robin": place_round_robin,
    "heft": place_heft,
    "layer-round-robin": place_layer_round_robin,
    "contiguous": place_contiguous,
    "acyclic": place_acyclic,
    "linear-clustering": place_linear_clustering,
    "m-topo": place_m_topo,
    "m-etf": place_m_etf,
    "m-sct": place_m_sct,
    "metis": place_metis,
    "modulo": place_modulo,
    "owners": place_owners,
    "exact": place_exact,
}

#: Those that shard every op over all devices: called with a captured graph and a cluster.
SHARDED: Mapping[str, Callable[..., Sharding]] = {
    "tofu": tofu.search,
    "allrow-greedy": baselines.allrow_greedy,
    "spartan": baselines.spartan,
    "equal-chop": baselines.equal_chop,
    "icml18": baselines.icml18,
    "data-parallel": data_parallel,
    "zero-1": zero_1,
    "zero-2": zero_2,
    "zero-3": baselines.zero_3,
    "megatron": megatron,
    **PRODUCTS,
}

#: Cuts as experts make them, which `auto` tries beside `tofu`.
CUTS = ("data-parallel", "zero-1", "zero-2", "zero-3", "megatron", *PRODUCTS)

#: Cuts by simpler rules than `tofu`'s, which `auto` tries, too: now and then one of them is faster.
RULES = ("equal-chop", "allrow-greedy", "spartan", "icml18")

#: Pipelines as experts build them, of a step whose batch is in pieces.
RECIPES = tuple(SCHEDULES)
#: Of those, what `auto` tries of the whole batch: a step gains little of stages alone, but local
#: search from them may end where it does from no other plan. An LSTM on four devices: 13.0 ms
#: instead of 16.2.
STAGED = ("1f1b", "zb-v")

#: Those that run a solver in a child process, which may not be installed.
SOLVER_BASED = frozenset({"m-sct", "metis", "exact"})
#: A solver crashed or gave a wrong answer; found nothing in its time; in that of the search.
SOLVER_FAILED = ("E109", "E709", "E710")
#: Of the time that `exact` is given; the rest is for the others, should it prove nothing.
SOLVER_SHARE = 0.75

#: Names for the best of a portfolio. `auto` also considers sharding every op (`tofu`, `CUTS`),
#: which adds sums up in another order; with `auto-whole` each op runs on one device and losses keep
#: every bit.
BEST, BEST_WHOLE = "auto", "auto-whole"

#: What is tried first where state is on the devices: the plan that ran before, if it is one for
#: this graph too.
BEFORE = "the plan before"

#: What `auto` tries, the most promising first: all that need no solver, the last seven only where
#: they are cheap.
AUTO = ("pardnn", "heft", "contiguous", "single")
AUTO_SMALL = (
    *AUTO, "m-etf", "linear-clustering", "round-robin", "m-topo", "layer-round-robin", "modulo",
    "owners",
)  # fmt: skip
#: What `auto` tries only where steps in a row count: one step gains nothing of it.
OF_PERIOD = ("acyclic",)
#: What `auto` tries only where pieces of the step are alike, as microbatches are.
OF_PIECES = ("modulo", "owners")
#: Ops up to which `auto` tries `AUTO_SMALL` and polishes the best two plans.
SMALL_OPS = 50_000
#: Solver-based algorithms that `auto` tries last, where the solver is installed: up to how many
#: ops, and the solver's module. Their plans are not polished: what is installed makes a difference
#: only where they are best.
AUTO_SOLVERS = {"metis": (SMALL_OPS, "pymetis"), "m-sct": (5_000, "highspy")}
#: Devices up to which they are tried: on 4 and 8, in 97 cases of `bench auto`, `m-sct` took 1.07
#: times as long as the best plan, or longer, `metis` 1.09.
SOLVED_DEVICES = 3


def check_algorithm(name: str) -> None:
    """Raise if there is no such algorithm.

    Raises:
        UsageError: E210, listing the algorithms.
    """
    known = known_algorithms()
    if name not in known and mixed_parts(name) is None:
        raise UsageError(
            f"no algorithm {name!r:.40}; there are {', '.join(known)}, and CUT*PLACEMENT, such as "
            "megatron*1f1b" + did_you_mean(name, known),
            code="E210",
        )


def mixed_parts(name: str) -> tuple[str, str] | None:
    """Return the cut and the placement of a mixed algorithm, "megatron*1f1b"; None of others."""
    cut, _, placement = name.rpartition("*")
    is_mixed = cut in SHARDED and (placement in ALGORITHMS or placement in RECIPES)
    return (cut, placement) if is_mixed else None


def cuts_ops(name: str) -> bool:
    """Whether an algorithm cuts every op, over all devices or inside submeshes."""
    return name in SHARDED or mixed_parts(name) is not None


def known_algorithms() -> list[str]:
    """Return the names that `--algorithm` accepts."""
    return [BEST, BEST_WHOLE, *ALGORITHMS, *SHARDED, *RECIPES]


def algorithms_to_try(algorithm: str, num_ops: int) -> tuple[str, ...]:
    """Return what an algorithm's name stands for, on a graph of this size."""
    if algorithm not in (BEST, BEST_WHOLE):
        return (algorithm,)
    return AUTO_SMALL if num_ops <= SMALL_OPS else AUTO


def solvers_to_try(algorithm: str, num_ops: int, num_devices: int) -> tuple[str, ...]:
    """Return which solver-based algorithms are tried once the best plans are polished."""
    if algorithm not in (BEST, BEST_WHOLE) or num_devices > SOLVED_DEVICES:
        return ()
    return tuple(
        name
        for name, (max_ops, module) in AUTO_SOLVERS.items()
        if num_ops <= max_ops and importlib.util.find_spec(module) is not None
    )


def is_polished(algorithm: str, num_ops: int) -> bool:
    """Return whether the best plans of `algorithm` are polished, on a graph of this size."""
    return algorithm in (BEST, BEST_WHOLE) and num_ops <= SMALL_OPS

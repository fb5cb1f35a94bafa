"""Load kernels before planning is timed; where the cache is empty, compile them side by side.

Kernels are compiled when they are first called, so each is called on a tiny graph. The machine code
goes to numba's cache, where processes find what others have compiled: on a cold cache, some *steps*
of planning are left to child processes, which call their kernels directly, while this one runs the
algorithms. Each step was chosen to need little of what others compile at the same time; the small
ones come first, so that processes that need them later find them.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.cost.host import usable_cores
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.kernels.compilations import COMPILATIONS
from pardnn.place.colocation import closed_arrays
from pardnn.place.ordering import memory_bounded, schedule
from pardnn.place.ordering.least_peak import least_peak_positions
from pardnn.place.ordering.low_memory_orders import eager_free_positions, file_positions
from pardnn.place.pardnn import overflow_knapsack
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.problem import problem_of
from pardnn.place.polish.polish import load_kernels
from pardnn.place.polish.search import search_kernel
from pardnn.planner.algorithms import ALGORITHMS, SOLVER_BASED
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide
from pardnn.sim import engine
from pardnn.sim.bounds import degree_of_parallelism, lower_bound_seconds
from pardnn.sim.dynamic import emulate
from pardnn.sim.machine import Machine, machine_of
from pardnn.sim.peak import peaks

#: A tiny step whose plan overflows two devices of this many bytes each, and yet fits.
_WARM_UP_BYTES = 80


def _warm_up_graph() -> Graph:
    def op(i: int) -> Op:
        is_source = i % 6 == 0
        return Op(
            name=f"op{i}",
            kind="parameter" if is_source else "pardnn.warm_up",
            inputs=() if is_source else (f"t{i - 1}",),
            after=(f"op{i - 5}",) if i % 6 == 5 else (),
            outputs=(Tensor(name=f"t{i}", bytes=32 if is_source else 8),),
            memory="residual" if is_source else "normal",
            seconds={"accelerator": 1e-6},
        )

    return build_graph("warm-up", [op(i) for i in range(24)])


def warm_up(names: Iterable[str], *, limited: bool = True, polished: bool = False) -> None:
    """Compile, or load from the cache, the kernels of these algorithms on a tiny graph.

    Args:
        names: Of algorithms.
        limited: Also those that resolve overflows.
        polished: Also those of local search.
    """
    wanted = [name for name in names if name not in SOLVER_BASED and name in ALGORITHMS]
    searched = "pardnn" in wanted
    simulating = ["plan", *["overflow"] * (limited and searched), "simulate"]
    # What only ParDNN compiles takes so long that plans can be made when they are needed here.
    apart = [*[simulating] * searched, *[["memory"]] * limited, *[["polish"]] * polished]
    cold = [steps for steps in apart if _is_cold(_STEPS[steps[0]].largest)]
    with _compiling(cold):
        _load(wanted, limited=False)
    for steps in (simulating, *apart):
        _load_steps(steps)
    for steps in cold:
        _date(_STEPS[steps[0]].largest)
    if limited:
        _load(wanted, limited=True)


def _load(names: Sequence[str], *, limited: bool) -> None:
    graph = _warm_up_graph()
    cluster = Cluster.uniform(2, memory=_WARM_UP_BYTES if limited else None)
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(reserve=0.0))
    for name in names:
        with contextlib.suppress(InfeasibleError):
            decide(problem, name)


def _load_steps(steps: Iterable[str]) -> None:
    graph = _warm_up_graph()
    arrays, machine = closed_arrays(graph), machine_of(graph_costs(graph), Cluster.uniform(2))
    for step in steps:
        _STEPS[step].load(arrays, machine)


def _load_plan(arrays: GraphArrays, machine: Machine) -> None:
    """Load the kernels that make a plan and compute its peaks."""
    place = np.arange(arrays.num_ops) % 2
    peaks(arrays, schedule.free_plan(arrays, 2, place, file_positions(arrays)))
    schedule.ordered_plan(arrays, 2, place, emulate(arrays, machine, place), _nothing_written())


def _load_simulate(arrays: GraphArrays, machine: Machine) -> None:
    """Load the simulator and the lower bounds."""
    place = np.arange(arrays.num_ops) % 2
    engine.run_lists(arrays, machine, schedule.free_plan(arrays, 2, place, file_positions(arrays)))
    lower_bound_seconds(arrays, machine, [None, None])
    degree_of_parallelism(arrays, machine)


def _load_memory(arrays: GraphArrays, machine: Machine) -> None:
    """Load the low-memory orders and the memory-bounded schedule."""
    place, position = np.arange(arrays.num_ops) % 2, eager_free_positions(arrays)
    memory_bounded.memory_bounded_plan(
        arrays, machine, place, position, [_WARM_UP_BYTES] * 2, _nothing_written()
    )
    least_peak_positions(arrays)


def _load_overflow(arrays: GraphArrays, machine: Machine) -> None:
    """Load overflow repair: here of the first device, which holds all ops."""
    place = np.zeros(arrays.num_ops, dtype=np.int64)
    capacity = memory_bounded.limits([_WARM_UP_BYTES, None])
    profile = memory_profile_of(arrays, place, file_positions(arrays), capacity)
    overflow_knapsack.resolve_overflow(problem_of(arrays, machine), profile)


def _nothing_written() -> np.ndarray:
    return np.empty((0, 2), dtype=np.int64)


class _Step(NamedTuple):
    """A part of planning, and its largest kernel."""

    load: Callable[[GraphArrays, Machine], None]
    largest: Callable[..., Any]


_STEPS = {
    "plan": _Step(_load_plan, schedule._hold_and_post_kernel),
    "simulate": _Step(_load_simulate, engine._order_kernel),
    "memory": _Step(_load_memory, memory_bounded._hold_kernel),
    "overflow": _Step(_load_overflow, overflow_knapsack._resolve_kernel),
    "polish": _Step(load_kernels, search_kernel),
}


def _is_cold(kernel: Any) -> bool:
    """Whether a kernel is not in the cache, or older than its source, and can be kept there."""
    if not hasattr(kernel, "stats") or usable_cores() < 2:  # kernels run as plain Python
        return False
    if kernel.stats.cache_path is None:  # none can be kept: what a child compiles is lost
        return False
    source = Path(kernel.py_func.__code__.co_filename)
    try:
        kept = (path.stat().st_mtime for path in _kept(kernel))
        return max(kept, default=0.0) < source.stat().st_mtime
    except OSError:
        return False


def _kept(kernel: Any) -> Iterator[Path]:
    """Return the files that list a kernel's machine code."""
    stem = Path(kernel.py_func.__code__.co_filename).stem
    return Path(kernel.stats.cache_path).glob(f"{stem}.{kernel.__name__}-*.nbi")


def _date(kernel: Any) -> None:
    """Give a kernel's files in the cache the present date, now that it is loaded.

    Numba compares the source's content: after another checkout of the same source it uses what it
    has, and writes nothing that `_is_cold` would see.
    """
    with contextlib.suppress(OSError):
        for path in _kept(kernel):
            path.touch()


@contextlib.contextmanager
def _compiling(shares: Iterable[Sequence[str]]) -> Iterator[None]:
    """Let other processes fill the cache meanwhile; what they fail to do is done here later."""
    children: list[subprocess.Popen[bytes]] = []
    nowhere = subprocess.DEVNULL
    for steps in shares:
        command = [sys.executable, "-m", __name__, json.dumps(steps)]
        with contextlib.suppress(OSError):
            child = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
            children.append(child)
            COMPILATIONS.begin()
    try:
        yield
    except BaseException:
        for child in children:
            child.terminate()
        raise
    finally:
        for child in children:
            child.wait()
            COMPILATIONS.end()


if __name__ == "__main__":
    _load_steps(json.loads(sys.argv[1]))

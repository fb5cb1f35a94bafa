"""What the ranks of the fidelity bench do: time calls side by side, and run plans.

All ranks of one size live in one set of forked processes, one thread each, that take the plans in
turn: starting them anew for each would take most of the time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.common.forked import forked, process_group
from pardnn.backends.torch.comm.joining import join
from pardnn.backends.torch.profile.op_times import profile_graph
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.cost.table import CostTable, Entry, Machine
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan

CPU = torch.device("cpu")


class Case(NamedTuple):
    """One plan to run: the model's function, its graph, the plan."""

    make: Callable[[], Any]
    graph: Graph
    plan: Plan


def profiled(graphs: Sequence[Graph], side_by_side: int, budget_s: float) -> CostTable:
    """Return what the graphs' calls take while so many processes make the same calls.

    Args:
        graphs: Captured or partitioned ones.
        side_by_side: Processes that measure at the same time; the mean of theirs counts.
        budget_s: Seconds per graph after which a call is timed once only.
    """

    def body(rank: int, store: str) -> dict[str, float]:
        if side_by_side > 1:
            process_group(rank, side_by_side, store)
        with tempfile.TemporaryDirectory() as folder:
            for graph in graphs:
                if side_by_side > 1:
                    dist.barrier()
                table = profile_graph(
                    graph, CPU, threads=1, folder=Path(folder), budget_seconds=budget_s
                )[0]
        return {text: entry.seconds for text, entry in table.entries.items()}

    ranks = forked(side_by_side, body, limit_s=1800.0)
    entries = {
        text: Entry(seconds=statistics.fmean([each[text] for each in ranks if text in each]))
        for text in ranks[0]
    }
    return CostTable(Machine(device="cpu", library="torch", threads=1), entries)


def faster(one: CostTable, other: CostTable) -> CostTable:
    """Return the faster of two timings of each call, as what else runs here only adds."""
    entries = {
        text: min(entry, other.entries[text], key=lambda each: each.seconds)
        for text, entry in one.entries.items()
        if text in other.entries
    }
    return CostTable(one.machine, dict(one.entries) | entries)


def ran(cases: Sequence[Case], num_ranks: int, steps: int) -> list[dict[str, Any]]:
    """Run each plan for some steps; return seconds of the fastest and median step, and peaks.

    Args:
        cases: The plans.
        num_ranks: Number of ranks.
        steps: Steps of each run.
    """

    def body(rank: int, store: str) -> list[dict[str, Any]]:
        if num_ranks > 1:
            process_group(rank, num_ranks, store)
        return [_run(case, steps) for case in cases]

    ranks = forked(num_ranks, body, limit_s=1800.0)
    return [_together([each[i] for each in ranks]) for i in range(len(cases))]


def _run(case: Case, steps: int) -> dict[str, Any]:
    step, args = case.make()
    world = join(CPU, timeout_s=120.0)
    try:
        program = Program(case.graph, case.plan)
        binding, state = Binding(step, args, case.graph, CPU), LiveState(world)

        executor = start(program, world, lambda: state.take(program, binding)[0])
        batch = [
            arg for arg in args if not isinstance(arg, torch.nn.Module | torch.optim.Optimizer)
        ]
        cpu: list[float] = []
        for _ in range(steps):
            begin = time.process_time()
            executor.step(lambda: binding.batch_inputs(batch))
            cpu.append(time.process_time() - begin)
    except PardnnError as error:
        return {"error": f"{error.code} {error.message.splitlines()[0]}"}
    finally:
        world.close()
    return {
        "step_s": executor.step_s,
        "cpu_s": min(cpu[1:]),
        "peak_bytes": executor.peak_bytes,
        "predicted_bytes": program.peaks[executor.rank],
    }


def _together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failed = next((each for each in ranks if "error" in each), None)
    if failed is not None:
        return failed
    slowest = [max(step) for step in zip(*(each["step_s"] for each in ranks), strict=True)]
    later = sorted(slowest[1:])  # the first step counts bytes
    return {
        "measured_s": later[0],
        "median_s": later[len(later) // 2],
        "measured_cpu_s": sum(each["cpu_s"] for each in ranks),
        "measured_bytes": [each["peak_bytes"] for each in ranks],
        "predicted_bytes": [each["predicted_bytes"] for each in ranks],
    }

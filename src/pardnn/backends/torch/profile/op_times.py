"""Measured op times: every distinct call of a graph is timed on the real device.

A step of thousands of ops has some hundred distinct calls (`pardnn.cost.call.signature`). If the
graph fits on a CPU, they are timed there in the context of the step (`in_context.py`). What cannot
is made alone on synthetic inputs (`op_alone.py`), so a model that is too large for the device
is still measured op by op. Of a partitioned graph, one rank's share is timed (`rank_shares.py`).

Results are kept in the user's cache; a second run measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.large_pages import has_large_pages
from pardnn.backends.torch.ops.host_allocator import GROWN_BYTES, SMALL_BYTES, as_on_ranks
from pardnn.backends.torch.profile.in_context import profile_in_context
from pardnn.backends.torch.profile.op_alone import measure_alone, measure_overheads
from pardnn.backends.torch.profile.rank_shares import rank_shares
from pardnn.cost.call import is_free, is_view, signature, tensors_by_name
from pardnn.cost.costs import HOST_SIGNATURE, VIEW_SIGNATURE
from pardnn.cost.host import cpu_name
from pardnn.cost.presets import DEVICE_MODELS, device_model
from pardnn.cost.roofline import DeviceModel, op_seconds
from pardnn.cost.table import CostTable, Entry, Machine, cache_folder, load_table, save_table
from pardnn.errors import FileError, UnsupportedError
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.time_limit import seconds_left

#: Seconds after which each remaining call is timed only once.
BUDGET_SECONDS = 60.0

Progress = Callable[[int, int], None]

#: What an op may raise that cannot be run as it is.
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, MemoryError, FileError,
             UnsupportedError)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProfileStats:
    """How many calls a profile measured.

    Attributes:
        measured: Number of calls timed now.
        cached: Number of calls that the cache knew.
        estimated: (op name, kind, reason) of each call that could not be run and was estimated
            by a roofline instead; counted in neither of the above.
        seconds: Duration of the profile.
    """

    measured: int
    cached: int
    estimated: tuple[tuple[str, str, str], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Case:
    """One distinct call: its signature and the first op that makes it."""

    text: str
    op: Op


def machine_of(device: torch.device, *, keeps_freed: bool = True) -> Machine:
    """Return the key of the cost cache for this device, library and number of threads.

    The setting of float32 products counts as part of the library: TF32 changes their speed. So do
    the pages of a CPU's tensors, and which tensors have fresh ones.

    Args:
        device: The device.
        keeps_freed: See `profile_graph`.
    """
    library = f"torch {torch.__version__}, float32 {torch.get_float32_matmul_precision()}"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"{found.name}, {found.total_memory >> 20} MiB, {found.multi_processor_count} SMs"
        return Machine(device=name, library=f"{library}, CUDA {torch.version.cuda}", threads=0)
    name = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    fresh = (GROWN_BYTES if keeps_freed else SMALL_BYTES) >> 20
    library += f", {'2 MiB' if has_large_pages() else '4 KiB'} pages, fresh from {fresh} MiB on"
    library += ", but for fixed places"
    return Machine(device=name, library=library, threads=torch.get_num_threads())


def profile_graph(
    graph: Graph,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    *,
    threads: int | None = None,
    folder: Path | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    memory: int | None = None,
    admit: Callable[[Op], None] | None = None,
    is_kept: bool = True,
    keeps_freed: bool = True,
) -> tuple[CostTable, ProfileStats]:
    """Time every distinct call of the graph that the cache does not know.

    Args:
        graph: A captured graph.
        device: Where to run the calls.
        progress: Called with the number of calls done and in all.
        threads: How many threads an op may use on a CPU; the current number if absent, which is
            restored.
        folder: The folder of the cost cache; the user's if absent.
        budget_seconds: Time after which each remaining call is timed only once.
        memory: Bytes of tensors that it may take; a call that needs more is estimated by a
            roofline. None: what the device has free.
        admit: Raises `UnsupportedError` for an op that may not run; it is estimated, and so are ops
            for which the budget leaves no time. None runs all.
        is_kept: Whether results go into the cache.
        keeps_freed: Freed tensors of a CPU stay in the heap, as on ranks without a limit or with
            much room; False: only those below 2 MiB.

    Returns:
        Costs for `measured_costs`, and what was done. Views and host arithmetic are costed by one
        figure each, measured too.
    """
    start = time.perf_counter()
    device = torch.device(device)
    budget_seconds = min(budget_seconds, max(seconds_left(), 0.0))
    tensors = tensors_by_name(graph)
    folder = folder or cache_folder()
    with _quiet(device, threads):
        machine = machine_of(device, keeps_freed=keeps_freed)
        cached = load_table(machine, folder)
        cases = _cases(graph, tensors)
        missing = [case for case in cases if case.text not in cached.entries]
        measures = missing and device.type == "cpu"
        with as_on_ranks(keeps=keeps_freed) if measures else nullcontext():
            table, estimates, estimated = _measure_all(
                cached, missing, graph, tensors, device, progress, budget_seconds, memory, admit
            )
    if table is not cached and is_kept:
        save_table(table, folder)
    # Not kept: with more memory, the call can be timed.
    table = table.with_entries(estimates) if estimates else table
    stats = ProfileStats(
        measured=len(missing) - len(estimated),
        cached=len(cases) - len(missing),
        estimated=tuple(estimated),
        seconds=time.perf_counter() - start,
    )
    return table, stats


def cached_table(
    device: torch.device | str = "cpu",
    *,
    threads: int | None = None,
    folder: Path | None = None,
    keeps_freed: bool = True,
) -> CostTable:
    """Return the cached costs of a device.

    Args:
        device: Where the calls were run.
        threads: How many threads an op may use on a CPU; the current number if absent.
        folder: The folder of the cost cache; the user's if absent.
        keeps_freed: See `profile_graph`.
    """
    device = torch.device(device)
    with _quiet(device, threads):
        machine = machine_of(device, keeps_freed=keeps_freed)
        return load_table(machine, folder or cache_folder())


def _cases(graph: Graph, tensors: Mapping[str, Tensor]) -> list[_Case]:
    found: dict[str, Op] = {}
    for op in graph.ops:
        if not (is_free(op) or is_view(op) or op.kind.startswith("scalar.")):
            found.setdefault(signature(op, tensors), op)
    return [_Case(text, op) for text, op in found.items()]


@contextmanager
def _quiet(device: torch.device, threads: int | None) -> Iterator[None]:
    """Restore the generators, the number of threads and gradient recording afterwards.

    Denormal numbers are flushed to zero: synthetic values have more of them than those of a step,
    and a product of them takes ten times as long.
    """
    before, flushed = torch.get_num_threads(), not (torch.tensor(1e-39) * 1.0).item()
    devices = [device] if device.type == "cuda" else []
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(before)


def _measure_all(
    cached: CostTable,
    missing: list[_Case],
    graph: Graph,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    progress: Progress | None,
    budget_seconds: float,
    memory: int | None,
    admit: Callable[[Op], None] | None,
) -> tuple[CostTable, dict[str, Entry], list[tuple[str, str, str]]]:
    """Return the table of what was timed, the estimates of the rest, and what these cover."""
    found: dict[str, Entry] = {}
    estimates: dict[str, Entry] = {}
    estimated: list[tuple[str, str, str]] = []
    end = time.perf_counter() + budget_seconds
    if not {VIEW_SIGNATURE, HOST_SIGNATURE} <= set(cached.entries):
        found |= measure_overheads(device)
    in_context, tell = dict[str, Entry](), _rising(progress, len(missing))
    if missing and device.type == "cpu":
        refused = set[str]() if admit is None else _refused(graph, tensors, admit)
        for share in rank_shares(graph, [case.op for case in missing]):
            in_context = {**profile_in_context(share, end, memory, tell, refused), **in_context}
        found |= {text: each for text, each in in_context.items() if text not in cached.entries}
    for done, case in enumerate(missing):
        try:
            if case.text not in in_context:
                hurry = time.perf_counter() > end
                if admit is not None:
                    admit(case.op)
                    if hurry:
                        raise UnsupportedError("there is no time left to measure it")
                found[case.text] = measure_alone(case.op, tensors, device, memory, hurry=hurry)
        except _REFUSALS as error:
            seconds = op_seconds(case.op, tensors, _estimator(device))
            estimates[case.text] = Entry(seconds=seconds)
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
            estimated.append((case.op.name, case.op.kind, reason))
        tell((done + 1) / len(missing))
    return (cached.with_entries(found) if found else cached), estimates, estimated


def _rising(progress: Progress | None, number: int) -> Callable[[float], None]:
    """Return a function that reports the share of the calls timed so far, if it has grown."""
    reported = 0

    def tell(part: float) -> None:
        nonlocal reported
        done = round(part * number)
        if progress is not None and done > reported:
            reported = done
            progress(done, number)

    return tell


def _refused(graph: Graph, tensors: Mapping[str, Tensor], admit: Callable[[Op], None]) -> set[str]:
    """Return the names of the ops that may not run; equal calls are asked once."""
    is_refused: dict[Any, bool] = {}
    found: set[str] = set()
    for op in graph.ops:
        if op.is_source or is_free(op):
            continue
        results = (replace(t, name="", alias_of=None) for t in op.outputs)
        key = signature(op, tensors), tuple(results)
        if key not in is_refused:
            try:
                admit(op)
                is_refused[key] = False
            except _REFUSALS:
                is_refused[key] = True
        if is_refused[key]:
            found.add(op.name)
    return found


def _estimator(device: torch.device) -> DeviceModel:
    if device.type != "cuda":
        return device_model("cpu", threads=torch.get_num_threads())
    name = torch.cuda.get_device_name(device).lower()
    return next(
        (model for key, model in DEVICE_MODELS.items() if key in name), DEVICE_MODELS["a100"]
    )

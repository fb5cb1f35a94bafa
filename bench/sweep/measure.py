"""What one case shows: captured, placed on two ranks, cut over them, each beside eager steps.

A refusal is a `PardnnError` of a code of its own, kept with its whole text. Whatever else ends a
stage is a failure: an exception that is no `PardnnError`, a code E1xx, a rank that died or hung.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import pardnn
from bench.common.forked import forked, process_group
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.sources import batch_indices, sources
from pardnn.cluster import Cluster
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph

Row = dict[str, Any]
Factory = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]

RANKS, STEPS = 2, 3
#: Seconds for the ranks of one run, and for any wait of one for another.
RUN_S, WAIT_S = 120.0, 30.0
COSTS = "v100"
#: Of cut ops sums are taken in another order. Where losses differ by more, that is compared with
#: what the eager steps make of parameters that differ in their last bits.
TOLERANCE = 1e-4
NUDGES = 3
#: How each run is planned.
RUNS = {
    "placed": {"algorithm": "round-robin", "objective": "seconds"},
    "cut": {"algorithm": "tofu", "objective": "bytes"},
}


def measure(factory: Factory, save: Callable[[Row], None]) -> None:
    """Measure one case; `save` gets the row after every stage, so that a hang keeps the rest."""
    row: Row = {}
    begun = time.monotonic()
    try:
        step, args = factory()
        row["loss"] = _value(step(*args))
    except Exception:
        save({"case": {"status": "broken", "text": traceback.format_exc()}})
        return
    save(row | {"captured": {"status": "timeout"}})
    graph = _guarded(row, "captured", lambda: _captured(factory))
    if graph is None:
        save(row)
        return
    row["captured"] |= {"ops": len(graph.ops), "seconds": time.monotonic() - begun}
    save(row | {"placed": {"status": "timeout"}})
    expected = forked(1, lambda _rank, _store: eager(factory, graph), RUN_S)[0]
    for name, options in RUNS.items():
        save(row | {name: {"status": "timeout"}})
        begun = time.monotonic()

        def run(options: dict[str, Any] = options) -> Row:
            return on_ranks(factory, graph, expected, options)

        found = _guarded(row, name, run)
        row[name] |= found or {}
        if (found or {}).get("loss_difference", 0) > TOLERANCE:
            row[name]["noise"] = forked(1, lambda _r, _s: noise(factory, graph, expected), RUN_S)[0]
        row[name]["seconds"] = time.monotonic() - begun
        save(row)


def _captured(factory: Factory) -> Graph:
    step, args = factory()
    return pardnn.capture(step, *args)


def _guarded(row: Row, stage: str, work: Callable[[], Any]) -> Any:
    """Return what `work` returns; how it ended becomes the row's `stage`."""
    try:
        found = work()
    except PardnnError as error:
        row[stage] = error_row(error)
    except Exception as error:
        row[stage] = {"status": "failed", "code": type(error).__name__}
        row[stage]["text"] = traceback.format_exc()
    else:
        if isinstance(found, dict) and "status" in found:
            row[stage], found = found, None
        else:
            row[stage] = {"status": "ok"}
        return found
    return None


def error_row(error: PardnnError) -> Row:
    """Return how an error ends a stage."""
    status = "failed" if error.exit_status in (1, 6, 7) else "refused"
    return {"status": status, "code": error.code, "text": str(error)}


def _value(loss: Any) -> float:
    return float(loss_of(loss).detach())


def next_batch(args: Sequence[Any], call: int) -> None:
    """Roll the batch's tensors along their first dimension, in place: another batch of its kind."""
    if call == 0:
        return
    seen: set[int] = set()
    for index in batch_indices(args):
        for leaf in tree_leaves(args[index]):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.data_ptr() not in seen:
                seen.add(leaf.data_ptr())
                with torch.no_grad():
                    leaf.copy_(leaf.roll(1, 0))


def noise(factory: Factory, graph: Graph, expected: Row) -> float:
    """Return how far the losses of eager steps move with the last bits of the parameters.

    Args:
        factory: Of the case.
        graph: Of its step.
        expected: The eager steps from the parameters themselves.
    """
    moved = [eager(factory, graph, seed) for seed in range(1, NUDGES + 1)]
    return max(compared(each["losses"], {}, expected)["loss_difference"] for each in moved)


def nudge(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Move each number to one of the two next to it."""
    generator = torch.Generator().manual_seed(seed)
    for each in tensors:
        if each.is_floating_point():
            towards = torch.full_like(each, math.inf)
            towards[torch.rand(each.shape, generator=generator) < 0.5] *= -1
            each.copy_(torch.nextafter(each, towards))


def eager(factory: Factory, graph: Graph, seed: int = 0) -> Row:
    """Run the step itself; return its losses and what it leaves, by the graph's names.

    Args:
        factory: Of the case.
        graph: Of its step.
        seed: Of a nudge of the parameters; 0 for none.
    """
    step, args = factory()
    held = sources(step, args, graph)
    if seed:
        live = ((each.kind, each.get()) for each in held)
        with torch.no_grad():
            nudge((x for kind, x in live if kind == "parameter" and x is not None), seed)
    losses = []
    for call in range(STEPS):
        next_batch(args, call)
        losses.append(_value(step(*args)))
    # Once more: what the step replaces (a list of SOAP's state) is in no place of before.
    held = [*held, *sources(step, args, graph)]
    return {"losses": losses, "state": {each.name: as_list(each.get()) for each in held}}


def as_list(value: Any) -> list[float] | None:
    """Return a tensor's numbers, exactly; None for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.detach().double().reshape(-1).tolist()


def on_ranks(factory: Factory, graph: Graph, expected: Row, options: dict[str, Any]) -> Row:
    """Plan a graph, run it on ranks and compare with the eager run."""
    plan = pardnn.plan(graph, Cluster.uniform(RANKS), **options, costs=COSTS)

    def body(rank: int, store: str) -> Row:
        process_group(rank, RANKS, store)
        try:
            return _on_one_rank(factory, plan, expected)
        except PardnnError as error:
            return error_row(error)

    rows = forked(RANKS, body, RUN_S)
    # Where one rank stops, the others say only that it did.
    stopped = sorted(
        (row for row in rows if "status" in row), key=lambda row: row["status"] == "failed"
    )
    if stopped:
        return stopped[0]
    both = {key: [row[key] for row in rows] for key in ("measured_bytes", "predicted_bytes")}
    return rows[0] | both


def _on_one_rank(factory: Factory, plan: Any, expected: Row) -> Row:
    step, args = factory()
    fast = pardnn.parallelize(step, *args, plan=plan, timeout=WAIT_S)
    losses, peaks = [], Peaks()
    for call in range(STEPS):
        next_batch(args, call)
        losses.append(_value(fast(*(args[i] for i in batch_indices(args)))))
        peaks.note(fast)
    state = {
        name: as_list(fast.whole(name))
        for name in fast.names
        if expected["state"].get(name) is not None
    }
    measured, predicted = peaks.worst()
    found = {"measured_bytes": measured, "predicted_bytes": predicted, "graphs": len(peaks)}
    fast.close()
    return found | compared(losses, state, expected)


class Peaks:
    """Measured and predicted peaks of one rank, of each graph that ran."""

    def __init__(self) -> None:
        self._of_graph: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._of_graph)

    def note(self, fast: Any) -> None:
        """Note the peaks of the graph that ran last."""
        key = id(fast.graph)
        if key not in self._of_graph:
            predicted = Program(fast.graph, fast.plan).peaks[fast.rank]
            self._of_graph[key] = fast.peak_bytes, predicted

    def worst(self) -> tuple[int, int]:
        """Return the peaks of the graph that came nearest to its prediction, or beyond it."""
        return max(self._of_graph.values(), key=lambda pair: pair[0] / pair[1])


def compared(losses: list[float], state: dict[str, Any], expected: Row) -> Row:
    """Compare losses and states with the eager ones, with NaN equal to itself."""
    worst, where = 0.0, ""
    for name, values in state.items():
        known = expected["state"][name]
        largest = max((abs(x) for x in known if math.isfinite(x)), default=0.0)
        off = max(map(_off, values, known), default=0.0) / (largest or 1.0)
        if len(values) != len(known) or off > worst:
            worst, where = max(worst, off if len(values) == len(known) else math.inf), name
    return {
        "losses": losses,
        "expected_losses": expected["losses"],
        "loss_difference": max(
            _off(a, b) / (abs(b) or 1.0) for a, b in zip(losses, expected["losses"], strict=True)
        ),
        "state_difference": worst,
        "state_where": where,
        "states": len(state),
    }


def _off(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf

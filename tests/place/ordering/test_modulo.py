"""Modulo schedules against a naive twin on a grid of whole seconds, and keys by hand."""

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.edges import edges_of
from pardnn.place.ordering.modulo import model_of, modulo_keys, modulo_times
from pardnn.place.ordering.pieces import Pieces
from tests.place.machines import cluster_of, machine_for

LATENCY = 2.0


def drawn(seed: int, unit: float) -> tuple[Graph, np.ndarray]:
    """Ops of 0 to 3 units, in the order of the file, on two devices."""
    rng = np.random.default_rng(seed)
    ops = [
        Op(
            name=f"o{i}",
            kind="op",
            inputs=tuple(sorted({f"o{j}" for j in rng.integers(0, max(i, 1), 2)})) if i else (),
            outputs=(Tensor(name=f"o{i}", bytes=0),),
            seconds={"accelerator": float(unit * rng.integers(0, 4))},
        )
        for i in range(10)
    ]
    return build_graph("drawn", ops), rng.integers(0, 2, 10)


def times_on_a_grid(graph: Graph, place: np.ndarray, period: int, unit: float) -> list[int]:
    """Rau's table of reservations: units of a period that are taken, one by one."""
    name = {op.name: i for i, op in enumerate(graph.ops)}
    seconds = [round((op.seconds or {})["accelerator"] / unit) for op in graph.ops]
    reads = [[name[x] for x in op.inputs] for op in graph.ops]
    awaited = [False] * len(reads)  # by an op of another device, at the end of some path
    for op in reversed(range(len(reads))):
        for x in reads[op]:
            awaited[x] |= awaited[op] or bool(place[x] != place[op])
    start, taken = [0] * len(reads), {0: set[int](), 1: set[int]()}
    for op in sorted(range(len(reads)), key=lambda op: not awaited[op]):
        delays = [int(LATENCY) * int(place[x] != place[op]) for x in reads[op]]
        ready = max(
            (start[x] + seconds[x] + d for x, d in zip(reads[op], delays, strict=True)), default=0
        )
        start[op] = ready
        for t in range(ready, ready + period):
            slots = {s % period for s in range(t, t + seconds[op])}
            if len(slots) == seconds[op] and not slots & taken[int(place[op])]:
                start[op] = t
                break
        taken[int(place[op])] |= {s % period for s in range(start[op], start[op] + seconds[op])}
    return start


@pytest.mark.parametrize("unit", [1.0, 0.1])
@pytest.mark.parametrize("period", [3, 7, 9, 30])
def test_each_op_starts_when_its_device_is_free_in_every_period(period: int, unit: float) -> None:
    """In tenths of a second, which are no sums of powers of two, sums are rounded."""
    alone, cluster = Pieces(1, np.zeros(10, dtype=np.int64), np.arange(10)), cluster_of(2)
    for seed in range(25):
        graph, place = drawn(seed, unit)
        machine = machine_for(graph, cluster)._replace(latency=LATENCY * unit * (1 - np.eye(2)))
        edges = edges_of(graph.arrays, machine, place)
        times = modulo_times(edges, model_of(alone, edges, np.arange(10)), period * unit)
        grid = times_on_a_grid(graph, place, period, unit)
        assert times / unit == pytest.approx(grid, abs=1e-6), seed


def test_pieces_follow_a_period_later_and_fillers_are_delayed() -> None:
    """Two pieces of a -> (b on the other device, g here); both a read `w`, `s` reads both g.

    At a period of 2: a at 0, b at 1 + 2, g at 1. Half a period's delay puts each g at 2 and 4; `s`
    starts when the last g ends, at 5. What is there once before the pieces delays no key.
    """
    rows = [("a0", ("w",)), ("b0", ("a0",)), ("g0", ("a0",)), ("a1", ("w",)), ("b1", ("a1",)),
            ("g1", ("a1",)), ("s", ("g0", "g1")), ("w", ())]  # fmt: skip
    ops = [
        Op(name=name, kind="op", inputs=reads, outputs=(Tensor(name=name, bytes=0),),
           seconds={"accelerator": 5.0 if name == "w" else 1.0})
        for name, reads in rows
    ]  # fmt: skip
    graph = build_graph("two", ops)
    place = np.array([0, 1, 0, 0, 1, 0, 0, 0])
    pieces = Pieces(2, np.array([0, 0, 0, 1, 1, 1, -1, -1]), np.array([0, 1, 2, 0, 1, 2, 6, 7]))
    edges = edges_of(graph.arrays, machine_for(graph, cluster_of(2, latency=LATENCY)), place)
    reference = np.array([1, 2, 3, 4, 5, 6, 7, 0])
    model = model_of(pieces, edges, reference)
    assert model.period == 2.0  # a and g, on device 0
    assert np.flatnonzero(model.is_filler).tolist() == [1, 2, 4, 5]
    times = modulo_times(edges, model, 2.0)
    assert times.tolist() == [0, 3, 1, 0, 0, 0, 0, 0]
    keys = modulo_keys(pieces, edges, model, reference, times, 2.0, 0.5)
    assert keys == pytest.approx([0, 4, 2, 2, 6, 4, 5, 0], abs=1e-6)
    assert np.argsort(keys)[:4].tolist() == [7, 0, 2, 3]  # ties: by the reference order

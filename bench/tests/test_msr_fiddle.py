"""That project's latency and load, by hand."""

from pathlib import Path

import pytest

from bench.placement.msr_fiddle import (
    FOLDER,
    LIGHTER,
    Instance,
    cluster_of,
    latency,
    load,
    pieces,
    read,
    topological,
)
from pardnn.graph.build import build_graph
from pardnn.graph.interchange import MsrMachine
from pardnn.graph.ir import Op


def problem(reads: list[list[int]], seconds: list[float], send: list[float]) -> Instance:
    machine = MsrMachine(accelerators=3, accelerator_bytes=1, cpus=0)
    graph = build_graph("g", [Op(name=f"n{i}", kind="op") for i in range(len(reads))])
    return Instance(graph, machine, reads, topological(reads), seconds, send)


CHAIN = problem([[], [0], [1], [2]], [1.0, 2.0, 4.0, 8.0], [0.1, 0.2, 0.4, 0.0])


@pytest.mark.parametrize(
    ("place", "expected", "heaviest"),
    [
        ([0, 0, 0, 0], 15.0, 15.0),
        ([0, 0, 1, 1], 15.0 + 2 * 0.2, 12.2),
        # Device 0 is left and entered again: two pieces.
        ([0, 1, 0, 0], 15.0 + 2 * 0.1 + 2 * 0.2, 13.3),
        ([0, 1, 0, 1], 15.0 + 2 * 0.1 + 2 * 0.2 + 2 * 0.4, 10.7),
    ],
)
def test_a_chain(place: list[int], expected: float, heaviest: float) -> None:
    assert latency(CHAIN, place) == pytest.approx(expected)
    assert load(CHAIN, place) == pytest.approx(heaviest)


def test_a_piece_waits_for_all_its_inputs() -> None:
    """0 -> 1, 2 -> 3: node 3 shares a piece with 0 only until 1 and 2 come between."""
    diamond = problem([[], [0], [0], [1, 2]], [1.0, 2.0, 4.0, 8.0], [0.5, 0.25, 0.125, 0.0])
    assert pieces(diamond, [0, 1, 2, 0]) == [(0, 0), (1, 0), (2, 0), (0, 1)]
    # 0: 1 + 0.5 out. 2: 0.5 in + 4 + 0.125 out. 3: 0.25 + 0.125 in + 8. One fetch of node 0 each.
    assert latency(diamond, [0, 1, 2, 0]) == pytest.approx(1.5 + 4.625 + 8.375)
    # Only node 2 is elsewhere; node 1 reaches the second piece through host memory all the same.
    assert pieces(diamond, [0, 0, 1, 0]) == [(0, 0), (0, 0), (1, 0), (0, 1)]
    assert latency(diamond, [0, 0, 1, 0]) == pytest.approx((1 + 2 + 0.75) + 4.625 + 8.375)
    assert load(diamond, [0, 0, 1, 0]) == pytest.approx(1 + 2 + 8 + 0.5 + 0.125)


def test_pieces_that_wait_for_each_other() -> None:
    """0 -> 1 and 2 -> 3 with 0, 3 on one device and 1, 2 on another: a circle."""
    crossed = problem([[], [0], [], [2]], [1.0] * 4, [0.1] * 4)
    assert latency(crossed, [0, 1, 1, 0]) is None
    assert latency(crossed, [0, 0, 1, 1]) == pytest.approx(2.0)


def test_one_device_takes_the_published_time() -> None:
    whole = read(FOLDER / "layer_bert24_inference.json.gz")
    place = [0] * len(whole.graph.ops)
    assert latency(whole, place) == load(whole, place) == pytest.approx(0.092406)


@pytest.mark.parametrize("path", sorted(Path(FOLDER).glob("*.json.gz")), ids=lambda p: p.name)
def test_light_messages_take_the_same_time(path: Path) -> None:
    light, heavy = read(path), read(path, with_copies=True)
    fast, slow = cluster_of(heavy, with_copies=True), cluster_of(light)
    for one, other in zip(light.graph.ops, heavy.graph.ops, strict=True):
        assert sum(t.bytes for t in other.outputs) in (
            sum(t.bytes for t in one.outputs),
            other.outputs[0].bytes if one.memory == "reference" else None,
        )
        expected = fast.seconds(0, 1, other.outputs[0].bytes)
        rounding = LIGHTER / (1 << 30)
        assert slow.seconds(0, 1, one.outputs[0].bytes) == pytest.approx(expected, abs=rounding)
    assert light.send == heavy.send

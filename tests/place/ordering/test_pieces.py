"""Pieces of a step, found from the graph alone or from its names, on unit pipelines."""

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.pieces import piece_by_piece, pieces_of
from testbed.hand_graphs import StageTimes, pipeline


def seconds_of(graph: Graph) -> np.ndarray:
    return np.array([(op.seconds or {})["accelerator"] for op in graph.ops])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_microbatches_of_a_pipeline_are_pieces(count: int) -> None:
    """Each op of one is like that of the first; weights are there once. One batch is no piece."""
    graph = pipeline(2, count)
    found = pieces_of(graph, seconds_of(graph))
    if count == 1:
        assert found is None
        return
    assert found is not None
    assert found.count == count
    names = [op.name for op in graph.ops]
    for op, piece, model in zip(names, found.piece.tolist(), found.model.tolist(), strict=True):
        stage, _, number = op.partition(".")
        assert piece == (int(number) if number else -1)
        assert names[model] == (f"{stage}.0" if number else op)
    position = piece_by_piece(graph, found)
    for one in range(len(names)):
        for other in range(len(names)):
            if 0 <= found.piece[one] < found.piece[other]:
                assert position[one] < position[other]


def test_what_is_there_once_may_be_half_of_the_work() -> None:
    """Two stages of 3 s a microbatch, two of them: 12 s. Of 13 s once they are not the most."""
    for once, is_found in ((12.0, True), (13.0, False)):
        graph = pipeline(2, 2, times=StageTimes(1.0, 1.0, 1.0))
        last = Op(name="update", kind="update", inputs=("w0",), seconds={"accelerator": once},
                  outputs=(Tensor(name="update", bytes=0),))  # fmt: skip
        more = build_graph("more", [*graph.ops, last])
        assert (pieces_of(more, seconds_of(more)) is not None) == is_found


@pytest.mark.parametrize("count", [2, 3])
def test_names_say_what_is_a_piece(count: int) -> None:
    """Unlike kinds, and still pieces; unless one of them lacks an op that others have."""
    ops = [
        Op(name=f"{name}@{i}", kind=f"{name}{i}", seconds={"accelerator": 1.0},
           outputs=(Tensor(name=f"{name}@{i}", bytes=1),))
        for i in range(count) for name in "ab"
    ]  # fmt: skip
    total = Op(name="total", kind="sum", inputs=tuple(op.name for op in ops),
               outputs=(Tensor(name="total", bytes=1),), seconds={"accelerator": 1.0})  # fmt: skip
    graph = build_graph("named", [*ops, total])
    found = pieces_of(graph, seconds_of(graph))
    assert found is not None
    assert found.count == count
    assert found.piece.tolist() == [*(i for i in range(count) for _ in "ab"), -1]
    assert found.model.tolist() == [*[0, 1] * count, 2 * count]
    fewer = build_graph("fewer", ops[:-1])
    assert pieces_of(fewer, seconds_of(fewer)) is None

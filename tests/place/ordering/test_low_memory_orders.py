"""Frugal orders run an update as soon as its gradient exists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.low_memory_orders import (
    _eager_free_kernel,
    blended_positions,
    eager_free_positions,
    file_positions,
)
from pardnn.place.ordering.schedule import free_plan
from pardnn.sim.peak import peaks
from tests.reference import pardnn as naive
from tests.reference.low_memory_orders import eager_free_order
from tests.strategies import FAMILIES, graphs, random_graph

LAYERS, SIZE = 20, 1 << 20


def step_of_rmsprop(number_bytes: int = 8) -> Graph:
    """Gradients of 20 layers; then per layer a host scalar, mean square, its root and the update.

    Only the update frees the gradient; the root before it takes as much.
    """

    def op(
        name: str, kind: str, inputs: tuple[str, ...], size: int, *, of: str | None = None
    ) -> Op:
        output = Tensor(name=name, bytes=size, alias_of=of)
        return Op(
            name=name,
            kind=kind,
            inputs=inputs,
            outputs=(output,),
            memory="reference" if of else "normal" if inputs else "residual",
            seconds={"accelerator": 1e-3},
            arguments={"mutates": [of]} if of else None,
        )

    ops: list[Op] = []
    for i in range(LAYERS):
        ops += [op(f"{kind}{i}", "parameter", (), SIZE) for kind in ("weight", "square")]
        ops.append(op(f"step{i}", "state", (), 4))
    for i in reversed(range(LAYERS)):
        above = () if i == LAYERS - 1 else (f"gradient{i + 1}",)
        ops.append(op(f"gradient{i}", "aten.mm.default", (f"weight{i}", *above), SIZE))
    for i in range(LAYERS):
        ops.append(op(f"number{i}", "scalar.item", (f"step{i}",), number_bytes))
        blended = (f"square{i}", f"gradient{i}", f"number{i}")
        ops.append(op(f"blend{i}", "aten.addcmul_.default", blended, SIZE, of=f"square{i}"))
        ops.append(op(f"root{i}", "aten.sqrt.default", (f"blend{i}",), SIZE))
        inputs = (f"weight{i}", f"gradient{i}", f"root{i}")
        ops.append(op(f"update{i}", "aten.addcdiv_.default", inputs, SIZE, of=f"weight{i}"))
    return build_graph("rmsprop", ops)


@pytest.mark.parametrize("number_bytes", [8, 256])
def test_updates_run_as_soon_as_they_can(number_bytes: int) -> None:
    """What a chain makes beside what it frees is small beside the largest tensor, not 8 bytes."""
    a = step_of_rmsprop(number_bytes).arrays

    def peak(position: np.ndarray) -> int:
        return int(peaks(a, free_plan(a, 1, np.zeros(a.num_ops, dtype=np.int64), position))[0])

    lasting = 2 * LAYERS * SIZE
    assert peak(file_positions(a)) > lasting + LAYERS * SIZE
    assert peak(eager_free_positions(a)) < lasting + 4 * SIZE


@given(graph=graphs(max_ops=14, shuffled=True), weight=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_orders_are_topological(graph: Graph, weight: float) -> None:
    a = graph.arrays
    successors = naive.op_successors(graph)
    file, eager = file_positions(a), eager_free_positions(a)
    for position in (file, eager, blended_positions(file, eager, weight)):
        assert sorted(position.tolist()) == list(range(a.num_ops))
        assert all(position[i] < position[j] for i in range(a.num_ops) for j in successors[i])
    assert np.array_equal(blended_positions(file, eager, 0.0), file)
    assert np.array_equal(blended_positions(file, eager, 1.0), eager)


@pytest.mark.parametrize(("tiny", "length"), [(0, 0), (8, 6), (40, 2)])
def test_what_frees_memory_is_drawn_forward_as_the_twin_says(tiny: int, length: int) -> None:
    moved = 0
    for seed in range(18):
        a = random_graph(seed, 16, FAMILIES[seed % 6]).arrays
        base, position = file_positions(a), np.empty(a.num_ops, dtype=np.int64)
        _eager_free_kernel(a, base, tiny, np.empty(length, dtype=np.int64), position)
        order = eager_free_order(a, base.tolist(), tiny, length)
        assert np.argsort(position).tolist() == order
        moved += order != np.argsort(base).tolist()
    assert moved > 3

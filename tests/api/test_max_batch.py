"""max-batch: what two captures predict, and a search that believes captures alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pardnn.api import max_batch
from pardnn.api.batch_scaling import costs_at, family_of, graph_at
from pardnn.backends.entry_point import EntryPoint
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, UsageError, UserCodeError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from tests.strategies import examples


def tensor(name: str, *shape: int, **settings: Any) -> Tensor:
    num_bytes = 4
    for size in shape:
        num_bytes *= size
    return Tensor(name=name, bytes=num_bytes, shape=shape, dtype="float32", **settings)


def step_graph(batch: int, width: int = 10, *, is_square: bool = False) -> Graph:
    """A step with weights, activations that grow with the batch, and perhaps with its square."""

    def op(kind: str, output: Tensor, *inputs: str, **settings: Any) -> Op:
        seconds = {"accelerator": 1e-6 * batch}
        return Op(
            name=output.name,
            kind=kind,
            inputs=inputs,
            outputs=(output,),
            seconds=seconds,
            **settings,
        )

    last = (batch, batch) if is_square else (batch, 3)
    strides = (1, batch)  # of the transpose: of a square, both dims and a stride grow
    return build_graph(
        "step",
        [
            op("parameter", tensor("w", width, width), memory="residual"),
            op("input", tensor("x", batch, width)),
            op("aten.mm.default", tensor("h", batch, width), "x", "w"),
            op(
                "aten.view.default",
                tensor("v", 2 * batch, width // 2, alias_of="h"),
                "h",
                memory="reference",
                arguments={"args": [{"tensor": "h"}, [2 * batch, width // 2]], "kwargs": {}},
            ),
            op(
                "aten.mm.default",
                tensor("y", *last, strides=strides),
                "v",
                "w",
                workspace=8 * batch,
            ),
            op("aten.sum.default", tensor("s"), "y", "h"),
        ],
    )


@examples(15)
@example(low=1, gap=1, batch=2, is_square=True)  # strides of one sample tell no order of dims
@given(
    low=st.integers(1, 20),
    gap=st.integers(1, 20),
    batch=st.integers(1, 500),
    is_square=st.booleans(),
)
def test_predicted_bytes_are_those_of_a_capture(
    low: int, gap: int, batch: int, is_square: bool
) -> None:
    one, other, real = (step_graph(b, is_square=is_square) for b in (low, low + gap, batch))
    family = family_of(one, low, other, low + gap)
    assert family is not None
    made = graph_at(family, batch)
    assert [op.outputs for op in made.ops] == [op.outputs for op in real.ops]
    assert [op.arguments for op in made.ops] == [op.arguments for op in real.ops]
    found = made.arrays
    assert found.tensor_bytes.tolist() == real.arrays.tensor_bytes.tolist()
    assert found.workspace.tolist() == real.arrays.workspace.tolist()
    assert not found.tensor_bytes.flags.writeable
    cluster = Cluster.uniform(1)
    low_costs, high_costs = costs_for(one, cluster), costs_for(other, cluster)
    seconds = costs_at(family, low_costs, high_costs, batch).on("accelerator")
    assert seconds == pytest.approx(costs_for(real, cluster).on("accelerator"))


def test_graphs_of_other_ops_are_no_family() -> None:
    graph = step_graph(2)
    assert family_of(graph, 2, build_graph("step", graph.ops[:-1]), 4) is None
    renamed = [*graph.ops[:-1], Op(name="s", kind="aten.mean.default", inputs=("y",))]
    assert family_of(graph, 2, build_graph("step", renamed), 4) is None


Make = Callable[[int], Graph]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Searches over the graphs that a function makes; `.sizes` are those that were captured."""

    class Search:
        sizes: list[int] = []  # noqa: RUF012

        def __call__(
            self, make: Make, memory: int | None, *, start: int = 4, devices: int = 1,
            recompute: bool = False,
        ) -> Any:  # fmt: skip
            def training(batch_size: int = start) -> None:
                raise AssertionError(batch_size)

            def captured(_entry: EntryPoint, batch_size: int) -> tuple[Graph, None]:
                self.sizes.append(batch_size)
                return make(batch_size), None

            self.sizes = []
            monkeypatch.setattr(max_batch, "captured", captured)
            monkeypatch.setattr(max_batch, "warm_up", lambda _names: None)
            cluster = Cluster.uniform(devices, memory=memory)
            return max_batch.max_batch(
                EntryPoint("x.py:training", training),
                cluster,
                PlanOptions(algorithm="single", reserve=0.0, recompute=recompute),
            )

    return Search()


def fits(graph: Graph, memory: int) -> bool:
    cluster = Cluster.uniform(1, memory=memory)
    try:
        problem = Problem(
            graph, cluster, costs_for(graph, cluster), PlanOptions(algorithm="single", reserve=0.0)
        )
        make_plan(problem)
    except InfeasibleError:
        return False
    return True


@pytest.mark.jit
@pytest.mark.parametrize(("memory", "start"), [(700, 1), (700, 4), (5000, 4), (5000, 64)])
def test_the_largest_batch_is_found(search: Any, memory: int, start: int) -> None:
    found = search(step_graph, memory, start=start)
    assert found.step == 1
    assert fits(step_graph(found.batch_size), memory)
    assert not fits(step_graph(found.batch_size + 1), memory)
    assert found.peak_bytes[0] <= memory
    # Two for the prediction, the answer, and the size that does not fit.
    assert len(set(search.sizes)) <= 4
    captured = [tried for tried in found.tried if tried.captured]
    assert {t.batch_size: t.fits for t in captured}[found.batch_size + 1] is False


def layers(batch: int) -> Graph:
    """Six layers and their gradients, each of which reads its layer's input."""
    names = [f"f{i}" for i in range(7)] + [f"g{i}" for i in range(6, 0, -1)]
    reads = [(), *((f"f{i}",) for i in range(6)), ("f6", "f5")]
    reads += [(f"g{i + 1}", f"f{i - 1}") for i in range(5, 0, -1)]
    ops = [
        Op(name=name, kind="aten.mm.default", inputs=inputs, outputs=(tensor(name, batch, 10),),
           seconds={"accelerator": 1e-6 * batch})
        for name, inputs in zip(names, reads, strict=True)
    ]  # fmt: skip
    return build_graph("layers", ops)


@pytest.mark.jit
def test_second_calls_let_larger_batches_fit(search: Any) -> None:
    plain, again = search(layers, 4000), search(layers, 4000, recompute=True)
    assert again.batch_size > plain.batch_size
    assert again.peak_bytes[0] <= 4000
    assert again.makespan_s / again.batch_size > plain.makespan_s / plain.batch_size


@pytest.mark.jit
def test_large_answers_are_known_to_one_part_in_a_hundred(search: Any) -> None:
    found = search(step_graph, 100_000)
    assert found.step == found.batch_size // 100 > 1
    assert not fits(step_graph(found.batch_size + found.step), 100_000)


@pytest.mark.jit
@pytest.mark.parametrize("growth", [0.7, 1.6])
def test_a_wrong_prediction_is_put_right_by_captures(search: Any, growth: float) -> None:
    def bent(batch: int) -> Graph:
        return step_graph(batch if batch <= 8 else int(8 + growth * (batch - 8)))

    found = search(bent, 8_000)
    assert fits(bent(found.batch_size), 8_000)
    assert not fits(bent(found.batch_size + found.step), 8_000)
    assert len(set(search.sizes)) < 10


@pytest.mark.jit
def test_other_ops_at_every_size_are_captured_one_by_one(search: Any) -> None:
    def other(batch: int) -> Graph:
        ops = step_graph(batch).ops
        extra = Op(
            name=f"only {batch}", kind="aten.neg.default", inputs=("s",), seconds=ops[0].seconds
        )
        return build_graph("step", [*ops, extra])

    found = search(other, 5000)
    assert fits(other(found.batch_size), 5000)
    assert not fits(other(found.batch_size + 1), 5000)
    assert all(tried.captured for tried in found.tried)


def test_an_entry_point_may_take_multiples_only(search: Any) -> None:
    def picky(batch: int) -> Graph:
        if batch % 4:
            raise UserCodeError("cannot split")
        return step_graph(batch)

    found = search(picky, 5000)
    assert found.batch_size % 4 == 0
    assert found.step == 4
    assert fits(step_graph(found.batch_size), 5000)
    assert not fits(step_graph(found.batch_size + 4), 5000)


def test_what_raises_at_its_own_size_raises(search: Any) -> None:
    def broken(_batch: int) -> Graph:
        raise UserCodeError("no")

    with pytest.raises(UserCodeError):
        search(broken, 5000)


def test_nothing_fits(search: Any) -> None:
    with pytest.raises(InfeasibleError, match="no batch size fits; at the smallest, 1") as error:
        search(step_graph, 100)
    assert error.value.code == "E301"
    assert 1 in error.value.details["tried"]


def test_nothing_limits_the_batch(search: Any) -> None:
    with pytest.raises(UsageError, match="max-memory") as error:
        search(step_graph, None)
    assert error.value.code == "E216"
    with pytest.raises(UsageError, match="Does FUNCTION use it"):
        search(lambda _batch: step_graph(4), 5000)

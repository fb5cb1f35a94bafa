"""A user's description is held against its operator before a plan relies on it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import Opaque, Reducer

NAME = "pardnn_checked"


def centred(x: torch.Tensor) -> torch.Tensor:
    """Each row less its mean."""
    return x - x.mean(1, keepdim=True)


def single_centred(x: torch.Tensor) -> torch.Tensor:
    """The same of a kernel that takes single precision alone."""
    if x.dtype != torch.float32:
        raise TypeError("single precision, please")
    return centred(x)


def broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such device")


def graph_with(kernel: Callable[..., Any], width: int = 6) -> Graph:
    made = torch.library.Library(NAME, "FRAGMENT")
    made.define("centre(Tensor x) -> Tensor")
    made.impl("centre", kernel, "CPU")
    made.impl("centre", torch.empty_like, "Meta")
    LIBRARIES.append(made)

    def step(model: torch.nn.Module, optimizer: torch.optim.SGD, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * getattr(torch.ops, NAME).centre(x)).sum()
        loss.backward()
        optimizer.step()
        return loss

    model = torch.nn.Linear(width, width)
    return capture(step, model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, width))


LIBRARIES: list[Any] = []


@pytest.fixture(autouse=True)
def own_libraries(own_registry: None) -> Iterator[None]:
    yield
    for made in LIBRARIES:
        made._destroy()
    LIBRARIES.clear()


def planned(graph: Graph) -> Plan:
    return pardnn.plan(graph, Cluster.uniform(2), "tofu", "bytes", costs="v100")


def element_by_element(x: Any) -> Any:
    """Wrong: an element depends on its whole row."""
    return lambda i, j: x[i, j] * 1.0


def by_rows(x: Any) -> Any:
    f = Opaque()
    return lambda i, j: f(x[i, :])[j]


@pytest.mark.parametrize("width", [6, 2048])
def test_a_wrong_description_is_refused_with_the_counterexample(width: int) -> None:
    pardnn.describe(f"{NAME}::centre")(element_by_element)
    graph = graph_with(centred, width)
    for _ in range(2):  # what is known is not forgotten, nor is the error
        with pytest.raises(DescriptionError) as caught:
            planned(graph)
        text = str(caught.value)
        assert caught.value.code == "E220"
        assert "cut along 'j' among 2 workers, output 0: it is off by" in text
        assert "test_check_descriptions.py" in text
    assert pardnn.plan(graph, Cluster.uniform(2), "round-robin", costs="v100")  # cuts nothing


@pytest.mark.parametrize("kernel", [centred, single_centred])
def test_a_right_description_is_used(kernel: Callable[..., Any]) -> None:
    pardnn.describe(f"{NAME}::centre")(by_rows)
    assert planned(graph_with(kernel)).notes == ()


def test_a_kernel_that_runs_in_single_precision_alone_is_checked_in_it() -> None:
    pardnn.describe(f"{NAME}::centre")(element_by_element)
    with pytest.raises(DescriptionError, match="is wrong: cut along 'j'"):
        planned(graph_with(single_centred))


def test_an_operator_that_cannot_run_here_is_noted() -> None:
    pardnn.describe(f"{NAME}::centre")(by_rows)
    (note,) = planned(graph_with(broken)).notes
    assert "was not checked: on made-up values it raises RuntimeError: no such device" in note
    assert "pardnn.verify" in note


def test_a_reducer_that_plans_do_not_know_is_noted() -> None:
    joined = Reducer("together", combine=lambda partials: sum(partials[1:], partials[0]))

    @pardnn.describe(f"{NAME}::centre")
    def summed(x: Any) -> Any:
        f = Opaque()
        return lambda i, j: joined(lambda k: f(x[i, k])[j])

    (note,) = planned(graph_with(spread_sum)).notes
    assert "is not cut along 'k'" in note
    assert "reducer 'together', only of max, mean, min, prod, sum" in note


def spread_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row, at every place of it."""
    return x.sum(1, keepdim=True).expand(-1, 6).contiguous()

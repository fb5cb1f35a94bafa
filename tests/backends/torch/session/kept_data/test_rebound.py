"""What is put in the place of a tensor's data between two calls is taken, or refused by name."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.cluster import Cluster
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

Objects = tuple[nn.Sequential, torch.optim.SGD]


def made() -> tuple[Callable[..., Any], nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def rows(*shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.linspace(-1, 1, size, dtype=torch.float64).reshape(shape)


def vector(model: nn.Sequential, _: Any) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    torch.nn.utils.vector_to_parameters(rows(size), model.parameters())


def momentum(model: nn.Sequential, optimizer: torch.optim.SGD) -> dict[str, Any]:
    return optimizer.state[model[2].weight]


def given(model: nn.Sequential, _: Any) -> None:
    model[2].weight.data = rows(8, 8)


def halved(model: nn.Sequential, _: Any) -> None:
    model[2].weight.data = model[2].weight.data * 0.5


def swapped(model: nn.Sequential, optimizer: Any) -> None:
    torch.utils.swap_tensors(model[2].weight, nn.Parameter(rows(8, 8) - 1))
    torch.utils.swap_tensors(momentum(model, optimizer)["momentum_buffer"], rows(8, 8))


def nothing(_model: Any, _optimizer: Any) -> None:
    """Leave all as it is."""


#: One between each two steps.
TAKEN: list[Callable[[Any, Any], Any]] = [
    nothing,
    given,
    halved,
    lambda m, o: setattr(m[1].running_var, "data", rows(8) + 2),
    lambda m, o: setattr(momentum(m, o)["momentum_buffer"], "data", rows(8, 8)),
    vector,
    lambda m, o: m[2].weight.data.set_(rows(8, 8)),
    swapped,
    lambda m, o: momentum(m, o).update(momentum_buffer=rows(8, 8)),
]


def trained(changes: Sequence[Any], objects: Objects, run: Callable[..., Any]) -> Any:
    losses = []
    for i, change in enumerate(changes):
        change(*objects)
        losses.append(run(rows(4, 6).cos() * (i + 1)).item())
    return losses


def eager(changes: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    def body(_rank: int, _path: str) -> Any:
        step, *objects = made()
        losses = trained(changes, objects, lambda x: step(*objects, x))
        names = dict(objects[0].named_parameters()) | dict(objects[0].named_buffers())
        return losses, {f"model.{name}": tensor.tolist() for name, tensor in names.items()}

    return run_ranks(1, body)[0].value


def scattered(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


def cut(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    options = PlanOptions(algorithm="tofu", costs="v100")
    return next_plan(graph, Cluster.uniform(size), options, None, state)


def on_ranks(size: int, changes: Sequence[Any], decide: Any = scattered) -> Any:
    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        step, *objects = made()
        fast = parallelize(step, *objects, rows(4, 6), decide=decide, timeout=20, device="cpu")
        losses = trained(changes, objects, fast)
        return losses, {name: fast.whole(name).tolist() for name in fast.names}, fast.captures

    return run_ranks(size, body)


@pytest.mark.parametrize("size", long_but([2], [1, 2]))
def test_new_data_is_taken(size: int) -> None:
    losses, state = eager(TAKEN)
    for outcome in on_ranks(size, TAKEN):
        assert outcome.status == 0, outcome.error
        found, whole, captures = outcome.value
        assert found == losses
        assert {each: whole[each] for each in state} == state
        assert captures == 2  # anew for the last alone: another object, not other data


def freeze(index: int, *, is_frozen: bool = True) -> Callable[[Any, Any], Any]:
    return lambda model, _: model[index].requires_grad_(not is_frozen)


#: One between each two steps, among those of data.
FROZEN: list[Callable[[Any, Any], Any]] = [
    nothing,
    freeze(2),
    nothing,
    given,
    freeze(0),
    lambda m, o: (given(m, o), freeze(0, is_frozen=False)(m, o)),
    freeze(2, is_frozen=False),
]


def test_what_is_frozen_between_steps_is_seen_beside_new_data() -> None:
    losses, state = eager(FROZEN)
    for outcome in on_ranks(2, FROZEN):
        assert outcome.status == 0, outcome.error
        found, whole, captures = outcome.value
        assert found == losses
        assert {each: whole[each] for each in state} == state
        assert captures == 3


def test_each_rank_takes_its_shard() -> None:
    losses, state = eager(TAKEN[:3])
    for outcome in on_ranks(2, TAKEN[:3], cut):
        assert outcome.status == 0, outcome.error
        found, whole, captures = outcome.value
        assert found == pytest.approx(losses, rel=1e-10)
        weight = torch.tensor(whole["model.2.weight"]), torch.tensor(state["model.2.weight"])
        assert torch.allclose(*weight, atol=1e-10)
        assert captures == 1


def transposed(model: nn.Sequential, _: Any) -> None:
    model[2].weight.data = rows(8, 8).t()


def turned(model: nn.Sequential, _: Any) -> None:
    model[2].weight.data = model[2].weight.data.t()


#: Other strides: of other data, and of the same data where it lies.
TRANSPOSED: list[Callable[[Any, Any], Any]] = [
    transposed,
    turned,
    lambda m, o: momentum(m, o)["momentum_buffer"].t_(),
]


def test_other_strides_are_captured_anew_on_one_rank() -> None:
    changes = [nothing, *TRANSPOSED]
    losses, _ = eager(changes)
    (outcome,) = on_ranks(1, changes)
    assert outcome.status == 0, outcome.error
    assert (outcome.value[0], outcome.value[2]) == (losses, len(changes))


@pytest.mark.parametrize("change", TRANSPOSED)
def test_other_strides_are_refused_on_two_ranks(change: Any) -> None:
    assert {outcome.code for outcome in on_ranks(2, [nothing, change])} == {"E527"}


def test_what_reads_as_nan_is_not_taken() -> None:
    """Each rank holds one of the two biases, and the other's place."""

    def exchanged(model: nn.Sequential, _: Any) -> None:
        one, other = model[0].bias, model[2].bias
        one.data, other.data = other.data, one.data

    def apart(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
        plans = (random_plan(graph, size, seed=seed) for seed in range(100))
        return next(p for p in plans if p.placement["model.0.bias"] != p.placement["model.2.bias"])

    outcomes = on_ranks(2, [exchanged], apart)
    assert {outcome.code for outcome in outcomes} == {"E527"}
    assert "other ranks" in outcomes[0].error["message"]


def test_what_is_saved_is_the_new_data() -> None:
    step, model, optimizer = made()
    fast = parallelize(step, model, optimizer, rows(4, 6), decide=scattered, device="cpu")
    fast(rows(4, 6))
    given(model, optimizer)
    assert torch.equal(fast.whole("model.2.weight"), rows(8, 8))
    assert torch.equal(fast.state_dict()["model"]["2.weight"], rows(8, 8))
    transposed(model, optimizer)
    with pytest.raises(PardnnError, match="Call the step") as caught:
        fast.state_dict()
    assert caught.value.code == "E527"


class Kept:
    """Copies that the user refills between steps, of which no graph reads anything."""

    def __init__(self) -> None:
        self.scale, self.copies, self.others = 1.0, {"a": rows(8)}, {"b": rows(8)}


def keeping(size: int) -> Any:
    """Train on ranks, refill between two steps, and return what is then read as a whole."""

    def body(rank: int, store: str) -> Any:
        connect(rank, size, store, 20).close()
        _, model, optimizer = made()
        model.register_buffer("best", rows(8))
        kept = Kept()

        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = model(x).square().mean() * kept.scale
            loss.backward()
            optimizer.step()
            return loss

        fast = parallelize(step, model, optimizer, rows(4, 6), decide=scattered, device="cpu")
        names = [name for name in fast.names if name.endswith(("best", ".a", ".b"))]
        fast(rows(4, 6))
        model.best = rows(8) + 2
        kept.copies["a"], kept.others = rows(8) + 3, {"b": rows(8) + 4}
        found = {name: fast.whole(name).tolist() for name in names}
        gathered = fast.state_dict()  # empty on other ranks
        best = gathered["model"]["best"].tolist() if rank == 0 else found["model.best"]
        fast(rows(4, 6))
        return found, best, {name: fast.whole(name).tolist() for name in names}

    return run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2])
def test_what_no_graph_reads_is_taken_when_the_state_is_read(size: int) -> None:
    expected = {
        "model.best": (rows(8) + 2).tolist(),
        "kept.copies.a": (rows(8) + 3).tolist(),
        "kept.others.b": (rows(8) + 4).tolist(),
    }
    for outcome in keeping(size):
        assert outcome.status == 0, outcome.error
        found, best, later = outcome.value
        assert found == later == expected
        assert best == expected["model.best"]


def test_another_shape_is_not_taken_between_steps() -> None:
    step, model, optimizer = made()
    model.register_buffer("best", rows(8))
    fast = parallelize(step, model, optimizer, rows(4, 6), decide=scattered, device="cpu")
    fast(rows(4, 6))
    model.best = rows(9)
    with pytest.raises(PardnnError, match="Call the step first") as caught:
        fast.whole("model.best")
    assert caught.value.code == "E527"
    fast(rows(4, 6))
    assert torch.equal(fast.whole("model.best"), rows(9))


def test_without_a_change_whole_tensors_take_one_walk_of_the_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walks = list[None]()
    walk = Binding.objects

    def counted(binding: Binding) -> Any:
        walks.append(None)
        return walk(binding)

    def body(rank: int, store: str) -> Any:
        connect(rank, 2, store, 20).close()
        step, model, optimizer = made()
        model.register_buffer("best", rows(8))
        fast = parallelize(step, model, optimizer, rows(4, 6), decide=scattered, device="cpu")
        fast(rows(4, 6))
        walks.clear()
        names = fast.names
        first = len([fast.whole(name) for name in names] and walks)
        model.best = rows(8) + 2
        best = fast.whole("model.best").tolist()
        return len(names), first, len(walks), best

    monkeypatch.setattr(Binding, "objects", counted)
    for outcome in run_ranks(2, body):
        num_names, first, walks_in_all, best = outcome.value
        assert num_names > 10
        assert (first, walks_in_all) == (1, 2)
        assert best == (rows(8) + 2).tolist()

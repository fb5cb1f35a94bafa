"""Gradients that several calls add up before one of them updates: every loss is that of eager."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import Entry, assert_leaves_as_eager, cut_plan, small
from tests.long_cases import long_but

CALLS, EACH = 7, 3


def made(kind: str) -> Entry:
    """Return a step that updates at every third call, in one of the usual forms."""
    model, x, y = (each.double() for each in small())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if kind == "left over":
        F.mse_loss(model(x), y).backward()

    def step(model, optimizer, x, y, i):
        if kind == "dropped before" and i % EACH == 0:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        (loss / EACH).backward()
        if (i + 1) % EACH == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if kind != "dropped before":
                optimizer.zero_grad(set_to_none=kind != "set to zero")
        return loss

    return step, (model, optimizer, x, y, 0)


def losses(run: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> list[float]:
    return [run(x.roll(i, 0), y, i).item() for i in range(CALLS)]


def beside_eager(kind: str, size: int, plan_of: Any) -> tuple[list[float], list[list[float]]]:
    step, (model, optimizer, x, y, _) = made(kind)
    expected = losses(lambda *batch: step(model, optimizer, *batch), x, y)

    def body(rank: int, path: str) -> list[float]:
        connect(rank, size, path, 20).close()
        step, args = made(kind)
        decide = lambda graph, size, _: plan_of(graph, size)  # noqa: E731
        fast = parallelize(step, *args, decide=decide, timeout=20, device="cpu")
        found = losses(fast, *args[2:4])
        fast.close()
        return found

    outcomes = run_ranks(size, body)
    assert all(each.status == 0 for each in outcomes), [each.error for each in outcomes]
    return expected, [each.value for each in outcomes]


@pytest.mark.parametrize("kind", ["dropped", "dropped before", "set to zero", "left over"])
def test_gradients_live_between_calls(kind: str) -> None:
    expected, found = beside_eager(kind, 1, random_plan)
    assert found == [expected]


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1, momentum=0.5, weight_decay=1, nesterov=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    ],
)
def test_each_update_takes_the_graph_of_the_first(kind: Callable[..., Any]) -> None:
    model, x, y = (each.double() for each in small())
    optimizer = kind(model.parameters())

    def step(model, optimizer, x, y, i):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if (i + 1) % EACH == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    fast = parallelize(
        step, model, optimizer, x, y, 0, device="cpu", decide=lambda g, n, _: random_plan(g, n)
    )
    losses(fast, x, y)
    assert fast.captures == 2


def test_ranks_hand_their_gradients_on() -> None:
    expected, found = beside_eager("left over", 2, random_plan)
    assert found == [expected, expected]


@pytest.mark.parametrize("size", [1, 2])
def test_state_that_a_call_does_not_read_has_a_name_and_is_gathered(size: int) -> None:
    """The last of the calls only adds to the gradients."""
    step, (model, optimizer, x, y, _) = made("dropped")
    losses(lambda *batch: step(model, optimizer, *batch), x, y)
    expected = optimizer.state[model[0].weight]["exp_avg"].tolist()

    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        step, args = made("dropped")
        decide = lambda graph, size, _: random_plan(graph, size)  # noqa: E731
        fast = parallelize(step, *args, decide=decide, timeout=20, device="cpu")
        losses(fast, *args[2:4])
        name = "optimizer.state.model.0.weight.exp_avg"
        return name in fast.names, fast.whole(name).tolist()

    for outcome in run_ranks(size, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [True, expected]


def zero_1(graph: Graph, size: int) -> Plan:
    """Parameters are whole, what is kept beside them is cut: torch takes no such `.grad`."""
    return pardnn.plan(graph, pardnn.Cluster.uniform(size), "zero-1", costs="v100")


@pytest.mark.parametrize("plan_of", [cut_plan, zero_1])
def test_cut_gradients_are_handed_on(plan_of: Any) -> None:
    expected, found = beside_eager("dropped", 2, plan_of)
    for each in found:
        assert each == pytest.approx(expected, rel=1e-10)


def test_a_step_that_never_updates_is_refused() -> None:
    model, x, y = small()

    def step(model, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="nothing to train: .* only adds to gradients"):
        capture(step, model, x, y)


def test_a_history_of_lists_is_filled_by_calls_that_update_and_by_others() -> None:
    """The second path finds the list that the first one has made in the dictionary."""

    def with_history() -> Any:
        step, args = made("dropped before")
        history: defaultdict[str, list[float]] = defaultdict(list)

        def followed(*args: Any) -> Any:
            loss = step(*args)
            history["loss"].append(loss.item())
            return loss

        return followed, args, [history]

    assert assert_leaves_as_eager(with_history, steps=7, given=lambda i: {4: i}) == 2 + 1


def test_gradients_of_earlier_calls_do_not_stay_beside_a_call_that_resets_them() -> None:
    """They would be read for those of the last call."""
    model, x, y = small()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step(model, optimizer, x, y)
    decide = lambda graph, size, _: random_plan(graph, size)  # noqa: E731
    fast = parallelize(step, model, optimizer, x, y, decide=decide, device="cpu")
    fast(x, y)
    assert model[2].weight.grad is None
    assert model[0].weight.grad is not None  # the optimizer does not hold it: it adds up
    optimizer.add_param_group({"params": list(model[0].parameters())})
    for _ in range(2):
        fast(x, y)
        assert model[0].weight.grad is None
    fast.close()
    assert fast.captures == 2


def critic_and_generator() -> tuple[Any, Any]:
    """Return two steps with their arguments; the generator's leaves gradients to the critic's."""
    torch.manual_seed(0)
    critic, generator = nn.Linear(5, 3).double(), nn.Linear(4, 5).double()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (critic, generator)]

    def critic_step(critic, optimizer, x):
        optimizer.zero_grad()
        loss = critic(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def generator_step(critic, generator, optimizer, z):
        optimizer.zero_grad()
        loss = critic(generator(z)).cos().mean()
        loss.backward()
        optimizer.step()
        return loss

    x, z = torch.randn(4, 5).double(), torch.randn(4, 4).double()
    return (
        (critic_step, (critic, optimizers[0], x)),
        (generator_step, (critic, generator, optimizers[1], z)),
    )


def test_a_step_leaves_gradients_to_another_in_shards_that_are_not_alike() -> None:
    (one, of_one), (other, of_other) = critic_and_generator()
    expected = [f(*args).item() for _ in range(3) for f, args in ((one, of_one), (other, of_other))]

    def body(rank: int, path: str) -> list[float]:
        connect(rank, 2, path, 20).close()
        steps = [
            (parallelize(step, *args, decide=lambda graph, size, _: cut_plan(graph, size),
                         timeout=20, device="cpu"), args[-1])
            for step, args in critic_and_generator()
        ]  # fmt: skip
        found = [fast(batch).item() for _ in range(3) for fast, batch in steps]
        for fast, _ in steps:
            fast.close()
        return found

    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == pytest.approx(expected, rel=1e-10)


#: Calls of the steps that skip parameters.
SKIPPING_CALLS = 10
Optimizer = Callable[..., torch.optim.Optimizer]


class Net(nn.Module):
    """A head, and a body that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body, self.is_whole = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x) if self.is_whole else x)


def skipping(kind: Optimizer) -> tuple[Any, tuple[Any, ...], Any]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = kind(model.parameters(), lr=0.1)

    def step(model, optimizer, x, i):
        loss = model(x).square().mean()
        loss.backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, (model, optimizer, torch.randn(3, 4).double(), 0), [model, optimizer]


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=0.1)


def frozen(i: int, args: tuple[Any, ...]) -> None:
    args[0].body.requires_grad_(not 3 <= i < 7)  # half of its gradients are there at its first call


def left_out(i: int, args: tuple[Any, ...]) -> None:
    args[0].is_whole = i % 4 < 2


def given_a_gradient(i: int, args: tuple[Any, ...]) -> None:
    args[0].body.requires_grad_(False)
    if i == 4:
        args[0].body.weight.grad = torch.ones(4, 4).double()


def reset(i: int, args: tuple[Any, ...]) -> None:
    if i % 4 == 3:
        args[1].zero_grad()


CHANGES = [frozen, left_out, given_a_gradient, reset]


@pytest.mark.parametrize("between", CHANGES)
@pytest.mark.parametrize("kind", [sgd, torch.optim.AdamW])
def test_what_no_call_adds_to_is_not_updated(kind: Optimizer, between: Any) -> None:
    captures = assert_leaves_as_eager(
        lambda: skipping(kind), SKIPPING_CALLS, given=lambda i: {3: i}, between=between
    )
    if kind is torch.optim.AdamW:  # a path that comes again is not captured again
        assert captures <= 5, captures


@pytest.mark.parametrize("between", long_but(["left_out"], CHANGES))
def test_two_ranks_see_the_same(between: Any) -> None:
    def losses(call: Callable[..., Any], args: tuple[Any, ...]) -> list[float]:
        found = []
        for i in range(SKIPPING_CALLS):
            between(i, args)
            found.append(call(args[2], i).item())
        return found

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, args, _ = skipping(torch.optim.AdamW)
        decide = lambda graph, size, _: random_plan(graph, size)  # noqa: E731
        fast: Any = parallelize(step, *args, decide=decide, device="cpu", timeout=20)
        found = losses(fast, args)
        fast.close()
        return found

    step, args, _ = skipping(torch.optim.AdamW)
    expected = losses(lambda *batch: step(*args[:2], *batch), args)
    outcomes = run_ranks(2, body)
    assert [each.value for each in outcomes] == [expected] * 2, outcomes

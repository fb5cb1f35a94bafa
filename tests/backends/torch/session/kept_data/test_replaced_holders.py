"""State whose optimizer or layer the user has replaced is neither saved nor gathered any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import weighed

BATCH = torch.linspace(-1, 1, 12).reshape(3, 4)


def scattered(graph: Graph, size: int, state: Any) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


def made() -> tuple[Any, nn.Sequential]:
    """Return what holds the optimizer and the step, and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    held = SimpleNamespace(optimizer=torch.optim.Adam(model.parameters(), lr=0.1))

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        held.optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        held.optimizer.step()
        return loss

    held.step = step
    return held, model


def in_parallel(held: Any, model: nn.Sequential) -> Parallel:
    return parallelize(held.step, model, BATCH, decide=scattered, timeout=20, device="cpu")


def momentum(held: Any, model: nn.Sequential) -> None:
    held.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def head(held: Any, model: nn.Sequential) -> None:
    """Replace the head, and freeze the rest: no graph reads its momentum meanwhile."""
    model[0].requires_grad_(False)
    for parameter in model[1].parameters():
        del held.optimizer.state[parameter]
    torch.manual_seed(1)
    model[1] = nn.Linear(4, 2)
    held.optimizer.param_groups[0]["params"][2:] = list(model[1].parameters())


def cleared(held: Any, model: nn.Sequential) -> None:
    held.optimizer.state.clear()


def states(held: Any, model: nn.Sequential) -> dict[str, dict[str, Any]]:
    found = held.optimizer.state
    return {
        name: {key: value.tolist() for key, value in found[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in found
    }


def train(call: Callable[..., Any], change: Callable[[], None]) -> None:
    """Call a step four times, with a change in the middle."""
    for i in range(4):
        if i == 2:
            change()
        call(BATCH)


def eager(change: Callable[..., None]) -> tuple[dict[str, Any], dict[str, Any]]:
    held, model = made()
    train(lambda batch: held.step(model, batch), lambda: change(held, model))
    return {n: p.tolist() for n, p in model.named_parameters()}, states(held, model)


@pytest.mark.parametrize("size", [1, 2])
def test_the_new_optimizer_s_state_is_gathered(size: int) -> None:
    def body(rank: int, store: str) -> Any:
        connect(rank, size, store, 20).close()
        held, model = made()
        fast = in_parallel(held, model)
        train(fast, lambda: momentum(held, model))
        whole = {
            name: fast.whole(f"held.optimizer.state.model.{name}.momentum_buffer").tolist()
            for name in ("0.weight", "0.bias", "1.weight", "1.bias")
        }
        return whole, fast.state_dict().get("held.optimizer", {}).get("state", {})

    _, expected = eager(momentum)
    for rank, outcome in enumerate(run_ranks(size, lambda *args: _plain(body(*args)))):
        assert outcome.status == 0, outcome.error
        whole, exported = outcome.value
        assert whole == {name: each["momentum_buffer"] for name, each in expected.items()}
        assert rank or list(exported.values()) == list(expected.values())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def test_a_replaced_head_beside_frozen_layers_is_the_one_that_is_gathered() -> None:
    held, model = made()
    fast = in_parallel(held, model)
    train(fast, lambda: head(held, model))
    parameters, _ = eager(head)
    gathered = fast.state_dict()["model"]
    assert {name: each.tolist() for name, each in gathered.items()} == parameters
    assert fast.whole("model.1.weight").tolist() == parameters["1.weight"]


@pytest.mark.parametrize("change", [momentum, head, cleared])
def test_before_the_next_call_it_is_refused(change: Callable[..., None]) -> None:
    held, model = made()
    fast = in_parallel(held, model)
    fast(BATCH)
    change(held, model)
    with pytest.raises(PardnnError, match="deleted, or what held it was replaced") as caught:
        fast.state_dict()
    assert caught.value.code == "E527"
    fast(BATCH)
    fast.state_dict()


def test_an_optimizer_that_is_put_back_is_read_again() -> None:
    held, model = made()
    fast = in_parallel(held, model)
    fast(BATCH)
    optimizer, held.optimizer = held.optimizer, None
    with pytest.raises(PardnnError, match="put it back") as caught:
        fast.state_dict()
    assert caught.value.code == "E527"
    held.optimizer = optimizer
    assert len(fast.state_dict()["held.optimizer"]["state"]) == 4


def test_a_tuple_that_a_step_left_may_become_none_in_a_dictionary_of_ones_own() -> None:
    """No more than a refusal by name: an accumulating step keeps the tensor as its state."""

    class Attributes(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

        def __setattr__(self, name: str, value: Any) -> None:
            self[name] = value

    left = Attributes(last=None)
    model, x = nn.Linear(4, 4), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: Any, i: int) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        left.last = (loss.item(), loss.detach())
        return loss

    fast: Any = parallelize(
        step, model, optimizer, x, 0, device="cpu", decide=lambda g, n, _: random_plan(g, n)
    )
    for i in range(3):
        fast(x, i)
    left.last = None
    with contextlib.suppress(PardnnError):
        fast(x, 3)
        assert left.last is not None
    fast.close()


def test_what_a_call_leaves_in_the_place_of_state_is_not_that_state() -> None:
    held = SimpleNamespace(mean=None)

    def weigh(loss: torch.Tensor) -> torch.Tensor:
        if held.mean is not None:
            loss = loss + 0.1 * held.mean
        held.mean = loss.detach()  # pyright: ignore[reportAttributeAccessIssue]
        return loss

    step, args, _ = weighed(weigh)
    fast = parallelize(step, *args, device="cpu", decide=scattered)
    listed = []
    for is_reset in (False, False, True, False):
        held.mean = None if is_reset else held.mean
        loss = fast(*args[2:])
        found = [name for name in fast.names if name.endswith("mean")]
        assert [fast.whole(name) for name in found] == [loss] * len(found)
        listed.append(len(found))
    assert listed == [0, 1, 0, 1]


def test_state_made_anew_is_told_after_a_call_that_read_a_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer, weight = torch.optim.Adam(model.parameters(), lr=0.1), model[1].weight

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    fast = parallelize(step, model, optimizer, BATCH, device="cpu", decide=scattered)
    for i in range(3):
        if i == 1:
            weight.grad = torch.ones_like(weight)
        if i == 2:
            optimizer.state[weight].clear()
        fast(BATCH)
    told = fast.state_dict()["optimizer"]["state"][2]
    assert told["step"] == optimizer.state[weight]["step"] == 1
    assert torch.equal(told["exp_avg"], optimizer.state[weight]["exp_avg"])

"""Tensors that an optimizer's step puts into its groups: Prodigy, D-Adaptation."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager, small

Note = Callable[[dict[str, Any]], None]


class Noting(torch.optim.SGD):
    """Notes something in its group at each step."""

    def __init__(self, params: Any, held: dict[str, Any], note: Note) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(held)
        self.note = note

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.note(self.param_groups[0])
        super().step(closure)


def train(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def norm(group: dict[str, Any]) -> Any:
    return sum(p.grad.norm() for p in group["params"])


def unread(group: dict[str, Any]) -> None:
    group["norm"] = norm(group)


def read(group: dict[str, Any]) -> None:
    group["norm"] = norm(group) if group["norm"] is None else group["norm"] * 0.9 + norm(group)
    for p in group["params"]:
        p.mul_(1 - group["norm"] * 1e-2)


def reshaped(group: dict[str, Any]) -> None:
    group["norm"] = group["params"][0].grad[0]


def in_a_list(group: dict[str, Any]) -> None:
    group["norms"][0] = norm(group)


def dropped(group: dict[str, Any]) -> None:
    group["norm"] = None


def made(held: Callable[[], dict[str, Any]], note: Note, taken: int = 0) -> Any:
    model, x, y = small()
    optimizer = Noting(model.parameters(), held(), note)
    for _ in range(taken):
        train(model, optimizer, x, y)
    noted = lambda: [{**optimizer.param_groups[0], "params": None}, model]  # noqa: E731
    return train, (model, optimizer, x, y), noted


def of_zero() -> dict[str, Any]:
    return {"norm": torch.zeros(())}


def of_none() -> dict[str, Any]:
    return {"norm": None}


def of_zeros() -> dict[str, Any]:
    return {"norms": [torch.zeros(()), 0.0]}


@pytest.mark.parametrize(
    ("held", "note"),
    [
        (of_zero, unread),
        (of_none, unread),
        (of_zero, read),
        (of_none, read),
        (of_zero, reshaped),
        (of_zeros, in_a_list),
        (of_zero, dropped),
    ],
)
def test_a_tensor_that_a_step_puts_into_a_group_is_there(
    held: Callable[[], dict[str, Any]], note: Note
) -> None:
    assert_leaves_as_eager(lambda: made(held, note))


def test_every_rank_finds_it() -> None:
    def entry() -> Any:
        return made(of_zero, read)[:2]

    assert_as_eager(entry, state=lambda args: args[1].param_groups[0]["norm"].item())


@pytest.mark.parametrize(
    ("held", "note"),
    [
        (dict, unread),
        (lambda: {"norm": 0.0}, unread),
        (lambda: {"norms": [None]}, in_a_list),
    ],
)
def test_one_that_only_the_first_step_makes_is_there_after_one_of_ones_own(
    held: Callable[[], dict[str, Any]], note: Note
) -> None:
    step, args, _ = made(held, note)
    with pytest.raises(UnsupportedError, match="after one step of your own") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert_leaves_as_eager(lambda: made(held, note, taken=1))


class Sharing(torch.optim.SGD):
    """Keeps one tensor in two places of its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["sum"] = state.get("sum", torch.zeros(())) + p.grad.norm()
            state["last"] = state["sum"]
        super().step(closure)


def test_a_state_in_two_places_is_there_after_one_step_of_ones_own() -> None:
    def sharing(taken: int) -> Any:
        model, x, y = small()
        optimizer = Sharing(model.parameters(), lr=0.1)
        for _ in range(taken):
            train(model, optimizer, x, y)
        states = lambda: [dict(each) for each in optimizer.state.values()]  # noqa: E731
        return train, (model, optimizer, x, y), states

    step, args, _ = sharing(0)
    with pytest.raises(UnsupportedError, match="several places") as caught:
        capture(step, *args)
    assert caught.value.code == "E806"
    assert_leaves_as_eager(lambda: sharing(1))


class ByAddress(torch.optim.SGD):
    """Keeps its state by the ids of parameters, as Magma does, or in its own state."""

    kept: dict[Any, Any] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p] if self.kept is None else self.kept.setdefault(id(p), {})
            state["mean"] = p.grad.lerp(state.get("mean", torch.zeros_like(p)), 0.9)
            p.sub_(state["mean"])
        super().step(closure)


def test_no_message_shows_the_address_of_a_parameter() -> None:
    def entry(by_id: bool) -> Any:
        model, x, y = small()
        optimizer = ByAddress(model.parameters(), lr=0.1)
        optimizer.kept = {} if by_id else None
        return train, (model, optimizer, x, y), [model]

    step, args, _ = entry(by_id=True)
    with pytest.raises(UnsupportedError, match=r"(?s)kept\[an id\].*self.state\[p\]") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert not re.search(r"\d{12}", f"{caught.value} {caught.value.details}")
    assert_leaves_as_eager(lambda: entry(by_id=False))

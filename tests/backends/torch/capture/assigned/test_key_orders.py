"""Dictionaries have their keys in the order of the eager step, however these come into being."""

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.runtime.filled_containers import put_in_order
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, small
from tests.long_cases import long_but


def sums(held: dict[str, Any], loss: Any) -> None:
    held["sums"]["loss"] += loss.item()
    held["sums"]["correct"] += (loss > 0).sum().item()


def update(held: dict[str, Any], loss: Any) -> None:
    held["log"].update(loss=loss.item(), n=held["n"], name="a", before=loss.detach())
    held["n"] += 1


def moved(held: dict[str, Any], loss: Any) -> None:
    held["ordered"].move_to_end("a")
    held["log"]["x"] = held["log"].pop("x")


def by_turns(held: dict[str, Any], loss: Any) -> None:
    held["ordered"].move_to_end("a" if held["n"] % 2 else "b")
    held["n"] += 1


def made(put: Callable[..., Any], is_given: bool) -> Entry:
    model, x, y = small()
    held: dict[str, Any] = {
        "n": 0, "log": {"x": 1, "y": 2}, "sums": defaultdict(float),
        "ordered": OrderedDict(a=1, b=2), "meter": Meter(),
    }  # fmt: skip

    def step(model, optimizer, x, y, given):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        put(given if is_given else held, loss)
        return loss

    args = (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    step.held = held
    return step, (*args, held if is_given else {"held": held})


def numbered(held: dict[str, Any], loss: Any) -> None:
    meter = held["meter"]
    meter.mean = 0.9 * meter.mean + loss.item()
    meter.count += 1
    meter.name = "a"


class Meter:
    """Its numbers are the class's, until a step sets them."""

    mean, count = 0.0, 0


QUICK = [
    (numbered, False, 1),
    (sums, False, 1),
    (update, True, 2),
    (moved, True, 1),
    (by_turns, False, 1),
]


@pytest.mark.parametrize(
    ("put", "is_given", "size"),
    long_but(
        QUICK, itertools.product([numbered, sums, update, moved, by_turns], [False, True], [1, 2])
    ),
)
def test_keys_are_in_the_order_of_eager(put: Callable[..., Any], is_given: bool, size: int) -> None:
    def state(args: tuple[Any, ...]) -> list[Any]:
        held = args[4].get("held", args[4])
        named = {**held, "meter": vars(held["meter"])}
        return [[*named[name]] for name in ("log", "sums", "ordered", "meter")]

    assert_as_eager(
        lambda: made(put, is_given), state=state, steps=4, sizes=(size,), is_followed=True
    )


def test_keys_that_each_step_moves_to_elsewhere_are_refused() -> None:
    def rotated(held: dict[str, Any], loss: Any) -> None:
        held["ordered"].move_to_end(next(iter(held["ordered"])))

    step, args = made(rotated, False)
    with pytest.raises(UnsupportedError, match="changes Python state: .*ordered") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"


@given(st.lists(st.integers(0, 6), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_only_the_given_keys_move(keys: list[int], held: list[int]) -> None:
    container = {key: str(key) for key in held}
    put_in_order(container, keys)
    assert container == {key: str(key) for key in held}
    assert [key for key in container if key in keys] == [key for key in keys if key in held]
    assert [k for k in container if k not in keys] == [k for k in held if k not in keys]
    places = [key in keys for key in held]
    assert [key in keys for key in container] == places

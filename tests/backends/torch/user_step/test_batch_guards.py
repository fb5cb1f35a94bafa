"""Functions, classes and sets among the arguments: what differs in another call is followed."""

import datetime
import decimal
import functools
from collections import ChainMap
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.backends.torch.stepping import assert_leaves_as_eager, small

Losses = Callable[[int], Any]


class Squared:
    """Its class alone tells it from the other one."""

    def __call__(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(found, wanted)


class Absolute(Squared):
    def __call__(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(found, wanted)


class Scaled:
    """Has a method that is passed."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(found, wanted) * self.scale


def scaled(scale: Any) -> Any:
    return lambda found, wanted: F.mse_loss(found, wanted) * scale


def defaults(scale: float) -> Any:
    return lambda found, wanted, scale=scale: F.mse_loss(found, wanted) * scale


def captures(loss_of: Losses, step_of: Any = None, steps: int = 4) -> int:
    """Compare a step that gets `loss_of(i)` at call i with eager; return the captures."""

    def make() -> Any:
        model, x, y = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def step(x: torch.Tensor, y: torch.Tensor, given: Any) -> torch.Tensor:
            optimizer.zero_grad()
            out = model(x)
            loss = given(out, y) if step_of is None else step_of(out, y, given)
            loss.backward()
            optimizer.step()
            return loss

        return step, (x, y, loss_of(0)), [model]

    return assert_leaves_as_eager(make, steps, lambda i: {2: loss_of(i)})


CACHED, CACHED_TOO = functools.cache(Squared().__call__), functools.cache(Absolute().__call__)
ALTERNATING: dict[str, Losses] = {
    "functions": lambda i: (F.mse_loss, F.l1_loss)[i % 2],
    "closures": lambda i: scaled(1.0 + i % 2),
    "tensors in closures": lambda i: scaled(torch.tensor(1.0 + i % 2)),
    "defaults": lambda i: defaults(1.0 + i % 2),
    "partials": lambda i: functools.partial(F.huber_loss, delta=0.1 + i % 2),
    "cached ones": lambda i: (CACHED, CACHED_TOO)[i % 2],
    "objects": lambda i: (Squared, Absolute)[i % 2](),
    "methods": lambda i: Scaled(1.0 + i % 2).loss,
}


@pytest.mark.parametrize("kind", ALTERNATING)
def test_a_loss_that_is_passed(kind: str) -> None:
    """Another one was ignored, without a word."""
    assert captures(ALTERNATING[kind]) > 1


class Rows(list[Any]):
    """A list with an attribute."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight


#: What a batch holds under "more" at capture, and what code may tell of something else there.
MORE: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "a number that is new": (None, 0.5, lambda more: more),
    "an empty list that is new": (None, [], lambda more: 2.0),
    "a tuple for a list": ([], (), lambda more: 2.0 if more == [] else 3.0),
    "a longer list of numbers": ([1.0, 2.0], [1.0, 2.0, 3.0], sum),
    "a date": (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1), lambda more: more.year - 2019),
    "a decimal": (decimal.Decimal("0.5"), decimal.Decimal("0.25"), float),
    "bytes": (bytearray(b"ab"), bytearray(b"abc"), len),
    "a chain": (ChainMap({"w": 2}), ChainMap({"w": 3}), lambda more: more["w"]),
    "items": ({"w": 2.0}.items(), {"w": 3.0}.items(), lambda more: sum(w for _, w in more)),
    "keys": ({}.keys(), {"w": 1}.keys(), lambda more: 1.0 + len(more)),
    "a float for an int": (1, 1.5, lambda more: 2.0 if isinstance(more, int) else 3.0),
    "an attribute of a list": (Rows(2.0), Rows(3.0), lambda more: more.weight),
    "a view": (MappingProxyType({"w": 2}), MappingProxyType({"w": 3}), lambda more: more["w"]),
}


@pytest.mark.parametrize("kind", MORE)
def test_what_is_new_or_other_in_a_dictionary(kind: str) -> None:
    """A graph without the number, or with the first value, ran without a word."""
    then, now, tell = MORE[kind]
    given = ({} if then is None else {"more": then}), {"more": now}

    def told(out: Any, y: Any, batch: Any) -> Any:
        return F.mse_loss(out, y) * (tell(batch["more"]) if "more" in batch else 1.0)

    captures(lambda i: given[i % 2], told)


def test_a_function_made_anew_of_the_same_code_is_the_same() -> None:
    assert captures(lambda i: lambda found, wanted: F.mse_loss(found, wanted)) == 1
    assert captures(lambda i: scaled(2.0)) == 1
    assert captures(lambda i: functools.partial(F.huber_loss, delta=0.5)) == 1


def test_functions_in_containers_classes_and_sets() -> None:
    def told(out: Any, y: Any, given: Any) -> Any:
        losses, kind, names = given
        return sum(loss(out, y) for loss in losses) + kind()(out, y) * (2 if "a" in names else 1)

    assert captures(lambda i: ([F.mse_loss], nn.MSELoss, {"a"}), told) == 1
    for changed in (
        ([F.l1_loss], nn.MSELoss, {"a"}),
        ([F.mse_loss], nn.L1Loss, {"a"}),
        ([F.mse_loss], nn.MSELoss, {"b"}),
    ):
        given = ([F.mse_loss], nn.MSELoss, {"a"}), changed
        assert captures(lambda i, given=given: given[i % 2], told) == 2


def test_functions_that_refer_to_themselves() -> None:
    def recursive(found: torch.Tensor, wanted: torch.Tensor, n: int = 1) -> torch.Tensor:
        return recursive(found, wanted, n - 1) * 2 if n else F.mse_loss(found, wanted)

    assert captures(lambda i: recursive) == 1


def test_another_object_of_which_the_step_sets_a_number_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def setting(found: torch.Tensor, wanted: torch.Tensor, given: Scaled) -> torch.Tensor:
        given.scale = 3.0
        return given.loss(found, wanted)

    assert captures(lambda i: Scaled(1.0 + i), setting, steps=1) == 2
    assert caplog.text.rstrip().endswith("'given' is 'another object', but was 'that of capture'")

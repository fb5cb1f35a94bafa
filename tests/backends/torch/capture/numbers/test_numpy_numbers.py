"""Counters given to NumPy, sets, dictionaries and `divmod`; settings that are floats of NumPy."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.capture.numbers.test_numbers_read import entry as weighing
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.stepping import Entry, assert_as_eager, small
from tests.long_cases import long_but

RATES = {0: 0.1, 2: 0.05}
MILESTONES = {2, 4}


def cosine(n: int, group: dict[str, Any]) -> Any:
    group["lr"] = 0.1 * 0.5 * (1 + np.cos(np.pi * n / 10))
    return 1


def ramp(n: int, group: dict[str, Any]) -> Any:
    return 2 / (1 + np.exp(-10 * n / 10)) + np.sqrt(n + 1) * np.log(n + 2) + np.tanh(n) + np.sin(n)


def rounded(n: int, group: dict[str, Any]) -> Any:
    return f"{np.floor(n / 3)} {np.ceil(n / 3)}", np.log2(n + 1) + np.log10(n + 2)


def table(n: int, group: dict[str, Any]) -> Any:
    group["lr"] = np.linspace(0.1, 0.01, 10)[n]
    return 1


def in_sets(n: int, group: dict[str, Any]) -> Any:
    if n in MILESTONES or n in {3}:
        group["lr"] *= 0.5
    return RATES.get(n, 2)


@functools.cache
def of_cache(n: int) -> float:
    return 1.0 / (1 + n)


def divided(n: int, group: dict[str, Any]) -> Any:
    whole, rest = divmod(n, 3)
    return 1 + whole + rest


def made(weigh: Callable[..., Any]) -> Entry:
    model, x, y = small()
    held = SimpleNamespace(n=0, text="")

    def step(model, optimizer, x, y, held):
        optimizer.zero_grad()
        weight = weigh(held.n, optimizer.param_groups[0])
        if isinstance(weight, tuple):
            print(weight[0])
            weight = weight[1]
        loss = F.mse_loss(model(x), y) * weight
        loss.backward()
        optimizer.step()
        held.n += 1
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), np.float64(0.1)), x, y, held)


def rate(args: tuple[Any, ...]) -> list[Any]:
    return [float(args[1].param_groups[0]["lr"]).hex(), args[4].n]


@pytest.mark.parametrize(
    "weigh",
    long_but({"ramp", "table", "in_sets"}, [cosine, ramp, rounded, table, in_sets, divided]),
)
def test_counters_are_those_of_eager(weigh: Callable[..., Any]) -> None:
    sizes = (1,) if weigh in (table, in_sets) else (1, 2)  # captured anew at each call
    assert_as_eager(lambda: made(weigh), state=rate, steps=6, sizes=sizes, is_followed=True)


def test_a_number_is_no_key_of_a_functions_cache() -> None:
    def make() -> Entry:
        of_cache.cache_clear()
        model, x, y = small()

        def step(model, optimizer, x, y, epoch):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * of_cache(epoch)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), 0.1), x, y, 0)

    assert_as_eager(make, lambda i: {4: i // 2}, sizes=(1, 2), is_followed=True)
    assert all(type(of_cache(n)) is float for n in range(4))


def test_a_counter_that_becomes_a_key_is_refused_as_such() -> None:
    step, args = made(lambda n, group: of_cache(n))
    with pytest.raises(UnsupportedError, match="becomes a key") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"


class Best:
    """As people keep the best: in a class attribute at first."""

    best = float("inf")


def test_what_a_first_step_leaves_may_reach_code_that_takes_numbers_alone() -> None:
    def keeping() -> Entry:
        model, x, y = small()
        model = nn.Sequential(model[0], nn.BatchNorm1d(6), model[2])
        found = Best()

        def step(model, optimizer, x, y, found):
            norm = model[1]
            if hasattr(norm, "backup"):
                norm.momentum = norm.backup
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            norm.backup, norm.momentum = norm.momentum, 0
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            found.best = min(found.best, loss.item())
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, found)

    def state(args: tuple[Any, ...]) -> list[Any]:
        norm, found = args[0][1], args[4]
        return [norm.running_mean.tolist(), norm.momentum, norm.backup, found.best.hex()]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on ranks: sums over a batch depend on it
    try:
        assert_as_eager(keeping, state=state, sizes=(1,), is_followed=True)
    finally:
        torch.set_num_threads(threads)


def sums_of(count: int) -> Callable[..., Any]:
    return lambda m, x, y: F.mse_loss(m(x), y) * np.mean([v.item() for v in x.flatten()[:count]])


def test_sums_that_numpy_takes_in_another_order_are_refused() -> None:
    assert_equal(lambda: weighing(sums_of(7)))
    step, args = weighing(sums_of(8))
    with pytest.raises(UnsupportedError, match="in an order of its own") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    mean = lambda x: sum(numbers := [v.item() for v in x.flatten()]) / len(numbers)  # noqa: E731
    assert_equal(lambda: weighing(lambda m, x, y: F.mse_loss(m(x), y) * mean(x)))


@pytest.mark.parametrize(
    "number", [lambda x: np.sqrt(x.var().item()), lambda x: np.mean([x.std().item()] * 2)]
)
def test_a_tensor_of_a_number_of_numpy_names_its_dtype(number: Callable[..., Any]) -> None:
    def loss(m: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.mse_loss(m(x), y) * torch.tensor(number(x), **options)

    step, args = weighing(loss)
    with pytest.raises(UnsupportedError, match="Name the dtype") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert_equal(lambda: weighing(functools.partial(loss, dtype=torch.float64)))

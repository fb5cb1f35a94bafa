"""Containers of classes and of other modules that a step fills: refused, and left as they were."""

import collections
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, small


class Meter:
    """Its containers are shared by all meters."""

    history: dict[str, list[Any]] = collections.defaultdict(list)  # noqa: RUF012
    epochs: dict[str, list[Any]] = {"loss": []}  # noqa: RUF012


settings: Any = types.ModuleType("settings_of_a_test")
settings.log, settings.losses = [], {"loss": []}
settings.total, settings.Sums = 0.0, type("Sums", (), {"__module__": __name__, "total": 0.0})
package: Any = types.ModuleType("package_of_a_test")
package.settings = settings
log = settings.log  # as `from settings import log` binds it


def by_key(loss: torch.Tensor) -> None:
    Meter.history["loss"].append(loss.item())


def in_a_tuple(loss: torch.Tensor) -> None:
    Meter.epochs["loss"].append((1, loss.item()))


def of_a_module(loss: torch.Tensor) -> None:
    settings.log.append(loss.detach())


def of_a_module_in_a_package(loss: torch.Tensor) -> None:
    package.settings.log.append(loss.item())


def of_a_module_imported_in_the_step(loss: torch.Tensor) -> None:
    import settings_of_a_test

    settings_of_a_test.log.append(loss.item())


def to_a_number_in_a_package(loss: torch.Tensor) -> None:
    package.settings.total += loss.item()


def to_a_number_imported_in_the_step(loss: torch.Tensor) -> None:
    import settings_of_a_test

    settings_of_a_test.total += loss.item()


def to_a_new_name_in_a_package(loss: torch.Tensor) -> None:
    package.settings.last = loss.item()


def by_name(loss: torch.Tensor) -> None:
    log.append(loss.item())


def in_one_of_a_module(loss: torch.Tensor) -> None:
    settings.losses["loss"].append({"value": loss.item()})


def made(note: Callable[[torch.Tensor], None]) -> tuple[Any, tuple[Any, ...], Any]:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Any] = []

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        note(loss)
        losses.append(loss.item())
        return loss

    return step, (model, optimizer, x, y), losses


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)


@pytest.mark.parametrize(
    "note",
    [
        by_key,
        in_a_tuple,
        of_a_module,
        in_one_of_a_module,
        of_a_module_in_a_package,
        of_a_module_imported_in_the_step,
        to_a_number_in_a_package,
        to_a_number_imported_in_the_step,
        to_a_new_name_in_a_package,
    ],
)
def test_what_it_puts_there_is_refused_and_taken_out_again(note: Any) -> None:
    step, args, _ = made(note)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert not Meter.history
    assert Meter.epochs == settings.losses == {"loss": []}
    assert (settings.log, settings.total, hasattr(settings, "last")) == ([], 0.0, False)


def test_numbers_of_a_class_that_only_a_module_holds_are_counted() -> None:
    def note(loss: torch.Tensor) -> None:
        package.settings.Sums.total += loss.item()

    def make() -> Any:
        settings.Sums.total = 0.0
        step, args, _ = made(note)
        return step, args, lambda: settings.Sums.total

    assert assert_leaves_as_eager(make) == 1


def test_a_container_imported_by_name_is_followed() -> None:
    settings.log.clear()
    assert_leaves_as_eager(lambda: made(by_name))
    assert len(settings.log) == 2 * 3
    assert all(type(each) is float for each in settings.log)
    settings.log.clear()


def test_a_global_put_together_anew_and_returned_is_refused_by_name() -> None:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log: list[Any] = []

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        nonlocal log
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        log = [*log, (1, loss.item())]
        return loss, log

    with pytest.raises(UnsupportedError, match="E804"):
        capture(step, model, optimizer, x, y)

"""What a step binds in modules is followed where its code names it as a global, else refused."""

import builtins
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import small
from tests.backends.torch.user_step import settings


def attribute(loss: Any) -> None:
    settings.last = loss.item()


def tensor(loss: Any) -> None:
    settings.kept = loss.detach()


def replaced(loss: Any) -> None:
    settings.FACTOR = loss.item()


def built_in(loss: Any) -> None:
    builtins.counted = getattr(builtins, "counted", 0) + 1


def new_global(loss: Any) -> None:
    global no_such_name
    no_such_name = loss.item()


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (attribute, "settings.last"),
        (tensor, "settings.kept"),
        (replaced, "settings.FACTOR"),
        (built_in, "builtins.counted"),
        (new_global, "test_namespaces.no_such_name"),
    ],
)
def test_names_that_no_place_has_are_refused_and_put_back(put: Any, name: str) -> None:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        put(loss)
        return loss

    held, mine = dict(vars(settings)), set(globals())
    with pytest.raises(UnsupportedError, match=rf"changes Python state.*{name}") as caught:
        capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert caught.value.code == "E804"
    assert vars(settings) == held
    assert not hasattr(builtins, "counted")
    assert set(globals()) == mine

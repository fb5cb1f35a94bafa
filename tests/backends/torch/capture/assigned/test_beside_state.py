"""What a step puts beside its states, and on parameters, is followed or refused by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, cut_plan, small
from tests.long_cases import long_but


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        self.norm = torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def made(put: Any = None) -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if put is not None:
            put(model[0].weight, optimizer, loss)
        optimizer.step()
        return loss

    return step, (model, Clipped(model.parameters(), lr=0.1), x, y)


def test_a_tensor_in_an_attribute_of_an_optimizer_is_that_of_eager() -> None:
    def state(args: Any) -> Any:
        return args[1].norm.item()

    assert_as_eager(made, state=state, sizes=(1,), is_followed=True)


class AttrDict(dict):
    """As everybody has one: names that are not there raise KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


HELD = AttrDict()


def test_dictionaries_whose_attributes_are_their_items() -> None:
    def put(weight: Any, optimizer: Any, loss: Any) -> None:
        HELD.n += 1
        HELD.last = loss.item()
        HELD.new = loss.item() * 2

    def make() -> Entry:
        HELD.clear()
        HELD.update(n=0, last=0.0)
        return made(put)

    assert_as_eager(make, state=lambda _: dict(HELD), sizes=(1,), is_followed=True)


def _number(weight: Any, optimizer: Any, loss: Any) -> None:
    weight.norm = weight.grad.norm().item()


def _tensor(weight: Any, optimizer: Any, loss: Any) -> None:
    weight.norm = weight.grad.norm()


def _count(weight: Any, optimizer: Any, loss: Any) -> None:
    weight.n = getattr(weight, "n", 0) + 1


def _in_group(weight: Any, optimizer: Any, loss: Any) -> None:
    optimizer.param_groups[0]["last"] = loss.detach()


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (_number, "model.0.weight.norm"),
        (_tensor, "model.0.weight.norm"),
        (_count, "model.0.weight.n"),
        (_in_group, "optimizer.param_groups.0.last"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(put: Any, name: str) -> None:
    step, args = made(put)
    with pytest.raises(UnsupportedError, match=f"changes Python state.*: {name}") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"


def _normed(kind: str) -> Entry:
    model, x, y = small()
    if kind == "prune":
        prune.l1_unstructured(model[0], "weight", 0.3)
    else:
        getattr(nn.utils, kind)(model[0])

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "kind", long_but(["spectral_norm"], ["spectral_norm", "weight_norm", "prune"])
)
def test_a_weight_that_a_hook_sets_is_that_of_the_last_call(kind: str) -> None:
    def state(args: Any) -> Any:
        return args[0][0].weight.detach().sum().item().hex()

    assert_as_eager(lambda: _normed(kind), state=state, steps=3, sizes=(1, 2))
    step, args = _normed(kind)
    assert cut_plan(capture(step, *args), 2).num_devices == 2

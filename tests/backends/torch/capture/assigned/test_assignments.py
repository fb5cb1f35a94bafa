"""Plain values that a step assigns under a condition on its own count, beside the eager step."""

from __future__ import annotations

import enum
import re
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, small


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


def _assigning(state: Any, assign: Any, factor: Any) -> Entry:
    """Return a step that calls `assign` in its second call and scales its loss by `factor`."""
    model, x, y = small()
    other = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model, optimizer, other, x, y):
        state.count += 1
        if state.count == 2:
            assign(state, model, other)
        chosen = state.optimizer or optimizer
        chosen.zero_grad()
        loss = F.mse_loss(model(x), y) * factor(state)
        loss.backward()
        chosen.step()
        return loss

    state.__dict__.update({"count": 0, "optimizer": None})
    return step, (model, torch.optim.SGD(model.parameters(), lr=0.3), other, x, y)


def _values(state: Any, model: Any, other: Any) -> None:
    state.stage = "b"
    state.phase = Phase.MAIN
    state.shape = model[0].weight.shape
    state.note = ("kept", 3, None)


def _objects(state: Any, model: Any, other: Any) -> None:
    state.optimizer = other
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize("assign", [_values, _objects], ids=["values", "objects"])
def test_what_a_step_assigns_arrives_and_later_steps_go_by_it(assign: Any) -> None:
    state = types.SimpleNamespace(stage="a", phase=Phase.WARM, shape=None)

    def make() -> Entry:
        state.__dict__.update({"stage": "a", "phase": Phase.WARM, "shape": None})
        state.__dict__.pop("note", None)
        return _assigning(state, assign, lambda s: s.phase.value * (3 if s.stage == "b" else 1))

    def seen(args: Any) -> Any:
        flags = [parameter.requires_grad for parameter in args[0].parameters()]
        return {**vars(state), "optimizer": state.optimizer is args[2]}, flags

    assert_as_eager(make, state=seen, steps=4, is_followed=True)


def test_a_text_that_each_step_replaces_decides_the_way_of_the_next() -> None:
    state = types.SimpleNamespace()

    def factor(state: Any) -> int:
        was, state.mode = state.mode, "g" if state.mode == "d" else "d"
        return 2 if was == "d" else 1

    def make() -> Entry:
        state.mode = "d"
        return _assigning(state, lambda *_: None, factor)

    assert_as_eager(make, state=lambda _: state.mode, steps=3, sizes=(1,), is_followed=True)


def test_an_object_that_no_place_holds_is_refused() -> None:
    state = types.SimpleNamespace(act=torch.relu)

    def factor(state: Any) -> int:
        state.act = torch.tanh
        return 1

    step, args = _assigning(state, lambda *_: None, factor)
    with pytest.raises(UnsupportedError, match=r"state\.act") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert state.act is torch.relu


def test_two_places_of_one_name_are_refused() -> None:
    """A rank could not tell them apart."""
    model, x, y = small()

    def counting() -> Any:
        stage = "a"

        def count() -> None:
            nonlocal stage
            stage = "b"

        return count

    first, second = counting(), counting()

    def step(model, optimizer, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        first()
        second()
        return loss

    with pytest.raises(UnsupportedError, match="stage"):
        capture(step, model, torch.optim.SGD(model.parameters(), lr=0.3), x, y)


def _remembering(keep: Any, hidden: Any) -> Entry:
    """Return a step that reads two tensors of the step before, and keeps others for the next."""
    model, x, y = small()
    state = types.SimpleNamespace(hidden=hidden)

    def step(model, optimizer, state, x, y):
        optimizer.zero_grad()
        held = state.hidden
        h, c = (held["h"], held["c"]) if isinstance(held, dict) else held
        out = model(x) + h.mean() - c.mean()
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        keep(state, out.detach(), out.detach() * h)
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.3), state, x, y)


def _zeros() -> list[torch.Tensor]:
    _, _, y = small()
    return [torch.zeros_like(y), torch.zeros_like(y)]


def _new_list(state: Any, h: Any, c: Any) -> None:
    state.hidden = [h, c]


def _new_dict(state: Any, h: Any, c: Any) -> None:
    state.hidden = {"h": h, "c": c}


def _items(state: Any, h: Any, c: Any) -> None:
    state.hidden[0], state.hidden[1] = h, c


def _keys(state: Any, h: Any, c: Any) -> None:
    state.hidden["h"] = h
    state.hidden["c"] = c


def _tuple(state: Any, h: Any, c: Any) -> None:
    state.hidden = h, c


@pytest.mark.parametrize(
    ("refused", "advice", "rewritten", "hidden"),
    [
        (_new_list, "self.hidden[0], self.hidden[1] = ", _items, list),
        (_new_list, "keep a tuple", _tuple, tuple),
        (_new_dict, 'self.hidden["h"] = ', _keys, lambda x: dict(zip("hc", x, strict=True))),
    ],
)
def test_new_containers_of_tensors_are_refused_with_what_is_followed(
    refused: Any, advice: str, rewritten: Any, hidden: Any
) -> None:
    given = list if refused is _new_list else hidden
    step, args = _remembering(refused, given(_zeros()))
    with pytest.raises(UnsupportedError, match=re.escape(advice)) as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert_as_eager(lambda: _remembering(rewritten, hidden(_zeros())), steps=3, sizes=(1, 2))

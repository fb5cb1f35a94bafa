"""Stand-ins for what a step has left: making one runs no code of the user's."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

import pytest

from pardnn.backends.torch.capture.assigned.stand_ins import stand_in
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.numbers.containers import OtherUse
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import small


class Registered:
    """Has its subclasses in a registry, by what they say they are."""

    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind: str = "unknown") -> None:
        """Register a subclass."""
        Registered.kinds.append(kind)


class Value(Registered, kind="value"):
    """Makes itself in `__new__`."""

    number: float

    def __new__(cls, number: float) -> Any:
        """Return a value."""
        made = super().__new__(cls)
        made.number = number
        return made


@pytest.mark.parametrize("value", [Fraction(1, 2), Value(1.0), 1.0, [2], {"a": 3}])
def test_each_use_tells_the_place(value: Any) -> None:
    found = stand_in(value, "a.b")
    assert Registered.kinds == ["value"]
    for use in (lambda: found + 1, lambda: found.number, lambda: found[0], lambda: bool(found)):
        with pytest.raises(OtherUse) as caught:
            use()
        assert caught.value.name == "a.b"


def test_a_fraction_that_each_step_replaces_is_refused() -> None:
    model, x, y = small()
    state = {"part": Fraction(1, 2)}

    def step(model, x, y):
        state["part"] = state["part"] / 2 + Fraction(1, 3)
        loss = (model(x) - y).square().mean() * float(state["part"])
        loss.backward()
        for p in model.parameters():
            p.data.sub_(p.grad)
            p.grad = None
        return loss

    with pytest.raises(UnsupportedError, match=r"state\.part"):
        capture(step, model, x, y)
    assert state == {"part": Fraction(1, 2)}

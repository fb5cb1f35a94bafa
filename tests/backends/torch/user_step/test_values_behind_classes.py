"""What a step reads of classes: what makes their objects, and what they hold as attributes."""

import enum
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, telling, weighed

SETTINGS = {"scale": 1.0}
Read = Callable[[], Any]
#: What makes a reader of a number, and sets it.
Made = tuple[Read, Callable[[float], None]]


def read_by_init() -> Made:
    class Scale:
        def __init__(self) -> None:
            self.scale = SETTINGS["scale"]

    return lambda: Scale().scale, lambda x: SETTINGS.update(scale=x)


def kept_by_new() -> Made:
    class Only:
        made: Any = None
        scale = 1.0

        def __new__(cls) -> Any:
            if cls.made is None:
                cls.made = super().__new__(cls)
            return cls.made

    only = Only()
    return lambda: Only().scale, lambda x: setattr(only, "scale", x)


def read_by_fields() -> Made:
    state = types.SimpleNamespace(scale=1.0)

    @dataclass
    class Scale:
        scale: float = field(default_factory=lambda: state.scale)

    return lambda: Scale().scale, lambda x: setattr(state, "scale", x)


class Inner:
    """An object that classes hold; only its method reads the number."""

    def __init__(self) -> None:
        self.held = 1.0

    def get(self) -> float:
        return self.held


def object_of_class() -> Made:
    class Settings:
        inner = Inner()

    return lambda: Settings.inner.get(), lambda x: setattr(Settings.inner, "held", x)


def object_in_containers_of_class() -> Made:
    class Settings:
        inner: ClassVar[dict[str, list[Inner]]] = {"a": [Inner()]}

    return lambda: Settings.inner["a"][0].get(), lambda x: setattr(
        Settings.inner["a"][0], "held", x
    )


def class_in_a_registry() -> Made:
    class Base:
        registry: ClassVar[dict[str, Any]] = {}

        def __init_subclass__(cls) -> None:
            Base.registry["only"] = cls

    class Scale(Base):
        factor = 1.0

        def __call__(self) -> float:
            return self.factor

    return lambda: Base.registry["only"](), lambda x: setattr(Scale, "factor", x)


def member_of_an_enumeration() -> Made:
    class Kind(enum.Enum):
        ONE = 1

        def get(self) -> float:
            return self.scale  # type: ignore[attr-defined]

    Kind.ONE.scale = 1.0  # type: ignore[attr-defined]
    return lambda: Kind.ONE.get(), lambda x: setattr(Kind.ONE, "scale", x)


def partial_method() -> Made:
    class Scale:
        own = 1.0

        def times(self, by: float) -> float:
            return self.own * by

        twice = functools.partialmethod(times, 2.0)

    scale = Scale()
    return lambda: scale.twice(), lambda x: setattr(Scale, "own", x)


def key_of_a_comparison() -> Made:
    state = types.SimpleNamespace(sign=1.0)

    def compared(a: float, b: float) -> Any:
        return (a - b) * state.sign

    key = functools.cmp_to_key(compared)
    return lambda: min([2.0, 3.0], key=key), lambda x: setattr(state, "sign", 1.5 - x)


@pytest.mark.parametrize(
    "made",
    [read_by_init, kept_by_new, read_by_fields, object_of_class, object_in_containers_of_class,
     class_in_a_registry, member_of_an_enumeration, partial_method, key_of_a_comparison],
)  # fmt: skip
def test_a_change_is_seen(made: Callable[[], Made]) -> None:
    changes: list[Callable[[float], None]] = []

    def make() -> Any:
        read, change = made()
        changes[:] = [change]
        change(1.0)

        def weigh(loss: torch.Tensor) -> torch.Tensor:
            found = read()
            return loss * (found() if callable(found) else float(found))  # type: ignore[operator]

        return weighed(weigh)

    assert assert_leaves_as_eager(make, 3, between=lambda i, _: changes[0](1.0 + i // 2)) == 2


def test_a_key_made_of_a_count_is_told_as_that() -> None:
    state, table = types.SimpleNamespace(n=0), {"0": 1.0, "1": 2.0}

    def tell(loss: torch.Tensor, model: Any) -> None:
        state.n += 1
        model[0].weight.grad.mul_(table[str(state.n % 2)])

    step, args = telling(tell)
    with pytest.raises(UnsupportedError, match="makes a string of a number") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"

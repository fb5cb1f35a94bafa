"""What a step reads by names that it computes, and beside what a number or container holds."""

import builtins
import collections
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.user_step.code_names import names_in_fields
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, weighed
from tests.long_cases import long_but

SCALE = 1.0
Read = Callable[[], float]
#: What makes a reader of a number, and sets it.
Made = tuple[Read, Callable[[float], None]]


def _set_global(number: float) -> None:
    globals()["SCALE"] = number


def scale_of_global() -> float:
    return SCALE


class Text(str):
    __slots__ = ("__dict__",)


class Number(float):
    __slots__ = ("__dict__",)


class Numbers(list[float]):
    factor = 1.0


class Defaults(dict[str, float]):
    value = 1.0

    def __missing__(self, key: str) -> float:
        return self.value


class Shown:
    def __init__(self) -> None:
        self.scale = 1.0

    def __str__(self) -> str:
        return str(self.scale)

    def __repr__(self) -> str:
        return f"1{self.scale}"


def by_globals() -> Made:
    kind = SimpleNamespace(name="global")
    return lambda: globals()[f"scale_of_{kind.name}"](), _set_global


def by_eval() -> Made:
    return lambda: eval("SCALE * 2"), _set_global


def by_eval_of_attribute() -> Made:
    held = SimpleNamespace(scale=1.0)
    return lambda: eval("held.scale", {"held": held}), lambda x: setattr(held, "scale", x)


def by_exec() -> Made:
    held = SimpleNamespace(scale=1.0)

    def read() -> float:
        found = {"held": held}
        exec("x = held.scale", found)
        return found["x"]  # type: ignore[return-value]

    return read, lambda x: setattr(held, "scale", x)


def by_module() -> Made:
    return lambda: getattr(importlib.import_module(__name__), "SCA" + "LE"), _set_global


def by_sys_modules() -> Made:
    return lambda: getattr(sys.modules[__name__], "SCA" + "LE"), _set_global


def by_field() -> Made:
    held = SimpleNamespace(hidden=1.0)
    read = lambda: float("{0.hidden}".format(held))  # noqa: E731, UP030, UP032
    return read, lambda x: setattr(held, "hidden", x)


def by_field_of_held_text() -> Made:
    held = SimpleNamespace(hidden=1.0, layout="{0.hidden}")
    return lambda: float(held.layout.format(held)), lambda x: setattr(held, "hidden", x)


def by_str() -> Made:
    held = Shown()
    return lambda: float(f"{held}"), lambda x: setattr(held, "scale", x)


def by_repr() -> Made:
    held = Shown()
    return lambda: float(repr(held)), lambda x: setattr(held, "scale", x)


def beside_text() -> Made:
    held = SimpleNamespace(text=Text("x"))

    def change(x: float) -> None:
        held.text = Text("x")
        held.text.scale = x

    change(1.0)
    return lambda: held.text.scale, change


def beside_number() -> Made:
    held = Number(1.0)
    held.scale = 1.0
    return lambda: held.scale, lambda x: setattr(held, "scale", x)


def beside_items() -> Made:
    held = Numbers([1.0])
    return lambda: held[0] * held.factor, lambda x: setattr(held, "factor", x)


def in_class_of_items() -> Made:
    Defaults.value, held = 1.0, Defaults()
    return lambda: held["x"], lambda x: setattr(Defaults, "value", x)


def default_factory() -> Made:
    held = collections.defaultdict(lambda: 1.0)
    return lambda: held.default_factory(), lambda x: setattr(held, "default_factory", lambda: x)  # type: ignore[misc]


def among_builtins() -> Made:
    builtins.SCALE_OF_ALL = 1.0  # type: ignore[attr-defined]
    return (
        lambda: SCALE_OF_ALL,  # type: ignore[name-defined] # noqa: F821
        lambda x: setattr(builtins, "SCALE_OF_ALL", x),
    )


def in_code_of_text() -> Made:
    found: dict[str, Any] = {"scale": 1.0}
    exec("def read():\n    return scale", found)
    return lambda: found["read"](), lambda x: found.update(scale=x)


def in_class_of_text() -> Made:
    found: dict[str, Any] = {"scale": 1.0, "__name__": __name__}
    exec("class Read:\n    def __call__(self):\n        return scale", found)
    return found["Read"](), lambda x: found.update(scale=x)


@pytest.mark.parametrize(
    "made",
    long_but(
        [
            "by_globals", "by_eval", "by_module", "by_field", "by_str", "beside_text",
            "beside_items", "default_factory", "among_builtins", "in_code_of_text",
            "in_class_of_text",
        ],
        [
            by_globals, by_eval, by_eval_of_attribute, by_exec, by_module, by_sys_modules, by_field,
            by_field_of_held_text, by_str, by_repr, beside_text, beside_number, beside_items,
            in_class_of_items, default_factory, among_builtins, in_code_of_text, in_class_of_text,
        ],
    ),
)  # fmt: skip
def test_a_change_is_seen(made: Callable[[], Made]) -> None:
    read, change = made()
    change(1.0)
    assert_leaves_as_eager(
        lambda: weighed(lambda loss: loss * read()), between=lambda i, _: change(1.0 + i // 2)
    )


def test_a_class_of_text_needs_a_module() -> None:
    found: dict[str, Any] = {}
    exec("class Read:\n    def __call__(self):\n        return 1.0", found)
    read = found["Read"]()
    step, args, _ = weighed(lambda loss: loss * read())
    with pytest.raises(UnsupportedError, match=r"'read' is of a class 'Read' that exec has made"):
        capture(step, *args)


def test_a_model_in_eval_mode_computes_no_names() -> None:
    """What code does not name may change where it calls `model.eval()` and lays out its texts."""
    held = SimpleNamespace(scale=1.0, unasked=0, model=SimpleNamespace(eval=lambda: 2.0))

    def weigh(loss: Any) -> Any:
        return loss * held.scale * held.model.eval() * len("{}".format(2.0))  # noqa: UP032

    def change(i: int, _args: Any) -> None:
        held.unasked = i

    assert assert_leaves_as_eager(lambda: weighed(weigh), between=change) == 1


def test_what_a_meter_shows_of_itself_opens_nothing() -> None:
    """`__dict__` in a text that an object makes of itself names no attribute of others."""

    class Meter:
        def __init__(self) -> None:
            self.total = 0.0

        def __str__(self) -> str:
            return "{total}".format(**self.__dict__)

    held = SimpleNamespace(meter=Meter(), unasked=0)
    made = lambda: weighed(lambda loss: loss * (1 + held.meter.total))  # noqa: E731
    changed = assert_leaves_as_eager(made, between=lambda i, _: setattr(held, "unasked", i))
    assert changed == 1


def test_fields_of_texts() -> None:
    found = list(names_in_fields("{} {0.mode:>{x.width}} {cfg[key].name!r} {{no}}"))
    assert found == ["mode", "key", "name"]
    assert list(names_in_fields("{")) == list(names_in_fields("100 %")) == []

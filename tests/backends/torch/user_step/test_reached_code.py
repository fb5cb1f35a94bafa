"""Globals that methods write: of models, optimizers, callbacks, and of the object behind a step."""

import copy
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.user_step.used_names import users_code
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import (
    Entry,
    assert_as_eager,
    assert_leaves_as_eager,
    weighed,
)
from tests.long_cases import long_but

LOG: list[float] = []
LAST: Any = None
TABLES: dict[str, Any] = {}
N = 0


def note(value: Any) -> None:
    global N
    N += 1
    LOG.append(value)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        found = self.linear(x)
        note(found.mean().item())
        return found


class Sgd(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        global LAST
        LAST = self.param_groups[0]["params"][0].grad.norm()
        return super().step(closure)


class Callback:
    def end(self, loss):
        note(loss.item())


class Trainer:
    def __init__(self, model: Any = None, optimizer: Any = None, **held: Any) -> None:
        torch.manual_seed(0)
        self.model = model() if model else nn.Linear(5, 3)
        self.optimizer = (optimizer or torch.optim.SGD)(self.model.parameters(), lr=0.1)
        self.held = held

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.tell(loss)
        for callback in self.held.values():
            getattr(callback, "end", callback)(loss)
        return loss

    def tell(self, loss):
        pass


class Telling(Trainer):
    def tell(self, loss):
        TABLES["loss"] = loss.detach()
        self.tell_all(loss)
        self.tell_class(loss)
        note(self.twice * 2)

    @staticmethod
    def tell_all(loss):
        note(loss.item())

    @classmethod
    def tell_class(cls, loss):
        TABLES[cls.__name__] = loss.item()

    @property
    def twice(self):
        note(1.0)
        return 2.0


def hooked() -> Trainer:
    trainer = Trainer()
    trainer.model.register_forward_hook(lambda module, given, found: note(found.sum().item()))
    return trainer


CASES: dict[str, Callable[[], Trainer]] = {
    "forward": lambda: Trainer(Net),
    "optimizer": lambda: Trainer(None, Sgd),
    "methods": Telling,
    "callback": lambda: Trainer(a=Callback()),
    "function": lambda: Trainer(a=lambda loss: note(loss.item())),
    "partial": lambda: Trainer(a=functools.partial(lambda more, loss: note(loss.item()), 1)),
    "hook": hooked,
}


@pytest.mark.parametrize("name", long_but({"optimizer", "methods", "partial", "hook"}, CASES))
def test_what_reached_code_writes_is_that_of_eager(name: str) -> None:
    trainers: list[Trainer] = []

    def make() -> Entry:
        global N, LAST
        N, LAST = 0, None
        LOG.clear()
        TABLES.clear()
        trainers[:] = [CASES[name]()]
        return trainers[0].step, (torch.randn(4, 5), torch.randn(4, 3))

    def state(_args: Any) -> list[Any]:
        last = LAST if LAST is None else LAST.item()
        return [N, [*map(float, LOG)], last, {k: float(v) for k, v in TABLES.items()}]

    sizes = (1,) if name == "optimizer" else (1, 2)  # the tensor is on one rank
    assert_as_eager(make, state=state, steps=4, sizes=sizes, is_followed=True)


def test_a_class_whose_module_has_no_file_is_the_users() -> None:
    """As in a notebook, where each cell is a file of its own and the module has none."""
    source = """
class Cell:
    def step(self): return self.call()
    def call(self): return 1
"""
    names = {"__name__": "of_a_notebook"}
    exec(compile(source, str(Path(__file__).with_name("cell.py")), "exec"), names)
    held = names["Cell"]()
    assert [f.__name__ for f in users_code(held.step, [held]).functions] == ["step", "call"]


class Plain:
    def step(self):
        return self.used + self.call()

    def call(self):
        return N

    @property
    def used(self):
        return N

    def never(self):
        return N


class Open(Plain):
    def step(self):
        return getattr(self, "ne" + "ver")()


def test_methods_that_nothing_names_are_left_out() -> None:
    def found(held: Any) -> set[str]:
        return {each.__qualname__ for each in users_code(held.step, [held]).functions}

    assert found(Plain()) == {"Plain.step", "Plain.used", "Plain.call"}
    assert "Plain.never" in found(Open())
    assert "Sgd.step" in found(Trainer(None, Sgd).optimizer)


class Named:
    def one(self) -> int:
        return N

    def two(self) -> int:
        return N


@pytest.mark.parametrize("kind", [operator.methodcaller, operator.attrgetter])
def test_each_callable_that_holds_a_name_counts(kind: Callable[[str], Any]) -> None:
    def step() -> None:
        pass

    held = [Named(), kind("one"), kind("two")]
    names = {each.__name__ for each in users_code(step, held).functions}
    assert names == {"step", "one", "two"}


def of_an_end(counts: dict[str, Any]) -> Callable[[Any], Any]:
    class Ending:
        def __del__(self) -> None:
            counts["n"] += 1

    def weigh(loss: Any) -> Any:
        Ending()
        return loss

    return weigh


def of_a_metaclass(counts: dict[str, Any]) -> Callable[[Any], Any]:
    class Kind(type):
        def __call__(cls, *args: Any) -> Any:
            counts["n"] += 1
            return super().__call__(*args)

    class Made(metaclass=Kind):
        pass

    return lambda loss: loss * (1 if Made() else 2)


def of_a_subclass(counts: dict[str, Any]) -> Callable[[Any], Any]:
    class Base:
        def __init_subclass__(cls) -> None:
            counts["n"] += 1

    def weigh(loss: Any) -> Any:
        class _Derived(Base):
            pass

        return loss

    return weigh


def of_a_setter(counts: dict[str, Any]) -> Callable[[Any], Any]:
    class Scaled:
        weight = 1.0

        @property
        def scale(self) -> float:
            return self.weight

        @scale.setter
        def scale(self, value: float) -> None:
            counts["n"] += 1
            self.weight = value * counts["factor"]

        @scale.deleter
        def scale(self) -> None:
            counts["n"] += 10

    scaled = Scaled()

    def weigh(loss: Any) -> Any:
        scaled.scale = 0.5
        weighed_loss = loss * scaled.scale
        del scaled.scale
        return weighed_loss

    return weigh


def of_a_copy(counts: dict[str, Any]) -> Callable[[Any], Any]:
    class Copied:
        def __init__(self, weight: float) -> None:
            self.weight = weight

        def __reduce__(self) -> Any:
            counts["n"] += 1
            return Copied, (self.weight * counts["factor"],)

    copied = Copied(0.5)
    return lambda loss: loss * copy.copy(copied).weight


def of_a_factory(counts: dict[str, Any]) -> Callable[[Any], Any]:
    def factor() -> float:
        counts["n"] += 1
        return counts["factor"]

    made: dict[str, Any] = {"factor": factor}
    exec("def make():\n    return factor()", made)  # as attrs makes its methods
    return lambda loss: loss * made["make"]()


class Rows(list[Any]):
    """A list that counts."""

    calls = 0


class Table(dict[str, Any]):
    """A dictionary that keeps something beside its items."""

    last = 0.0


def of_containers(counts: dict[str, Any]) -> Callable[[Any], Any]:
    counts["rows"], counts["table"] = rows, table = Rows([2.0]), Table(a=0.5)
    table.last = 0.0

    def weigh(loss: Any) -> Any:
        rows.calls += 1
        table.last = loss.item()
        return loss * rows[0] * table["a"] / rows.calls

    return weigh


class Counting(list[Any]):
    """A list that counts who reads it."""

    calls = 0

    def __getitem__(self, key: Any) -> Any:
        self.calls += 1
        return super().__getitem__(key)


def test_a_container_that_a_look_changes_is_refused() -> None:
    counting = Counting([1.0])
    step, args, _ = weighed(lambda loss: loss * counting[0])
    with pytest.raises(UnsupportedError, match="'counting' is a Counting, whose __getitem__ sets"):
        capture(step, *args)


@pytest.mark.parametrize(
    "make",
    [of_an_end, of_a_metaclass, of_a_subclass, of_a_setter, of_a_copy, of_a_factory, of_containers],
)
def test_what_runs_without_a_call_in_the_code_is_read(make: Callable[..., Any]) -> None:
    """Capture alone counted, and a factor that a setter reads was that of capture."""
    held: list[dict[str, Any]] = []

    def making() -> Any:
        held[:] = [{"n": 0, "factor": 1.0}]
        step, args, _ = weighed(make(held[0]), None)
        return step, args, lambda: [held, *map(vars, list(held[0].values())[2:])]

    def between(i: int, _args: Any) -> None:
        held[0]["factor"] = 1.0 + i

    assert_leaves_as_eager(making, 4, between=between)

"""Functions, methods and hooks that are put in the place of others, for all that use them."""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pardnn.backends.torch.user_step.guards.guards import Guards
from tests.backends.torch.stepping import assert_leaves_as_eager, telling, weighed


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def tripled(_self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 3


def held_back(optimizer: Any, closure: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.sub_(parameter.grad, alpha=group["lr"] / 10)


REPLACED: dict[str, tuple[Any, str, Any]] = {
    "F.linear": (F, "linear", lambda x, weight, bias: x @ weight.T),
    "Tanh.forward": (nn.Tanh, "forward", tripled),
    "Tanh.__call__": (nn.Tanh, "__call__", tripled),
    "Module.__call__": (nn.Module, "__call__", lambda self, x: self.forward(x) * 2),
    "Tensor.square": (torch.Tensor, "square", lambda x: x * 3),
    "SGD.step": (torch.optim.SGD, "step", held_back),
    "Doubled.__call__": (Doubled, "__call__", tripled),
}


@pytest.mark.parametrize("name", REPLACED)
def test_other_code_in_a_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, (model, *rest) = telling(lambda loss, model: None)
    model.append(Doubled())
    guards = Guards(lambda *args: step(*args).square(), [model, *rest], (2, 3))
    assert guards.changes({}) == []
    monkeypatch.setattr(*REPLACED[name], raising=False)
    for _ in range(2):  # it is not taken for known
        assert [change.name for change in guards.changes({})] == [name]


def test_what_no_step_uses_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = telling(lambda loss, model: None)
    monkeypatch.delattr(torch.Tensor, "__slotnames__", raising=False)
    guards = Guards(step, args, (2, 3))
    monkeypatch.setattr(torch.Tensor, "__slotnames__", [], raising=False)  # as saving a tensor does
    monkeypatch.setattr(torch.Tensor, "cauchy_", None)
    monkeypatch.setattr(nn.Tanh, "something_new", 1, raising=False)
    assert guards.changes({}) == []


def test_steps_run_the_code_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(i: int, args: Any) -> None:
        monkeypatch.undo()
        if i == 1:
            monkeypatch.setattr(nn.Tanh, "forward", tripled)
        if i == 2:
            monkeypatch.setattr(torch.optim.SGD, "step", held_back)

    assert assert_leaves_as_eager(lambda: weighed(lambda loss: loss), 4, between=between) == 3


class OfAll:
    """Hooks on all modules and optimizers, removed after a test."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def add(self, handle: Any) -> None:
        self.handles.append(handle)

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()


@pytest.fixture
def of_all() -> Iterator[OfAll]:
    made = OfAll()
    yield made
    made.remove()


def on_update(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def doubled(_module: Any, *values: Any) -> Any:
    return values[-1] * 2


def doubled_input(_module: Any, values: Any) -> Any:
    return (values[0] * 2,)


def of_gradients(_module: Any, gradients: Any, *_: Any) -> Any:
    return tuple(each if each is None else each * 2 for each in gradients)


modules = nn.modules.module
REGISTER: dict[str, Callable[[], Any]] = {
    "forward": lambda: modules.register_module_forward_hook(doubled),
    "forward_pre": lambda: modules.register_module_forward_pre_hook(doubled_input),
    "backward": lambda: modules.register_module_full_backward_hook(of_gradients),
    "step_pre": lambda: register_optimizer_step_pre_hook(on_update),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_on_all_modules_may_come_and_go(kind: str, of_all: OfAll) -> None:
    def between(i: int, args: Any) -> None:
        of_all.remove()
        if i == 1:
            of_all.add(REGISTER[kind]())

    assert assert_leaves_as_eager(lambda: weighed(lambda loss: loss), between=between) == 2


def test_what_a_hook_on_all_modules_reads_may_change(of_all: OfAll) -> None:
    held = SimpleNamespace(scale=1.0, weight=torch.ones(()))

    def scaled(_module: Any, _inputs: Any, out: Any) -> Any:
        return out * held.scale * held.weight

    def between(i: int, args: Any) -> None:
        held.scale = 1.0 + i
        held.weight.fill_(1.0 + i / 10)

    of_all.add(modules.register_module_forward_hook(scaled))
    assert_leaves_as_eager(lambda: weighed(lambda loss: loss), between=between)


def test_hooks_run_in_the_order_of_each_call() -> None:
    def make() -> Any:
        step, args, held = weighed(lambda loss: loss)
        model = args[0]
        for hook in (doubled, lambda module, inputs, out: out + 1):
            model[0].register_forward_hook(hook)
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        model[0].weight.register_hook(lambda gradient: gradient + 1)
        return step, args, held

    def between(i: int, args: Any) -> None:
        layer = args[0][0]
        # torch's C++ reads those of a tensor, and does not see that they have moved.
        for table in (layer._forward_hooks, layer.weight._backward_hooks) if i == 1 else ():
            table.move_to_end(next(iter(table)))

    assert assert_leaves_as_eager(make, between=between) == 2


class Meta(type):
    inner: float

    @property
    def doubled(cls) -> float:
        return cls.inner * 2


class Configured(metaclass=Meta):
    inner = 1.0


def of_a_metaclass() -> tuple[Any, Any]:
    return lambda o: Configured.doubled, lambda o: setattr(Configured, "inner", 2.0)


def of_a_getter() -> tuple[Any, Any]:
    held, get = SimpleNamespace(below=SimpleNamespace(far=1.0)), operator.attrgetter("below.far")
    return lambda o: get(held), lambda o: setattr(held.below, "far", 2.0)


def of_a_module() -> tuple[Any, Any]:
    import this_is_of_a_library as module  # pyright: ignore[reportMissingImports]

    return lambda o: module.GAIN, lambda o: setattr(module, "GAIN", 2.0)


def of_defaults() -> tuple[Any, Any]:
    return lambda o: o.defaults["lr"], lambda o: o.defaults.update(lr=2.0)


def of_a_new_key() -> tuple[Any, Any]:
    return (
        lambda o: o.param_groups[0].get("gain", 1.0),
        lambda o: o.param_groups[0].update(gain=2.0),
    )


def of_cudnn() -> tuple[Any, Any]:
    def change(_: Any) -> None:
        torch.backends.cudnn.deterministic = True

    return lambda o: torch.backends.cudnn.deterministic, change


@pytest.mark.parametrize(
    "read", [of_a_metaclass, of_a_getter, of_a_module, of_defaults, of_a_new_key, of_cudnn]
)
def test_what_is_read_by_a_way_around_is_guarded(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("this_is_of_a_library")
    module.GAIN = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "this_is_of_a_library", module)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(Configured, "inner", 1.0)
    get, change = read()
    model = nn.Linear(2, 2)
    args = [model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2)]
    guards = Guards(lambda model, optimizer, x: model(x) * get(optimizer), args, (2,))
    assert guards.changes({}) == []
    change(args[1])
    assert len(guards.changes({})) == 1

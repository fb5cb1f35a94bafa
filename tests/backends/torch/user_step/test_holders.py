"""Values are guarded wherever they lie: in views, chains, metaclasses, orders, the process."""

from __future__ import annotations

import abc
import collections
import decimal
import math
import multiprocessing
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.backends.torch.user_step.sources import batch_indices

X = torch.ones(2)


class Registry(type):
    """A metaclass with a setting."""

    gain = 1.0


class Registered(metaclass=Registry):
    pass


def of_a_view() -> tuple[Callable[..., Any], Callable[[], Any]]:
    below = {"gain": [1.0]}
    view = types.MappingProxyType(below)
    return lambda x: x * view["gain"][0], lambda: below["gain"].append(2.0)


def of_a_chain() -> tuple[Callable[..., Any], Callable[[], Any]]:
    first: dict[str, float] = {}
    chained = collections.ChainMap(first, {"gain": 1.0})
    return lambda x: x * chained["gain"], lambda: first.update(gain=2.0)


def of_a_user_dict() -> tuple[Callable[..., Any], Callable[[], Any]]:
    held = collections.UserDict(gain=1.0)
    return lambda x: x * held["gain"], lambda: held.update(gain=2.0)


def of_a_user_list() -> tuple[Callable[..., Any], Callable[[], Any]]:
    held = collections.UserList([1.0])
    return lambda x: x * len(held), lambda: held.append(2.0)


def of_a_metaclass() -> tuple[Callable[..., Any], Callable[[], Any]]:
    return lambda x: x * Registered.gain, lambda: setattr(Registry, "gain", 2.0)


def of_an_order() -> tuple[Callable[..., Any], Callable[[], Any]]:
    held = {"a": 1.0, "b": 2.0}
    return lambda x: x * list(held.values())[0], lambda: held.update(a=held.pop("a"))  # noqa: RUF015


def of_another_order() -> tuple[Callable[..., Any], Callable[[], Any]]:
    held = collections.OrderedDict(a=1.0, b=2.0)
    return lambda x: x * list(held.values())[0], lambda: held.move_to_end("a")  # noqa: RUF015


def of_threads() -> tuple[Callable[..., Any], Callable[[], Any]]:
    now = torch.get_num_threads()
    return lambda x: x * torch.get_num_threads(), lambda: torch.set_num_threads(now + 1)


def of_recursion() -> tuple[Callable[..., Any], Callable[[], Any]]:
    now = sys.getrecursionlimit()
    return lambda x: x * sys.getrecursionlimit(), lambda: sys.setrecursionlimit(now + 1)


def of_a_folder() -> tuple[Callable[..., Any], Callable[[], Any]]:
    return lambda x: x * len(os.getcwd()), lambda: os.chdir("/")  # noqa: PTH109


def of_the_command_line() -> tuple[Callable[..., Any], Callable[[], Any]]:
    return lambda x: x * float(sys.argv[-1]), lambda: sys.argv.append("2.0")


def of_a_precision() -> tuple[Callable[..., Any], Callable[[], Any]]:
    def change() -> None:
        decimal.getcontext().prec = 2

    return lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3)), change


def of_errors_of_numpy() -> tuple[Callable[..., Any], Callable[[], Any]]:
    return lambda x: x * len(np.geterr()["over"]), lambda: np.seterr(over="raise")


def warned(x: Any) -> Any:
    try:
        warnings.warn("once", stacklevel=1)
    except UserWarning:
        return x * 2
    return x


def of_warnings() -> tuple[Callable[..., Any], Callable[[], Any]]:
    return warned, lambda: warnings.simplefilter("error", UserWarning)


def of_a_lock() -> tuple[Callable[..., Any], Callable[[], Any]]:
    lock = threading.Lock()
    return lambda x: x * (2 if lock.acquire(blocking=False) else 1), lock.acquire


def of_a_barrier() -> tuple[Callable[..., Any], Callable[[], Any]]:
    barrier = threading.Barrier(2)
    return lambda x: x * (1 + barrier.broken), barrier.abort


def of_a_thread() -> tuple[Callable[..., Any], Callable[[], Any]]:
    thread, is_over = threading.Thread(target=(over := threading.Event()).wait), over.set
    thread.start()
    return lambda x: x * (1 + thread.is_alive()), lambda: (is_over(), thread.join())


def of_processes() -> tuple[Callable[..., Any], Callable[[], Any]]:
    event = multiprocessing.Event()
    return lambda x: x * (1 + event.is_set()), event.set


class Other(nn.Linear):
    pass


def of_a_class() -> tuple[Callable[..., Any], Callable[[], Any]]:
    model = nn.Linear(2, 2)
    return lambda x: model(x), lambda: setattr(model, "__class__", Other)


def of_a_sign() -> tuple[Callable[..., Any], Callable[[], Any]]:
    held = {"gain": 0.0}
    return lambda x: x * math.copysign(1.0, held["gain"]), lambda: held.update(gain=-0.0)


def of_a_module_made_by_hand() -> tuple[Callable[..., Any], Callable[[], Any]]:
    config: Any = types.ModuleType("config")
    config.gain, config.scaled = 1.0, lambda x: x * config.gain
    return lambda x: config.scaled(x), lambda: setattr(config, "gain", 2.0)


def of_a_hook_of_torch() -> tuple[Callable[..., Any], Callable[[], Any]]:
    model = nn.utils.spectral_norm(nn.Linear(2, 2))
    hook = next(iter(model._forward_pre_hooks.values()))
    return lambda x: model(x), lambda: setattr(hook, "n_power_iterations", 2)


def of_a_distribution() -> tuple[Callable[..., Any], Callable[[], Any]]:
    prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    return lambda x: prior.log_prob(x), lambda: setattr(prior, "loc", torch.ones(2))


def of_a_sampler() -> tuple[Callable[..., Any], Callable[[], Any]]:
    sampler: Any = DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
    return lambda x: x * sampler.epoch, lambda: sampler.set_epoch(3)


class Kind(abc.ABC):
    """Classes may be registered with it, or with a subclass."""

    @abc.abstractmethod
    def gain(self) -> float:
        """Return a number."""


class Special(Kind):
    pass


def of_registered_classes() -> tuple[Callable[..., Any], Callable[[], Any]]:
    class Plain:
        pass

    plain = Plain()
    return lambda x: x * (1 + isinstance(plain, Kind)), lambda: Special.register(Plain)


def of_an_equal_list() -> tuple[Callable[..., Any], Callable[[], Any]]:
    front, back = [0.0], [0.0]
    held = types.SimpleNamespace(now=front)
    return lambda x: x * (1 + (held.now is front)), lambda: setattr(held, "now", back)


def of_an_equal_tuple() -> tuple[Callable[..., Any], Callable[[], Any]]:
    front, back = tuple([0.0]), tuple([0.0])  # noqa: C409 (two objects)
    now = front

    def change() -> None:
        nonlocal now
        now = back

    return lambda x: x * (1 + (id(now) == id(front))), change


def of_digits_of_numpy() -> tuple[Callable[..., Any], Callable[[], Any]]:
    values = np.array([1.2345])

    def step(x: torch.Tensor) -> torch.Tensor:
        print(values)
        return x

    return step, lambda: np.set_printoptions(precision=2)


HOLDERS: dict[str, Callable[[], tuple[Callable[..., Any], Callable[[], Any]]]] = {
    "len(view.gain)": of_a_view,
    "chained.maps.0.gain": of_a_chain,
    "held.data.gain": of_a_user_dict,
    "len(held.data)": of_a_user_list,
    "Registry.gain": of_a_metaclass,
    "the order of held": of_an_order,
    "held": of_another_order,
    "get_num_threads()": of_threads,
    "getrecursionlimit()": of_recursion,
    "getcwd()": of_a_folder,
    "sys.argv": of_the_command_line,
    "decimal.getcontext()": of_a_precision,
    "geterr()": of_errors_of_numpy,
    "the filters of warnings that raise": of_warnings,
    "lock.locked": of_a_lock,
    "barrier.broken": of_a_barrier,
    "thread.is_alive": of_a_thread,
    "event.is_set": of_processes,
    "the class of model": of_a_class,
    "held.gain": of_a_sign,
    "config.gain": of_a_module_made_by_hand,
    "model._forward_pre_hooks.0.n_power_iterations": of_a_hook_of_torch,
    "prior.loc": of_a_distribution,
    "sampler.epoch": of_a_sampler,
    "the classes registered with Kind": of_registered_classes,
    "held.now": of_an_equal_list,
    "now": of_an_equal_tuple,
    "numpy.get_printoptions()": of_digits_of_numpy,
}


@pytest.fixture
def _process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts back what the changes below change."""
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(Registry, "gain", 1.0)
    threads, limit = torch.get_num_threads(), sys.getrecursionlimit()
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    with decimal.localcontext(), np.errstate(), np.printoptions(), warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("_process")
@pytest.mark.parametrize("name", HOLDERS)
def test_a_change_is_named(name: str) -> None:
    step, change = HOLDERS[name]()
    guards = Guards(step, (X,), (0,))
    assert not guards.changes({0: X})
    change()
    assert [each.name for each in guards.changes({0: X})] == [name]


def test_equal_lists_are_the_same_to_code_that_does_not_tell_them_apart() -> None:
    held = types.SimpleNamespace(now=[0.0])
    guards = Guards(lambda x: x * held.now[0] if held.now is not None else x, (X,), (0,))
    held.now = [0.0]
    assert not guards.changes({0: X})


@pytest.mark.usefixtures("_process")
def test_settings_of_the_process_that_no_code_asks_for_may_change() -> None:
    guards = Guards(lambda x: x + 1, (X,), (0,))
    for change in (of_threads()[1], of_recursion()[1], of_a_folder()[1]):
        change()
    assert not guards.changes({0: X})


def test_a_group_that_is_given_another_list_of_parameters_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> Any:
        model(x).sum().backward()
        optimizer.step()

    args = (model, optimizer, X)
    guards = Guards(step, args, batch_indices(args))
    optimizer.param_groups[1]["params"] = [model.weight]
    assert "optimizer.param_groups.1.params" in [each.name for each in guards.changes({2: X})]


def classes(x: torch.Tensor) -> torch.Tensor:
    """Of a name that is that of a module of torch, which makes something of any attribute."""
    return x.argmax(-1)


def ops(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones(2)


def test_names_of_torchs_own_namespaces_are_the_users_to_take() -> None:
    assert not Guards(lambda x: ops(x) + classes(x), (X,), (0,)).changes({0: X})

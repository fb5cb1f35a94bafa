"""Names of sources and places: what they may be called, and what else has the same name."""

import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.user_step.code_names import globals_named, is_typed
from tests.backends.torch.stepping import Entry, assert_as_eager, assert_leaves_as_eager, small


class Trainer:
    """Holds the example batch; its step takes another one, and may read the one it holds."""

    def __init__(self, *, reads: bool) -> None:
        torch.manual_seed(0)
        self.model, self.reads = nn.Linear(4, 4), reads
        self.x, self.y = torch.randn(3, 4), torch.randn(3, 4)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train once."""
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), self.x if self.reads else y)
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("reads", [False, True])
def test_a_batch_that_the_step_s_object_holds_too(reads: bool) -> None:
    def make() -> Entry:
        trainer = Trainer(reads=reads)
        return trainer.step, (trainer.x, trainer.y)

    def given(i: int) -> dict[int, Any]:
        generator = torch.Generator().manual_seed(i)
        return {k: torch.randn(3, 4, generator=generator) for k in (0, 1)}

    assert_as_eager(make, given, steps=3, sizes=(1, 2))


def test_the_argument_has_the_name_and_the_attribute_another() -> None:
    trainer = Trainer(reads=True)
    graph = capture(trainer.step, trainer.x, trainer.y)
    kinds = {op.name: op.kind for op in graph.ops if op.name.rpartition(".")[2] == "x"}
    assert kinds == {"x": "input", "self.x": "buffer"}


class Agent:
    """Its network and its count are called like arguments of its step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.y = nn.Linear(4, 4), 0
        self.optimizer = torch.optim.Adam(self.x.parameters(), lr=0.1)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train once."""
        self.y += 1
        return _trained(self.x, self.optimizer, x * self.y, y)


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def _agent() -> Callable[..., Any]:
    return Agent().step


def _variables() -> Callable[..., Any]:
    """Return a step that calls a function with variables called like its arguments."""
    torch.manual_seed(0)
    batch = [nn.Linear(4, 4), torch.ones(4)]
    optimizer = torch.optim.Adam(batch[0].parameters(), lr=0.1)

    def trained(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _trained(batch[0], optimizer, a * batch[1], b)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        return trained(*batch)

    return step


@pytest.mark.parametrize("made", [_agent, _variables])
def test_what_is_called_like_an_argument_is_not_taken_for_the_batch(
    made: Callable[[], Callable[..., Any]],
) -> None:
    x, y = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    assert_as_eager(lambda: (made(), (x, y)), lambda i: {0: x * i}, steps=3, sizes=(1, 2))


def _leaves_as_eager(held: Callable[[], Any], change: Callable[..., Any]) -> None:
    """Compare a step that calls `change(held, loss, model)` with eager ones."""

    def make() -> Any:
        (model, x, y), args = small(), held()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            change(args, loss, model)
            optimizer.step()
            return loss

        return step, (x, y), (model, args)

    assert_leaves_as_eager(make)


def test_settings_that_a_variable_named_args_holds() -> None:
    """As `args = parser.parse_args()` in most scripts: `parallelize` ended with a TypeError."""

    def change(args: Any, loss: torch.Tensor, _model: nn.Module) -> None:
        args.step += 1
        args.log.append(loss.item())
        args.last = loss.detach()

    _leaves_as_eager(lambda: types.SimpleNamespace(step=0, log=[], last=None), change)


def test_new_numbers_under_keys_with_dots() -> None:
    """By names of parameters: they were looked for in a dictionary called "counts.0"."""

    def change(counts: Any, _loss: torch.Tensor, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            counts[name] += 1
            counts["norm." + name] += parameter.grad.norm().item()

    _leaves_as_eager(Counter, change)


class Counting:
    """Its step counts by an attribute that its class has: the object gets one of its own."""

    total = 0

    def __init__(self) -> None:
        self.model, self.x, self.y = small()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.total += 1
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y) / self.total
        loss.backward()
        self.optimizer.step()
        return loss


def test_a_new_number_of_the_object_whose_method_the_step_is() -> None:
    def make() -> Any:
        counting = Counting()
        return counting.step, (counting.x, counting.y), counting

    assert_leaves_as_eager(make)


def test_a_step_that_was_typed_and_is_in_no_file() -> None:
    """Its globals are the user's, and what changes in them is followed."""
    script = """
import torch, pardnn
from torch import nn
torch.manual_seed(0)
tau, batches = 2.0, torch.randn(2, 2, 4)
def train(wrap):
    global tau
    net = nn.Linear(4, 4)
    nn.init.ones_(net.weight), nn.init.ones_(net.bias)
    globals().update(net=net, opt=torch.optim.SGD(net.parameters(), 0.1))
    one, tau, losses = wrap(step), 2.0, []
    for x in batches:
        losses.append(float(one(x)))
        tau *= 1.5
    return losses
def step(x):
    opt.zero_grad()
    loss = (net(x) / tau).square().mean()
    loss.backward()
    opt.step()
    return loss
assert train(lambda step: step) == train(pardnn.parallelize)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
print({op.source for op in pardnn.capture(step, batches[0]).ops})
"""
    found = subprocess.run(
        [sys.executable, "-"], input=script, text=True, capture_output=True, check=True
    )
    assert "<stdin>:18" in found.stdout


def test_an_attribute_is_no_global_of_its_name() -> None:
    """`self.model` would else lead to another model, which a script has trained before."""

    def step(held: Any) -> Any:
        return held.torch, [nn.Linear for _ in held.F]

    assert globals_named(step) == ["nn"]  # `torch` and `F` are globals here, too


def test_text_is_typed_where_no_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that libraries make, such as that of dataclasses, has the name of what `-c` gives."""
    assert not is_typed("<string>")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert is_typed("<string>")
    assert is_typed("<ipython-input-3-0123456789ab>")
    assert not is_typed("<frozen importlib._bootstrap>")


class Projected:
    """A hook that holds a head, as BYOL has one on a hidden layer."""

    def __init__(self) -> None:
        self.head = nn.Linear(6, 6)

    def __call__(self, _module: Any, _given: Any, found: torch.Tensor) -> torch.Tensor:
        return self.head(found)


def test_what_hooks_hold_has_the_same_name_in_each_process() -> None:
    """A plan and a checkpoint are read by others, where more or fewer hooks were there before."""

    def names() -> set[str]:
        model, x, y = small()
        model[1].register_forward_hook(hook := Projected())
        optimizer = torch.optim.SGD([*model.parameters(), *hook.head.parameters()], lr=0.1)

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        graph = capture(step, model, optimizer, x, y)
        return {op.name for op in graph.ops if op.kind == "parameter"}

    found = names()
    assert "model.1._forward_hooks.0.head.weight" in found
    assert names() == found

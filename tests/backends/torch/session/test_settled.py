"""Whether anything is another object than at a walk, told without another walk."""

import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.session.settled import Settled
from pardnn.backends.torch.user_step.object_graph import walk_objects

TABLE = torch.zeros(2)


class Slotted:
    __slots__ = ("best",)

    def __init__(self) -> None:
        self.best = torch.zeros(2)


class Held:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.slotted, self.named = Slotted(), {"best": torch.zeros(2)}
        self.list, self.queue = [torch.zeros(2)], deque([torch.zeros(2)])
        self.ordered = OrderedDict(b=torch.zeros(2))
        self.pair = (torch.zeros(2), {"best": torch.zeros(2)})

    def step(self) -> None:
        self.model(TABLE)
        self.optimizer.step()


def set_global(_held: Held) -> None:
    globals()["TABLE"] = torch.zeros(2)


CHANGES: dict[str, Callable[[Held], Any]] = {
    "attribute": lambda held: setattr(held, "model", nn.Linear(2, 2)),
    "parameter": lambda held: setattr(held.model, "bias", nn.Parameter(torch.zeros(2))),
    "buffer": lambda held: held.model.register_buffer("table", torch.zeros(2)),
    "state": lambda held: held.optimizer.state[held.model.bias].update(m=torch.zeros(2)),
    "group": lambda held: held.optimizer.param_groups[0].update(params=[held.model.bias]),
    "slot": lambda held: setattr(held.slotted, "best", torch.zeros(2)),
    "key": lambda held: held.named.update(best=torch.zeros(2)),
    "new key": lambda held: held.named.update(new=torch.zeros(2)),
    "ordered": lambda held: held.ordered.update(b=torch.zeros(2)),
    "item": lambda held: held.list.__setitem__(0, torch.zeros(2)),
    "deque": lambda held: held.queue.__setitem__(0, torch.zeros(2)),
    "in a tuple": lambda held: held.pair[1].update(best=torch.zeros(2)),
    "global": set_global,
    "gradient": lambda held: setattr(held.model.weight, "grad", torch.ones(2, 2)),
}


def settled(held: Held) -> tuple[Settled, Callable[[Settled], bool]]:
    """Return what a walk has found, and what asks whether it holds."""
    grad = SimpleNamespace(get=lambda: held.model.weight.grad)
    program: Any = SimpleNamespace(state={"weight.grad": ()})
    binding: Any = SimpleNamespace(sources={"weight.grad": grad})
    found = Settled(program, binding, walk_objects(held.step, []))
    return found, lambda each: each.holds(program, binding)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[Held], Any]) -> None:
    held = Held()
    found, holds = settled(held)
    gc.collect()
    assert holds(found)
    assert holds(found)
    change(held)
    assert not holds(found)


def test_another_program_is_another_question() -> None:
    found, _ = settled(Held())
    other: Any = SimpleNamespace(state={}, sources={})
    assert not found.holds(other, other)


def test_what_is_no_part_of_the_step_may_change() -> None:
    held = Held()
    found, holds = settled(held)
    globals()["NOT_NAMED"] = 1
    del globals()["NOT_NAMED"]
    assert holds(found)

"""Numbers and settings of optimizers are compared at each call, also where nothing was written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture_step
from pardnn.backends.torch.runtime import granted_values
from pardnn.backends.torch.runtime.binding import Binding

RATE = "optimizer.param_groups.0.lr"


def bound() -> tuple[Binding, torch.optim.SGD, torch.Tensor]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step(model: nn.Module, optimizer: torch.optim.SGD, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(4, 3)
    graph = capture_step(step, [model, optimizer, x]).graph
    binding = Binding(step, [model, optimizer, x], graph, torch.device("cpu"))
    binding.watch()
    return binding, optimizer, x


def names(binding: Binding, x: torch.Tensor) -> list[str]:
    return [change.name for change in binding.changes(binding.read([x]))]


@pytest.fixture(params=["tags", "no tags"], autouse=True)
def _tags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no tags":
        monkeypatch.setattr(granted_values, "HAS_TAGS", False)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nesterov": lambda group: group.update(nesterov=True),
    "maximize": lambda group: group.update(maximize=True),
    "momentum": lambda group: group.update(momentum=0.0),
    "weight_decay": lambda group: group.update(weight_decay=0.0),
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_change_is_told_at_every_call_until_it_is_taken_back(key: str) -> None:
    binding, optimizer, x = bound()
    (group,) = optimizer.param_groups
    before = dict(group)
    for _ in range(3):
        assert names(binding, x) == []
    CHANGES[key](group)
    for _ in range(2):
        assert names(binding, x) == [f"optimizer.param_groups.0.{key}"]
    group.update(before)
    for _ in range(2):
        assert names(binding, x) == []


def test_each_call_reads_the_rate_of_its_time() -> None:
    binding, optimizer, x = bound()
    (group,) = optimizer.param_groups
    for rate in (0.1, 0.1, 0.2, 0.2, 0.1, 0.3):
        group["lr"] = rate
        batch = binding.read([x])
        assert not list(binding.changes(batch))
        assert binding.batch_inputs(batch)[RATE] == rate
        binding.end_step()


def test_another_group_in_the_place_of_one_is_told() -> None:
    binding, optimizer, x = bound()
    assert names(binding, x) == []
    optimizer.load_state_dict(optimizer.state_dict())
    assert names(binding, x)

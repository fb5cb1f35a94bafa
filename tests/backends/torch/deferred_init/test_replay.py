"""Shards of parameters are replayed bit for bit, and random fills outside of the slice counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.deferred_init import replay as replay_module
from pardnn.backends.torch.deferred_init.initialise import build, record, replay
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.rng import generator as rng


def twice_initialised() -> nn.Module:
    """As Hugging Face models are made: built, initialised again as a whole, then converted."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    for module in model:
        nn.init.normal_(module.weight, std=0.02)
        nn.init.trunc_normal_(module.bias)
    return model.double()


@pytest.mark.parametrize("make", [record, build])
def test_shards_of_parameters_are_those_of_the_whole(make: Any) -> None:
    expected = dict(twice_initialised().named_parameters())
    end = rng.read_state(torch.default_generator)
    model, recording = make(twice_initialised)
    found = dict(model.named_parameters())
    boxes = [tuple((n // 3, n) for n in p.shape) for p in expected.values()]
    shards = replay(recording, list(found.values()), [(box, None) for box in boxes])
    assert rng.read_state(torch.default_generator) == end
    for shard, box, whole in zip(shards, boxes, expected.values(), strict=True):
        assert torch.equal(shard, box_view(whole, box))
        assert shard.untyped_storage().nbytes() == shard.numel() * 8
        assert shard.requires_grad
    if make is build:
        assert all(p.untyped_storage().nbytes() == 0 for p in found.values())


def test_replaying_shards_takes_little_more_than_the_largest_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, recording = record(twice_initialised)
    allocated: list[int] = []
    original = replay_module._deliver

    def noting(state: Any, storage: int) -> None:
        allocated.append(sum(real.nbytes() for real in state.live.values()))
        original(state, storage)

    monkeypatch.setattr(replay_module, "_deliver", noting)
    found = list(model.parameters())
    shards = replay(recording, found, [(tuple((0, n // 2) for n in p.shape), None) for p in found])
    largest = 64 * 64 * 8
    assert len(shards) == 20
    # A weight and what it is converted from, and a bias.
    assert max(allocated) <= 1.6 * largest


def test_fills_are_counted_not_drawn() -> None:
    def factory() -> Any:
        return [
            torch.empty(100, 3).uniform_(),
            torch.empty(100, 3).normal_(),
            nn.init.trunc_normal_(torch.empty(50, 5), std=0.02),
        ]

    _, recording = record(factory)
    calls = [event for event in recording.events if getattr(event, "generator", None) is not None]
    counts = [replay_module.counted_draws(call) for call in calls]
    assert counts == [rng.fixed(300), rng.fixed(316), rng.fixed(266)]


def test_truncation_that_rejects_is_drawn() -> None:
    _, recording = record(lambda: nn.init.trunc_normal_(torch.empty(50, 5)))
    call = next(e for e in recording.events if getattr(e, "generator", None) is not None)
    assert replay_module.counted_draws(call) is None

"""A tensor of which shards are wanted is made a block of rows at a time, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.deferred_init import blocks
from pardnn.backends.torch.deferred_init import replay as replay_module
from pardnn.backends.torch.deferred_init.initialise import record, replay
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.rng import generator as rng

Make = Callable[[], torch.Tensor]


def padded() -> torch.Tensor:
    return nn.Embedding(97, 13, padding_idx=41).weight


def scaled_in_half() -> torch.Tensor:
    weight = torch.empty(70, 11).normal_().mul_(0.02).add_(1).clamp_(0.9, 1.1)
    return weight.to(torch.bfloat16).neg_()


def truncated() -> torch.Tensor:
    return nn.init.trunc_normal_(torch.empty(1, 90, 7), std=0.02)


def doubled() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Linear(13, 91).weight
    finally:
        torch.set_default_dtype(torch.float32)


def seeded() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.empty(80, 9).normal_(generator=generator)


IN_BLOCKS: dict[str, Make] = {
    "uniform": lambda: nn.Linear(13, 97).weight,
    "normal": lambda: torch.empty(97, 13).normal_(1, 2),
    "a vector": lambda: torch.empty(1003).normal_(),
    "rows of 16": lambda: torch.empty(40, 32).normal_(),
    "a padding row": padded,
    "converted": scaled_in_half,
    "truncated": truncated,
    "float64": doubled,
    "ones": lambda: torch.empty(97, 13).fill_(1).mul_(3),
    "its own generator": seeded,
}
WHOLE: dict[str, Make] = {
    "a sum": lambda: torch.empty(97, 13).normal_().add_(torch.ones(97, 13)),
    "rejecting": lambda: nn.init.trunc_normal_(torch.empty(97, 13)),
    "drawn across": lambda: torch.empty(13, 97).t().normal_(),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(97, 97)),
    "a part drawn again": lambda: _drawn_again(torch.empty(97, 13).normal_()),
    "cumulated": lambda: torch.empty(97, 13).normal_().cumsum_(0),
}


def _drawn_again(weight: torch.Tensor) -> torch.Tensor:
    weight[3:9].normal_()
    return weight


def boxes_of(shape: tuple[int, ...]) -> list[Any]:
    """The whole cut along one dim after the other, unevenly, and an inner box."""
    found = [tuple((0, n) for n in shape)]
    for dim, extent in enumerate(shape):
        at = extent // 3
        for low, high in ((0, at), (at, extent)):
            box = [(0, n) for n in shape]
            box[dim] = (low, high)
            found.append(tuple(box))
    return [*found, tuple((n // 4, n - n // 3) for n in shape)]


@pytest.mark.parametrize("name", [*IN_BLOCKS, *WHOLE])
def test_shards_have_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1500)
    chains: list[blocks.Chain] = []
    original = replay_module.chains_of

    def noting(*args: Any) -> list[blocks.Chain]:
        chains.extend(found := original(*args))
        return found

    monkeypatch.setattr(replay_module, "chains_of", noting)

    def factory() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before = torch.empty(5).normal_()  # not wanted
        return before, (IN_BLOCKS | WHOLE)[name](), torch.empty(7).uniform_()

    torch.manual_seed(4)
    _, expected, after = factory()
    end = rng.read_state(torch.default_generator)
    for box in boxes_of(tuple(expected.shape)):
        torch.manual_seed(4)
        (_, fake, last), recording = record(factory)
        chains.clear()
        shard, drawn_after = replay(recording, [fake, last], [(box, None), None])
        assert len(chains) == (name in IN_BLOCKS)
        assert torch.equal(shard, box_view(expected, box))
        assert shard.dtype == expected.dtype
        assert torch.equal(drawn_after, after)
        assert rng.read_state(torch.default_generator) == end


def test_what_one_storage_gives_twice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1500)
    torch.manual_seed(4)
    expected = nn.Linear(13, 97).weight
    torch.manual_seed(4)
    model, recording = record(lambda: nn.Linear(13, 97))
    halves = [((0, 50), (0, 13)), ((50, 97), (0, 13))]
    shards = [(halves[0], None), (halves[1], (1, 47))]
    first, second = replay(recording, [model.weight, model.weight], shards)
    assert torch.equal(torch.cat([first, second]), expected)
    assert second.stride() == (1, 47)

"""What a user keeps of a tensor that each step replaces stays as it was, as beside eager steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks

Keep = Callable[["Trainer"], torch.Tensor]


class Trainer:
    """Trains on what its last steps left: a tensor, a pair, a buffer and a variable."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.model.register_buffer("mean", torch.zeros(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.h, self.pair = torch.zeros(3, 4), (torch.ones(3, 4), torch.zeros(3, 4))
        self.last, self.loss = torch.zeros(3, 4), torch.zeros(())
        self.left = None
        local = torch.zeros(3, 4)

        def step(x: torch.Tensor) -> Any:
            nonlocal local
            h = torch.tanh(self.model(x + self.h + self.pair[0] * self.pair[1] + local))
            loss = (h - self.last + self.model.mean).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            old = self.h, self.loss
            self.last = self.left = self.h
            self.h, self.loss = h.detach(), loss.detach()
            self.pair, local = (h.detach() * 2, self.pair[0]), local + h.detach()
            self.model.mean = self.model.mean * 0.5 + h.detach().mean(0)
            return loss, *old

        self.step, self.local = step, lambda: local


KEPT: dict[str, Keep] = {
    "a tensor": lambda t: t.h,
    "a view": lambda t: t.h[1:],
    "an array": lambda t: t.h.numpy(),
    "a tuple": lambda t: t.pair,
    "a buffer": lambda t: t.model.mean,
    "a variable": lambda t: t.local(),
    "what another place held": lambda t: t.last,
    "in a place of its own": lambda t: t.left,
}  # fmt: skip


def run(trainer: Trainer, step: Callable[..., Any], keep: Keep) -> list[Any]:
    """Return what each of five calls returned, and what was kept after it, as of the end."""
    kept, found = [keep(trainer)], list[Any]()
    for x in torch.linspace(-1, 1, 60).reshape(5, 3, 4):
        found += step(x)
        kept.append(keep(trainer))
    return [_plain(each) for each in (*found, *kept)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return None if value is None else torch.as_tensor(value).tolist()


def scattered(graph: Graph, size: int, _state: Any) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


@pytest.mark.parametrize("what", KEPT)
def test_kept_as_it_was(what: str) -> None:
    trainer, eager = Trainer(), Trainer()
    fast = parallelize(trainer.step, torch.zeros(3, 4), decide=scattered, device="cpu")
    try:
        assert run(trainer, fast, KEPT[what]) == run(eager, eager.step, KEPT[what])
        assert fast.captures == 1
    finally:
        fast.close()


def test_put_into_the_batch_it_is_the_old_content() -> None:
    def calls(trainer: Trainer, step: Callable[..., Any]) -> list[Any]:
        cache, found = {"h": torch.ones(3, 4)}, []
        for _ in range(3):
            step(cache)
            found.append(cache["h"].tolist())
        return found

    def with_cache(trainer: Trainer) -> Callable[..., Any]:
        def step(cache: dict[str, torch.Tensor]) -> torch.Tensor:
            before = trainer.h
            loss, *_ = trainer.step(cache["h"])
            cache["h"] = before
            return loss

        return step

    trainer, eager = Trainer(), Trainer()
    example = {"h": torch.ones(3, 4)}
    fast = parallelize(with_cache(trainer), example, decide=scattered, device="cpu")
    try:
        assert calls(trainer, fast) == calls(eager, with_cache(eager))
    finally:
        fast.close()


def test_nothing_is_copied_that_nobody_keeps() -> None:
    trainer, x = Trainer(), torch.ones(3, 4)
    fast = parallelize(trainer.step, x, decide=scattered, device="cpu")
    try:
        fast(x)
        held = [weakref.ref(each) for each in (trainer.h, trainer.pair[0], trainer.model.mean)]
        fast(x)
        now = trainer.h, trainer.pair[0], trainer.model.mean
        assert [ref() is each for ref, each in zip(held, now, strict=True)] == [True] * 3
    finally:
        fast.close()


def test_kept_through_another_graph_and_a_checkpoint(tmp_path: Any) -> None:
    def calls(trainer: Trainer, step: Callable[..., Any], *, saved: bool) -> list[Any]:
        kept = []
        for rate in (0.1, 0.1, 0.0, 0.0, 0.1, 0.1):
            trainer.model.bias.requires_grad_(rate > 0)
            step(torch.ones(3, 4))
            kept.append(trainer.h)
            if saved:
                step.save(tmp_path, keep=1)
                assert step.whole("self.h").equal(trainer.h)
        return [each.tolist() for each in kept]

    trainer, eager = Trainer(), Trainer()
    fast = parallelize(trainer.step, torch.ones(3, 4), decide=scattered, device="cpu")
    try:
        assert calls(trainer, fast, saved=True) == calls(eager, eager.step, saved=False)
        assert fast.captures == 2
        trainer.h.zero_()
        fast.load(tmp_path)
        assert trainer.h.equal(eager.h)
    finally:
        fast.close()


def _rank(rank: int, store: str) -> list[list[Any]]:
    connect(rank, 2, store, 20).close()
    trainer = Trainer()
    fast = parallelize(trainer.step, torch.zeros(3, 4), decide=scattered, device="cpu")
    losses, kept = list[Any](), list[Any]()
    for x in torch.linspace(-1, 1, 60).reshape(5, 3, 4):
        losses += fast(x)
        kept.append(trainer.h)
    fast.close()
    return [[each.tolist() for each in losses], [each.tolist() for each in kept]]


def test_ranks_hold_the_old_content_where_they_hold_the_tensor() -> None:
    eager = Trainer()
    found = run(eager, eager.step, KEPT["a tensor"])
    outcomes = run_ranks(2, _rank)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
        assert outcome.value[0] == found[:15]
    assert [outcome.value[1] == found[16:] for outcome in outcomes].count(True) == 1


def test_kept_between_two_steps_on_one_state() -> None:
    def calls(trainer: Trainer, steps: list[Callable[..., Any]]) -> list[Any]:
        kept = []
        for i in range(6):
            steps[i % 2](torch.full((3, 4), 0.1 * i))
            kept.append(trainer.h)
        return [each.tolist() for each in kept]

    trainer, eager = Trainer(), Trainer()
    one = parallelize(trainer.step, torch.zeros(3, 4), decide=scattered, device="cpu")
    two = parallelize(trainer.step, torch.zeros(3, 4), decide=scattered, device="cpu")
    try:
        assert calls(trainer, [one, two]) == calls(eager, [eager.step, eager.step])
    finally:
        one.close()
        two.close()


def test_what_the_step_also_writes_in_place_is_not_passed_on() -> None:
    trainer = Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        trainer.last.mul_(0.5)
        loss, *_ = trainer.step(x)
        return loss

    with pytest.raises(PardnnError, match=r"the step replaces 'trainer.last' by 'trainer.h'"):
        parallelize(step, torch.zeros(3, 4), decide=scattered, device="cpu")


class Writing(Trainer):
    """Writes into what it then replaces, and gives a tensor other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = torch.ones(3, 4)
        step = self.step

        def writing(x: torch.Tensor) -> Any:
            self.h.add_(1)
            self.model.mean[0] += 2
            self.taken.data = self.taken * 2
            loss, *_ = step(x + self.taken)
            return loss, x, x

        self.step = writing


WRITTEN: dict[str, Keep] = {
    "a tensor": lambda t: t.h,
    "a view": lambda t: t.h[1:],
    "a buffer": lambda t: t.model.mean,
    "the same tensor": lambda t: t.taken,
    "its old memory": lambda t: t.taken[:],
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_the_step_wrote_before_it_replaced_it(what: str) -> None:
    trainer, eager = Writing(), Writing()
    fast = parallelize(trainer.step, torch.zeros(3, 4), decide=scattered, device="cpu")
    try:
        assert run(trainer, fast, WRITTEN[what]) == run(eager, eager.step, WRITTEN[what])
    finally:
        fast.close()


def test_memory_that_the_step_writes_and_then_replaces_is_refused_if_held() -> None:
    def clipping(trainer: Trainer) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> Any:
            found = trainer.step(x)
            trainer.model.weight.data = trainer.model.weight.data.clamp(-0.2, 0.2)
            return found

        return step

    trainer, eager, x = Trainer(), Trainer(), torch.ones(3, 4)
    fast = parallelize(clipping(trainer), x, decide=scattered, device="cpu")
    try:
        for _ in range(3):
            assert [*map(_plain, fast(x))] == [*map(_plain, clipping(eager)(x))]
        held = trainer.model.state_dict()
        with pytest.raises(
            PardnnError, match=r"'trainer\.model\.weight'.*test_held_else"
        ) as caught:
            fast(x)
        assert caught.value.code == "E530"
        del held
    finally:
        fast.close()

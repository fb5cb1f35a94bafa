"""Tensors that the user puts in the place of others between calls are taken without a capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.session.new_tensors import NewTensors
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but


class Trainer:
    """A step with state in an attribute, a tuple, a list, two places and a buffer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(4, 8)
        self.cell.register_buffer("scale", torch.ones(8))
        self.optimizer = torch.optim.SGD(self.cell.parameters(), lr=0.1, momentum=0.9)
        self.hidden = torch.zeros(3, 8), torch.zeros(3, 8)
        self.weight = torch.ones(3, 1)
        self.terms = [torch.zeros(8)]
        self.twice = {"a": torch.ones(8)}
        self.twice["b"] = self.twice["a"]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.cell(x, self.hidden)
        rest = self.terms[0] + self.twice["a"] * self.twice["b"]
        weight = self.weight * getattr(self.weight, "gain", 1.0)
        loss = (weight * self.cell.scale * hidden[0] + rest).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.terms[0].add_(loss.detach())
        h, c = hidden
        self.hidden = h.detach(), c.detach()
        return loss


def batch(i: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(i))


Event = Callable[[Trainer], Any]


def hidden(trainer: Trainer, rows: int = 3) -> None:
    trainer.hidden = torch.zeros(rows, 8), torch.ones(rows, 8)


def both(trainer: Trainer) -> None:
    trainer.twice["a"] = trainer.twice["b"] = torch.full((8,), 2.0)


def momentum(trainer: Trainer) -> None:
    state = trainer.optimizer.state[trainer.cell.weight_hh]
    state["momentum_buffer"] = torch.zeros(32, 8)


def buffer(trainer: Trainer) -> None:
    trainer.cell.scale = torch.full((8,), 0.5)


def column(trainer: Trainer) -> None:
    trainer.weight = torch.tensor([[1.0], [0.0], [2.0]])


def item(trainer: Trainer) -> None:
    trainer.terms[0] = torch.ones(8)


TAKEN: list[Event] = [hidden, both, momentum, buffer, column, item, hidden]


def losses(trainer: Trainer, run: Callable[..., Any], events: list[Event]) -> list[float]:
    found = [run(batch(0)).item(), run(batch(1)).item()]
    for i, event in enumerate(events):
        event(trainer)
        found += [run(batch(j)).item() for j in (2 * i, 2 * i + 1)]
    return found


def eager(events: list[Event]) -> Any:
    def body(_rank: int, _path: str) -> Any:
        trainer = Trainer()
        return losses(trainer, trainer.step, events)

    return run_ranks(1, body)[0].value


def scattered(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


def on_ranks(size: int, events: list[Event], of_last: list[Event] | None = None) -> Any:
    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 5).close()
        trainer = Trainer()
        fast = parallelize(trainer.step, batch(0), decide=scattered, timeout=5, device="cpu")
        mine = of_last if of_last is not None and rank == size - 1 else events
        return losses(trainer, fast, mine), fast.captures

    return run_ranks(size, body)


@pytest.mark.parametrize("size", long_but([2], [1, 2]))
def test_they_are_taken_without_another_capture(size: int) -> None:
    wanted = eager(TAKEN)
    for outcome in on_ranks(size, TAKEN):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [wanted, 1]


def one_of_two(trainer: Trainer) -> None:
    trainer.twice["a"] = torch.full((8,), 2.0)


def view(trainer: Trainer) -> None:
    trainer.whole = torch.ones(6, 1)  # pyright: ignore
    trainer.weight = trainer.whole[:3]  # pyright: ignore


def expanded(trainer: Trainer) -> None:
    trainer.weight, trainer.terms[0] = torch.ones(3, 1), torch.ones(1).expand(8).clone()
    trainer.twice["a"] = trainer.twice["b"] = torch.ones(1).expand(8)


def shared(trainer: Trainer) -> None:
    trainer.terms[0] = trainer.cell.scale


def trained(trainer: Trainer) -> None:
    trainer.weight = torch.ones(3, 1, requires_grad=True)


def marked(trainer: Trainer) -> None:
    trainer.weight = torch.ones(3, 1)
    trainer.weight.gain = 2.0  # pyright: ignore


def double(trainer: Trainer) -> None:
    trainer.weight = torch.ones(3, 1, dtype=torch.float64)


def column_of_two(trainer: Trainer) -> None:
    trainer.weight = torch.ones(1, 1)


@pytest.mark.parametrize(
    "event", [one_of_two, view, expanded, shared, trained, marked, double, column_of_two]
)
def test_what_the_graph_does_not_hold_for_is_captured(event: Event) -> None:
    events = [event, hidden]
    (outcome,) = on_ranks(1, events)
    assert outcome.status == 0, outcome.error
    assert outcome.value[0] == eager(events)
    assert outcome.value[1] > 1


def test_each_shape_of_a_batch_keeps_its_graph() -> None:
    def run(trainer: Trainer, step: Callable[..., Any]) -> list[float]:
        found = []
        for _ in range(3):
            for rows in (3, 3, 2):
                trainer.weight = torch.ones(rows, 1)
                hidden(trainer, rows)
                found.append(step(batch(rows, rows)).item())
        return found

    def wanted(_rank: int, _path: str) -> Any:
        trainer = Trainer()
        return run(trainer, trainer.step)

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        trainer = Trainer()
        fast = parallelize(trainer.step, batch(0), decide=scattered, timeout=20, device="cpu")
        return run(trainer, fast), fast.captures

    expected = run_ranks(1, wanted)[0].value
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [expected, 2]


def test_one_rank_alone_cannot_replace_a_tensor() -> None:
    assert "E519" in {outcome.code for outcome in on_ranks(2, [hidden], [lambda _: None])}


def test_ranks_cannot_put_different_tensors_there() -> None:
    assert {outcome.code for outcome in on_ranks(2, [column], [buffer])} == {"E519"}
    other: Event = lambda trainer: setattr(trainer, "weight", torch.zeros(3, 1))  # noqa: E731
    assert {outcome.code for outcome in on_ranks(2, [column], [other])} == {"E518"}


def test_what_shows_no_other_value_is_a_change_all_the_same() -> None:
    """Such as whether a batch has an item, which may be None."""

    def body(_rank: int, path: str) -> Any:
        connect(0, 1, path, 20).close()
        trainer = Trainer()
        fast = parallelize(trainer.step, batch(0), decide=scattered, timeout=20, device="cpu")
        fast(batch(0))
        variants, current = fast._variants, fast._variants.current
        of = current.executor.program, current.binding, current.constants
        new = NewTensors(variants._state, *of)
        given = current.binding.read([batch(0)])
        found = new.accepted([Change("item", None, None)], given), new.accepted([], given)
        return [each is None for each in found]

    assert run_ranks(1, body)[0].value == [True, False]


@pytest.mark.parametrize("size", [1, 2])
def test_another_step_takes_them_too(size: int) -> None:
    def run(trainer: Trainer, step: Callable[..., Any], other: Callable[..., Any]) -> list[float]:
        found = []
        for i in range(3):
            column(trainer)
            hidden(trainer)
            found += [each(batch(i)).item() for each in (step, other, step, other)]
        return found

    def other_of(trainer: Trainer) -> Callable[..., Any]:
        def other(x: torch.Tensor) -> torch.Tensor:
            loss = (trainer.weight * trainer.cell(x, trainer.hidden)[0]).square().sum()
            trainer.optimizer.zero_grad()
            loss.backward()
            trainer.optimizer.step()
            return loss

        return other

    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        trainer = Trainer()
        given = {"decide": scattered, "timeout": 20, "device": "cpu"}
        steps = [parallelize(s, batch(0), **given) for s in (trainer.step, other_of(trainer))]
        return run(trainer, *steps)

    wanted = run_ranks(1, lambda _r, _p: run(t := Trainer(), t.step, other_of(t)))[0].value
    for outcome in run_ranks(size, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == wanted

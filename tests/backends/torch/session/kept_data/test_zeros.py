"""Numbers to which a step adds tensors (`self.total += loss.detach()`), and that users reset."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.first_step.numbering import is_zero
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but


class Meter:
    """As in many training scripts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum: Any = 0
        self.value: Any = 0
        self.count = 0

    def update(self, value: Any, n: int) -> None:
        self.value = value
        self.sum += value * n
        self.count += n


class Trainer:
    """A step whose counts become tensors at the first call."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.meter, self.right = Meter(), dict[str, Any]()
        self.rows: list[Any] = [0.0, "rows"]
        self.reset()

    def reset(self) -> None:
        self.meter.reset()
        self.total: Any = 0.0
        self.average: Any = 0.0
        self.model.total = 0.0  # pyright: ignore
        self.right["all"] = 0
        self.rows[0] = 0.0
        self.rest: Any = 1.0
        self.left: Any = 3

    def trained(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(x)
        loss = out.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return out.detach(), loss

    def step(self, x: torch.Tensor) -> torch.Tensor:
        out, loss = self.trained(x)
        self.meter.update(loss.detach(), len(x))
        self.total = loss.detach() + self.total
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.model.total += out.mean(0)  # pyright: ignore
        self.right["all"] += (out > 0).sum()
        self.rows[0] = self.rows[0] + loss.detach() ** 2
        self.rest -= loss.detach()
        self.left = out.mean(0) + self.left
        return loss

    def counts(self) -> list[Any]:
        held = (
            self.meter.sum, self.meter.value, self.total, self.average, self.model.total,
            self.right["all"], self.rows[0], self.rest, self.left,
        )  # fmt: skip
        return [*map(_plain, held), self.meter.count, self.rows[1]]


def _plain(value: Any) -> Any:
    return [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value


def batch(i: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(i))


def epochs(trainer: Trainer, run: Callable[..., Any], whole: Callable[[], Any]) -> list[Any]:
    found = []
    for i in range(9):
        if i and i % 3 == 0:
            trainer.reset()
        found.append([run(batch(i)).item(), whole()])
    return found


def scattered(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


def eager() -> Any:
    def body(_rank: int, _path: str) -> Any:
        trainer = Trainer()
        return epochs(trainer, trainer.step, trainer.counts)

    return run_ranks(1, body)[0].value


def test_they_become_tensors_as_beside_eager_steps() -> None:
    def body(_rank: int, path: str) -> Any:
        connect(0, 1, path, 20).close()
        trainer = Trainer()
        fast = parallelize(trainer.step, batch(0), decide=scattered, timeout=20, device="cpu")
        return epochs(trainer, fast, trainer.counts), fast.captures

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    assert outcome.value == [eager(), 1]


@pytest.mark.parametrize("size", long_but([2], [2, 3]))
def test_each_is_on_one_rank(size: int) -> None:
    names = ["meter.sum", "total", "average", "model.total", "right.all", "rows.0", "rest", "left"]

    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        trainer = Trainer()
        fast = parallelize(trainer.step, batch(0), decide=scattered, timeout=20, device="cpu")
        whole = lambda: [_plain(fast.whole(name)) for name in names]  # noqa: E731
        return epochs(trainer, fast, whole), fast.captures

    wanted = [[loss, [counts[0], *counts[2:9]]] for loss, counts in eager()]
    for outcome in run_ranks(size, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [wanted, 1]


def printing(trainer: Trainer, x: torch.Tensor) -> Any:
    print("so far", trainer.total)
    trainer.total += trainer.trained(x)[1].detach()


def asking(trainer: Trainer, x: torch.Tensor) -> Any:
    scale = 2 if isinstance(trainer.total, float) else 1
    trainer.total += trainer.trained(x * scale)[1].detach()


def from_one(trainer: Trainer, x: torch.Tensor) -> Any:
    trainer.total = (trainer.total or 1.0) + trainer.trained(x)[1].detach()


@pytest.mark.parametrize("body", [printing, asking, from_one])
def test_a_first_step_that_sees_the_number_is_refused(body: Callable[..., Any]) -> None:
    trainer = Trainer()

    def step(x: torch.Tensor) -> torch.Tensor:
        body(trainer, x)
        return trainer.trained(x)[1]

    with pytest.raises(UnsupportedError) as caught:
        capture(step, batch(0))
    assert caught.value.code in ("E802", "E806")
    assert type(trainer.total) is float


def test_zeros_that_no_capture_has_seen_are_captured() -> None:
    """The graph was captured with a tensor in place: it might have branched on a number."""

    def body(_rank: int, path: str) -> Any:
        connect(0, 1, path, 20).close()
        trainer = Trainer()
        trainer.step(batch(0))
        fast = parallelize(trainer.step, batch(0), decide=scattered, timeout=20, device="cpu")
        return epochs(trainer, fast, trainer.counts), fast.captures

    def wanted(_rank: int, _path: str) -> Any:
        trainer = Trainer()
        trainer.step(batch(0))
        return epochs(trainer, trainer.step, trainer.counts)

    (outcome,), (expected,) = run_ranks(1, body), run_ranks(1, wanted)
    assert outcome.status == 0, outcome.error
    assert outcome.value == [expected.value, 2]


@pytest.mark.parametrize(
    ("value", "is_one"), [(0, True), (0.0, True), (-0.0, False), (False, False), (1, False)]
)
def test_zero_has_no_sign_and_is_no_flag(value: Any, is_one: bool) -> None:
    assert is_zero(value) == is_one

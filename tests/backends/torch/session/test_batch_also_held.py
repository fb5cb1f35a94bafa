"""Tensors of the batch that the user's objects hold, too: they stay whole, or are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import PardnnError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.session.kept_data.test_rebound import made, rows
from tests.backends.torch.stepping import cut_plan


def placed(graph: Any, size: int, _: Any) -> Any:
    return random_plan(graph, size, seed=len(graph.ops))


def cut(graph: Any, size: int, _: Any) -> Any:
    return cut_plan(graph, size)


@pytest.mark.parametrize("decide", [placed, cut])
def test_what_an_evaluation_reaches_but_does_not_read_stays_whole(decide: Any) -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, *objects = made()
        data = {"x": rows(4, 6), "rest": rows(6, 4), "row": rows(4, 6)[0]}
        data["view"] = data["x"][1:]

        def validate(model: Any, x: torch.Tensor) -> torch.Tensor:
            return model(x).sum() * len(data)

        fast = parallelize(step, *objects, data["x"], decide=decide, device="cpu")
        found = []
        for _ in range(2):
            fast(data["x"])
            found.append(fast.evaluate(validate, data["x"]).item())
        whole = {key: list(value.shape) for key, value in data.items()}
        return found, whole, any(value.isnan().any() for value in data.values())

    def eager() -> list[float]:
        step, model, optimizer = made()
        found = []
        for _ in range(2):
            step(model, optimizer, rows(4, 6))
            with torch.no_grad():
                model.eval()
                found.append(model(rows(4, 6)).sum().item() * 4)
                model.train()
        return found

    for found, whole, is_lost in (outcome.value for outcome in run_ranks(2, body)):
        assert found == pytest.approx(eager(), rel=1e-12)
        assert whole == {"x": [4, 6], "rest": [6, 4], "row": [6], "view": [3, 6]}
        assert not is_lost


def other_step(trainer: SimpleNamespace) -> Any:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * trainer.x.sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_a_step_that_reads_a_tensor_as_state_is_not_given_it_as_batch() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        _, *objects = made()
        x = rows(4, 6).cos()
        told = []
        for held in (x.clone(), x):
            step = other_step(SimpleNamespace(x=held))
            try:
                fast = parallelize(step, *objects, x, decide=placed, device="cpu")
                told.append([fast(rows(4, 6).cos()).item(), fast(x).item()])
            except PardnnError as error:
                told.append([error.code, str(error)])
        return told

    def eager(_rank: int, _path: str) -> list[float]:
        _, *objects = made()
        x = rows(4, 6).cos()
        step = other_step(SimpleNamespace(x=x))
        return [step(*objects, x).item() for _ in range(2)]

    expected = run_ranks(1, eager)[0].value
    found = [outcome.value for outcome in run_ranks(2, body)]
    for losses, (code, text) in found:
        assert losses == expected
        assert code == "E529"
        assert "argument 'x' is 'trainer.x'" in text
    assert any("x.clone()" in text for _, (_, text) in found)


class Trainer:
    """Keeps the batch and a tensor of its own, as a framework's loop does."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.worst = torch.tensor(float("inf"))

    def before_step(self) -> None:
        """Be what an optimizer's hook belongs to."""


def test_what_an_optimizer_only_leads_to_is_left_alone() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, model, optimizer = made()
        trainer = Trainer()
        optimizer.before_step = trainer.before_step
        fast, found = None, []
        for number in range(3):
            trainer.batch = (x := rows(4, 6) + number,)
            trainer.worst = torch.tensor(float(number))
            fast = fast or parallelize(step, model, optimizer, x, decide=placed, device="cpu")
            found.append(fast(x).item())
            assert torch.equal(trainer.batch[0], rows(4, 6) + number)
            assert trainer.worst.item() == number
        return found

    def eager(_rank: int, _path: str) -> list[float]:
        step, *objects = made()
        return [step(*objects, rows(4, 6) + number).item() for number in range(3)]

    outcomes = run_ranks(2, body)
    assert [outcome.error for outcome in outcomes] == [{}, {}]
    expected = run_ranks(1, eager)[0].value
    assert [outcome.value for outcome in outcomes] == [expected, expected]

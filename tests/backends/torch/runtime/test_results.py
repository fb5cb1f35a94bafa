"""What a step writes into its batch is in the caller's tensors afterwards, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime.results import check_written
from pardnn.errors import MismatchError, UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

Entry = tuple[Callable[..., Any], tuple[Any, ...]]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def truncated() -> Entry:
    """Truncated backpropagation through time: the hidden state is handed on in place."""

    def step(model, optimizer, x, h):
        optimizer.zero_grad()
        new = model(x + h)
        loss = new.square().mean()
        loss.backward()
        optimizer.step()
        h.copy_(new.detach())
        return loss

    return step, (*model_and_optimizer(), torch.randn(4, 6), torch.zeros(4, 6))


def normalised() -> Entry:
    """The batch is scaled in place before it is used."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        batch["x"].div_(2)
        loss = model(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (*model_and_optimizer(), {"x": torch.randn(4, 6)})


def averaged() -> Entry:
    """Rows of a table of moving averages are written, and the table lies transposed."""

    def step(model, optimizer, x, table):
        optimizer.zero_grad()
        out = model(x)
        loss = (out - table[1]).square().mean()
        loss.backward()
        optimizer.step()
        table[1] = 0.9 * table[1] + 0.1 * out.detach().mean(0)
        return loss

    return step, (*model_and_optimizer(), torch.randn(4, 6), torch.zeros(6, 3).t())


def sliced() -> Entry:
    """What is written is a slice of a tensor of the caller's, with gaps."""
    step, (model, optimizer, x, _) = truncated()
    return step, (model, optimizer, x, torch.zeros(4, 12)[:, ::2])


def repeated() -> Entry:
    """The row that is written is all rows of the table."""
    step, (model, optimizer, x, _) = averaged()
    return step, (model, optimizer, x, torch.zeros(1, 6).expand(3, 6))


WRITING = [truncated, normalised, averaged, sliced, repeated]


def batch_tensors(batch: Any) -> list[list[float]]:
    flat = [t for arg in batch for t in (arg.values() if isinstance(arg, dict) else [arg])]
    return [tensor.flatten().tolist() for tensor in flat]


def eager(factory: Callable[[], Entry]) -> tuple[list[float], list[list[float]]]:
    step, args = factory()
    return [step(*args).item() for _ in range(4)], batch_tensors(args[2:])


@pytest.mark.parametrize("factory", WRITING, ids=lambda factory: factory.__name__)
@pytest.mark.parametrize("size", long_but([3], [1, 2, 3]))
def test_the_caller_finds_what_the_step_wrote(factory: Callable[[], Entry], size: int) -> None:
    step, args = factory()
    plan = random_plan(capture(step, *args), size, seed=size)

    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        step, args = factory()
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        losses = [fast(*args[2:]).item() for _ in range(4)]
        fast.close()
        return losses, batch_tensors(args[2:])

    expected = eager(factory)
    for outcome in run_ranks(size, body):
        assert outcome.status == 0, outcome.error
        assert tuple(outcome.value) == expected


def rebound() -> Entry:
    """The container gets another tensor instead."""

    def step(model, optimizer, x, cache):
        optimizer.zero_grad()
        new = model(x + cache["h"])
        loss = new.square().mean()
        loss.backward()
        optimizer.step()
        cache["h"] = new.detach()
        return loss

    return step, (*model_and_optimizer(), torch.randn(4, 6), {"h": torch.zeros(4, 6)})


@pytest.mark.parametrize("size", long_but([3], [1, 2, 3]))
def test_a_container_gets_the_tensor_that_the_step_puts_into_it(size: int) -> None:
    step, args = rebound()
    plan = random_plan(capture(step, *args), size, seed=size)

    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        step, args = rebound()
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        losses = [fast(*args[2:]).item() for _ in range(3)]
        first = args[3]["h"]
        args[3]["h"] = torch.ones(4, 6)  # a state of the caller's own
        losses += [fast(*args[2:]).item() for _ in range(2)]
        fast.close()
        return [losses, first.tolist(), args[3]["h"].tolist()]

    def alone(_rank: int, _path: str) -> Any:
        step, args = rebound()
        losses = [step(*args).item() for _ in range(3)]
        first = args[3]["h"]
        args[3]["h"] = torch.ones(4, 6)
        losses += [step(*args).item() for _ in range(2)]
        return [losses, first.tolist(), args[3]["h"].tolist()]

    (expected,) = run_ranks(1, alone)
    for outcome in run_ranks(size, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == expected.value


def test_a_cut_step_puts_whole_tensors_into_containers() -> None:
    step, args = rebound()
    plan = pardnn.plan(capture(step, *args), pardnn.Cluster.uniform(2), "equal-chop", costs="v100")

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, args = rebound()
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        losses = [fast(*args[2:]).item() for _ in range(3)]
        fast.close()
        return [losses, args[3]["h"].tolist()]

    step, args = rebound()
    losses = [step(*args).item() for _ in range(3)]
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value[0] == pytest.approx(losses, rel=1e-5)
        assert torch.allclose(torch.tensor(outcome.value[1]), args[3]["h"], rtol=1e-4, atol=1e-6)


def test_a_cut_is_refused_and_auto_places() -> None:
    step, args = truncated()
    graph = capture(step, *args)
    cluster = pardnn.Cluster.uniform(2)
    with pytest.raises(UnsupportedError, match="'h' in place") as caught:
        pardnn.plan(graph, cluster, "tofu", costs="v100")
    assert caught.value.code == "E823"
    plan = pardnn.plan(graph, cluster, "auto", costs="v100")
    assert plan.partition is None
    assert any("tofu was not considered" in note for note in plan.notes)


def test_what_lies_between_the_written_elements_stays_each_callers_own() -> None:
    step, args = sliced()
    plan = random_plan(capture(step, *args), 2, seed=2)

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, args = sliced()
        gaps = args[3]._base[:, 1::2]
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        gaps.fill_(rank)
        fast(*args[2:])
        fast.close()
        return gaps.unique().tolist()

    assert [outcome.value for outcome in run_ranks(2, body)] == [[0.0], [1.0]]


def test_a_written_input_shares_no_memory_with_another() -> None:
    table, program = torch.zeros(4, 4), SimpleNamespace(written=["h"])

    def check(h: torch.Tensor, x: torch.Tensor) -> None:
        check_written(cast("Any", program), {"h": h, "x": x}, torch.device("cpu"))

    for apart in (table[2:], table[:2, 2:], torch.zeros(2, 2)):
        check(table[:2, :2], apart)
    for shared in (table, table[1:], table.t()[:2]):
        with pytest.raises(MismatchError, match="'h' and 'x' share their memory") as caught:
            check(table[:2, :2], shared)
        assert caught.value.code == "E512"

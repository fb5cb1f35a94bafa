"""Two epochs over batches of many sequence lengths, the last batch of each epoch a short one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions
from tests.backends.torch.executors import bits
from tests.backends.torch.ranks import connect, run_ranks

LENGTHS, ROWS, EPOCHS = 20, 3, 2


def made() -> tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model, optimizer, tokens):
        optimizer.zero_grad()
        scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer


def epoch() -> Iterator[torch.Tensor]:
    """Batches of 2 to `LENGTHS` + 1 tokens; then one of fewer rows."""
    for length in range(2, LENGTHS + 2):
        yield torch.arange(ROWS * length).reshape(ROWS, length) * 7 % 11
    yield torch.arange(5).reshape(1, 5)


def eager(_rank: int, _path: str) -> Any:
    step, model, optimizer = made()
    losses = [bits(step(model, optimizer, tokens)) for _ in range(EPOCHS) for tokens in epoch()]
    return losses, {f"model.{name}": bits(p) for name, p in model.named_parameters()}


def decide(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    options = PlanOptions(algorithm="round-robin", costs="v100")
    return next_plan(graph, Cluster.uniform(size), options, None, state)


def on_rank(rank: int, path: str) -> Any:
    connect(rank, 2, path, 60).close()
    step, model, optimizer = made()
    first = next(epoch())
    fast = parallelize(step, model, optimizer, first, decide=decide, timeout=60, device="cpu")
    losses, captures = [], []
    for _ in range(EPOCHS):
        losses += [bits(fast(tokens)) for tokens in epoch()]
        captures.append(fast.captures)
    state = {name: bits(fast.whole(name)) for name, _ in _named(model)}
    moved = fast.moved
    fast.close()
    return losses, state, captures, moved


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((f"model.{name}", parameter) for name, parameter in model.named_parameters())


def test_each_length_is_captured_once_in_all_epochs_and_no_state_moves() -> None:
    expected, parameters = run_ranks(1, eager)[0].value
    for outcome in run_ranks(2, on_rank, limit_s=600.0):
        assert outcome.status == 0, outcome.error
        losses, state, captures, moved = outcome.value
        assert losses == expected
        assert state == parameters
        assert captures == [LENGTHS + 1] * EPOCHS
        assert moved == 0

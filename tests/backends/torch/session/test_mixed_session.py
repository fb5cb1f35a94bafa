"""What a script does around training, with a plan that cuts inside of submeshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.plan.plan import Plan
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions
from tests.backends.torch.models import classify_step as step
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

RANKS = 4
CLUSTER = pardnn.Cluster.uniform(RANKS)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
    model = nn.Sequential(*pairs).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def validate(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model(x), y)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator, dtype=torch.double)
    return x, torch.randint(16, (rows,), generator=generator)


def decide_after(own: Plan) -> Any:
    def decide(graph: Any, _size: int, state: Any) -> Plan:
        return next_plan(graph, CLUSTER, PlanOptions(costs="v100"), own, state)

    return decide


def program(run: Any, evaluate: Any) -> list[float]:
    """Train and validate, with batches that are short, of one sample, and longer."""
    found = [run(*batch(6)), run(*batch(6)), evaluate(validate, *batch(6)), run(*batch(5))]
    found += [run(*batch(1)), evaluate(validate, *batch(3)), run(*batch(9)), run(*batch(6))]
    return [each.item() for each in found]


def eager() -> tuple[list[float], dict[str, Any]]:
    model, optimizer = made()

    def evaluate(function: Any, *args: Any) -> Any:
        with torch.no_grad():
            return function(model, *args)

    losses = program(lambda *given: step(model, optimizer, *given), evaluate)
    return losses, model.state_dict()


@pytest.mark.parametrize("algorithm", long_but({"megatron*1f1b"}, ["megatron*1f1b", "tofu*heft"]))
def test_batches_of_other_sizes_evaluation_and_weights(algorithm: str, tmp_path: Path) -> None:
    expected = eager()
    graph = capture(step, *made(), *batch(6))
    options = {"algorithm": algorithm, "microbatches": 2, "costs": "v100"}
    own = pardnn.plan(graph, CLUSTER, **options)

    def body(rank: int, path: str) -> Any:
        connect(rank, RANKS, path, 60).close()
        model, optimizer = made()
        fast = parallelize(
            step, model, optimizer, *batch(6), plan=own, decide=decide_after(own), device="cpu"
        )
        losses = program(fast, fast.evaluate)
        state = fast.state_dict()
        fast.export(tmp_path / "model.safetensors")
        before = float(fast.evaluate(validate, *batch(6)))
        fast(*batch(6))
        fast.load_weights(tmp_path / "model.safetensors")
        after = float(fast.evaluate(validate, *batch(6)))
        fast.close()
        if rank == 0:
            torch.testing.assert_close(state["model"], expected[1], rtol=1e-7, atol=1e-9)
        return [losses, before, after]

    outcomes = run_ranks(RANKS, body, limit_s=120)
    for outcome in outcomes:
        assert outcome.status == 0, (outcome.error, outcome.crash)
        losses, before, after = outcome.value
        assert losses == pytest.approx(expected[0], rel=1e-10)
        assert before == after

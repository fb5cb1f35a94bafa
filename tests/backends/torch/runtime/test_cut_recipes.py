"""The cuts of experts on real ranks: GPT-2 trains as one device does, within the proven peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pardnn
from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan
from pardnn.shard.recipes.product import PRODUCTS
from pardnn.sim.peak import one_device_peak
from tests.backends.torch import models
from tests.backends.torch.executors import captured
from tests.backends.torch.ranks import connect, run_ranks

RECIPES = ("data-parallel", "zero-2", "zero-3", "megatron")
STEPS = 3
Factory = Callable[[], models.Entry]


def transformer(blocks: int = 1) -> models.Entry:
    """Blocks with as many heads and samples as the most ranks, and dropout beside attention."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=blocks, n_head=4, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return models.double_language_step, (model, optimizer, torch.randint(64, (4, 8)))


def two_blocks() -> models.Entry:
    return transformer(2)


#: Bytes of a device.
LIMITS = {transformer: 650_000, two_blocks: 1_100_000}


def planned(factory: Factory, name: str, size: int, memory: int | None = None) -> Plan:
    """Return a recipe's plan as ranks read it from its file."""
    cluster = Cluster.uniform(size, memory=memory)
    plan = pardnn.plan(captured(factory), cluster, name, reserve=0.0, costs="v100")
    return plan_from_json(plan_to_json(plan))


def trained(factory: Factory, plan: Plan) -> list[Any]:
    """Losses, peak, generator and whole parameters of a rank."""
    step, args = factory()
    fast = parallelize(step, *args, plan=plan, device="cpu", timeout=20)
    torch.manual_seed(99)
    losses = [fast(args[2]).item() for _ in range(STEPS)]
    peak, random = fast.peak_bytes, int(torch.get_rng_state().sum())
    held = {name: fast.whole(f"model.{name}").tolist() for name, _ in args[0].named_parameters()}
    fast.close()
    return [losses, peak, random, held]


def assert_trained(factory: Factory, size: int, recipes: Sequence[str] = RECIPES) -> None:
    """All recipes in one launch, within a limit that one device alone would exceed."""
    limit = LIMITS[factory]
    plans = {name: planned(factory, name, size, limit) for name in recipes}
    assert one_device_peak(captured(factory).arrays) > limit
    step, args = factory()
    torch.manual_seed(99)
    losses = [step(*args).item() for _ in range(STEPS)]
    random = int(torch.get_rng_state().sum())

    def body(rank: int, store: str) -> Any:
        connect(rank, size, store, 20.0)
        return [trained(factory, plan) for plan in plans.values()]

    for rank, outcome in enumerate(run_ranks(size, body, limit_s=240)):
        assert outcome.status == 0, outcome.error
        for plan, found in zip(plans.values(), outcome.value, strict=True):
            assert found[0] == pytest.approx(losses, rel=1e-10), plan.algorithm
            assert found[2] == random, plan.algorithm
            for name, expected in args[0].named_parameters():
                made = torch.tensor(found[3][name], dtype=torch.float64)
                torch.testing.assert_close(made, expected.detach(), rtol=1e-10, atol=1e-10)
            assert plan.predicted is not None
            predicted = plan.predicted.peak_bytes[rank]
            assert 0.99 * predicted <= found[1] <= predicted, plan.algorithm


def test_recipes_train_as_one_device() -> None:
    assert_trained(transformer, 2)


@pytest.mark.long
def test_recipes_train_as_one_device_on_four_ranks() -> None:
    assert_trained(two_blocks, 4, (*RECIPES, *PRODUCTS))


@pytest.mark.parametrize("name", RECIPES)
def test_a_limit_below_what_a_recipe_holds_is_refused(name: str) -> None:
    """Its states alone: cut where the recipe cuts them."""
    graph = captured(transformer)
    held = sum(t.bytes for op in graph.ops if op.memory == "residual" for t in op.outputs)
    least = held if name == "data-parallel" else held // 2
    with pytest.raises(InfeasibleError, match="no plan fits") as caught:
        planned(transformer, name, 2, least // 2)
    assert caught.value.code == "E301"

"""Models without data in the user's own script: each rank initialises its shards alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import MismatchError, PardnnError, UnsupportedError
from tests.backends.torch.models import NormNet
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import assert_leaves_as_eager
from tests.long_cases import long_but


def step(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = NormNet(3)
    nn.init.normal_(model.first.weight, std=0.5)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def eager(make: Any = built) -> list[float]:
    """Losses on one device, in a process with the threads of a rank."""

    def body(_rank: int, _path: str) -> list[float]:
        torch.manual_seed(3)
        model, optimizer = make()
        return [step(model, optimizer, torch.randn(5, 6)).item() for _ in range(4)]

    (outcome,) = run_ranks(1, body)
    return outcome.value


def graph() -> Any:
    torch.manual_seed(3)
    return capture(step, *built(), torch.randn(5, 6))


def trained(make: Any, size: int, plan: Any) -> list[Any]:
    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        torch.manual_seed(3)
        model, optimizer = make()
        x = torch.zeros(5, 6)
        fast = parallelize(step, model, optimizer, x, plan=plan, timeout=20, device="cpu")
        losses = [fast(torch.randn(5, 6)).item() for _ in range(4)]
        whole = fast.whole("model.first.weight").tolist()
        fast.close()
        return [losses, whole]

    outcomes = run_ranks(size, body)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
    return [outcome.value for outcome in outcomes]


def deferred() -> Any:
    with pardnn.deferred():
        return built()


def on_meta() -> Any:
    with torch.device("meta"):
        model = NormNet(3)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def emptied() -> Any:
    """What one device does with a model on the meta device."""
    with torch.device("meta"):
        model = NormNet(3)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("size", long_but([1, 3], [1, 2, 3]))
def test_a_deferred_model_trains_as_on_one_device(size: int) -> None:
    plan = random_plan(graph(), size, seed=1)
    for losses, _ in trained(deferred, size, plan):
        assert losses == eager()


def test_a_deferred_model_is_cut_from_the_start() -> None:
    plan = pardnn.plan(graph(), pardnn.Cluster.uniform(2), "equal-chop", costs="v100")
    torch.manual_seed(3)
    weight = built()[0].first.weight.tolist()
    for losses, whole in trained(deferred, 2, plan):
        assert losses == pytest.approx(eager(), rel=1e-5)
        assert len(whole) == len(weight)


def test_a_model_on_the_meta_device_has_the_numbers_of_one_device() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        model, optimizer = on_meta()
        x = torch.randn(5, 6)
        torch.manual_seed(3)
        fast = parallelize(step, model, optimizer, x, plan=plan, timeout=20, device="cpu")
        losses = [fast(torch.randn(5, 6)).item() for _ in range(4)]
        fast.close()
        return losses

    plan = random_plan(graph(), 2, seed=1)
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == eager(emptied)


@pytest.mark.parametrize("without_data", [pardnn.deferred, lambda: torch.device("meta")])
def test_optimizer_state_and_gradients_follow_parameters_that_are_made(without_data: Any) -> None:
    """A graph of another shape began with state of its own, and state_dict() found none."""

    def add_up(model: Any, optimizer: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()  # adds to the gradient of the call before
        optimizer.step()
        return loss

    def body(_rank: int, _path: str) -> Any:
        torch.manual_seed(3)
        with without_data():
            model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x = torch.ones(5, 6).cumsum(1)
        decide = lambda graph, size, _: random_plan(graph, size)  # noqa: E731
        fast = parallelize(add_up, model, optimizer, x, decide=decide, timeout=20, device="cpu")
        torch.manual_seed(3)
        alone = nn.Linear(6, 3)
        adam = torch.optim.Adam(alone.parameters(), lr=0.1)
        losses = [[fast(b).item(), add_up(alone, adam, b).item()] for b in (x, x[:3], x, x[:3])]
        state = fast.state_dict()["optimizer"]["state"]
        fast.close()
        return losses, [int(each["step"]) for each in state.values()]

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    losses, steps = outcome.value
    assert [found for found, _ in losses] == [expected for _, expected in losses]
    assert steps == [4, 4]


def test_what_is_drawn_after_the_block_is_what_would_have_been() -> None:
    torch.manual_seed(3)
    deferred()
    after = torch.randn(4)
    torch.manual_seed(3)
    built()
    assert torch.equal(after, torch.randn(4))


def test_nothing_is_allocated_inside() -> None:
    with pardnn.deferred():
        model = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
    assert model.weight.shape == (1 << 20, 1 << 20)


def test_what_cannot_be_recorded_is_told_with_what_can_be_done() -> None:
    told = pytest.raises(UnsupportedError, match=r"(?s)E820.*\n +Build it without .pardnn.def")
    with told, pardnn.deferred():
        nn.LazyLinear(3)
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.randn(2, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert capture(step, model, optimizer, torch.randn(2, 6))


def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    with torch.device("meta"):
        model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"'model\.scale'.*Scaled.*") as caught:
        parallelize(
            step, model, optimizer, torch.randn(2, 6), device="cpu",
            decide=lambda graph, size, _: random_plan(graph, size),
        )  # fmt: skip
    assert caught.value.code == "E820"
    assert "with pardnn.deferred():" in caught.value.message


class Shifted(nn.Module):
    """Has a parameter and a buffer that no `reset_parameters` gives values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 3), nn.Dropout(0.4)
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x)) * self.scale + self.shift


def test_a_template_on_the_meta_device_draws_nothing_and_stays_there() -> None:
    """As torch's tutorial of ensembles has it; dropout shows where the generator is."""
    templates = []

    def make() -> Any:
        torch.manual_seed(0)
        models = [Shifted() for _ in range(2)]
        parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
        template = Shifted().to("meta")
        templates.append(template)

        def step(optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            def one(*own: Any) -> torch.Tensor:
                return torch.func.functional_call(template, own, (x,))

            loss = torch.func.vmap(one, randomness="different")(parameters, buffers).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
        return step, (optimizer, torch.randn(4, 6)), [parameters, torch.get_rng_state]

    assert_leaves_as_eager(make)
    assert all(x.is_meta for x in (*templates[1].parameters(), *templates[1].buffers()))


def test_two_blocks_are_refused() -> None:
    one, two = deferred(), deferred()
    with pytest.raises(UnsupportedError, match="several"):
        parallelize(
            lambda m, n, o, x: step(nn.Sequential(m, n), o, x), one[0], two[0], one[1],
            torch.randn(5, 6), device="cpu",
        )  # fmt: skip


def test_ranks_with_other_seeds_are_refused() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        torch.manual_seed(rank)
        made = deferred()
        try:
            parallelize(step, *made, torch.zeros(5, 6), plan=plan, timeout=20, device="cpu")
        except PardnnError as error:
            return error.code
        return "trained"

    plan = random_plan(graph(), 2, seed=1)
    assert [outcome.value for outcome in run_ranks(2, body)] == ["E518", "E518"]
    assert MismatchError.__name__

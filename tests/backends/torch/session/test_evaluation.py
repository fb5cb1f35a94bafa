"""Evaluation between steps, and several steps on one state: bits of one device, nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.errors import PardnnError
from pardnn.plan.plan import Plan
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions
from tests.backends.torch.models import NormNet
from tests.backends.torch.models import classify_step as step
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

SCALE = 1.0


def validate(model: Any, x: Any, y: Any) -> Any:
    logits = model(x) * SCALE
    right = (logits.argmax(1) == y).sum().item()
    return {"loss": nn.functional.cross_entropy(logits, y), "right": right, "logits": logits}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = NormNet(4).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.double)
    return x, torch.randint(4, (rows,), generator=generator)


def decide(graph: Any, size: int, state: Any) -> Plan:
    options = PlanOptions(algorithm=ALGORITHM, costs="v100")
    return next_plan(graph, pardnn.Cluster.uniform(size), options, None, state)


ALGORITHM = "round-robin"


def flat(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return {k: flat(v) for k, v in result.items()} if isinstance(result, dict) else result


def program(run: Callable[..., Any], evaluate: Callable[..., Any]) -> list[Any]:
    """Train, validate two shapes, train, validate again: what a script does."""
    global SCALE
    found = []
    for epoch in range(2):
        found += [flat(run(*batch(5, 10 * epoch + i))) for i in range(2)]
        found += [flat(evaluate(validate, *batch(rows, rows))) for rows in (7, 3, 7)]
        SCALE = 2.0  # a global that the evaluation reads
    found.append(flat(evaluate(validate, *batch(7, 7))))
    SCALE = 1.0
    return found


def eager() -> list[Any]:
    def body(_rank: int, _path: str) -> list[Any]:
        model, optimizer = made()

        def evaluate(function: Any, *args: Any) -> Any:
            model.eval()
            with torch.no_grad():
                result = function(model, *args)
            model.train()
            return result

        return program(lambda *b: step(model, optimizer, *b), evaluate)

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    return outcome.value


def on_ranks(size: int, body: Callable[[], Any]) -> list[Any]:
    def with_connection(rank: int, path: str) -> Any:
        connect(rank, size, path, 30).close()
        return body()

    outcomes = run_ranks(size, with_connection, limit_s=60)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("size", long_but([2], [1, 2]))
def test_evaluation_between_steps_keeps_every_bit(size: int) -> None:
    def body() -> Any:
        model, optimizer = made()
        fast = parallelize(step, model, optimizer, *batch(5, 0), decide=decide, device="cpu")
        found = program(fast, fast.evaluate)
        modes = {module.training for module in model.modules()}
        moved, captures = fast.moved, fast.captures
        fast.close()
        return [found, moved, captures, sorted(modes)]

    expected = eager()
    for found, moved, captures, modes in on_ranks(size, body):
        assert found == expected
        assert (moved, captures, modes) == (0, 1, [True])


def test_evaluation_of_a_cut_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ALGORITHM", "equal-chop")

    def body() -> Any:
        model, optimizer = made()
        fast = parallelize(step, model, optimizer, *batch(5, 0), decide=decide, device="cpu")
        found = program(fast, fast.evaluate)
        assert fast.plan.partition is not None
        fast.close()
        return found

    expected = eager()
    for found in on_ranks(2, body):
        for mine, theirs in zip(found, expected, strict=True):
            for key in ("loss", "right"):
                one, other = (v[key] if isinstance(v, dict) else v for v in (mine, theirs))
                assert one == pytest.approx(other, rel=1e-10)


def test_what_is_told_of_an_evaluation_calls_it_so(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made()
    fast = parallelize(step, model, optimizer, *batch(5, 0), decide=decide, device="cpu")
    for rows in (5, 3):
        fast.evaluate(validate, *batch(rows, 0))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "pardnn"]
    assert "evaluation 1 is captured again" in line
    fast.close()


def test_an_evaluation_that_cannot_be_captured_leaves_the_step_usable() -> None:
    def broken(model: Any, x: Any) -> Any:
        return model(x)[model(x) > 0]

    def body() -> Any:
        model, optimizer = made()
        fast = parallelize(step, model, optimizer, *batch(5, 0), decide=decide, device="cpu")
        losses = [fast(*batch(5, 0)).item()]
        with pytest.raises(PardnnError, match="test_evaluation.py"):
            fast.evaluate(broken, batch(5, 0)[0])
        losses.append(fast(*batch(5, 1)).item())
        fast.close()
        return losses

    expected = [value for value in eager() if isinstance(value, float)][:2]
    assert on_ranks(2, body) == [expected, expected]


def critic_step(critic: Any, generator: Any, optimizer: Any, real: Any, noise: Any) -> Any:
    optimizer.zero_grad()
    with torch.no_grad():
        fake = generator(noise)
    loss = critic(fake).mean() - critic(real).mean()
    loss.backward()
    optimizer.step()
    return loss


def generator_step(critic: Any, generator: Any, optimizer: Any, noise: Any) -> Any:
    optimizer.zero_grad()
    loss = -critic(generator(noise)).mean()
    loss.backward()
    optimizer.step()
    return loss


def gan() -> Any:
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (critic, generator)]
    return critic, generator, *optimizers


def noise(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(6, n, generator=generator, dtype=torch.double) for n in (4, 3))  # type: ignore[return-value]


@pytest.mark.parametrize("size", long_but([2], [1, 2]))
def test_two_steps_share_their_models(size: int) -> None:
    def body() -> Any:
        critic, generator, for_critic, for_generator = gan()
        real, z = noise(0)
        one = parallelize(
            critic_step, critic, generator, for_critic, real, z, decide=decide, device="cpu"
        )
        two = parallelize(
            generator_step, critic, generator, for_generator, z, decide=decide, device="cpu"
        )
        found = []
        for i in range(4):
            real, z = noise(i)
            found += [one(real, z).item(), two(z).item()]
        weight = two.whole("critic.0.weight").tolist()
        moved = one.moved + two.moved
        assert isinstance(two, Parallel)
        one.close()
        found.append(two(noise(9)[1]).item())  # the other goes on
        two.close()
        return [found, weight, moved]

    def alone(_rank: int, _path: str) -> Any:
        critic, generator, for_critic, for_generator = gan()
        found = []
        for i in range(4):
            real, z = noise(i)
            found.append(critic_step(critic, generator, for_critic, real, z).item())
            found.append(generator_step(critic, generator, for_generator, z).item())
        weight = critic[0].weight.tolist()
        found.append(generator_step(critic, generator, for_generator, noise(9)[1]).item())
        return [found, weight]

    (expected,) = run_ranks(1, alone)
    for found, weight, moved in on_ranks(size, body):
        assert [found, weight] == expected.value
        assert moved == 0


def test_a_model_of_two_unrelated_steps_is_refused() -> None:
    capture(step, *made(), *batch(5, 0))  # a capture keeps nothing
    model, optimizer = made()
    other, another = made()
    one = parallelize(step, model, optimizer, *batch(5, 0), decide=decide, device="cpu")
    two = parallelize(step, other, another, *batch(5, 0), decide=decide, device="cpu")

    def both(a: Any, b: Any, o: Any, x: Any, y: Any) -> Any:
        return step(nn.Sequential(a, nn.Linear(4, 6).double(), b), o, x, y)

    with pytest.raises(PardnnError) as caught:
        parallelize(both, model, other, optimizer, *batch(5, 0), decide=decide, device="cpu")
    assert caught.value.code == "E216"
    one.close()
    two.close()


def test_a_state_that_starts_as_a_copy_of_another_type_is_not_its_parameter() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                if "slow" not in self.state[parameter]:
                    self.state[parameter]["slow"] = parameter.detach().double()
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["slow"].lerp_(parameter.detach().double(), 0.5)
                parameter.data.copy_(self.state[parameter]["slow"])

    def single() -> Any:
        torch.manual_seed(0)
        model = NormNet(4)
        return model, Slow(model.parameters(), lr=0.1)

    x, y = batch(5, 0)
    model, optimizer = single()
    fast = parallelize(step, model, optimizer, x.float(), y, decide=decide, device="cpu")
    torch.manual_seed(5)
    found = [fast(x.float(), y).item() for _ in range(3)]
    fast.close()
    model, optimizer = single()
    torch.manual_seed(5)
    assert found == [step(model, optimizer, x.float(), y).item() for _ in range(3)]

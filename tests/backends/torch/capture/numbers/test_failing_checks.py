"""What a check on data leaves where it fails, besides what it tells: refused, and never lost."""

from __future__ import annotations

import contextvars
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import small


def counts(state: Any, loss: torch.Tensor) -> None:
    state.failures += 1


def names(state: Any, loss: torch.Tensor) -> None:
    state.name = "broken"


def collects(state: Any, loss: torch.Tensor) -> None:
    state.failed.append(state.calls)


def notes_anew(state: Any, loss: torch.Tensor) -> None:
    state.last = loss.item()


def slows_down(state: Any, loss: torch.Tensor) -> None:
    state.optimizer.param_groups[0]["lr"] *= 0.5


def evaluates(state: Any, loss: torch.Tensor) -> None:
    state.model.eval()


def freezes(state: Any, loss: torch.Tensor) -> None:
    state.model[0].weight.requires_grad = False


def drops_a_gradient(state: Any, loss: torch.Tensor) -> None:
    state.model[0].weight.grad = None


def seeds(state: Any, loss: torch.Tensor) -> None:
    torch.manual_seed(5)


class Meter:
    """Counts for all of its objects."""

    count = 0


def counts_in_a_class(state: Any, loss: torch.Tensor) -> None:
    Meter.count += 1


def adds_to_a_set(state: Any, loss: torch.Tensor) -> None:
    state.seen.add(state.calls)


def draws(state: Any, loss: torch.Tensor) -> None:
    random.random()


def draws_by_numpy(state: Any, loss: torch.Tensor) -> None:
    np.random.rand()  # noqa: NPY002


SEEN: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


def sets_a_context_variable(state: Any, loss: torch.Tensor) -> None:
    SEEN.set(SEEN.get() + 1)


LEFT: dict[Callable[..., None], str] = {
    counts: "'state.failures'",
    names: "'state.name'",
    collects: "'state.failed'",
    notes_anew: "'state.last'",
    slows_down: "'state.optimizer.param_groups.0.lr'",
    evaluates: "'state.model.training'",
    freezes: "'state.model.0.weight.requires_grad'",
    drops_a_gradient: "gradients",
    counts_in_a_class: r"'tests\.\S*\.Meter.count'",
    adds_to_a_set: "'state.seen'",
    sets_a_context_variable: "'seen'",
    seeds: "torch's random generator",
    draws: "Python's random generator",
    draws_by_numpy: "that of NumPy",
}


def made(fail: Callable[..., None]) -> Any:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    state = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        failures=0,
        calls=0,
        name="a",
        failed=[],
        losses=[],
        seen=set(),
        meter=Meter(),
    )

    def step(state: Any, x: Any, y: Any) -> Any:
        state.calls += 1
        state.optimizer.zero_grad()
        loss = F.mse_loss(state.model(x), y)
        loss.backward()
        state.losses += [loss.item()]
        if not torch.isfinite(loss):
            fail(state, loss)
            raise ValueError(f"call {state.calls}: {loss.item()}")
        state.optimizer.step()
        return loss

    return step, (state, x, y), state


@pytest.mark.parametrize("fail", LEFT)
def test_what_would_be_lost_is_refused_by_name(fail: Any) -> None:
    step, args, state = made(fail)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(UnsupportedError, match=f"changes {LEFT[fail]}\n") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert "test_failing_checks.py" in caught.value.details["source"]
    assert (state.failures, state.name, state.failed, hasattr(state, "last")) == (0, "a", [], False)
    assert state.model.training
    assert state.model[0].weight.requires_grad
    assert torch.equal(torch.get_rng_state(), before[0])
    random.setstate(before[1])


def test_a_check_that_computes_with_tensors_is_told_what_a_check_may_do() -> None:
    def fail(state: Any, loss: torch.Tensor) -> None:
        state.model[0].weight.detach().zero_()

    step, args, _ = made(fail)
    with pytest.raises(UnsupportedError, match="only prints, logs and collects") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"


def test_what_is_told_is_followed_and_the_advised_rewrite_counts() -> None:
    def fail(state: Any, loss: torch.Tensor) -> None:
        print("failed at", state.calls)
        state.losses += [-1.0, state.calls, loss.item() - 1, f"{loss.item():.2f}"]

    def seen(call: Callable[..., Any], state: Any, x: Any, y: Any) -> Any:
        found = []
        for i in range(3):
            try:
                found.append(call(x * (math.nan if i == 2 else 1), y).item())
            except ValueError as error:
                state.failures += 1
                found.append(str(error))
        return found, state.failures, state.calls, repr(state.losses)

    step, args, _ = made(fail)
    expected = seen(lambda x, y: step(args[0], x, y), *args)
    assert expected[1] == 1
    step, args, _ = made(fail)
    fast = parallelize(step, *args, device="cpu", decide=lambda g, n, _: random_plan(g, n))
    assert seen(fast, *args) == expected
    fast.close()


def test_a_check_says_that_the_update_is_made_and_the_advised_condition_leaves_it_out() -> None:
    def step(state: Any, x: Any, y: Any) -> Any:
        state.optimizer.zero_grad()
        loss = F.mse_loss(state.model(x), y)
        loss.backward()
        if torch.isfinite(loss):
            state.optimizer.step()
        if not torch.isfinite(loss):
            raise ValueError("no loss")
        return loss

    def seen(call: Callable[..., Any], state: Any, x: Any, y: Any) -> Any:
        call(x, y)
        with pytest.raises(ValueError, match="no loss") as caught:
            call(x * math.nan, y)
        return [p.tolist() for p in state.model.parameters()], caught.value

    _, args, _ = made(counts)
    expected, error = seen(lambda x, y: step(args[0], x, y), *args)
    assert not hasattr(error, "__notes__")
    _, args, _ = made(counts)
    fast = parallelize(step, *args, device="cpu", decide=lambda g, n, _: random_plan(g, n))
    found, error = seen(fast, *args)
    fast.close()
    assert found == expected
    assert "if torch.isfinite(loss): optimizer.step()" in error.__notes__[0]


LinAlgError: type[Exception] = vars(torch.linalg)["LinAlgError"]


def cholesky(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(x * torch.eye(4)).sum()


def asserted(x: torch.Tensor) -> torch.Tensor:
    torch.ops.aten._assert_async.msg(x > 0, "too small")
    return x


OF_OPS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "cholesky": (cholesky, LinAlgError, "linalg.cholesky: .* not positive-definite"),
    "inv": (
        lambda x: torch.linalg.inv(x * torch.eye(3)).sum(),
        LinAlgError, "linalg.inv: .* not invertible",
    ),
    "an assert": (asserted, RuntimeError, "^too small"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OPS)
def test_what_an_op_checks_is_checked_in_each_step(name: str) -> None:
    ask, kind, text = OF_OPS[name]

    def step(model: Any, optimizer: Any, x: Any, y: Any, z: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + ask(z)
        loss.backward()
        optimizer.step()
        return loss

    model, x, y = small()
    args = (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    good, bad = torch.tensor(2.0), torch.tensor(0.0)
    fast = parallelize(step, *args, good, device="cpu", decide=lambda g, n, _: random_plan(g, n))
    copied, *_ = small()
    expected = step(copied, torch.optim.SGD(copied.parameters(), lr=0.1), x, y, good)
    assert torch.equal(fast(x, y, good), expected)
    with pytest.raises(kind):
        step(*args, bad)
    with pytest.raises(kind, match=text):
        fast(x, y, bad)
    fast.close()


def test_what_an_op_checks_of_constants_is_known_at_capture() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        try:
            loss = loss + cholesky(torch.tensor(-1.0))
        except LinAlgError:
            loss = loss * 3.0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, x, _ = small()
    graph = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    assert not any("cholesky" in op.kind for op in graph.ops)

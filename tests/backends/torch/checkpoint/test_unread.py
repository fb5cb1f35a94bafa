"""Steps whose calls take turns are resumed by `load` alone: what no graph reads yet is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.errors import MismatchError
from testbed.counting_optimizers import AdaBelief
from tests.backends.torch import models
from tests.backends.torch.checkpoint.test_resume import in_place, scattered
from tests.backends.torch.checkpoint.training import values
from tests.backends.torch.executors import bits
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.session.test_accumulation import zero_1
from tests.backends.torch.stepping import cut_plan
from tests.long_cases import long_but

CALLS = 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "counting": lambda parameters: AdaBelief(parameters),
}


def adding(kind: str) -> models.Entry:
    """A step that updates at every other call, and counts its updates."""
    _, (model, _, x, y) = models.small()
    optimizer = OPTIMIZERS[kind](model.parameters())
    counts = {"updates": 0}

    def step(model, optimizer, x, y, i):
        loss = cross_entropy(model(x), y)
        loss.backward()
        if i % 2:
            loss = loss * (1 + 0.1 * counts["updates"])
            counts["updates"] += 1
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step.counts = counts
    return step, (model, optimizer, x, y, 0)


def adversarial(_kind: str) -> models.Entry:
    """A step that updates a critic and a generator by turns."""
    torch.manual_seed(0)
    both = nn.ModuleList([nn.Linear(5, 1), nn.Linear(4, 5)])
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in both]

    def step(both, optimizers, x, z, i):
        critic, generator = both
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = softplus(critic(generator(z)) * (1 if i % 2 else -1)).mean()
        loss = loss + softplus(-critic(x)).mean() if i % 2 else loss
        loss.backward()
        optimizers[0 if i % 2 else 1].step()
        return loss

    return step, (both, optimizers, torch.randn(3, 5), torch.randn(3, 4), 0)


def called(call: Any, args: Any, calls: range) -> list[str]:
    """Return the losses of some calls, each with a batch of its own."""
    return [bits(call(args[2].roll(i, 0), args[3].roll(i, 0), i)) for i in calls]


def parameters_of(model: nn.Module) -> dict[str, str]:
    return {name: bits(parameter.detach()) for name, parameter in model.named_parameters()}


def gathered(fast: Parallel, model: nn.Module) -> dict[str, str]:
    prefix = "model." if isinstance(model, nn.Sequential) else "both."
    return {name: bits(fast.whole(prefix + name)) for name, _ in model.named_parameters()}


def eager(made: models.Entry) -> tuple[list[str], dict[str, str]]:
    step, args = made
    losses = called(lambda *batch: step(*args[:2], *batch), args, range(CALLS))
    return losses, parameters_of(args[0])


def parallel(made: models.Entry, first: int = 0, decide: Any = in_place) -> tuple[Parallel, Any]:
    """Return the step on all ranks, captured for one kind of call, and its arguments."""
    step, args = made
    return parallelize(step, *args[:4], first, decide=decide, timeout=20, device="cpu"), args


def on_ranks(size: int, body: Callable[[], Any]) -> list[Any]:
    def run(rank: int, store: str) -> Any:
        connect(rank, size, store, 20).close()
        return body()

    return values(run_ranks(size, run))


def saved(path: Path, made: models.Entry, calls: int = 5, decide: Any = in_place) -> list[str]:
    fast, args = parallel(made, decide=decide)
    losses: list[str] = []
    for i in range(calls):
        losses += called(fast, args, range(i, i + 1))
        fast.save(path)
    fast.close()
    return losses


@pytest.mark.parametrize(
    ("factory", "kind", "before", "after"),
    [
        (adding, "counting", 1, 2),
        (adversarial, "adam", 1, 2),
        *long_but((), [(adding, "adam", 2, 2), (adding, "momentum", 2, 1)]),
    ],
)
def test_a_run_goes_on_where_it_was_saved_before_any_call(
    factory: Any, kind: str, before: int, after: int, tmp_path: Path
) -> None:
    """Within what calls add up, and at its end; the first graph is of either kind of call.

    So no graph reads the gradients, or the optimizer's state, before the second call.
    """
    losses, parameters = eager(factory(kind))

    def resume() -> list[Any]:
        found = []
        for step, first in ((3, 1), (4, 0)):
            decide = in_place if first else scattered
            fast, args = parallel(factory(kind), first, decide)
            fast.load(tmp_path, step)
            rest = called(fast, args, range(step, CALLS))
            found.append([rest, gathered(fast, args[0])])
            fast.close()
        return found

    assert on_ranks(before, lambda: saved(tmp_path, factory(kind))) == [losses[:5]] * before
    expected = [[losses[step:], parameters] for step in (3, 4)]
    assert on_ranks(after, resume) == [expected] * after


@pytest.mark.parametrize("plan_of", [cut_plan, zero_1])
def test_cut_state_goes_on_as_well(plan_of: Any, tmp_path: Path) -> None:
    """Under `zero-1` every rank has the parameters whole; what lies beside them is on one."""

    def double() -> models.Entry:
        step, (model, _, x, y, i) = adding("adam")
        optimizer = OPTIMIZERS["adam"](model.double().parameters())
        return step, (model, optimizer, x.double(), y, i)

    def resume() -> list[str]:
        fast, args = parallel(double(), decide=lambda graph, size, _: plan_of(graph, size))
        fast.load(tmp_path, 3)
        with pytest.raises(MismatchError, match="'optimizer' is spread over the ranks"):
            args[1].state_dict()
        losses = called(fast, args, range(3, CALLS))
        fast.close()
        return losses

    expected = eager(double())[0]
    saved(tmp_path, double())
    for found in on_ranks(2, resume):
        for one, other in zip(found, expected[3:], strict=True):
            a, b = (
                torch.frombuffer(bytearray.fromhex(x), dtype=torch.float64) for x in (one, other)
            )
            assert a.item() == pytest.approx(b.item(), rel=1e-10)


def test_until_a_call_reads_it_it_is_saved_and_gathered_with_the_rest(tmp_path: Path) -> None:
    """The first call after `load` only adds to gradients, which reads no optimizer state."""
    losses, parameters = eager(adding("adam"))
    saved(tmp_path / "a", adding("adam"))

    def resume() -> list[Any]:
        fast, args = parallel(adding("adam"), decide=scattered)
        fast.load(tmp_path / "a", 4)
        fast.save(tmp_path / "b")
        fast.load(tmp_path / "b")
        fast.export(tmp_path / "model.safetensors", optimizer=True)
        fast.load_state_dict(fast.state_dict())
        fast.sync_model()
        again = called(fast, args, range(4, 5))
        fast.save(tmp_path / "b", wait=False)
        fast.load(tmp_path / "b", 5)
        found = [again + called(fast, args, range(5, CALLS)), gathered(fast, args[0])]
        fast.close()
        return found

    assert on_ranks(2, resume) == [[losses[4:], parameters]] * 2
    tensors = [
        {t.name: (t.dtype, t.shape) for t in read_manifest(resolve(tmp_path / name, step)).tensors}
        for name, step in (("a", 4), ("b", 4), ("b", 5))
    ]
    assert tensors[0] == tensors[1] == tensors[2]
    assert len(load_file(tmp_path / "model.safetensors")) == len(tensors[0])


def test_a_later_load_without_it_drops_it(tmp_path: Path) -> None:
    losses, parameters = eager(adding("momentum"))
    saved(tmp_path, adding("momentum"))
    made = adding("momentum")
    fast, args = parallel(made)
    fast.load(tmp_path)
    assert made[0].counts["updates"] == 2
    fast.load(tmp_path, 1)  # before the first update
    assert made[0].counts["updates"] == 0
    assert not any(args[1].state.values())
    fast.load(tmp_path)
    assert called(fast, args, range(5, CALLS)) == losses[5:]
    assert parameters_of(args[0]) == parameters
    fast.close()


@pytest.mark.parametrize(
    ("was", "now"), [("sgd", "adam"), *long_but((), [("adam", "sgd"), ("adam", "counting")])]
)
def test_state_of_another_optimizer_is_refused(was: str, now: str, tmp_path: Path) -> None:
    """No graph says yet what the optimizer's state is: its settings tell."""
    saved(tmp_path, adding(was))
    fast, args = parallel(adding(now))
    with pytest.raises(MismatchError, match="is of another optimizer than 'optimizer'"):
        fast.load(tmp_path)
    assert not args[1].state
    called(fast, args, range(2))
    fast.close()


def test_state_of_parameters_that_the_optimizer_has_not_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, adding("momentum"))
    step, (model, _, *rest) = adding("momentum")
    optimizer = OPTIMIZERS["momentum"](model[0].parameters())
    fast, _ = parallel((step, (model, optimizer, *rest)))
    with pytest.raises(MismatchError, match=r"has 'optimizer\.state\.model\.2\.weight\.mom"):
        fast.load(tmp_path)
    fast.close()


@pytest.mark.parametrize("kind", ["momentum", "sgd"])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_state_of_fewer_parameters_is_refused(kind: str, is_fresh: bool, tmp_path: Path) -> None:
    """Before the first update, or without state, nothing else tells."""
    step, (model, _, *rest) = adding(kind)
    saved(tmp_path, (step, (model, OPTIMIZERS[kind](model[0].parameters()), *rest)))
    fast, args = parallel(adding(kind))
    called(fast, args, range(0 if is_fresh else 2))
    with pytest.raises(MismatchError, match=r"has \[2\] parameters in groups|lacks") as caught:
        fast.load(tmp_path)
    assert caught.value.code == "E520"
    state = fast.state_dict()
    state["optimizer"]["param_groups"][0]["params"].pop()
    with pytest.raises(MismatchError, match="has groups of"):
        fast.load_state_dict(state)
    fast.close()


def in_a_new_dict(held: Any, is_third: bool) -> float:
    if is_third:
        held.made.setdefault("calls", {"all": 0})["all"] += 1
    return 1 + held.made.get("calls", {"all": 0})["all"]


def for_none(held: Any, is_third: bool) -> float:
    if is_third:
        held.value = (held.value or 0) + 1
    return 1 + (held.value or 0)


def of_text(held: Any, is_third: bool) -> float:
    if is_third:
        held.value = "warm"
    return 2.0 if held.value == "warm" else 1.0


def fresh(held: Any, is_third: bool) -> float:
    if is_third:
        held.value = {"rates": [0.5]}
    return held.value["rates"][0] if held.value else 1.0


@pytest.mark.parametrize("leave", [in_a_new_dict, for_none, of_text, fresh])
@pytest.mark.parametrize("before", long_but([5], [3, 5]))
def test_what_some_calls_leave_is_there_for_those_after_a_load(
    leave: Callable[[Any, bool], float], before: int, tmp_path: Path
) -> None:
    """The run that goes on has made none of them, and the first one was the last before 3."""

    def made() -> models.Entry:
        step, args = adding("sgd")
        held = SimpleNamespace(made={}, value=None)
        return lambda *args: step(*args) * leave(held, args[-1] % 3 == 2), args

    losses, _ = eager(made())
    assert saved(tmp_path, made(), before) == losses[:before]
    fast, args = parallel(made())
    fast.load(tmp_path)
    fast.save(tmp_path / "again")
    fast.close()
    fast, args = parallel(made())
    fast.load(tmp_path / "again")
    assert called(fast, args, range(before, CALLS)) == losses[before:]
    fast.close()


def test_who_loads_is_told_of_objects_that_calls_had_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(value: Any = None) -> models.Entry:
        step, args = adding("sgd")
        held = SimpleNamespace(value=value, loss=None)

        def keeping(*args):
            loss = step(*args)
            if args[-1] % 3 == 2:
                held.value, held.loss = SimpleNamespace(rate=0.5), loss.detach()
            return loss * (held.value.rate if held.value else 1.0)

        return keeping, args

    losses, _ = eager(made())
    assert saved(tmp_path, made()) == losses[:5]
    told = []
    for value in (None, SimpleNamespace(rate=0.5)):
        fast, args = parallel(made(value))
        caplog.clear()
        with caplog.at_level("WARNING", "pardnn"):
            fast.load(tmp_path)
        told.append([each.getMessage() for each in caplog.records])
    assert called(fast, args, range(5, CALLS)) == losses[5:]
    fast.close()
    assert told[1] == []
    assert len(told[0]) == 1, "tensors are state"
    assert "left 'SimpleNamespace' in held.value, which a checkpoint cannot hold" in told[0][0]
    assert "'NoneType' here" in told[0][0]


def test_a_count_in_an_object_that_a_call_makes_is_refused_before_that_call(
    tmp_path: Path,
) -> None:
    def made() -> models.Entry:
        step, args = adding("sgd")
        held = SimpleNamespace(counts=None)

        def counting(*args):
            if held.counts is None:
                held.counts = SimpleNamespace(all=0)
            held.counts.all += 1
            return step(*args) * held.counts.all

        return counting, args

    losses, _ = eager(made())
    assert saved(tmp_path, made()) == losses[:5]
    fast, args = parallel(made())
    with pytest.raises(MismatchError, match="make one call before `load`"):
        fast.load(tmp_path)
    called(fast, args, range(2))
    fast.load(tmp_path)
    assert called(fast, args, range(5, CALLS)) == losses[5:]
    fast.close()


def test_what_calls_have_counted_since_is_not_taken_for_that_of_a_step_before(
    tmp_path: Path,
) -> None:
    """When the first step was saved no graph read the count, so that it is in no checkpoint."""
    saved(tmp_path, adding("sgd"))
    fast, args = parallel(adding("sgd"))
    called(fast, args, range(2))
    with pytest.raises(MismatchError, match="before the first call that changes 'counts.updates'"):
        fast.load(tmp_path, 1)
    fast.close()

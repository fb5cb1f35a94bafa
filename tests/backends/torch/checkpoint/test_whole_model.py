"""The user's objects between steps: they give whole state, or refuse by name."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import MismatchError
from pardnn.plan.state_layout import state_layout
from tests.backends.torch import models
from tests.backends.torch.checkpoint.training import Rank, in_double, on_ranks, plan_of, values
from tests.backends.torch.executors import batches, bits, captured
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import run_ranks
from tests.long_cases import long_but

ALGORITHMS = ["placed", "allrow-greedy"]


def double_perceptron() -> models.Entry:
    return in_double(models.small)


@functools.cache
def eager_state() -> dict[str, Any]:
    """State after two steps on one device: bits by name."""

    def run(_rank: int, _store: str) -> Any:
        step, args = double_perceptron()
        for i in range(2):
            step(*args[:2], *batches(args, (2, 3), i))
        model, optimizer = args[:2]
        return [model_bits(model.state_dict()), optimizer_bits(optimizer.state_dict())]

    (value,) = values(run_ranks(1, run))
    return value


def model_bits(state: dict[str, Any]) -> dict[str, str]:
    return {key: bits(value.contiguous()) for key, value in state.items()}


def optimizer_bits(state: dict[str, Any]) -> Any:
    rows = [
        [i, key, bits(value)] for i, each in state["state"].items() for key, value in each.items()
    ]
    return [sorted(rows), state["param_groups"][0]["params"]]


def close(one: Any, other: Any, dtype: torch.dtype = torch.float64, relative: float = 1e-9) -> bool:
    """Equal, or within a cut's tolerance: bits of a type."""
    if one == other:
        return True
    a, b = (torch.frombuffer(bytearray.fromhex(x), dtype=dtype) for x in (one, other))
    return torch.allclose(a, b, rtol=relative, atol=1e-12)


def trained(one: Rank) -> None:
    for i in range(2):
        one.fast(*batches(one.args, (2, 3), i))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whole_state_dicts_are_those_of_one_device(algorithm: str) -> None:
    def body(one: Rank) -> Any:
        trained(one)
        state = one.fast.state_dict()
        if one.rank:
            return state
        return [model_bits(state["model"]), optimizer_bits(state["optimizer"])]

    first, *others = values(
        on_ranks(double_perceptron, plan_of(double_perceptron, 2, algorithm), body)
    )
    assert others == [{}]
    model, (rows, params) = eager_state()
    assert list(first[0]) == list(model)
    assert all(close(first[0][key], model[key]) for key in model)
    assert first[1][1] == params
    for (i, key, found), (j, other, expected) in zip(first[1][0], rows, strict=True):
        assert (i, key) == (j, other)
        assert close(found, expected), key


def with_a_tensor_rate() -> models.Entry:
    step, (model, _, x, y) = models.small()
    return step, (model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.125)), x, y)


def test_a_rate_that_another_rank_holds_as_a_tensor_is_whole(tmp_path: Path) -> None:
    rate, graph = "optimizer.defaults.lr", captured(with_a_tensor_rate)
    plans = (plan_of(with_a_tensor_rate, 2, seed=seed) for seed in range(99))
    plan = next(each for each in plans if state_layout(graph, each)[rate][0].device == 1)

    def body(one: Rank) -> Any:
        trained(one)
        one.fast.save(tmp_path)
        state = one.fast.state_dict()
        one.fast.load(tmp_path)
        after_load = one.fast.whole(rate).item()
        one.fast.load_state_dict(state)
        groups = state["optimizer"]["param_groups"] if state else [{"lr": torch.tensor(0.125)}]
        return [groups[0]["lr"].item(), after_load, one.fast.whole(rate).item()]

    assert values(on_ranks(with_a_tensor_rate, plan, body)) == [[0.125] * 3] * 2


def message(call: Any) -> str:
    with pytest.raises(MismatchError) as caught:
        call()
    assert caught.value.code in ("E523", "E524")
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_spread_objects_refuse_to_be_read_and_called(algorithm: str) -> None:
    def body(one: Rank) -> Any:
        trained(one)
        model, optimizer = one.args[:2]
        texts = [
            message(model.state_dict),
            message(lambda: model(one.args[2])),
            message(lambda: model.load_state_dict({})),
            message(optimizer.state_dict),
            message(lambda: optimizer.load_state_dict({})),
        ]
        trained(one)  # nothing of this is a change
        return texts

    for texts in values(
        on_ranks(double_perceptron, plan_of(double_perceptron, 2, algorithm), body)
    ):
        assert "'model' is spread over the ranks" in texts[0]
        assert "fast.state_dict()" in texts[0]
        assert "fast.sync_model()" in texts[1]
        assert "fast.load_state_dict(...)" in texts[2]
        assert "'optimizer' is spread" in texts[3]


def test_one_rank_holds_all_and_refuses_nothing() -> None:
    def body(one: Rank) -> Any:
        trained(one)
        model, optimizer = one.args[:2]
        optimizer.state_dict()
        return [model_bits(model.state_dict()), bool(model(one.args[2]).isfinite().all())]

    (found,) = values(on_ranks(double_perceptron, plan_of(double_perceptron, 1), body))
    assert found == [eager_state()[0], True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_synced_model_is_whole_on_rank_0_until_the_next_step(algorithm: str) -> None:
    def body(one: Rank) -> Any:
        trained(one)
        model = one.args[0]
        one.fast.sync_model()
        found = None
        if one.rank == 0:
            found = model_bits(model.state_dict())
            with torch.no_grad():
                assert model(one.args[2]).isfinite().all()
        else:
            message(model.state_dict)
        one.step(2)
        message(model.state_dict)
        after = one.fast.state_dict()
        return [found, model_bits(after["model"]) if after else None]

    def plain(one: Rank) -> Any:
        trained(one)
        one.step(2)
        after = one.fast.state_dict()
        return model_bits(after["model"]) if after else None

    plan = plan_of(double_perceptron, 2, algorithm)
    (found, after), _ = values(on_ranks(double_perceptron, plan, body))
    assert all(close(found[key], value) for key, value in eager_state()[0].items())
    assert after == values(on_ranks(double_perceptron, plan, plain))[0]


def test_a_copy_of_a_whole_model_stays_whole_and_one_of_a_spread_model_refuses() -> None:
    def body(one: Rank) -> Any:
        trained(one)
        spread = copy.deepcopy(one.args[0])
        message(spread.state_dict)
        one.fast.sync_model()
        found = None
        if one.rank == 0:
            message(lambda: one.args[0].load_state_dict({}))
            best = copy.deepcopy(one.args[0])
        one.step(2)
        if one.rank == 0:
            found = model_bits(best.state_dict())
            best.load_state_dict(best.state_dict())
            assert best(one.args[2]).isfinite().all()
        message(lambda: spread(one.args[2]))
        return found

    found = values(on_ranks(double_perceptron, plan_of(double_perceptron, 2), body))
    assert found == [eager_state()[0], None]


def test_a_change_to_a_synced_model_is_not_lost_silently() -> None:
    def body(one: Rank) -> Any:
        trained(one)
        one.fast.sync_model()
        if one.rank == 0:
            with torch.no_grad():
                one.args[0][0].weight.zero_()
        one.step(2)

    for outcome in on_ranks(double_perceptron, plan_of(double_perceptron, 2), body):
        assert outcome.code == "E524"
        assert "'model.0.weight' was changed" in outcome.error["message"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_state_dicts_are_taken_by_every_rank(algorithm: str) -> None:
    """What two ranks gave, three ranks of another plan take; a wrong key changes nothing."""

    def give(one: Rank) -> Any:
        trained(one)
        state = one.fast.state_dict()
        if one.rank == 0:
            torch.save(state, path)
        return one.step(2)

    def take(one: Rank) -> Any:
        state = torch.load(path) if one.rank == 0 else None
        bad = {"model": {"0.weight": torch.zeros(1)}} if one.rank == 0 else None
        with pytest.raises(MismatchError, match=r"lacks '0\.bias'"):
            one.fast.load_state_dict(bad)
        one.fast.load_state_dict(state)
        for schedule in one.schedules:
            schedule.last_epoch = 2
        return one.step(2)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "state.pt"
        first = values(on_ranks(double_perceptron, plan_of(double_perceptron, 2), give))
        plan = plan_of(double_perceptron, 3, algorithm)
        then = values(on_ranks(double_perceptron, plan, take, other=True))
    assert all(close(found, first[0]) for found in then)


@pytest.mark.parametrize("algorithm", long_but({"placed"}, ALGORITHMS))
def test_a_tied_model_is_exported_under_its_own_names(algorithm: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def body(one: Rank) -> Any:
        one.step(0)
        one.fast.export(path)
        one.fast.export(tmp_path / "all.safetensors", optimizer=True)
        state = one.fast.state_dict()
        return model_bits(state["model"]) if state else None

    expected = values(on_ranks(models.gpt2, plan_of(models.gpt2, 2, algorithm), body))[0]
    _, (model, *_) = models.gpt2()
    assert load_model(model, path) == (set(), [])
    assert model_bits(model.state_dict()) == expected
    found = load_file(tmp_path / "all.safetensors")
    assert "optimizer.state.model.transformer.wte.weight.exp_avg" in found
    assert set(load_file(path)) < set(found)
    assert [each.name for each in tmp_path.iterdir()] != []
    assert not list(tmp_path.glob("*.tmp-*"))


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one that has none of the base class's hooks, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


def wrapped() -> models.Entry:
    step, (model, optimizer, *batch) = models.small()
    return step, (model, Wrapped(optimizer), *batch)


def test_an_optimizer_in_a_wrapper_trains_and_refuses_to_be_read() -> None:
    def body(one: Rank) -> Any:
        losses = [bits(one.fast(*batches(one.args, (2, 3), i))) for i in range(2)]
        return [losses, message(one.args[1].state_dict)]

    def eager(_rank: int, _store: str) -> Any:
        step, args = wrapped()
        return [bits(step(*args[:2], *batches(args, (2, 3), i))) for i in range(2)]

    (expected,) = values(run_ranks(1, eager))
    plan = plan_of(wrapped, 2)
    for losses, text in values(on_ranks(wrapped, plan, body)):
        assert losses == expected
        assert "'optimizer.optimizer' is spread" in text


def test_what_the_step_does_not_read_survives_a_synced_model() -> None:
    step, (model, optimizer, *batch) = double_perceptron()
    model.unread, held = torch.ones(3), [torch.ones(2)]

    def of_held(model: Any, optimizer: Any, *batch: Any) -> Any:
        assert held
        return step(model, optimizer, *batch)

    fast: Any = parallelize(
        of_held, model, optimizer, *batch, device="cpu", decide=lambda g, n, _: random_plan(g, n)
    )
    fast(*batch)
    fast.sync_model()
    fast(*batch)
    fast.close()
    assert model.unread.tolist() == [1, 1, 1]
    assert held[0].tolist() == [1, 1]


@pytest.mark.parametrize("bias", [None, torch.full((8,), 0.5)])
def test_what_takes_the_place_of_a_tensor_in_a_synced_model_stays(bias: Any) -> None:
    def losses(*, is_parallel: bool) -> list[str]:
        step, (model, optimizer, x, y) = models.small()
        run: Any = functools.partial(step, model, optimizer)
        if is_parallel:
            run = parallelize(
                step, model, optimizer, x, y, device="cpu", decide=lambda g, n, _: random_plan(g, n)
            )
        found = []
        for i in range(3):
            if i == 1:
                if is_parallel:
                    run.sync_model()
                own = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
                model[0].bias = own
            found.append(bits(run(x, y)))
        return found

    assert losses(is_parallel=True) == losses(is_parallel=False)

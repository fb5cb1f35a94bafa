"""Lists and dictionaries that a step fills: each rank fills its own after each step, as eager."""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.numbers.containers import filled_containers
from pardnn.backends.torch.capture.numbers.selection import Selection
from pardnn.backends.torch.capture.traces import Traces
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.user_step.object_graph import walk_value
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import (
    Entry,
    assert_as_eager,
    assert_leaves_as_eager,
    cut_plan,
    eager,
    on_ranks,
    small,
    telling,
    weighed,
)


def each_call(i: int) -> dict[int, Any]:
    """Return another batch and another number of the step for each call."""
    torch.manual_seed(i)
    return {2: torch.randn(4, 5), 4: i}


def test_a_list_gets_the_numbers_of_each_step() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model, i):
        trainer.log.append(loss.item())
        trainer.log.append((i, loss.item() * 2, None))
        trainer.log += [f"{i}: {loss.item():.3f}", {"loss": loss.item(), "at": [i, "x"]}]
        trainer.log.extend(model[2].bias.grad.tolist())

    def make() -> Entry:
        trainer.log = ["first"]
        return telling(tell, 0)

    assert_as_eager(make, each_call, state=lambda args: trainer.log)


def test_histories_get_a_number_more() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model, i):
        trainer.history["loss"].append(loss.item())
        trainer.by_step[i] = loss.item()
        trainer.of["loss"].append(loss.item())
        trainer.last.update(loss=loss.item(), text="now")
        trainer.recent.append(loss.item())
        trainer.lists.setdefault("loss", []).append(loss.item())

    def make() -> Entry:
        trainer.history, trainer.of = {"loss": [], "other": []}, defaultdict(list)
        trainer.by_step, trainer.last, trainer.lists = {}, {}, {}
        trainer.recent = deque([0.5], maxlen=3)
        return telling(tell, 0)

    assert_as_eager(make, each_call, state=lambda args: vars(trainer))


def test_tensors_are_kept_as_copies() -> None:
    kept: list[Any] = []

    def tell(loss, model):
        kept.append(loss.detach())
        kept.append(model[0].weight.grad)

    def make() -> Entry:
        kept[:] = [torch.ones(2)]
        return telling(tell)

    assert_as_eager(make, state=lambda args: [tensor.tolist() for tensor in kept])


def test_a_list_among_the_arguments() -> None:
    def tell(loss, model, log):
        log.append(loss.item())
        log.append("text")

    assert_as_eager(lambda: telling(tell, []), state=lambda args: args[4])


LOG: list[Any] = []


def test_a_global_list() -> None:
    def tell(loss, model):
        LOG.append(loss.item())

    def make() -> Entry:
        LOG.clear()
        return telling(tell)

    assert_as_eager(make, state=lambda args: LOG)


class Meter:
    """As in many training scripts."""

    def __init__(self) -> None:
        self.val = self.sum = self.avg = 0.0
        self.count = 0

    def update(self, value: Any, n: int = 1) -> None:
        self.val = value
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count


def test_a_meter() -> None:
    meters: list[Meter] = [Meter()]

    def tell(loss, model):
        meters[0].update(loss.item(), 4)

    def make() -> Entry:
        meters[0].__init__()
        return telling(tell)

    assert_as_eager(make, state=lambda args: vars(meters[0]))


def test_a_list_that_some_steps_fill() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model):
        trainer.calls += 1
        if trainer.calls % 3 == 0:
            trainer.log.append((trainer.calls, loss.item()))
            trainer.by_call[trainer.calls] = loss.item()

    def make() -> Entry:
        trainer.calls, trainer.log, trainer.by_call = 0, ["first"], {}
        return telling(tell)

    assert_as_eager(make, state=lambda args: vars(trainer), steps=8, sizes=(1, 2), is_followed=True)


def test_what_some_steps_fill_is_captured_anew_once() -> None:
    trainer = SimpleNamespace(calls=0, log=[])

    def tell(loss, model):
        trainer.calls += 1
        if trainer.calls % 2 == 0:
            trainer.log.append(loss.item())

    step, args = telling(tell)
    fast = parallelize(
        step, *args, plan=random_plan(capture(step, *args), 1), device="cpu", timeout=10,
        decide=lambda graph, size, _: random_plan(graph, size),
    )  # fmt: skip
    for _ in range(9):
        fast(*args[2:])
    fast.close()
    assert len(trainer.log) == 4
    # Without, with, and without once more, now that the list is known to be filled alone.
    assert fast.captures == 3


@pytest.mark.parametrize("is_warm", [False, True])
def test_what_a_step_clears_it_may_fill_and_read(is_warm: bool) -> None:
    held = SimpleNamespace()

    def make() -> Entry:
        held.acts, held.named, held.recent, held.largest = [], {}, deque(), []
        if is_warm:  # of steps before the first call
            held.acts += [torch.ones(2), torch.ones(3)]
            held.named |= {"Tanh": torch.ones(2)}
            held.recent.append(1.0)
        model, x, y = small()

        def noted(module, given, result):
            held.acts.append(result)
            held.named[type(module).__name__] = result.detach()

        model[0].register_forward_hook(noted)
        model[1].register_forward_hook(noted)

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            del held.acts[:]
            held.named.clear()
            held.recent.clear()
            first = model(x * 2).mean()
            loss = first + sum(each.mean() for each in held.acts)
            held.acts.clear()
            loss = loss + F.mse_loss(model(x), y) + sum(each.abs().mean() for each in held.acts)
            loss = loss + held.named["Tanh"].mean() * len(held.acts)
            loss.backward()
            held.recent.append(loss.item())
            held.recent.extend([loss.item() * 2, 3.0])
            held.largest.append(max(held.recent))
            optimizer.step()
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)

    def state(_args: Any) -> Any:
        return [len(held.acts), list(held.named), list(held.recent), held.largest]

    assert_as_eager(make, state=state, sizes=(1, 2))


def test_what_a_step_clears_may_be_told_at_some_steps() -> None:
    held = SimpleNamespace()

    def make() -> Entry:
        held.acts, held.log, held.calls = [], [], 0
        model, x, y = small()
        model[1].register_forward_hook(lambda module, given, result: held.acts.append(result))

        def step(model, optimizer, x, y):
            held.acts.clear()
            held.calls += 1
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if held.calls % 2 == 0:
                held.log.append(held.acts[0].mean().item())
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)

    assert_as_eager(
        make, state=lambda _: [len(held.acts), held.log], steps=7, sizes=(1, 2), is_followed=True
    )


def test_what_a_step_clears_and_changes_otherwise_is_refused() -> None:
    acts: list[Any] = []

    def by_data(loss, model):
        acts.clear()
        if loss > 1:
            acts.append(loss.detach())
        model[0].weight.grad.mul_(len(acts))

    def read_before(loss, model):
        model[0].weight.grad.mul_(1 + len(acts))
        acts.clear()
        acts.append(loss.detach())

    def taken(loss, model):
        acts.clear()
        acts.append(loss.detach())
        acts.append(acts.pop() * 2)

    assert "fills a container that the step clears" in refused(by_data).message
    assert refused(read_before).code == "E804"
    assert refused(taken).code == "E804"
    assert not acts


def test_a_dictionary_of_defaults_that_a_step_clears() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model):
        trainer.of.clear()
        trainer.of["loss"].append(loss.item())

    def make() -> Entry:
        trainer.of = defaultdict(list)
        return telling(tell)

    assert_as_eager(make, state=lambda args: dict(trainer.of))


def test_a_step_that_cannot_run_twice_is_not_blamed_on_the_user() -> None:
    model, x, y = small()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    calls = SimpleNamespace(n=0)

    def step(model, optimizer, x, y):
        if calls.n == 0:
            optimizer.add_param_group({"params": list(model[2].parameters())})
        calls.n += 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(UnsupportedError, match="raises when capture runs it again") as caught:
        capture(step, model, optimizer, x, y)
    assert caught.value.code == "E804"
    assert "more than one parameter group" in caught.value.message
    assert "test_filled_containers.py:" in caught.value.details["source"]
    assert len(optimizer.param_groups) == 1


def test_what_only_the_first_call_makes_of_its_data_is_followed() -> None:
    def made() -> Any:
        held = SimpleNamespace(n=0, first=None)

        def weigh(loss: Any) -> Any:
            if held.n == 0:
                held.first = loss.detach()
            held.n += 1
            return loss / held.first

        return weighed(weigh, held)

    assert assert_leaves_as_eager(made, 4) == 2


def test_between_steps_the_containers_are_the_users() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model):
        trainer.log.append(loss.item())
        trainer.history["loss"].append(loss.detach())

    def run(call: Any, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        told = []
        for i in range(6):
            if i == 2:
                trainer.log.clear()
            if i == 3:
                trainer.log, trainer.history["loss"] = [], []
            if i == 5:
                x = x[:2]
                y = y[:2]
            call(x, y)
            losses = [tensor.item() for tensor in trainer.history["loss"]]
            told.append([list(trainer.log), losses])
        return told

    def made() -> Entry:
        trainer.log, trainer.history = [], {"loss": [torch.tensor(9.0)]}
        return telling(tell)

    step, (model, optimizer, x, y) = made()
    expected = run(lambda *batch: step(model, optimizer, *batch), x, y)

    def body(rank: int, store: str) -> Any:
        connect(rank, 1, store, 10.0)
        step, (model, optimizer, x, y) = made()
        fast = parallelize(
            step, model, optimizer, x, y, decide=lambda graph, size, _: random_plan(graph, size)
        )
        told = run(fast, x, y)
        trainer.history = {"loss": [], "other": 1}
        fast(x, y)
        told.append([fast.captures, len(trainer.history["loss"])])
        fast.close()
        return told

    (outcome,) = run_ranks(1, body)
    # A short batch, and another dictionary.
    assert outcome.value == [*expected, [3, 1]], outcome.error


def test_a_cut_step_fills_too() -> None:
    log: list[Any] = []

    def make() -> Entry:
        log.clear()
        return telling(lambda loss, model: log.append((loss.item(), model[0].bias.grad)))

    def flat(args: Any) -> Any:
        return [x for number, grad in log for x in (number, *grad.tolist())]

    expected = eager(make, state=flat)
    for found in on_ranks(make, 2, state=flat, plan_of=cut_plan):
        for (_, ours, _), (_, theirs, _) in zip(found, expected, strict=True):
            assert json.loads(ours) == pytest.approx(json.loads(theirs), rel=1e-4)


def refused(tell: Any, *more: Any) -> UnsupportedError:
    step, args = telling(tell, *more)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    return caught.value


def test_what_reads_the_list_is_refused() -> None:
    log: list[Any] = []

    def by_length(loss, model):
        log.append(loss.item())
        if len(log) > 3:
            model[0].weight.grad.mul_(0.5)

    def by_item(loss, model):
        log.append(loss.detach())
        model[0].weight.grad.mul_(log[-1])

    def by_iteration(loss, model):
        log.append(loss.item())
        model[0].weight.grad.mul_(min(log))

    def in_torch(loss, model):
        log.append(loss.detach())
        model[0].weight.grad.mul_(torch.stack(log).mean())

    def by_type(loss, model):
        if type(log) is list:
            log.append(loss.item())

    for each in (by_length, by_item, by_iteration, in_torch, by_type):
        error = refused(each)
        assert error.code in ("E802", "E804"), each
        assert not log


def test_what_is_the_same_only_at_capture_is_refused() -> None:
    log: list[Any] = []
    assert refused(lambda loss, model: log.append(time.perf_counter())).code == "E804"
    # The list would hold the weight itself, which changes on.
    assert refused(lambda loss, model: log.append(model[0].weight)).code == "E804"
    state = {"loss": 0.0}

    def same_dictionary(loss, model):
        state["loss"] = loss.item()
        log.append(state)

    assert refused(same_dictionary).code == "E804"
    assert not log


@pytest.mark.parametrize("hold", [lambda x: {"x": x}, lambda x: [[x]], lambda x: [(x, 1)]])
def test_containers_of_the_batch_cost_no_more_traces(
    hold: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts: list[bool] = []
    traced_once = Traces._traced_once

    def counted(self: Traces, chosen: Selection, *args: Any) -> Any:
        firsts.append(chosen.is_first)
        return traced_once(self, chosen, *args)

    def step(model, optimizer, held, y):
        x = [*held.values()] if isinstance(held, dict) else [*held[0]]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[0]), y[0])
        loss.backward()
        optimizer.step()
        return loss.detach()

    monkeypatch.setattr(Traces, "_traced_once", counted)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    capture(step, model, optimizer, hold(torch.randn(4, 3)), [torch.randn(4, 2)])
    assert firsts.count(True) == 1


def test_a_placeholder_is_no_new_item_where_its_own_tensor_was() -> None:
    own, other, fake = torch.ones(1), torch.zeros(1), torch.empty(1)
    for stood_for, is_filled in ((own, False), (other, True)):
        held = {"x": own}
        objects = walk_value(held, "held")
        held["x"] = fake
        assert bool(filled_containers(objects, (), (), {id(fake): stood_for})) == is_filled


def test_what_another_path_fills_is_idle_only_in_its_order() -> None:
    for keys, is_idle in (("ab", True), ("ba", False)):
        held = {"a": 1.0, "b": 2.0}
        objects, items = walk_value(held, "held"), dict(held)
        held.clear()
        held.update({key: items[key] for key in keys})
        assert ("held" in filled_containers(objects, (), ("held",), {})) == is_idle

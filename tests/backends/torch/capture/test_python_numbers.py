"""Python numbers that change from step to step: arguments, settings, and counters in the step."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from pardnn.graph.ir import LOSS_KIND, Graph
from tests.backends.torch.stepping import Entry, assert_as_eager, on_ranks, small
from tests.long_cases import long_but


def sgd(model: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **dict[str, Any](lr=0.1) | settings)


def granted(graph: Graph) -> dict[str, Any]:
    return next(op.arguments for op in graph.ops if op.kind == LOSS_KIND) or {}


def test_int_arguments_that_feed_arithmetic_are_read_at_every_step() -> None:
    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y, it, total):
            optimizer.zero_grad()
            rate = 0.1 * 0.5 * (1 + math.cos(math.pi * it / total)) * (1 - math.pow(0.5, it + 1))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.mse_loss(model(x), y) * (it + 1) + 0.5**it
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, y, 0, 10)

    assert_as_eager(make, lambda i: {4: i, 5: 10 + i % 2})


def test_an_int_that_decides_a_shape_is_a_setting() -> None:
    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y, k):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[:, :].roll(k, 0)), y) + torch.zeros(k).sum() * k
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, y, 2)

    step, args = make()
    graph = capture(step, *args)
    assert granted(graph)["settings"]["k"] == 2
    assert "host" not in granted(graph)
    assert not any(op.name == "k" for op in graph.ops)
    (found,) = on_ranks(make, 1, lambda i: {4: 3})
    assert found.startswith("E509")


def test_an_int_of_which_the_type_is_asked_is_followed_until_its_type_changes() -> None:
    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y, k):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * (k if isinstance(k, int) else 0.5)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, y, 3)

    assert_as_eager(make, lambda i: {4: 3 + i})
    (found,) = on_ranks(make, 1, lambda i: {4: 2.5 if i else 3})
    assert found.startswith("E509")


def test_a_branch_on_what_is_computed_from_an_int_guards_the_condition() -> None:
    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y, it):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if (it + 1) % 2 == 0:
                loss = loss * 2
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, y, 1)

    assert_as_eager(make, lambda i: {4: 2 * i + 1})
    (found,) = on_ranks(make, 1, lambda i: {4: 1 + i})
    assert found.startswith("E509")
    assert "(it + 1) % 2 == 0" in found
    assert "test_python_numbers.py:" in found


def test_a_number_that_python_needs_is_guarded_whole() -> None:
    """`math.cos` imported by name took the number of the capture, guarded as not zero alone."""
    cos = math.cos

    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y, angle):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * cos(angle)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, y, 0.5)

    (found,) = on_ranks(make, 1, lambda i: {4: 0.5 + i})
    assert found.startswith("E509")


COUNT = 0


def counting_in_attributes() -> Entry:
    model, x, y = small()
    trainer = SimpleNamespace(calls=0, rate=1.0, log={"n": 3})
    seen = 0

    def step(trainer, model, optimizer, x, y):
        global COUNT
        nonlocal seen
        trainer.calls += 1
        trainer.rate *= 0.9
        seen += 2
        COUNT += 1
        trainer.log["n"] = trainer.log["n"] + 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * trainer.rate / trainer.calls + seen + trainer.log["n"]
        loss.backward()
        optimizer.step()
        return loss

    trainer.seen = lambda: (seen, COUNT)
    return step, (trainer, model, sgd(model), x, y)


def test_counters_go_on_as_in_the_eager_step() -> None:
    def make() -> Entry:
        global COUNT
        COUNT = 0
        return counting_in_attributes()

    def state(args: Any) -> Any:
        trainer = args[0]
        return trainer.calls, trainer.rate, trainer.log, trainer.seen()

    assert_as_eager(make, state=state)


def test_another_dictionary_in_the_place_of_a_counters_is_a_change() -> None:
    def renew(args: Any) -> None:
        args[0].log = dict(args[0].log)

    (found,) = on_ranks(counting_in_attributes, 1, state=renew)
    assert found.startswith("E509")
    assert "trainer.log" in found


def test_a_rate_that_the_step_lowers() -> None:
    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
            return loss

        return step, (model, sgd(model), x, y)

    assert_as_eager(make, state=lambda args: args[1].param_groups[0]["lr"])


def test_a_counter_that_the_first_step_makes() -> None:
    def make() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y):
            model.steps = getattr(model, "steps", 0) + 1
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) / model.steps
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, y)

    assert_as_eager(make, state=lambda args: args[0].steps)


def test_a_first_step_that_counts_otherwise() -> None:
    def step(model, optimizer, x, y):
        if not hasattr(model, "steps"):
            model.steps, factor = 0, 3.0
        else:
            factor = 1.0
        model.steps += 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (factor / model.steps)
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Entry:
        model, x, y = small()
        return step, (model, sgd(model), x, y)

    assert_as_eager(make, state=lambda args: args[0].steps, sizes=(1,), is_followed=True)


def scheduled(kind: str, *args: Any, given: Any = lambda _loss: ()) -> Entry:
    model, x, y = small()
    optimizer: Any = sgd(model, momentum=0.9)
    schedule = getattr(torch.optim.lr_scheduler, kind)(optimizer, *args)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(*given(loss))
        return loss

    optimizer.schedule = schedule
    return step, (model, optimizer, x, y)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("LambdaLR", (lambda epoch: 0.95**epoch,)),
        *long_but(
            (),
            [("OneCycleLR", (0.5, 20)), ("StepLR", (2, 0.5)), ("CosineAnnealingLR", (10,))],
        ),
    ],
)
def test_schedules_inside_the_step(kind: str, args: tuple[Any, ...]) -> None:
    def state(args: Any) -> Any:
        schedule = args[1].schedule
        groups = [{k: v for k, v in g.items() if k != "params"} for g in args[1].param_groups]
        return schedule.last_epoch, schedule.get_last_lr(), groups

    assert_as_eager(lambda: scheduled(kind, *args), state=state, steps=5)


def test_a_schedule_by_a_metric_inside_the_step() -> None:
    def state(args: Any) -> Any:
        schedule = args[1].schedule
        return schedule.num_bad_epochs, float(schedule.best), args[1].param_groups[0]["lr"]

    def given(loss: torch.Tensor) -> Any:
        return [loss.detach()]

    make = functools.partial(scheduled, "ReduceLROnPlateau", "min", 0.5, 1, 0.9, given=given)
    assert_as_eager(make, state=state, steps=5)


def test_a_schedule_is_called_one_way() -> None:
    step, args = scheduled("StepLR", 2)

    def twice(model, optimizer, x, y):
        loss = step(model, optimizer, x, y)
        optimizer.schedule.step(1)
        return loss

    with pytest.raises(UnsupportedError, match="with arguments and without") as caught:
        capture(twice, *args)
    assert caught.value.code == "E804"


def test_what_a_schedule_changes_is_not_read_after_it() -> None:
    step, args = scheduled("StepLR", 2)

    def early(model, optimizer, x, y):
        optimizer.schedule.step()
        return step(model, optimizer, x, y)

    with pytest.raises(UnsupportedError) as caught:
        capture(early, *args)
    assert caught.value.code == "E804"
    assert "last call" in caught.value.message
    assert args[1].schedule.last_epoch == 0
    assert "step" not in args[1].schedule.__dict__


def test_the_counts_of_a_schedule_are_read_at_every_step() -> None:
    def make() -> Entry:
        model, x, y = small()
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * (1 + schedule.last_epoch) + schedule.get_last_lr()[0]
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss

        return step, (model, optimizer, x, y)

    assert_as_eager(make)


def test_a_text_that_changes_is_assigned_after_the_step() -> None:
    model, x, y = small()
    trainer = SimpleNamespace(name="a")

    def step(trainer, model, optimizer, x, y):
        trainer.name += "a"
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, trainer, model, sgd(model), x, y)
    assert graph.step_notes["effects"] == [{"assign": [["trainer", "name"], {"value": "aa"}, True]}]
    assert trainer.name == "a"

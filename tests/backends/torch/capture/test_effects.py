"""What a step only tells: prints, logs, and checks that raise, after each step on every rank."""

import inspect
import logging
import math
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import Entry, assert_as_eager, on_ranks, small, telling


def test_prints_are_those_of_the_eager_step() -> None:
    def tell(loss, model, i):
        print("step", i, f"loss {loss.item():.4f}", sep="|")
        print(f"twice {loss.item() * 2:>12.3e} of {i:03d} {model[0].weight.grad.norm().item()}")
        print("done", end=".\n")

    assert_as_eager(lambda: telling(tell, 0), lambda i: {4: i})


def test_log_records_go_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    def tell(loss, model, i):
        logging.getLogger("mine").warning("step %d: %s", i, f"{loss.item():.3f}")

    handler = logging.StreamHandler()
    handler.emit = lambda record: print(record.levelname, record.getMessage(), record.funcName)
    logging.getLogger("mine").addHandler(handler)
    try:
        assert_as_eager(lambda: telling(tell, 0), lambda i: {4: i}, sizes=(2,))
    finally:
        logging.getLogger("mine").removeHandler(handler)


def test_what_records_have_beside_their_message_is_told() -> None:
    def tell(loss, model, i):
        adapter = logging.LoggerAdapter(logging.getLogger("mine"), {"run": "first", "norm": None})
        adapter.warning("step %d", i)
        log.warning("", extra={"run": {"at": [i]}, "norm": loss.item()})
        log.warning("here", extra={"run": "", "norm": ""}, stack_info=True)
        try:
            raise KeyError(i)
        except KeyError:
            log.exception("failed", extra={"run": "", "norm": ""})

    log, handler = logging.getLogger("mine"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(run)s %(norm)s %(message)s"))
    handler.emit = lambda record: print(handler.format(record).partition("\nStack")[:2])
    log.addHandler(handler)
    try:
        assert_as_eager(lambda: telling(tell, 0), lambda i: {4: i})
    finally:
        log.removeHandler(handler)


def test_an_object_beside_the_message_of_a_record_is_refused() -> None:
    def tell(loss, model):
        logging.getLogger("mine").warning("step", extra={"who": SimpleNamespace()})

    step, args = telling(tell)
    with pytest.raises(UnsupportedError, match=r"'SimpleNamespace' as 'who'"):
        capture(step, *args)


@pytest.mark.parametrize(
    "tell",
    [
        lambda log, loss, i: log.warning("%.4f after %d", loss.detach(), i),
        lambda log, loss, i: log.warning("%5.1f%% %e", 100 * loss.detach(), loss.detach()),
        lambda log, loss, i: log.warning(
            "%*.*f, %r at %s", 9, 2, loss.detach(), loss.detach(), loss
        ),
        lambda log, loss, i: log.warning("%.2f %f", math.inf, loss.item()),
        lambda log, loss, i: log.warning("%d %.1f %.3f", np.int64(3), np.float32(0.5), loss.item()),
        lambda log, loss, i: log.warning("%(loss).3f", {"loss": loss.item()}),
    ],
)
def test_arguments_of_a_logger_are_numbers_where_its_format_wants_them(tell: Any) -> None:
    handler = logging.StreamHandler()
    handler.emit = lambda record: print(record.getMessage())
    log = logging.getLogger("numbers")
    log.addHandler(handler)
    try:
        assert_as_eager(
            lambda: telling(lambda loss, model, i: tell(log, loss, i), 0), lambda i: {4: i}
        )
    finally:
        log.removeHandler(handler)


def test_numbers_of_the_step_are_added_up_in_objects() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model):
        trainer.total += loss.item()
        trainer.last = loss.item() * 2
        trainer.calls += 1

    def make() -> Entry:
        trainer.total, trainer.last, trainer.calls = 0.0, -1.0, 0
        return telling(tell)

    assert_as_eager(make, state=lambda args: (trainer.total, trainer.last, trainer.calls))


def test_a_number_of_the_step_that_changes_its_type_is_noticed() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model):
        trainer.total += loss.item()

    def make() -> Entry:
        trainer.total = 0
        return telling(tell)

    (found,) = on_ranks(make, 1)
    assert found.startswith("E509")
    assert "the type of " in found


def test_a_text_that_goes_elsewhere_is_refused() -> None:
    texts = []

    def tell(loss, model):
        texts[:] = [f"{loss.item():.3f}"]

    step, args = telling(tell)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code in ("E802", "E804")


def nan_at(call: int) -> Any:
    x = small()[1]
    return lambda i: {2: x * float("nan") if i == call else x}


def test_a_check_of_the_loss_raises_on_every_rank() -> None:
    def tell(loss, model):
        if torch.isnan(loss):
            raise ValueError("the loss is not a number")
        assert torch.isfinite(loss), "not finite"

    assert_as_eager(lambda: telling(tell), nan_at(3))
    assert_as_eager(lambda: telling(tell), sizes=(2,), steps=3)


def test_what_a_failing_check_tells_has_its_numbers() -> None:
    counter = SimpleNamespace()

    def tell(loss, model):
        counter.calls += 1
        norm = model[0].weight.grad.norm()
        if not loss < 1e3:
            print("too large:", loss.item() * 2 + counter.calls)
            raise ValueError(f"{counter.calls}: {loss.item():.3e} of {norm.item()}")
        print("fine")

    def make() -> Entry:
        counter.calls = 0
        return telling(tell)

    assert_as_eager(make, lambda i: {3: small()[2] * (1e3 if i == 2 else 1.0)}, steps=4, sizes=(2,))


def test_an_exit_is_a_check() -> None:
    def tell(loss, model):
        if not math.isfinite(loss.item()):
            print("the loss is not finite")
            sys.exit(3)

    def run(rank: int, path: str) -> int:
        step, args = telling(tell)
        fast = parallelize(step, *args, plan=random_plan(capture(step, *args), 1), device="cpu")
        fast(*args[2:])
        fast(args[2] * math.nan, args[3])
        return 0

    (outcome,) = run_ranks(1, run)
    assert outcome.status == 3


def rooted() -> Entry:
    model, x, _ = small()

    def step(model, optimizer, x, scale):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                loss = (model(x).square() * scale).sqrt().sum()
                loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, torch.ones(3))


def test_anomaly_detection_names_the_op_whose_gradient_is_nan() -> None:
    def run(rank: int, path: str) -> str:
        connect(rank, 2, path, 20).close()
        step, args = rooted()
        fast = parallelize(step, *args, plan=random_plan(capture(step, *args), 2), device="cpu")
        losses = [float(fast(*args[2:])) for _ in range(2)]
        with pytest.raises(RuntimeError) as caught:
            fast(args[2], torch.zeros(3))
        return f"{losses} {caught.value}"

    step, args = rooted()
    expected = [float(step(*args)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="MulBackward0"):
        step(*args[:3], torch.zeros(3))
    line = inspect.getsourcelines(rooted)[1] + 8
    for outcome in run_ranks(2, run):
        assert outcome.value == (
            f"{expected} the backward pass makes the first NaN of the step in the gradient of "
            f"tests/backends/torch/capture/test_effects.py:{line}, op aten.mul.Tensor"
        )


def test_anomaly_detection_looks_at_no_gradient_below_a_condition_that_does_not_hold() -> None:
    def run(model, optimizer, x, least):
        loss = model(x).square().sum()
        with torch.autograd.detect_anomaly():
            if loss < least:
                (loss + (loss - 1e9).sqrt()).backward()
                optimizer.step()
        return loss

    def make() -> Entry:
        model, x, _ = small()
        return run, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, torch.tensor(0.0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_eager(make)


def test_checks_in_torchs_own_code() -> None:
    def tell(loss, model):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        variance = model[0].weight.detach().square()
        F.gaussian_nll_loss(model[0].weight, torch.zeros_like(variance), variance)

    assert_as_eager(lambda: telling(tell), steps=3)


def test_a_branch_that_does_more_than_raise_is_refused() -> None:
    def quiet(loss, model):
        try:
            if loss > 1.0:
                raise ValueError("large")
        except ValueError:
            model[0].weight.grad.mul_(0.5)

    step, args = telling(quiet)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert "test_effects.py:" in caught.value.message

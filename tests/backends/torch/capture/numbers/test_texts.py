"""Texts of numbers that only a run knows: as the eager step has them, or refused."""
# ruff: noqa: UP031, F504

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.numbers.texts import Texts, marks_in
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, telling


def test_truths_and_tensors_have_the_texts_of_the_eager_step() -> None:
    def tell(loss, model):
        print(
            torch.isfinite(loss).item(), loss.item() > 1.4, f"{loss} {loss:.3f} {loss.detach()!r}"
        )
        print(loss, model[0].bias, [model[0].bias.detach()], sep="\n")
        text = f"before: {model[2].bias}"
        model[2].bias.data.zero_()
        print(text, json.dumps({"loss": loss.item(), "text": f"{loss.item():.2f}"}))

    assert_as_eager(lambda: telling(tell), steps=3, sizes=(2,))


def test_conversions_in_c_are_followed() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model):
        value = loss.detach()
        print("[%d, %5d] %.3f of %s%% %8.2e %r" % (1, 20, loss.item(), 5, value, loss.item()))
        print("%(loss)7.3f" % {"loss": value, "i": 3}, "%d" % (loss.item() * 100))
        right = int((model[0].bias > 0).sum())
        print(f"{float(value):.3f}", right / 6, int(loss.item() * 100), float("2.5"), int("7", 8))
        print(round(float(value), 3), math.isfinite(value), np.isnan(loss.item()), float(True))
        trainer.total += float(value)
        (lambda: print("%.1f" % float(torch.isnan(loss))))()
        assert type(trainer.calls) is int

    def make() -> Entry:
        trainer.__dict__.update(total=0.0, calls=3)
        return telling(tell)

    code = tell.__code__
    assert_as_eager(make, state=lambda _: vars(trainer), steps=3, sizes=(1,))
    assert tell.__code__ is code


def test_names_that_capture_makes_of_tensors_are_no_texts_of_the_step() -> None:
    def tell(loss, model):
        if loss < 2:  # the optimizer's state has parameters for keys
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            print(f"{loss:.1f}")

    def make() -> Entry:
        step, (model, _, *rest) = telling(tell)
        return step, (model, torch.optim.Adam(model.parameters(), lr=0.1), *rest)

    assert_as_eager(make, steps=3, sizes=(1,))


def refused(tell: Callable[..., Any]) -> str:
    step, args = telling(tell)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    assert "test_texts.py:" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "use", [lambda text: text.ljust(10), lambda text: text.replace(".", ","), lambda text: text[:4]]
)
def test_a_text_that_is_laid_out_by_its_content_is_refused(use: Callable[[str], str]) -> None:
    assert "string of a number" in refused(lambda loss, model: print(use(f"{loss.item():.3f}")))


def test_what_is_taken_from_the_ends_of_a_text_is_seen() -> None:
    texts = Texts(Locator({}), lambda tensor: tensor), Texts(Locator({}), str, is_long=False)
    for text in (each.mark(1.0, ".2f") for each in texts):
        assert marks_in(f"{text}, {text}") == [text, text]
        assert not marks_in(text.rstrip("0")) or not marks_in(text.strip())


def test_numbers_begin_again() -> None:
    trainer = SimpleNamespace()

    def tell(loss, model, i):
        trainer.total += loss.item()
        if i % 2 == 1:
            print(f"{trainer.total / 2:.3f}")
            trainer.total = 0.0
        if trainer.first == 1:
            trainer.first = 0
            print("first")
        trainer.factor = 2.0
        now = loss.item()
        trainer.mean = now if trainer.mean is None else 0.9 * trainer.mean + 0.1 * now

    def make() -> Entry:
        trainer.__dict__.update(total=0.0, first=1, factor=5.0, mean=None)
        return telling(tell, 1)

    # Each way that the numbers lead is a graph of its own.
    assert_as_eager(make, lambda i: {4: i}, lambda _: vars(trainer), sizes=(1,), is_followed=True)

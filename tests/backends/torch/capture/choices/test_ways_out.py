"""Conditions on data with a `return`, a ternary or `or`, run in normal form: as eager."""

import contextlib
import importlib.util
import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError, UserCodeError
from tests.backends.torch.stepping import Entry, assert_as_eager, small


class EarlyStopping:
    """As people write it: the `if` is the last of its function."""

    def __init__(self) -> None:
        self.best, self.waited, self.is_over, self.is_low = math.inf, 0, False, False

    def __call__(self, loss):
        if loss < self.best:
            self.best = loss
            self.waited = 0
        else:
            self.waited += 1
        self.is_over = self.waited >= 2
        self.is_low = bool(loss < 1.4)


STOPPING = EarlyStopping()


def projected(parameter, gradient, update):
    """As AdamP does, with its `return` in a loop."""
    ratio = 1.0
    for view in [lambda x: x.reshape(x.size(0), -1), lambda x: x.reshape(1, -1)]:
        viewed = view(parameter)
        alike = F.cosine_similarity(view(gradient), viewed, dim=1).abs_()
        if alike.max() < 0.7 / math.sqrt(viewed.size(1)):
            normal = parameter / viewed.norm(dim=1).reshape(-1, *[1] * (parameter.dim() - 1))
            update -= normal * (normal * update).sum()
            ratio = 0.1
            return update, ratio
    return update, ratio


def adamp(loss, model):
    with torch.no_grad():
        for parameter in model.parameters():
            update, ratio = projected(parameter, parameter.grad, parameter.grad * 0.1)
            parameter.mul_(1 - 0.01 * ratio)
            parameter.sub_(update)


def stopped(loss, model):
    STOPPING(loss.item())


def weight_of(loss):
    if loss > 3:
        return 0.125
    if loss > 1.5:
        return 0.5
    return 1.0


def weighed(loss, model):
    weight = weight_of(loss)
    for parameter in model.parameters():
        parameter.grad.mul_(weight)


def clipped(loss, model, largest=0.5):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    if norm <= largest:
        return norm
    for parameter in model.parameters():
        parameter.grad.mul_(largest / norm)
    return norm


def ternary(loss, model):
    for parameter in model.parameters():
        norm = parameter.grad.norm()
        parameter.grad = parameter.grad * (0.5 / norm) if norm > 0.5 else parameter.grad


def ternaries(loss, model):
    model[0].weight.grad.mul_((0.125 if loss > 3 else 0.5) if loss > 1.5 else 1.0)


def either(loss, model):
    if loss > 3 or loss < 1.4:
        model[0].weight.grad.mul_(0.5)


def between(loss, model):
    if not 1.3 < loss < 3 and (loss > 4 or loss < 2):
        model[0].weight.grad.mul_(0.5)
    elif loss > 1.5:
        model[0].weight.grad.mul_(0.25)


def last_of_both(loss, model):
    if loss > 1.5:
        model[2].weight.grad.mul_(3)
    else:
        model[0].weight.grad.mul_(2)


def stepping(tell: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        tell(loss.detach(), model)
        optimizer.step()
        return loss

    return step


def returning(model, optimizer, x, y):
    """A step that skips an update, and returns something else then."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if loss.item() > 3:
        print(f"skipped {loss.item():.3f}")
        return torch.zeros(())
    optimizer.step()
    return loss.detach()


def rounds(loss, model):
    """Rounds that data skips, and a loop that it ends."""
    scale, last = 1.0, 0
    for k in (1.3, 1.5, 3.0):
        if loss > k:
            scale = scale * 0.5
            continue
        scale = scale * 0.9
    for last in [1, 2, 3]:
        scale = scale * 0.99
        if loss < last:
            break
    model[0].weight.grad.mul_(scale + last)


class Best:
    """Of a validation: it begins with None, and data is asked only after that."""

    def __init__(self) -> None:
        self.loss, self.waited = None, 0

    def __call__(self, loss):
        if self.loss is None or loss < self.loss - 1e-3:
            self.loss = loss
            self.waited = 0
        else:
            self.waited += 1


BEST = Best()


class Nested(EarlyStopping):
    """Looks at a count where data decides whether it counts."""

    has_stopped = 0

    def __call__(self, loss):
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
            if self.waited >= 2:
                self.has_stopped = 1


def best(loss, model):
    BEST(loss.item())
    model[0].weight.grad.mul_(1 + BEST.waited)


TOLD = [
    adamp, stopped, weighed, clipped, ternary, ternaries, either, between, last_of_both,
    rounds,
]  # fmt: skip


def made(step: Callable[..., Any]) -> Entry:
    STOPPING.__init__()
    BEST.__init__()
    model, x, y = small()
    return step, (model, torch.optim.SGD(model.parameters(), lr=0.05), x, y)


def batch(i: int) -> dict[int, Any]:
    torch.manual_seed(i)
    return {2: torch.randn(4, 5) * (0.3, 2.0, 0.1, 5.0)[i % 4]}


def state(_args: Any) -> list[Any]:
    flags = STOPPING.is_over, STOPPING.is_low
    return [float(STOPPING.best).hex(), STOPPING.waited, *flags]


@pytest.mark.parametrize("step", [*map(stepping, TOLD), returning], ids=lambda x: str(x)[:9])
def test_each_way_is_as_eager(step: Callable[..., Any]) -> None:
    assert_as_eager(lambda: made(step), batch, state, steps=8, sizes=(1,))


def test_data_may_be_asked_after_what_the_first_step_leaves() -> None:
    assert_as_eager(
        lambda: made(stepping(best)), batch, lambda _: [BEST.loss, BEST.waited], steps=8,
        sizes=(1,), is_followed=True,
    )  # fmt: skip


def test_a_count_may_be_looked_at_where_data_decides_whether_it_counts() -> None:
    """The step was called one that goes by a clock."""
    nested = Nested()

    def making() -> Entry:
        nested.__init__()
        nested.has_stopped = 0
        return made(stepping(lambda loss, model: nested(loss.item())))

    assert_as_eager(
        making, batch, lambda _: [nested.best, nested.waited, nested.has_stopped], steps=8,
        sizes=(1,), is_followed=True,
    )  # fmt: skip


def test_a_flag_that_data_sets_is_refused_and_a_number_is_the_way() -> None:
    stopping = types.SimpleNamespace(is_over=False)

    def sets(loss, model):
        if loss < 1.4:
            stopping.is_over = True

    with pytest.raises(UnsupportedError, match="(?s)flag .stopping.is_over'.*Make it a number"):
        capture(*_flat(made(stepping(sets))))


def test_ranks_agree() -> None:
    for tell in (adamp, weighed):
        assert_as_eager(lambda tell=tell: made(stepping(tell)), batch, steps=6, sizes=(2,))


def test_functions_get_their_own_code_back() -> None:
    functions = [each for each in globals().values() if isinstance(each, types.FunctionType)]
    before = [each.__code__ for each in functions]
    capture(*_flat(made(stepping(adamp))))
    assert [each.__code__ for each in functions] == before
    with pytest.raises(UnsupportedError):
        capture(*_flat(made(stepping(lambda loss, model: _text(loss)))))
    assert [each.__code__ for each in functions] == before


def _flat(entry: Entry) -> list[Any]:
    return [entry[0], *entry[1]]


def _text(loss):
    return "large" if loss > 1 else "small"


def _grown(loss, model):
    if loss > 1:
        return loss * 2
    return None


def _wide(loss, model):
    return torch.ones(3) if loss > 1 else torch.ones(2)


def test_what_cannot_be_chosen_is_refused_in_the_words_of_the_function() -> None:
    for tell, what in [
        (lambda loss, model: _text(loss), "gives a ternary a value that is neither"),
        (_grown, "returns a value that is neither"),
        (_wide, "gives a ternary a value"),
    ]:
        with pytest.raises(UnsupportedError) as caught:
            capture(*_flat(made(stepping(tell))))
        assert caught.value.code == "E802"
        assert what in caught.value.message
        line = caught.value.details["source"].rpartition(":")[2]
        assert 0 < int(line) < 400


def test_an_error_of_the_users_names_the_line_where_it_was_written() -> None:
    def wrong(loss, model):
        if loss > 1:
            model[0].weight.grad.mul_(2)
            return 1
        return torch.ones(3) + torch.ones(2)

    with pytest.raises(UserCodeError) as caught:
        capture(*_flat(made(stepping(wrong))))
    line = wrong.__code__.co_firstlineno + 4
    assert f"test_ways_out.py:{line})" in caught.value.message


def test_a_loop_over_an_iterator_is_not_left_by_data() -> None:
    def ends(loss, model):
        items = iter([1, 2, 3])
        for k in items:
            model[0].weight.grad.mul_(k)
            if loss > k:
                break

    with pytest.raises(UnsupportedError, match="a loop over an iterator") as caught:
        capture(*_flat(made(stepping(ends))))
    line = ends.__code__.co_firstlineno + 2
    assert caught.value.details["source"].endswith(f"test_ways_out.py:{line}")


SOURCE = """
import torch.nn.functional as F

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if loss > 1:
        return loss.detach()
    optimizer.step()
    model.bias.grad.mul_(FACTOR)
    return loss.detach() * 1
"""


def test_a_file_that_was_edited_since_is_not_run(tmp_path: Path) -> None:
    for factor, is_run in [("2", True), ("int('3')", False)]:
        path = tmp_path / f"step_{is_run}.py"
        path.write_text(SOURCE.replace("FACTOR", "2"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        path.write_text(SOURCE.replace("FACTOR", factor))
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.ExitStack() as stack:
            if not is_run:
                stack.enter_context(pytest.raises(UnsupportedError, match="branches on a tensor"))
            capture(module.step, model, optimizer, torch.randn(4, 5), torch.randn(4, 3))

"""What a step leaves in Python's objects is there after each call, as after the eager step."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager, seen, small


@dataclasses.dataclass
class Stats:
    loss: float = 0.0
    pred: Any = None


@dataclasses.dataclass(frozen=True)
class Config:
    scale: int = 1
    name: str = "a"


@dataclasses.dataclass(slots=True)
class Sums:
    total: float = 0.0
    n: int = 0
    last: Any = None


class Counter:
    __slots__ = ("__n", "copy", "info", "mode")

    def __init__(self) -> None:
        self.__n, self.mode = 0, "a"

    def count(self, out: Any) -> float:
        self.__n += 1
        self.info = {"n": self.__n, "out": out.sum().item()}
        self.copy = Counter()
        if self.__n == 2:
            self.mode = "b"
        return 2.0 if self.mode == "b" else 1.0

    @property
    def n(self) -> int:
        return self.__n


class Pair(NamedTuple):
    loss: float
    text: str


class Trainer:
    """As training scripts have it: what the step needs and leaves is held in attributes."""

    def __init__(self, leave: Callable[[Any, Any, Any], Any], **attributes: Any) -> None:
        self.model, _, _ = small()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.__dict__.update(attributes)
        self.leave = leave

    def step(self, x: Any, y: Any) -> Any:
        out = self.model(x)
        loss = F.mse_loss(out, y)
        factor = self.leave(self, loss, out)
        self.optimizer.zero_grad()
        (loss if factor is None else loss * factor).backward()
        self.optimizer.step()
        return loss


def batch(i: int) -> dict[int, Any]:
    torch.manual_seed(i)
    return {0: torch.randn(4, 5), 1: torch.randn(4, 3)}


def left(leave: Callable[[Any, Any, Any], Any], steps: int = 3, **attributes: Any) -> int:
    """Compare a trainer with the eager one; return how often its step was captured."""

    def make() -> Any:
        copied = {
            k: dataclasses.replace(v) if isinstance(v, Stats) else v for k, v in attributes.items()
        }
        copied = {k: type(v)(v) if isinstance(v, dict | list) else v for k, v in copied.items()}
        trainer = Trainer(leave, **copied)
        return trainer.step, tuple(batch(0).values()), trainer

    return assert_leaves_as_eager(make, steps, batch)


def refused(leave: Callable[[Any, Any, Any], Any], **attributes: Any) -> UnsupportedError:
    trainer = Trainer(leave, **attributes)
    before = dict(vars(trainer))
    with pytest.raises(UnsupportedError) as caught:
        capture(trainer.step, *batch(0).values())
    assert vars(trainer) == before
    assert caught.value.code == "E804"
    return caught.value


def test_fresh_containers_and_objects() -> None:
    def leave(t: Any, loss: Any, out: Any) -> None:
        rate = t.optimizer.param_groups[0]["lr"]
        t.metrics = {"loss": loss.item(), "lr": rate, "all": [loss.item(), {"n": 1}]}
        t.last = [loss.item(), out.sum().item()]
        t.stats = Stats(loss.item(), out)
        t.pair = Pair(loss.item(), "now")
        t.items = (loss.item(), 3)
        t.recent = deque([loss.item()], maxlen=3)
        t.ordered = OrderedDict(a=loss.detach(), b={"x", "y"})
        t.space = types.SimpleNamespace(loss=loss.item(), of=t.model)

    before = {"metrics": {}, "last": [], "stats": Stats(), "pair": Pair(0.0, ""), "items": None}
    assert left(leave, **before) == 1


def test_tensors_in_attributes_of_modules_and_objects() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.shown = None, torch.zeros(1)

        def forward(self, x: Any) -> Any:
            self.hidden = self.shown = x.tanh()
            return self.hidden

    def leave(t: Any, loss: Any, out: Any) -> None:
        t.loss, t.pred, t.was_none = loss, out.detach(), loss.detach()
        t.pair = (loss, out)
        t.weight = t.model[0].weight

    def make() -> Any:
        trainer = Trainer(leave, was_none=None, pair=(torch.ones(1), torch.ones(2)))
        trainer.model[1] = Keeps()
        return trainer.step, tuple(batch(0).values()), trainer

    # A parameter in a new attribute is held by one more name from the second call on.
    assert assert_leaves_as_eager(make, 3, batch) == 2


def test_a_step_in_methods_that_hand_on_what_they_make() -> None:
    """Written before it is read, in each step: nothing of it is read by the next one."""

    class Gan(Trainer):
        def step(self, x: Any, y: Any) -> Any:
            self.x, self.y = x, y
            self.forward()
            self.backward()
            self.optimizer.step()
            return self.loss

        def forward(self) -> None:
            self.fake = self.model(self.x)

        def backward(self) -> None:
            self.loss = F.mse_loss(self.fake, self.y)
            self.optimizer.zero_grad()
            self.loss.backward()

    def make() -> Any:
        trainer = Gan(lambda *_: None)
        return trainer.step, tuple(batch(0).values()), trainer

    assert assert_leaves_as_eager(make, 3, batch) == 1


_last: Any = None


def test_globals_and_variables_of_closures() -> None:
    def make() -> Any:
        global _last
        _last, last = None, None
        model, x, y = small()

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            global _last
            nonlocal last
            out = model(x)
            loss = F.mse_loss(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            _last, last = out, {"loss": loss.item()}
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        return step, (model, optimizer, x, y), lambda: (_last, last)

    # A global tensor is a state: it is written in place from the second call on.
    assert assert_leaves_as_eager(make) == 2


def test_an_object_among_the_arguments() -> None:
    def make() -> Any:
        trainer, kept = Trainer(lambda *_: None), types.SimpleNamespace(pred=None, n=0)

        def step(x: Any, y: Any, kept: Any) -> Any:
            loss = trainer.step(x, y)
            kept.pred, kept.info, kept.x = trainer.model(x), {"loss": loss.item()}, x
            return loss

        return step, (*batch(0).values(), kept), [trainer, kept]

    assert_leaves_as_eager(make, 3, batch)


def test_attributes_in_slots() -> None:
    def leave(t: Any, loss: Any, out: Any) -> Any:
        t.sums.total += loss.item()
        t.sums.n, t.sums.last = t.sums.n + 1, loss.detach()
        return t.counter.count(out)

    def make() -> Any:
        kept = Sums()
        trainer: Any = Trainer(leave, sums=Sums(last=torch.zeros(())), counter=Counter())

        def step(x: Any, y: Any, kept: Any) -> Any:
            loss = trainer.step(x, y)
            kept.last = loss
            return loss

        def held() -> Any:
            sums = [(each.total, each.n, each.last) for each in (trainer.sums, kept)]
            counter = trainer.counter
            return sums, counter.n, counter.copy.n, counter.mode, counter.info, trainer.model

        return step, (*batch(0).values(), kept), held

    assert_leaves_as_eager(make, 3, batch)


def test_what_is_deleted_is_gone() -> None:
    def leave(t: Any, loss: Any, out: Any) -> None:
        t.table.pop("a", None)
        if hasattr(t, "cache"):
            del t.cache, t.tensor
        t.mine = out
        del t.mine
        t.mask = None

    left(leave, cache=3, tensor=torch.ones(2), mask=torch.ones(2), table={"a": 1, "b": 2})


def test_what_the_next_step_reads_is_another_graph() -> None:
    """The first step finds nothing, all others a tensor."""

    def leave(t: Any, loss: Any, out: Any) -> Any:
        factor = None if t.hidden is None else (out * t.hidden).mean()
        t.hidden = out.detach()
        return factor

    assert left(leave, hidden=None) == 2


def test_items_that_the_first_step_makes() -> None:
    """A shadow of each parameter, by a name with dots."""

    def leave(t: Any, loss: Any, out: Any) -> None:
        for name, value in t.model.named_parameters():
            if name not in t.shadow:
                t.shadow[name] = value.detach().clone()
            else:
                t.shadow[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    assert left(leave, shadow={}) == 2


def test_a_tensor_that_is_put_and_taken_away() -> None:
    def leave(t: Any, loss: Any, out: Any) -> None:
        t.n += 1
        t.sum = loss.detach() if t.sum is None else t.sum + loss.detach()
        if t.n % 2 == 0:
            t.sum = None

    left(leave, steps=4, n=0, sum=None)


def test_an_attribute_with_the_name_of_an_argument() -> None:
    class Counting(Trainer):
        def step(self, x: Any, y: Any, epoch: int) -> Any:
            self.epoch = epoch
            return super().step(x, y)

    def make() -> Any:
        trainer = Counting(lambda *_: None, epoch=-1)
        return trainer.step, (*batch(0).values(), 0), trainer

    assert_leaves_as_eager(make, 3, lambda i: batch(i) | {2: i})


def test_a_tuple_of_which_the_next_step_reads_a_part() -> None:
    def leave(t: Any, loss: Any, out: Any) -> Any:
        factor = t.pair[0].mean()
        t.pair = (out.detach(), loss.detach())
        return factor

    assert "pair" in refused(leave, pair=(torch.zeros(4, 3), torch.zeros(()))).message


def test_one_object_in_two_places_stays_one() -> None:
    def leave(t: Any, loss: Any, out: Any) -> None:
        t.one = t.other = {"loss": loss.item()}

    trainers = []

    def make() -> Any:
        trainers.append(Trainer(leave, one=None, other=None))
        return trainers[-1].step, tuple(batch(0).values()), trainers[-1]

    assert_leaves_as_eager(make, 2, batch)
    assert trainers[-1].one is trainers[-1].other


def test_a_configuration_that_a_count_replaces() -> None:
    def leave(t: Any, loss: Any, out: Any) -> Any:
        t.n += 1
        if t.n == 2:
            t.config = dataclasses.replace(t.config, scale=3)
        return t.config.scale

    left(leave, steps=4, n=0, config=Config())


def test_what_each_step_replaces_and_reads_is_refused_with_its_line() -> None:
    def replaces(t: Any, loss: Any, out: Any) -> Any:
        t.config = dataclasses.replace(t.config, scale=t.config.scale + 1)
        return t.config.scale

    def averages(t: Any, loss: Any, out: Any) -> None:
        t.stats = Stats(0.9 * t.stats.loss + 0.1 * loss.item())

    for leave, name in ((replaces, "config"), (averages, "stats")):
        error = refused(leave, config=Config(), stats=Stats())
        line = leave.__code__.co_firstlineno + 1
        assert f"'{name}' (" in error.message, error.message
        assert f"test_left_behind.py:{line})" in error.message, error.message


@pytest.mark.parametrize("kind", [list, deque])
def test_a_list_that_only_the_first_step_changes_is_refused(kind: Any) -> None:
    def empties(t: Any, loss: Any, out: Any) -> None:
        t.queue.clear()

    def begins(t: Any, loss: Any, out: Any) -> None:
        if not t.names:
            t.names.append("a")

    def counts(t: Any, loss: Any, out: Any) -> None:
        t.n += 1
        if t.n == 1:
            t.names.append("a")
            t.names.reverse()

    def makes_a_mask(t: Any, loss: Any, out: Any) -> Any:  # which each step makes
        if not t.names:
            t.names.append(torch.ones(3))
        return (out * t.names[0]).mean()

    capture(Trainer(makes_a_mask, names=kind()).step, *batch(0).values())
    left(empties, queue=kind([1, 2]))  # each step leaves it empty
    for leave, name in ((begins, "names"), (counts, "names")):
        error = refused(leave, queue=kind([1, 2]), names=kind(), n=0)
        assert f"{name}." in error.message, error.message


def test_what_no_rank_could_make_is_refused_with_its_line() -> None:
    def leave(t: Any, loss: Any, out: Any) -> None:
        t.distribution = torch.distributions.Normal(out, 1.0)

    error = refused(leave)
    assert f"test_left_behind.py:{leave.__code__.co_firstlineno + 1}" in error.message
    assert "distribution" in error.message


def test_what_is_left_under_a_computed_key_is_the_users_too() -> None:
    def leave(t: Any, loss: Any, out: Any) -> None:
        key = "last".upper()
        t.made[key] = torch.distributions.Normal(out, 1.0)

    assert "made" in refused(leave, made={"LAST": None}).message


def test_two_ranks() -> None:
    def make() -> Any:
        def leave(t: Any, loss: Any, out: Any) -> None:
            t.metrics, t.hidden = {"loss": loss.item(), "out": out}, out.detach()

        trainer = Trainer(leave, metrics={}, hidden=None)
        held.append(trainer)
        x, y = batch(0).values()
        return trainer.step, (x, y)

    held: list[Any] = []

    def shown(_args: Any) -> Any:
        return seen([held[-1].metrics, held[-1].hidden])

    assert_as_eager(make, batch, state=shown, steps=2)


def test_hooks_that_a_library_installs_at_its_first_call() -> None:
    """`output_hidden_states=True` of transformers: a flag says that hooks are there, for good."""
    from transformers import LlamaConfig, LlamaModel

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)

    def make() -> Any:
        torch.manual_seed(0)
        model = LlamaModel(LlamaConfig(
            **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        ))  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(model: Any, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
            found = model(input_ids=ids, output_hidden_states=True).hidden_states
            loss = torch.stack([each.square().mean() for each in found]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, (model, optimizer, torch.arange(8).reshape(2, 4)), [model]

    assert assert_leaves_as_eager(make) == 1


class Recurrent(nn.Module):
    """A layer in an attribute: torch's own code sets the lists of weights in it at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(x)[0]


class Gated(nn.Module):
    """Leaves what the step adds to its loss in an attribute that its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        self.balance = scores.flatten(0, -2).mean(0).square().sum()
        return x * scores


def test_what_torch_sets_in_a_layer_beside_what_the_step_leaves() -> None:
    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss = loss + sum(each.balance for each in model if isinstance(each, Gated))
        loss.backward()
        optimizer.step()
        return loss

    def make() -> tuple[Any, tuple[Any, ...]]:
        torch.manual_seed(0)
        model = nn.Sequential(Recurrent(), Gated())
        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3, 4))

    assert_as_eager(make)

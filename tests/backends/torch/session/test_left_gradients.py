"""Gradients that one call leaves and another finds, in several paths of a step and several steps.

A step is a word: `z` resets the gradients, `Z` fills them with zeros, `b` runs backward, `h` does
so through the first layer alone, `s` is the optimizer's step, `n` computes a loss without backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.first_step.gradients import gradients_noted
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.session.left_gradients import used_tensors
from pardnn.errors import PardnnError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from tests.backends.torch.executors import bits
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import cut_plan
from tests.cost.helpers import call as op_of
from tests.cost.helpers import source, tensor


class Trainer:
    """A model and its optimizer, which moves parameters even if their gradients are zeros."""

    def __init__(self, momentum: float = 0.9) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1
        )

    def follow(self, word: str, x: torch.Tensor) -> torch.Tensor:
        loss = None
        for letter in word:
            if letter in "zZ":
                self.optimizer.zero_grad(set_to_none=letter == "z")
            elif letter == "s":
                self.optimizer.step()
            elif letter == "n":
                with torch.no_grad():
                    loss = self.model(x).square().mean()
            else:
                loss = (self.model if letter == "b" else self.model[0])(x).square().mean()
                loss.backward()
        return self.model(x).sum() if loss is None else loss


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=generator, dtype=torch.double)


def placed(graph: Graph, size: int, _state: object) -> Plan:
    return random_plan(graph, size, seed=len(graph.ops))


Call = Callable[[torch.Tensor, int], torch.Tensor]


def paths(trainer: Trainer, words: Sequence[str], **options: Any) -> tuple[Call, list[Any]]:
    """Return one step that takes the path of a word, and what is parallelized."""

    def step(x: torch.Tensor, number: int) -> torch.Tensor:
        return trainer.follow(words[number], x)

    if not options:
        return step, []
    fast = parallelize(step, batch(0), 0, **options)
    return fast, [fast]


def steps(trainer: Trainer, words: Sequence[str], **options: Any) -> tuple[Call, list[Any]]:
    """Return a call of one of several steps on the model, and what is parallelized."""

    def made(word: str) -> Callable[..., torch.Tensor]:
        return lambda x: trainer.follow(word, x)

    made_all = [made(word) for word in words]
    if not options:
        return lambda x, number: made_all[number](x), []
    fast = [parallelize(each, batch(0), **options) for each in made_all]
    return lambda x, number: fast[number](x), fast


def run(
    form: Any, words: Sequence[str], order: Sequence[int], momentum: float = 0.9, **options: Any
) -> list[Any]:
    """Losses, captures, and parameters of a run; an error ends it."""
    trainer = Trainer(momentum)
    call, fast = form(trainer, words, **options)
    found: list[Any] = []
    try:
        for i, number in enumerate(order):
            found.append(call(batch(i), number).item())
    except PardnnError as error:
        found.append(error.code)
    captures = [each.captures for each in fast]
    whole = [fast[0].whole(f"trainer.model.{n}") for n, _ in trainer.model.named_parameters()] \
        if fast else [*trainer.model.parameters()]  # fmt: skip
    for each in fast:
        each.close()
    return [found, captures, [*map(bits, whole)]]


PLACED = {"decide": placed, "device": "cpu"}


@pytest.mark.parametrize("form", [paths, steps])
@pytest.mark.parametrize(
    "words",
    [["zbs", "bsz"], ["zbs", "bs"], ["zbs", "hsz"], ["zbs", "hs"], ["zhs", "bsz"]],
    ids="-".join,
)
def test_a_gradient_that_a_call_leaves_and_another_uses_is_refused(form: Any, words: Any) -> None:
    eager, _, _ = run(form, words, [0, 1])
    found, _, _ = run(form, words, [0, 1], **PLACED)
    assert found == [eager[0], "E808"]


@pytest.mark.parametrize("words", [["bsz", "zbs"], ["zbs", "s"], ["zbs", "sz"]], ids="-".join)
def test_it_is_refused_whichever_path_is_captured_first(words: Any) -> None:
    order = [0, 1, 0] if words[0] == "bsz" else [0, 1]
    eager, _, _ = run(paths, words, order)
    found, _, _ = run(paths, words, order, **PLACED)
    assert found == [*eager[: len(order) - 1], "E808"]


@pytest.mark.parametrize("form", [paths, steps])
@pytest.mark.parametrize(
    "words",
    [["zbs", "zbsz"], ["zbs", "zhs"], ["bsz", "hsz"], ["zbs", "zhsz"], ["zbs", "Zbsz"]],
    ids="-".join,
)
def test_what_a_call_leaves_and_others_only_reset_is_followed(form: Any, words: Any) -> None:
    order = [0, 1, 0, 1, 1, 0]
    eager, _, parameters = run(form, words, order)
    found, captures, held = run(form, words, order, **PLACED)
    assert (found, held) == (eager, parameters)
    # What `Z` does depends on whether there is a gradient.
    assert max(captures) <= 2 + ("Zbsz" in words)


@pytest.mark.parametrize(
    ("words", "captures"),
    [
        (["zbs", "zb"], 2), (["zbs", "Zb"], 2), (["zb", "bsz"], 2), (["zb", "sz"], 3),
        (["zb", "s"], 2), (["zh", "bsz"], 2), (["b", "zbs"], 2), (["zbs", "n"], 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_paths_that_only_make_gradients_are_captured_once(words: Any, captures: int) -> None:
    order = [0, 1, 0, 1, 1, 0, 1, 0]
    eager, _, parameters = run(paths, words, order)
    found, made, held = run(paths, words, order, **PLACED)
    assert (found, held) == (eager, parameters)
    assert made == [captures]


def test_a_first_step_of_its_own_leaves_gradients_to_the_next() -> None:
    """The first `s` finds None, the second one zeros, with which it decays the weights."""
    eager, _, _ = run(paths, ["sbsbZ"], [0, 0], momentum=0)
    found, _, _ = run(paths, ["sbsbZ"], [0, 0], momentum=0, **PLACED)
    assert found == [eager[0], "E808"]


def test_a_step_captured_beside_another_finds_no_gradients() -> None:
    """The other's gradients add up from zeros, with which this one would decay the weights."""
    eager, _, parameters = run(steps, ["bs", "sbsz"], [1, 1, 0], momentum=0)
    found, _, held = run(steps, ["bs", "sbsz"], [1, 1, 0], momentum=0, **PLACED)
    assert (found, held) == (eager, parameters)


@pytest.mark.parametrize("decide", [placed, lambda graph, size, _: cut_plan(graph, size)])
def test_ranks_capture_what_was_left_of_shards(decide: Any) -> None:
    words, order = ["zbs", "zbsz", "bsz"], [0, 1, 0, 1, 2, 0, 2]

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        return run(paths, words, order, decide=decide, timeout=20, device="cpu")

    eager, _, _ = run(paths, words, order)
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        found, captures, _ = outcome.value
        assert found[-1] == "E808"
        assert found[:-1] == pytest.approx(eager[:-1], rel=1e-12)
        assert captures == [4]


@pytest.mark.parametrize(
    ("words", "order"),
    [(["zbs", "bz", "bsz"], [0, 1, 2, 0, 1, 2]), (["zbs", "Zhsz"], [0, 1, 1, 0, 1, 1])],
    ids=["sums that nobody reads", "zeros or None"],
)
def test_a_graph_knows_whether_gradients_are_left(words: Any, order: Any) -> None:
    eager, _, parameters = run(paths, words, order)
    found, _, held = run(paths, words, order, **PLACED)
    assert (found, held) == (eager, parameters)


def test_a_first_step_of_its_own_keeps_the_gradients_that_it_carries() -> None:
    """The last path finds gradients of `one`, makes those of `two`, and would find both next."""

    def losses(**options: Any) -> list[float]:
        torch.manual_seed(0)
        one, two = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        first = torch.optim.Adam(one.parameters(), lr=0.05)
        second = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.5)

        def step(x: torch.Tensor, number: int) -> torch.Tensor:
            if number != 1:
                second.step()
            hidden = one(x) if number == 0 else one(x).detach()
            if number == 2:
                first.step()
            loss = two(hidden).square().mean()
            loss.backward()
            if number == 0:
                second.zero_grad()
                first.step()
            return loss

        call = parallelize(step, batch(0), 1, **options) if options else step
        return [call(batch(i), number).item() for i, number in enumerate([1, 0, 2])]

    assert losses(**PLACED) == losses()


def test_a_refused_call_of_one_step_stops_no_rank() -> None:
    """The state is taken again before the graph is chosen: the last one may not be the next."""
    words, order = ["zZbs", "bhssZ", "Zhnhs"], [0, 2, 2, 0, 1]

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        return run(steps, words, order, momentum=0, timeout=20, **PLACED)

    eager, _, _ = run(steps, words, order, momentum=0)
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value[0] == [*eager[:-1], "E808"]


def test_a_refused_call_is_refused_again() -> None:
    """The gradients that it has put in place are not the user's."""
    trainer = Trainer(momentum=0)
    call, fast = steps(trainer, ["zbs", "bhssZ"], **PLACED)
    for number in (1, 0):
        call(batch(number), number)
    for _ in range(2):
        with pytest.raises(PardnnError) as caught:
            call(batch(2), 1)
        assert caught.value.code == "E808"
    for each in fast:
        each.close()


def test_another_path_of_a_step_goes_on_after_what_its_last_path_could_not_use() -> None:
    def losses(**options: Any) -> list[float]:
        trainer = Trainer()
        one, fast = paths(trainer, ["bsz", "zbs"], **options)
        other, more = steps(trainer, ["zbs"], **options)
        found = [one(batch(0), 0), other(batch(1), 0), one(batch(2), 1), one(batch(3), 1)]
        for each in (*fast, *more):
            each.close()
        return [loss.item() for loss in found]

    assert losses(**PLACED) == losses()


def test_gradients_that_the_user_resets_are_not_left() -> None:
    """A step that only adds to them leaves them in place, so that a reset shows."""

    def losses(form: Any, **options: Any) -> list[Any]:
        trainer = Trainer()
        call, fast = form(trainer, ["zbs", "b", "bsz"], **options)
        found = [call(batch(i), number).item() for i, number in enumerate([0, 1])]
        trainer.optimizer.zero_grad()
        found += [call(batch(i), number).item() for i, number in enumerate([2, 0])]
        for each in fast:
            each.close()
        return found

    assert losses(paths, **PLACED) == losses(paths)


def test_a_step_that_updates_first_is_taken_after_one_of_the_users_own() -> None:
    """Its first run finds no gradients, and its second makes momentum."""
    trainer = Trainer()
    with pytest.raises(PardnnError, match="run one step of your own") as caught:
        steps(trainer, ["szb"], **PLACED)
    assert caught.value.code == "E804"

    def losses(**options: Any) -> list[float]:
        trainer = Trainer()
        trainer.follow("szb", batch(0))
        call, fast = steps(trainer, ["szb"], **options)
        found = [call(batch(i), 0).item() for i in range(1, 5)]
        for each in fast:
            each.close()
        return found

    assert losses(**PLACED) == losses()


def test_gradients_of_subclasses_keep_their_type_after_a_capture() -> None:
    torch.overrides.get_default_nowrap_functions.cache_clear()
    with gradients_noted({}):
        torch.overrides.get_default_nowrap_functions()
    assert torch.Tensor.grad.__get__ in torch.overrides.get_default_nowrap_functions()


@pytest.mark.parametrize(
    ("target", "given", "is_used"),
    [("p.grad", "x", False), ("p.grad", "added", True), ("half", "y", True)],
    ids=["all of it", "by what it was", "a part of it"],
)
def test_a_gradient_is_not_used_once_all_of_it_is_overwritten(
    target: str, given: str, is_used: bool
) -> None:
    size = 4 if target == "half" else 8
    new = tensor("new", size, alias_of=target)
    added = tensor("added", 8, alias_of="p.grad")
    views = [op_of("half", "aten.slice.Tensor", ["p.grad", 0, 0, 4],
                   [tensor("half", 4, alias_of="p.grad")])]  # fmt: skip
    graph = build_graph("g", [
        source("x", 8), source("y", 4), source("p.grad", 8), *(views if target == "half" else ()),
        op_of("added", "aten.add_.Tensor", ["p.grad", "x"], [added]),
        op_of("new", "aten.copy_.default", [target, given], [new]),
        op_of("exp", "aten.exp.default", ["new"], [tensor("exp", size)]),
    ])  # fmt: skip
    assert used_tensors(graph, ["p.grad"]) == (["p.grad"] if is_used else [])

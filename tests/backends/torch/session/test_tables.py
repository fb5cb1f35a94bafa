"""Lists and tuples of numbers into which counts lead: read at each call, as eager does."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.errors import UnsupportedError, UserCodeError
from pardnn.graph.file import graph_from_json, graph_to_json
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager, small

CALLS = 8
RATES = [0.5, 0.25, 0.125, 1.0, 2.0, 3.0, 0.75, 4.0]
WEIGHTS = (3, 1, 4, 1, 5, 9, 2, 6)


def indexed(weigh: Callable[[Any, Any], Any], held: Any = None) -> Any:
    """Return a step as `weighed` does, with a count as its last argument that `weigh` gets."""
    model, x, y = small()

    def step(model, optimizer, x, y, it):
        optimizer.zero_grad()
        loss = weigh(F.mse_loss(model(x), y), it)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, 0), [model, held]


def captures(
    weigh: Callable[[Any, Any], Any],
    at: Callable[[int], int] = lambda i: i,
    change: Callable[[int], Any] = lambda _i: None,
    held: Callable[[], Any] = lambda: None,
) -> int:
    return assert_leaves_as_eager(
        lambda: indexed(weigh, held()), CALLS, lambda i: {4: at(i)}, lambda i, _args: change(i)
    )


def test_a_count_among_the_arguments_leads_into_lists_wherever_they_are() -> None:
    held = SimpleNamespace(rates=[*RATES], of={"weights": [*WEIGHTS]}, pair=(0.5, *RATES[1:]))
    rates = [*RATES]

    def weigh(loss: Any, it: int) -> Any:
        total = loss * held.rates[it] + held.of["weights"][it] / RATES[it // 2]
        return total * rates[it] + loss / held.pair[it] ** WEIGHTS[it]

    assert captures(weigh) == 1


def test_a_count_of_an_object_leads_into_a_list() -> None:
    held = SimpleNamespace(it=0)

    def change(i: int) -> None:
        held.it = i

    assert captures(lambda loss, _: loss * RATES[held.it], change=change) == 2


def test_a_count_of_the_step_leads_into_a_list() -> None:
    def make() -> Any:
        held = SimpleNamespace(it=-1)

        def weigh(loss: Any, _it: int) -> Any:
            held.it += 1
            return loss * RATES[held.it]

        return indexed(weigh, held)

    assert assert_leaves_as_eager(make, CALLS) == 1


def test_an_index_may_be_negative() -> None:
    assert captures(lambda loss, it: loss * RATES[it - 4] + RATES[-it - 1]) == 1


def test_what_changes_in_a_list_is_read() -> None:
    rates = [*RATES]

    def change(i: int) -> None:
        if i in (0, 6):
            rates[:] = RATES
        elif i == 3:
            rates[3] = 7.0
        elif i == 4:
            rates.insert(0, 9.0)

    assert captures(lambda loss, it: loss * rates[it], change=change) <= 4


def test_another_list_in_its_place_is_read() -> None:
    held = SimpleNamespace(rates=RATES)

    def change(i: int) -> None:
        held.rates = RATES if i < 4 else [*WEIGHTS]

    assert captures(lambda loss, it: loss * held.rates[it], change=change) == 2


@pytest.mark.parametrize("at", [8, -9])
def test_an_index_beyond_the_end_raises_and_changes_nothing(at: int) -> None:
    step, args, _ = indexed(lambda loss, it: loss * RATES[it] if RATES[it] > 0 else loss)
    fast: Parallel = parallelize(
        step, *args, device="cpu", decide=lambda graph, size, _: random_plan(graph, size)
    )
    fast(*args[2:4], 7)
    before = [each.detach().clone() for each in args[0].parameters()]
    with pytest.raises(UserCodeError, match="list index out of range") as caught:
        fast(*args[2:4], at)
    assert isinstance(caught.value.__cause__, IndexError)
    assert all(map(torch.equal, before, args[0].parameters()))
    fast(*args[2:4], -8)
    assert fast.captures == 2  # with the one that failed
    fast.close()


def test_a_count_that_decides_a_shape_is_captured_at_each_change() -> None:
    def weigh(loss: Any, it: int) -> Any:
        return loss * RATES[it] + torch.ones(it + 1).sum()

    assert captures(weigh) == CALLS


def test_what_a_list_gives_may_decide_a_branch_and_a_size() -> None:
    def weigh(loss: Any, it: int) -> Any:
        for _ in range(WEIGHTS[it] // 5):
            loss = loss * 0.5
        return loss * 2 if RATES[it] > 2.5 else loss

    assert captures(weigh) == 3


def _counts(held: Any, loss: Any, it: int) -> Any:
    held.rates[0] += 1
    return loss * held.rates[it]


def _keeps(held: Any, loss: Any, it: int) -> Any:
    held.last, held.of["last"] = WEIGHTS, held.rates
    return loss * held.rates[it] / held.last[it]


def _fills(held: Any, loss: Any, it: int) -> Any:
    held.rates.append(loss.item())
    return loss / WEIGHTS[it]


def _asks_another(held: Any, loss: Any, it: int) -> Any:
    return loss * WEIGHTS[it] * (2 if type(held.rates) is list else 3)


def _logs(held: Any, loss: Any, it: int) -> Any:
    held.log.append(WEIGHTS)
    return loss / WEIGHTS[it]


def _asks(held: Any, loss: Any, it: int) -> Any:
    return loss * held.rates[it] * (2 if type(held.rates) is list else 3)


@pytest.mark.parametrize(
    ("weigh", "expected"),
    [(_counts, 4), (_keeps, 2), (_logs, 4), (_fills, 1), (_asks, 4), (_asks_another, 1)],
)
def test_a_list_that_the_step_changes_or_keeps_stays_a_list(
    weigh: Callable[..., Any], expected: int
) -> None:
    def make() -> Any:
        held = SimpleNamespace(rates=[*RATES], last=None, log=[], of={})
        return indexed(functools.partial(weigh, held), held)

    assert assert_leaves_as_eager(make, 4, lambda i: {4: i}) == expected


def test_a_list_that_the_step_fills_and_reads_is_refused() -> None:
    held = SimpleNamespace(rates=[*RATES])

    def weigh(loss: Any, it: int) -> Any:
        held.rates.append(loss.item())
        return loss * held.rates[it]

    step, args, _ = indexed(weigh)
    with pytest.raises(UnsupportedError, match="E804.*held.rates"):
        capture(step, *args)
    assert held.rates == RATES


def test_a_list_that_the_step_returns_is_itself() -> None:
    step, args, _ = indexed(lambda loss, it: loss * RATES[it])

    def returning(*args: Any) -> Any:
        return step(*args), RATES, WEIGHTS, WEIGHTS[args[-1]]

    fast: Parallel = parallelize(
        returning, *args, device="cpu", decide=lambda graph, size, _: random_plan(graph, size)
    )
    for i in range(4):
        _, rates, weights, weight = fast(*args[2:4], i)
        assert rates is RATES
        assert type(weights) is tuple
        assert (weights, weight) == (WEIGHTS, WEIGHTS[i])
    assert fast.captures == 1
    fast.close()


def test_two_ranks_look_up() -> None:
    def make() -> Any:
        step, args, _ = indexed(lambda loss, it: loss * RATES[it] / WEIGHTS[it])
        return step, args

    assert_as_eager(make, lambda i: {4: i})


def test_a_lookup_is_written_to_a_graph_file_and_read() -> None:
    step, args, _ = indexed(lambda loss, it: loss * RATES[it])
    graph = capture(step, *args)
    (op,) = [op for op in graph.ops if op.kind == "scalar.lookup"]
    assert op.arguments == {"args": [RATES, {"tensor": "it"}]}
    assert graph_from_json(graph_to_json(graph), "file") == graph

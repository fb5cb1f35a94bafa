"""The caller gets all that the step returns, on every rank, under placed and cut plans."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.result import loss_of, roots_noted
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime.program import Program
from pardnn.plan.plan import Plan
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

Entry = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    cache: Any = None


class Cache:
    """Neither tensor nor container."""


def returning(made: Callable[..., Any]) -> Entry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return made(model, x, y, loss, logits)

    x, y = torch.randn(12, 8, dtype=torch.double), torch.randint(4, (12,))
    return step, (model, optimizer, x, y)


def accuracy(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == y).double().mean()


STRUCTURES: dict[str, Callable[..., Any]] = {
    "tuple": lambda model, x, y, loss, logits: (loss, accuracy(logits, y)),
    "dict": lambda model, x, y, loss, logits: {
        "n": 12, "acc": accuracy(logits, y), "loss": loss.detach(), "all": [logits, None, "text"],
    },
    "twice": lambda model, x, y, loss, logits: (loss, logits, logits, loss),
    "views": lambda model, x, y, loss, logits: (loss, logits.t()[1:], model[0].weight, x[2:4]),
    "numbers": lambda model, x, y, loss, logits: (
        loss, loss.item(), (logits.argmax(1) == y).sum().item(), (loss > 1).item(), loss.item() / 9,
    ),
    "integers": lambda model, x, y, loss, logits: (loss, logits.argmax(1), y, math.inf, y.shape),
}  # fmt: skip


def everything(model: Any, x: Any, y: Any, loss: Any, logits: Any) -> Any:
    """All of them in one result: what each is made of is read on one rank, and moved alike."""
    return loss, [made(model, x, y, loss, logits) for made in STRUCTURES.values()]


def flat(result: Any) -> Any:
    """A result as plain data."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, dict):
        return {key: flat(item) for key, item in result.items()}
    if isinstance(result, list | tuple):
        return [type(result).__name__, *map(flat, result)]
    return result


def on_ranks(made: Callable[..., Any], plan: Plan, read: Callable[[Any], Any]) -> list[Any]:
    def body(rank: int, path: str) -> Any:
        connect(rank, plan.num_devices, path, 20).close()
        step, args = returning(made)
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        found = [read(fast(*args[2:])) for _ in range(3)]
        fast.close()
        return [found, fast.peak_bytes <= Program(fast.graph, plan).peaks[rank]]

    outcomes = run_ranks(plan.num_devices, body)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
        assert outcome.value[1], "the peak is above the prediction"
    return [outcome.value[0] for outcome in outcomes]


def eager(made: Callable[..., Any], read: Callable[[Any], Any]) -> list[Any]:
    step, args = returning(made)
    return [read(step(*args)) for _ in range(3)]


@pytest.mark.parametrize(
    ("made", "size"),
    [*long_but((), ((made, 1) for made in STRUCTURES.values())), (everything, 3)],
)
def test_a_placed_step_returns_every_bit(made: Callable[..., Any], size: int) -> None:
    step, args = returning(made)
    plan = random_plan(capture(step, *args), size, seed=3)
    for found in on_ranks(made, plan, flat):
        assert found == eager(made, flat)


def close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= 1e-10 * max(1.0, abs(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


def test_a_cut_step_returns_whole_tensors() -> None:
    step, args = returning(everything)
    plan = pardnn.plan(capture(step, *args), pardnn.Cluster.uniform(2), "equal-chop", costs="v100")
    for found in on_ranks(everything, plan, flat):
        assert close(found, eager(everything, flat))


WITHOUT_LOSS: dict[str, Callable[..., Any]] = {
    "number": lambda model, x, y, loss, logits: loss.item(),
    "nothing": lambda model, x, y, loss, logits: None,
    "numbers": lambda model, x, y, loss, logits: {"loss": loss.item(), "n": len(y)},
    "logits": lambda model, x, y, loss, logits: logits,
}


def plan_of(made: Callable[..., Any], **how: Any) -> Plan:
    step, args = returning(made)
    graph = capture(step, *args)
    assert graph.loss_op is not None  # what `backward` was called on
    return pardnn.plan(graph, pardnn.Cluster.uniform(2), costs="v100", **how)


@pytest.mark.parametrize("name", WITHOUT_LOSS)
def test_a_step_may_return_no_loss(name: str) -> None:
    made = WITHOUT_LOSS[name]
    for found in on_ranks(made, plan_of(made, algorithm="round-robin"), flat):
        assert found == eager(made, flat)


@pytest.mark.parametrize(
    "how", [{"algorithm": "equal-chop"}, {"algorithm": "modulo", "microbatches": 2}]
)
def test_a_step_that_is_cut_may_return_no_loss(how: dict[str, Any]) -> None:
    made = WITHOUT_LOSS["numbers"]
    for found in on_ranks(made, plan_of(made, **how), flat):
        assert close(found, eager(made, flat))


def test_the_loss_is_what_the_last_backward_was_called_on() -> None:
    """Not what a checkpoint calls it on, within; nor what `torch.autograd.grad` is given."""
    model, x = nn.Linear(3, 1), torch.randn(4, 3, requires_grad=True)
    with roots_noted() as roots:
        first = model(x).mean()
        first.backward()
        last = 2 * checkpoint(lambda x: model(x).sum(), x, use_reentrant=True)
        last.backward()
        torch.autograd.grad(model(x).sum(), x)
    assert [*map(id, roots)] == [id(first), id(last)]
    assert loss_of(None, roots) is last
    assert loss_of({"loss": first}, roots) is first


def test_an_object_is_returned_by_its_fields() -> None:
    def made(model: Any, x: Any, y: Any, loss: Any, logits: Any) -> Output:
        return Output(loss, logits, Cache())

    def read(out: Any) -> Any:
        return [out.loss.item(), out.logits.tolist()]

    step, args = returning(made)
    plan = random_plan(capture(step, *args), 2, seed=1)
    for found in on_ranks(made, plan, read):
        assert found == eager(made, read)


Pair = collections.namedtuple("Pair", "loss logits")


class Typed(NamedTuple):
    loss: torch.Tensor
    pair: Pair
    accuracy: float


def test_a_named_tuple_keeps_its_names() -> None:
    def made(model: Any, x: Any, y: Any, loss: Any, logits: Any) -> Any:
        return Typed(loss, Pair(loss, logits), accuracy(logits, y).item()), logits.max(1)

    def both(result: Any) -> list[Any]:
        typed, most = result
        loss, pair, _ = typed
        read = [loss, typed.pair.logits, typed[1][1], pair.loss, typed.accuracy, most.values]
        read += [most.indices, typed._replace(accuracy=1.0).accuracy, copy.copy(typed).pair[1]]
        names = [typed._fields, [*typed._asdict()], pair._fields, typed == tuple(typed), len(typed)]
        return [*map(flat, read), *names]

    step, args = returning(made)
    fast = pardnn.parallelize(step, *args, algorithm="single", costs="v100")
    other, given = returning(made)
    for _ in range(2):
        assert both(fast(*args[2:])) == both(other(*given))
    with pytest.raises(AttributeError, match="no 'other', but loss, pair, accuracy"):
        _ = fast(*args[2:])[0].other
    fast.close()


@dataclasses.dataclass
class Stats:
    last: float = 0.0
    n: int = 0


def _in_dict(loss: Any, held: Any) -> Any:
    held.numbers["last"] = loss.item()
    held.numbers["n"] += 1
    return loss, held.numbers


def _in_object(loss: Any, held: Any) -> Any:
    held.stats.last, held.stats.n = loss.item(), held.stats.n + 1
    return {"loss": loss, "of": [held.stats]}


def _in_list(loss: Any, held: Any) -> Any:
    held.items[0], held.items[1] = loss.item(), held.items[1] + 1
    return loss, held.items


def _in_new_key(loss: Any, held: Any) -> Any:
    held.numbers["new"] = loss.item()
    return loss, held.numbers


def _in_filled_list(loss: Any, held: Any) -> Any:
    held.items.append(loss.item())
    return loss, held.items


def _within(loss: Any, held: Any) -> Any:
    held.inner["a"]["n"] += 2
    return Pair(loss, held.inner)


def _told(_args: Any, held: Any) -> list[Any]:
    return [held.numbers, held.stats, held.items, held.inner]


PUTS = [_in_dict, _in_object, _in_list, _in_new_key, _in_filled_list, _within]
QUICK = [(_in_object, False), (_in_new_key, False), (_within, True)]


@pytest.mark.parametrize(
    ("put", "is_given"), long_but(QUICK, itertools.product(PUTS, [False, True]))
)
def test_an_object_that_the_step_updates_and_returns_is_itself(put: Any, is_given: bool) -> None:
    def make() -> tuple[Entry, Any]:
        held = SimpleNamespace(
            numbers={"last": 0.0, "n": 0}, stats=Stats(), items=[0.0, 0], inner={"a": {"n": 0}}
        )
        given = (held,) if is_given else ()
        step, args = returning(lambda model, x, y, loss, logits: loss)

        def whole(model: Any, optimizer: Any, x: Any, y: Any, *more: Any) -> Any:
            return put(step(model, optimizer, x, y), more[0] if more else held)

        return (whole, (*args, *given)), held

    (step, args), _ = make()
    plan = random_plan(capture(step, *args), 2, seed=1)

    def body(rank: int, store: str) -> Any:
        connect(rank, 2, store, 20).close()
        (step, args), held = make()
        decide = lambda graph, size, _state: random_plan(graph, size, seed=1)  # noqa: E731
        fast = parallelize(step, *args, plan=plan, decide=decide, timeout=20, device="cpu")
        found = []
        for _ in range(3):
            result = fast(*args[2:])
            found.append((repr(flat_numbers(result)), repr(_told(args, held))))
        is_own = any(x is y for x in parts(result) for y in parts(_told(args, held)))
        fast.close()
        return found, is_own

    (step, args), held = make()
    expected = []
    for _ in range(3):
        result = step(*args)
        expected.append((repr(flat_numbers(result)), repr(_told(args, held))))
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [[[*each] for each in expected], True]


def test_another_object_in_the_batch_is_the_one_that_is_returned() -> None:
    step, args = returning(lambda model, x, y, loss, logits: loss)

    def whole(model: Any, optimizer: Any, x: Any, y: Any, numbers: Any) -> Any:
        numbers["of"]["n"] += 1
        return step(model, optimizer, x, y), numbers["of"]

    fast = pardnn.parallelize(whole, *args, {"of": {"n": 0}}, algorithm="single", costs="v100")
    for n in range(3):
        given = {"of": {"n": 10 * n}}
        assert fast(*args[2:], given)[1] is given["of"]
        assert given == {"of": {"n": 10 * n + 1}}
    fast.close()


def flat_numbers(result: Any) -> Any:
    """Values without what they are in: names of classes differ."""
    if isinstance(result, torch.Tensor):
        return result.item()
    if isinstance(result, dict):
        return [(key, flat_numbers(item)) for key, item in result.items()]
    return [*map(flat_numbers, result)] if isinstance(result, list | tuple) else result


def parts(result: Any) -> list[Any]:
    """Containers and objects in a result."""
    if isinstance(result, torch.Tensor | int | float | str):
        return []
    items = result.values() if isinstance(result, dict) else result
    inner = items if isinstance(result, dict | list | tuple) else []
    return [result, *(part for item in inner for part in parts(item))]


def test_a_namespace_is_returned_by_its_attributes() -> None:
    def made(model: Any, x: Any, y: Any, loss: Any, logits: Any) -> Any:
        return SimpleNamespace(loss=loss, logits=logits, n=loss.item())

    def read(out: Any) -> Any:
        return [out.loss.item(), out.logits.tolist(), out.n]

    step, args = returning(made)
    plan = random_plan(capture(step, *args), 2, seed=1)
    for found in on_ranks(made, plan, read):
        assert found == eager(made, read)


def test_what_cannot_be_returned_says_so() -> None:
    def made(model: Any, x: Any, y: Any, loss: Any, logits: Any) -> Output:
        return Output(loss, logits, Cache())

    step, args = returning(made)
    fast = parallelize(step, *args, plan=random_plan(capture(step, *args), 1, seed=1), device="cpu")
    out = fast(*args[2:])
    assert "Cache" in repr(out.cache)
    with pytest.raises(AttributeError, match=r"no 'accuracy', but loss, logits, cache"):
        _ = out.accuracy
    assert out["loss"] is out.loss


def test_the_last_result_stays_while_the_next_step_runs() -> None:
    made = STRUCTURES["tuple"]
    step, args = returning(made)
    fast = parallelize(step, *args, plan=random_plan(capture(step, *args), 1, seed=1), device="cpu")
    one = fast(*args[2:])
    before = flat(one)
    fast(*args[2:])
    assert flat(one) == before

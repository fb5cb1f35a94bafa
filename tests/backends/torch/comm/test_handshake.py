"""Ranks that do not fit together refuse to start, or to go on, and say what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.comm.handshake import check_agreement
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.errors import MismatchError
from pardnn.plan.actions import Receive, Send, Wait
from tests.backends.torch import models
from tests.backends.torch.executors import captured, executor_of
from tests.backends.torch.faults import (
    MARGIN_S,
    TIMEOUT_S,
    a_plan,
    assert_blamed,
    chain,
    run_with_faults,
)
from tests.backends.torch.messages import spec_of
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks


def test_another_world_size_is_refused_before_anything_is_allocated() -> None:
    """Case 51."""
    program = Program(captured(chain), a_plan(3))

    def body(rank: int, store: str) -> None:
        world = connect(rank, 2, store, TIMEOUT_S)
        start(program, world, lambda: pytest.fail("allocated"))

    for outcome in run_ranks(2, body):
        assert (outcome.status, outcome.code) == (5, "E511")
        assert "3 devices, but 2 ranks" in outcome.error["message"]


def test_ranks_with_different_plans_say_what_differs() -> None:
    """Case 52."""
    graph = captured(chain)
    plan = a_plan(2)
    others = {
        "a placement": a_plan(2, seed=2),
        "metadata": dataclasses.replace(plan, seed=7),
    }
    for what, other in others.items():
        outcomes = run_with_faults({}, plan=plan, programs={1: Program(graph, other)})
        for outcome in outcomes:
            assert (outcome.status, outcome.code) == (5, "E510"), what
            assert "rank 0" in outcome.error["message"]
            assert "rank 1" in outcome.error["message"]


def test_another_version_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 53."""

    def body(rank: int, store: str) -> None:
        if rank == 1:
            monkeypatch.setattr(torch, "__version__", "1.0.0")
        executor_of(chain, Program(captured(chain), a_plan(2)), rank, store, TIMEOUT_S)

    for outcome in run_ranks(2, body):
        assert outcome.code == "E510"
        assert "torch version is 2" in outcome.error["message"]
        assert "1.0.0 on rank 1" in outcome.error["message"]


def test_a_model_of_another_shape_names_rank_and_parameter() -> None:
    """Case 53."""

    def wide() -> models.Entry:
        step, (_, _, x, y) = chain()
        model = nn.Sequential(
            nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)

    plan = random_plan(captured(chain), 2, seed=1)

    def body(rank: int, store: str) -> None:
        program = Program(captured(chain), plan)
        factory = wide if rank == 1 else chain
        executor, binding, _ = executor_of(factory, program, rank, store, TIMEOUT_S)
        executor.step(binding.batch_inputs(binding.example()))

    outcomes = run_ranks(2, body)
    assert [outcome.code for outcome in outcomes] == ["E514", "E514"]
    assert outcomes[1].error["details"]["source"].startswith("model.")
    assert "is float32 [9" in outcomes[1].error["message"]
    assert outcomes[0].error["details"]["first_failing_rank"] == 1


def test_parameters_without_data_are_refused() -> None:
    """Case 19: a model on the meta device is planned, but not run."""

    def meta() -> models.Entry:
        step, (model, _, x, y) = chain()
        model = model.to("meta")
        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)

    def body(rank: int, store: str) -> None:
        executor_of(meta, Program(captured(chain), random_plan(captured(chain), 1)), rank, store)

    (outcome,) = run_ranks(1, body)
    assert (outcome.status, outcome.code) == (5, "E514")
    assert "uninitialised" in outcome.error["message"]


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_another_batch_is_refused_with_both_shapes(change: str) -> None:
    """Case 54, and 55: a short last batch."""

    def body(rank: int, store: str) -> None:
        program = Program(captured(chain), a_plan(2))
        executor, binding, (_, _, x, y) = executor_of(chain, program, rank, store, TIMEOUT_S)
        executor.step(binding.batch_inputs((x, y)))
        if rank == 1:
            x = x[:3] if change == "shape" else x.double()
        executor.step(lambda: binding.batch_inputs((x, y)))

    outcomes = run_ranks(2, body)
    assert [outcome.code for outcome in outcomes] == ["E512", "E512"]
    assert "[4, 8]" in outcomes[1].error["message"]
    assert "[3, 8]" in outcomes[1].error["message"] or change == "dtype"
    assert outcomes[0].seconds < MARGIN_S


# Case 61: plans that the checker would refuse, on one rank only.


def wrong_size(program: Program, _rank: int) -> None:
    spec = program.specs[0]
    shape = (*spec.shape[:-1], spec.shape[-1] * 2)
    strides = tuple(torch.empty(shape).stride())
    first = spec._replace(shape=shape, strides=strides, bytes=spec.bytes * 2)
    program.specs = (first, *program.specs[1:])


def wrong_dtype(program: Program, _rank: int) -> None:
    first = program.specs[0]._replace(dtype="int32")
    program.specs = (first, *program.specs[1:])


def without(program: Program, rank: int, kinds: tuple[type, ...]) -> None:
    """Leave out one message of a rank, and the waiting for it."""
    actions = program.lowered.ranks[rank]
    number = next(action.message for action in actions if isinstance(action, kinds))
    left = tuple(
        a for a in actions
        if not (isinstance(a, (*kinds, Wait)) and a.message == number)
    )  # fmt: skip
    ranks = list(program.lowered.ranks)
    ranks[rank] = left
    program.lowered = program.lowered._replace(ranks=tuple(ranks))


def missing_send(program: Program, rank: int) -> None:
    without(program, rank, (Send,))


def extra_receive(program: Program, rank: int) -> None:
    ranks = list(program.lowered.ranks)
    ranks[rank] = (*ranks[rank], Receive(0))
    program.lowered = program.lowered._replace(ranks=tuple(ranks))


def wrong_order(program: Program, rank: int) -> None:
    ranks = list(program.lowered.ranks)
    actions = list(ranks[rank])
    posts = [i for i, a in enumerate(actions) if isinstance(a, Send | Receive)]
    i, j = posts[0], posts[-1]
    actions[i], actions[j] = actions[j], actions[i]
    ranks[rank] = tuple(actions)
    program.lowered = program.lowered._replace(ranks=tuple(ranks))


def broken(how: Callable[[Program, int], None], rank: int) -> Program:
    program = Program(captured(chain), a_plan(2))
    how(program, rank)
    return program


@pytest.mark.parametrize("how", [wrong_size, wrong_dtype, missing_send, extra_receive, wrong_order])
def test_ranks_that_do_not_fit_together_refuse_to_start(how: Any) -> None:
    outcomes = run_with_faults({}, programs={1: broken(how, 1)})
    for outcome in outcomes:
        assert (outcome.status, outcome.code) == (5, "E510"), outcome.error
        assert "rank 1" in outcome.error["message"]


@pytest.mark.parametrize("how", [wrong_size, wrong_dtype])
def test_without_the_check_headers_tell_instead_of_silent_data(how: Any) -> None:
    program = Program(captured(chain), a_plan(2))
    receiver = program.specs[0].target
    outcomes = run_with_faults(
        {}, programs={receiver: broken(how, receiver)}, checked=False, headers=True
    )
    assert_blamed(outcomes, receiver, "E604", within_s=MARGIN_S)
    assert "sent something else" in outcomes[receiver].error["message"]


def test_without_the_check_a_missing_send_ends_in_time() -> None:
    outcomes = run_with_faults(
        {}, programs={1: broken(missing_send, 1)}, checked=False, headers=True
    )
    for outcome in outcomes:
        assert outcome.status not in (0, None)
        assert outcome.seconds < TIMEOUT_S + MARGIN_S


def test_headers_do_no_harm() -> None:
    outcomes = run_with_faults({}, headers=True)
    assert [outcome.status for outcome in outcomes] == [0, 0]


# The facts alone.


def facts(**changes: Any) -> dict[str, Any]:
    spec = list(spec_of(0, "x", torch.zeros(2, 3)))
    base = {"torch version": "2", "world size": 2, "graph": "g", "plan": "p", "num_ops": 1,
            "messages": [spec], "posts": [[True, 0]]}  # fmt: skip
    return base | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch version": "3"}, "torch version is 2 on rank 0 and 3 on rank 1"),
        ({"world size": 3}, "world size is 2 on rank 0 and 3 on rank 1"),
        ({"graph": "h"}, "graph is g on rank 0 and h on rank 1"),
        ({"plan": "q"}, "plan is p on rank 0 and q on rank 1"),
        ({"messages": []}, "rank 0 has 1 messages and rank 1 has 0"),
        ({"posts": []}, "post 0 of rank 1 is nothing, but must be the receive of message 0"),
        ({"posts": [[False, 0], [False, 0]]}, "post 1 of rank 1 is the receive of message 0"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], says: str) -> None:
    theirs = facts(**({"posts": [[False, 0]]} | changes))
    with pytest.raises(MismatchError, match=says):
        check_agreement([facts(), theirs])


def test_each_field_of_a_message_is_compared() -> None:
    mine = spec_of(0, "x", torch.zeros(2, 3))
    for field, value in {"tensor": "y", "bytes": 8, "dtype": "int32", "shape": (3, 2),
                         "strides": (1, 2), "producer": "o"}.items():  # fmt: skip
        theirs = facts(messages=[list(mine._replace(**{field: value}))], posts=[[False, 0]])
        with pytest.raises(MismatchError, match=f"rank 0 and rank 1 differ.* {field} is"):
            check_agreement([facts(), theirs])
    check_agreement([facts(), facts(posts=[[False, 0]])])

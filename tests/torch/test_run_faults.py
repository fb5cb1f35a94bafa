"""What goes wrong between ranks: every rank ends in time, non-zero, and names the first failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardnn.backends.torch import watch
from pardnn.backends.torch.launch import straggler_notes
from pardnn.backends.torch.program import Program
from pardnn.backends.torch.run import Executor
from pardnn.backends.torch.world import rank_device
from pardnn.errors import MismatchError, RankError
from pardnn.plan.actions import Receive, Send, Wait
from pardnn.plan.plan import Plan
from tests.torch import models
from tests.torch.plans import random_plan
from tests.torch.ranks import Outcome, connect, run_ranks
from tests.torch.test_run import captured, executor_of, perceptron

TIMEOUT_S = 1.5
#: What a failure may take on top of the timeout (promise: 10 s).
MARGIN_S = 8.0
Hurt = Callable[[Executor], None]


def chain() -> models.Entry:
    """Layer after layer, so that ranks wait for each other in a chain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return models.classify_step, (model, optimizer, torch.randn(4, 8), torch.randint(3, (4,)))


def a_plan(num_devices: int = 2, seed: int = 1) -> Plan:
    return random_plan(captured(chain), num_devices, seed=seed)


def run_hurt(
    hurt: dict[int, Hurt],
    *,
    num_devices: int = 2,
    steps: int = 3,
    plan: Plan | None = None,
    programs: dict[int, Program] | None = None,
    timeout_s: float = TIMEOUT_S,
    headers: bool = False,
    checked: bool = True,
) -> list[Outcome]:
    """Run the chain with some ranks hurt once they are ready."""
    plan = plan or a_plan(num_devices)
    program = Program(captured(chain), plan)
    programs = programs or {}

    def body(rank: int, store: str) -> Any:
        mine = programs.get(rank, program)
        executor, binding, _ = executor_of(
            chain, mine, rank, store, timeout_s, checked=checked, headers=headers
        )
        hurt.get(rank, lambda executor: None)(executor)
        for _ in range(steps):
            executor.step(binding.batch_inputs(binding.example()))
        executor.world.close()
        return executor.waits_s

    return run_ranks(num_devices, body, limit_s=timeout_s + 5)


def assert_blamed(outcomes: list[Outcome], rank: int, code: str, within_s: float) -> None:
    """All ranks but the dead one end non-zero, in time, and name `rank`."""
    for outcome in outcomes:
        assert outcome.status is not None, f"rank {outcome.rank} hung"
        assert outcome.seconds < within_s
        if outcome.rank == rank and not outcome.error:
            continue
        assert outcome.status != 0
        assert outcome.code == code, outcome.error
        assert outcome.error["details"]["first_failing_rank"] == rank, outcome.error["message"]
        assert f"rank {rank}" in outcome.error["message"].lower()


def at(fraction: float, action: Callable[[], Any], step: int = 1) -> Hurt:
    """Do something at this fraction of a rank's action list, in one step."""

    def hurt(executor: Executor) -> None:
        index = int(fraction * len(executor._calls))
        call = executor._calls[index]

        def hurting(env: dict[str, Any]) -> None:
            if len(executor.step_s) == step:
                action()
            call(env)

        executor._calls[index] = hurting

    return hurt


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


ENDS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit 0": lambda: os._exit(0),
    "abort": os.abort,
}


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.95], ids=["forward", "backward", "update"])
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_dies_is_named_by_all_others(how: str, fraction: float) -> None:
    """Case 56; also for exit status 0."""
    outcomes = run_hurt({1: at(fraction, ENDS[how])}, num_devices=3, timeout_s=5.0)
    assert_blamed(outcomes, 1, "E602", within_s=5.0 + MARGIN_S)


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_dies_before_the_first_step_is_named(how: str) -> None:
    """Case 56, while loading."""
    program = Program(captured(chain), a_plan(2))

    def body(rank: int, store: str) -> None:
        if rank == 1:
            connect(rank, 2, store, TIMEOUT_S)
            ENDS[how]()
        executor_of(chain, program, rank, store, TIMEOUT_S)

    outcomes = run_ranks(2, body)
    assert_blamed(outcomes, 1, "E702", within_s=TIMEOUT_S + MARGIN_S)


def test_an_exception_on_one_rank_is_its_own_and_one_line_on_the_others() -> None:
    """Case 57."""
    error = ValueError("the op is broken")
    outcomes = run_hurt({2: at(0.5, raising(error))}, num_devices=3)
    assert_blamed(outcomes, 2, "E601", within_s=MARGIN_S)
    assert "ValueError: the op is broken" in outcomes[2].error["message"]
    for outcome in outcomes[:2]:
        assert len(outcome.error["message"].splitlines()) == 1


def test_out_of_memory_names_device_op_and_peaks_and_releases_the_peers_at_once() -> None:
    """Case 58."""
    error = torch.OutOfMemoryError("no memory left")
    outcomes = run_hurt({0: at(0.4, raising(error))}, num_devices=3, timeout_s=30.0)
    assert_blamed(outcomes, 0, "E603", within_s=6.0)  # far below the timeout
    own = outcomes[0].error
    assert own["details"]["predicted_peak_bytes"] == Program(captured(chain), a_plan(3)).peaks[0]
    assert own["details"]["held_bytes"] > 0
    assert "--reserve" in own["message"]


def test_a_straggler_finishes_and_is_reported() -> None:
    """Case 59."""
    outcomes = run_hurt({1: at(0.3, lambda: time.sleep(1.0))}, timeout_s=5.0)
    assert [outcome.status for outcome in outcomes] == [0, 0]
    (note,) = straggler_notes([{"waits_s": outcome.value} for outcome in outcomes])
    assert note.startswith("rank 1 is a straggler: in step 1")


def test_a_hung_rank_is_found_through_those_that_wait_for_each_other() -> None:
    """Case 60: the rank that hangs is named, not the one that waits for it."""
    outcomes = run_hurt({1: at(0.3, lambda: time.sleep(4.5))}, num_devices=3)
    told = [outcome for outcome in outcomes if outcome.rank != 1]
    assert_blamed(told, 1, "E701", within_s=TIMEOUT_S + MARGIN_S)
    first = next(o for o in told if "report" not in o.error["details"])
    for word in ("waited 1.5 s", "tensor", "at op", "in step 1", "does not move", "send posted"):
        assert word in first.error["message"]
    assert len(first.error["details"]["states"]) == 3


def test_a_stopped_process_is_named_too() -> None:
    """Case 60, for a rank that cannot even answer."""

    def stop() -> None:
        # In a session of its own: a group that is orphaned while a member is stopped gets SIGHUP.
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)

    outcomes = run_hurt({0: at(0.3, stop)}, num_devices=2)
    assert_blamed(outcomes[1:], 0, "E701", within_s=TIMEOUT_S + MARGIN_S)
    assert "does not even answer" in outcomes[1].error["message"]


def test_another_world_size_is_refused_before_anything_is_allocated() -> None:
    """Case 51."""
    program = Program(captured(chain), a_plan(3))

    def body(rank: int, store: str) -> None:
        world = connect(rank, 2, store, TIMEOUT_S)
        from pardnn.backends.torch.session import start

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
        outcomes = run_hurt({}, plan=plan, programs={1: Program(graph, other)})
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
    wire = program.wires[0]
    shape = (*wire.shape[:-1], wire.shape[-1] * 2)
    strides = tuple(torch.empty(shape).stride())
    first = wire._replace(shape=shape, strides=strides, bytes=wire.bytes * 2)
    program.wires = (first, *program.wires[1:])


def wrong_dtype(program: Program, _rank: int) -> None:
    first = program.wires[0]._replace(dtype="int32")
    program.wires = (first, *program.wires[1:])


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
    outcomes = run_hurt({}, programs={1: broken(how, 1)})
    for outcome in outcomes:
        assert (outcome.status, outcome.code) == (5, "E510"), outcome.error
        assert "rank 1" in outcome.error["message"]


@pytest.mark.parametrize("how", [wrong_size, wrong_dtype])
def test_without_the_check_headers_tell_instead_of_silent_data(how: Any) -> None:
    program = Program(captured(chain), a_plan(2))
    receiver = program.wires[0].target
    outcomes = run_hurt({}, programs={receiver: broken(how, receiver)}, checked=False, headers=True)
    assert_blamed(outcomes, receiver, "E604", within_s=MARGIN_S)
    assert "sent something else" in outcomes[receiver].error["message"]


def test_without_the_check_a_missing_send_ends_in_time() -> None:
    outcomes = run_hurt({}, programs={1: broken(missing_send, 1)}, checked=False, headers=True)
    for outcome in outcomes:
        assert outcome.status not in (0, None)
        assert outcome.seconds < TIMEOUT_S + MARGIN_S


def test_headers_do_no_harm() -> None:
    outcomes = run_hurt({}, headers=True)
    assert [outcome.status for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_the_users_process_group_is_used_and_stays(fails: bool) -> None:
    """Case 64."""
    hurt = at(0.5, raising(ValueError("broken"))) if fails else (lambda executor: None)

    def body(rank: int, store: str) -> Any:
        program = Program(captured(chain), a_plan(2))
        executor, binding, _ = executor_of(chain, program, rank, store, TIMEOUT_S)
        if rank == 0:
            hurt(executor)
        with pytest.raises(RankError) if fails else contextlib.nullcontext():
            for _ in range(2):
                executor.step(binding.batch_inputs(binding.example()))
        executor.world.close()
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    for outcome in run_ranks(2, body):
        assert outcome.value == 2.0, outcome.error


def test_fewer_gpus_than_ranks_show_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 65."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MismatchError, match=r"cuda:2.*sees 2.*3,1") as caught:
        rank_device("cuda", 2)
    assert caught.value.code == "E513"


def test_the_wait_is_followed_to_the_rank_that_waits_for_nobody() -> None:
    states = {0: {"waits_for": 1}, 1: {"waits_for": 2}, 2: {"waits_for": None}}
    assert watch.culprit(0, states) == 2
    assert watch.culprit(1, {1: {"waits_for": 3}}) == 3  # it does not answer
    assert watch.culprit(0, {0: {"waits_for": 1}, 1: {"waits_for": 0}}) == 0


def test_nan_follows_pytorch() -> None:
    """Case 62: no guard by default; the loss is NaN on every rank."""

    def body(rank: int, store: str) -> bool:
        program = Program(captured(perceptron), random_plan(captured(perceptron), 2, seed=1))
        executor, binding, (_, _, x, y) = executor_of(perceptron, program, rank, store)
        return bool(executor.step(binding.batch_inputs((x * float("nan"), y))).isnan())

    assert [outcome.value for outcome in run_ranks(2, body)] == [True, True]

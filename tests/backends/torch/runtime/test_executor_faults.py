"""What goes wrong between ranks: every rank ends in time, non-zero, and names the first failure."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pardnn.backends.torch.comm import failure_detector
from pardnn.backends.torch.comm.joining import rank_device
from pardnn.backends.torch.launch.launcher import straggler_notes
from pardnn.backends.torch.runtime.gather import gathered
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import MismatchError, RankError
from pardnn.graph.ir import Tensor
from pardnn.plan.state_layout import Shard
from tests.backends.torch.executors import captured, executor_of, perceptron
from tests.backends.torch.faults import (
    MARGIN_S,
    TIMEOUT_S,
    a_plan,
    assert_blamed,
    at,
    chain,
    raising,
    run_with_faults,
)
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import Outcome, connect, run_ranks
from tests.long_cases import long_but

ENDS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit 0": lambda: os._exit(0),
    "abort": os.abort,
}


QUICK = {("SIGKILL", 0.05), ("SIGTERM", 0.5), ("exit 0", 0.95), ("abort", 0.5)}


@pytest.mark.parametrize(
    ("how", "fraction"), long_but(QUICK, itertools.product(ENDS, [0.05, 0.5, 0.95]))
)
def test_a_rank_that_dies_is_named_by_all_others(how: str, fraction: float) -> None:
    """Case 56; also for exit status 0."""
    outcomes = run_with_faults({1: at(fraction, ENDS[how])}, num_devices=3, timeout_s=5.0)
    assert_blamed(outcomes, 1, "E602", within_s=5.0 + MARGIN_S)
    assert ("Fatal Python error" in outcomes[1].crash) == (how == "abort")


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
    # Not after the timeout, but as soon as its connections have closed.
    assert_blamed(outcomes, 1, "E602", within_s=TIMEOUT_S + MARGIN_S)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_gather_ends_with_the_error_of_the_rank_that_failed(owner: int) -> None:
    output = Tensor(name="w", bytes=4, shape=(1,), dtype="float32", strides=(1,))

    def body(rank: int, store: str) -> None:
        world = connect(rank, 2, store, TIMEOUT_S)
        world.detect_failures()
        if rank == 1:
            raise world.report_failure(RankError("rank 1 ran out of memory", code="E603"))
        shards = [Shard(owner, "w", None)]
        while world.first_failure() is None:
            time.sleep(0.01)
        gathered(world, output, shards, torch.ones(1) if owner == rank else None)

    assert_blamed(run_ranks(2, body), 1, "E603", within_s=TIMEOUT_S + MARGIN_S)


def test_an_exception_on_one_rank_is_its_own_and_one_line_on_the_others() -> None:
    """Case 57."""
    error = ValueError("the op is broken")
    outcomes = run_with_faults({2: at(0.5, raising(error))}, num_devices=3)
    assert_blamed(outcomes, 2, "E601", within_s=MARGIN_S)
    assert "ValueError: the op is broken" in outcomes[2].error["message"]
    for outcome in outcomes[:2]:
        assert len(outcome.error["message"].splitlines()) == 1


def test_out_of_memory_names_device_op_and_peaks_and_releases_the_peers_at_once() -> None:
    """Case 58."""
    error = torch.OutOfMemoryError("no memory left")
    outcomes = run_with_faults({0: at(0.4, raising(error))}, num_devices=3, timeout_s=30.0)
    assert_blamed(outcomes, 0, "E603", within_s=6.0)  # far below the timeout
    own = outcomes[0].error
    assert own["details"]["predicted_peak_bytes"] == Program(captured(chain), a_plan(3)).peaks[0]
    assert own["details"]["held_bytes"] > 0
    assert "--reserve" in own["message"]


def test_a_straggler_finishes_and_is_reported() -> None:
    """Case 59."""
    outcomes = run_with_faults({1: at(0.3, lambda: time.sleep(1.0))}, timeout_s=5.0)
    assert [outcome.status for outcome in outcomes] == [0, 0]
    (note,) = straggler_notes([{"waits_s": outcome.value} for outcome in outcomes])
    assert note.startswith("rank 1 is a straggler: in step 1")


def test_a_hung_rank_is_found_through_those_that_wait_for_each_other() -> None:
    """Case 60: the rank that hangs is named, not the one that waits for it."""
    outcomes = run_with_faults({1: at(0.3, lambda: time.sleep(4.5))}, num_devices=3)
    told = [outcome for outcome in outcomes if outcome.rank != 1]
    assert_blamed(told, 1, "E701", within_s=TIMEOUT_S + MARGIN_S)
    first = next(o for o in told if "report" not in o.error["details"])
    for word in (
        "waited 1.5 s",
        "tensor",
        "at op",
        "in step 1",
        "makes no progress",
        "send posted",
    ):
        assert word in first.error["message"]
    # Of the hung rank and of this one; the third may be late where cores are shared.
    assert {state["rank"] for state in first.error["details"]["states"]} >= {1, first.rank}


def between_steps(busy_s: float, timeout_s: float) -> list[Outcome]:
    """Rank 0 works alone between two steps; each rank returns what it logged."""

    def body(rank: int, store: str) -> Any:
        program = Program(captured(chain), a_plan(2))
        executor, binding, _ = executor_of(chain, program, rank, store, timeout_s)
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("pardnn").addHandler(handler)
        for number in range(3):
            if number == 1 and rank == 0:
                time.sleep(busy_s)
            executor.step(binding.batch_inputs(binding.example()))
        executor.world.close()
        return logged

    return run_ranks(2, body, limit_s=timeout_s + 5)


def test_a_long_wait_is_told_before_it_times_out() -> None:
    outcomes = between_steps(busy_s=1.8, timeout_s=4.0)
    assert [outcome.status for outcome in outcomes] == [0, 0]
    assert outcomes[0].value == []
    (told,) = outcomes[1].value
    assert re.match(r"rank 1 is waiting for message .* since 1\.[3-7] s, at op .* in step 1", told)
    assert "(timeout 4 s)" in told
    assert re.search(
        r"Rank 0: in your script \(test_executor_faults\.py:\d+\), between steps 0 and 1", told
    )


def test_a_rank_that_is_busy_between_steps_is_not_blamed_on_an_op() -> None:
    outcomes = between_steps(busy_s=5.0, timeout_s=TIMEOUT_S)
    assert_blamed(outcomes[1:], 0, "E701", within_s=TIMEOUT_S + MARGIN_S)
    message = outcomes[1].error["message"]
    assert "Rank 0 is the one that makes no progress: in your script (test_executor" in message
    assert "what one rank does alone between steps" in message


def test_a_stopped_process_is_named_too() -> None:
    """Case 60, for a rank that cannot even answer."""

    def stop() -> None:
        # In a session of its own: a group that is orphaned while a member is stopped gets SIGHUP.
        os.setsid()
        os.kill(os.getpid(), signal.SIGSTOP)

    outcomes = run_with_faults({0: at(0.3, stop)}, num_devices=2)
    assert_blamed(outcomes[1:], 0, "E701", within_s=TIMEOUT_S + MARGIN_S)
    assert "does not even answer" in outcomes[1].error["message"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_users_process_group_is_used_and_stays(fails: bool) -> None:
    """Case 64."""
    fault = at(0.5, raising(ValueError("broken"))) if fails else (lambda executor: None)

    def body(rank: int, store: str) -> Any:
        program = Program(captured(chain), a_plan(2))
        executor, binding, _ = executor_of(chain, program, rank, store, TIMEOUT_S)
        if rank == 0:
            fault(executor)
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
    assert failure_detector.hung_rank(0, states) == 2
    assert failure_detector.hung_rank(1, {1: {"waits_for": 3}}) == 3  # it does not answer
    assert failure_detector.hung_rank(0, {0: {"waits_for": 1}, 1: {"waits_for": 0}}) == 0


def test_nan_follows_pytorch() -> None:
    """Case 62: no guard by default; the loss is NaN on every rank."""

    def body(rank: int, store: str) -> bool:
        program = Program(captured(perceptron), random_plan(captured(perceptron), 2, seed=1))
        executor, binding, (_, _, x, y) = executor_of(perceptron, program, rank, store)
        return bool(executor.step(binding.batch_inputs((x * float("nan"), y))).isnan())

    assert [outcome.value for outcome in run_ranks(2, body)] == [True, True]

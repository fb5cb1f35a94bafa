"""SIGTERM or SIGINT on some ranks: all stop after the same step, saved if they were asked to."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pardnn.backends.torch.comm.stop_signal import StopSignal
from pardnn.backends.torch.comm.world import World
from pardnn.checkpoint.directory import committed, read_manifest, resolve
from pardnn.checkpoint.verify import verify
from pardnn.errors import UsageError
from tests.backends.torch.checkpoint.training import (
    Rank,
    batch_numbers,
    on_ranks,
    plan_of,
    uninterrupted,
    values,
)
from tests.backends.torch.executors import perceptron
from tests.backends.torch.ranks import Outcome


def signalled(number: int, after_s: float) -> None:
    """Send this process a signal in a moment, wherever it is by then."""
    threading.Timer(after_s, os.kill, (os.getpid(), number)).start()


def trained(one: Rank, path: Path, signals: dict[int, Any], told: Path | None = None) -> None:
    if one.rank in signals:
        signalled(*signals[one.rank])
    for i in batch_numbers(one.order):
        one.step(i)
        if told is not None:
            (told / str(one.rank)).write_text(str(one.fast.steps))
        one.fast.save(path, extra=one.extra, keep=2, every=7)


def run(path: Path, signals: dict[int, Any], size: int = 3, **kwargs: Any) -> list[Outcome]:
    return on_ranks(
        perceptron, plan_of(perceptron, size), lambda one: trained(one, path, signals), **kwargs
    )


SIGNALS = {
    "one rank": {1: (signal.SIGINT, 0.2)},
    "all, one after the other": {i: (signal.SIGTERM, 0.3 * i) for i in range(3)},
}


@pytest.mark.parametrize("signals", SIGNALS.values(), ids=SIGNALS.keys())
def test_a_signal_on_some_ranks_saves_on_all_and_ends_them(
    signals: dict[int, Any], tmp_path: Path
) -> None:
    outcomes = run(tmp_path, signals, on_signal="save")
    assert [outcome.status for outcome in outcomes] == [130] * 3, outcomes
    path = resolve(tmp_path)
    manifest = read_manifest(path)
    verify(path, manifest)
    step = manifest.step
    assert committed(tmp_path)[-1].step == step

    def goes_on(one: Rank) -> list[str]:
        one.load(tmp_path)
        return one.train(3)

    for losses in values(on_ranks(perceptron, plan_of(perceptron, 2), goes_on, other=True)):
        assert losses == uninterrupted(perceptron, step + 3)[step:-1]


def test_a_signal_that_is_passed_on_late_changes_nothing(tmp_path: Path) -> None:
    def body(one: Rank) -> None:
        try:
            trained(one, tmp_path, {0: (signal.SIGTERM, 0.2)})
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    outcomes = on_ranks(perceptron, plan_of(perceptron, 2), body, on_signal="save")
    assert [outcome.status for outcome in outcomes] == [130] * 2, outcomes


def test_without_saving_all_stop_before_the_same_step(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    (tmp_path / "run").mkdir()  # on a busy machine the signal comes before the first save

    def body(one: Rank) -> None:
        trained(one, tmp_path / "run", {1: (signal.SIGINT, 0.3)}, tmp_path / "at")

    outcomes = on_ranks(perceptron, plan_of(perceptron, 3), body, on_signal="stop")
    assert [outcome.status for outcome in outcomes] == [130] * 3, outcomes
    assert len({(tmp_path / "at" / str(rank)).read_text() for rank in range(3)}) == 1
    assert all(each.step % 7 == 0 for each in committed(tmp_path / "run"))


def test_one_rank_alone_saves_and_stops_too(tmp_path: Path) -> None:
    (outcome,) = run(tmp_path, {0: (signal.SIGTERM, 0.2)}, size=1, on_signal="save")
    assert outcome.status == 130
    assert resolve(tmp_path)


def test_a_script_may_ask_whether_it_is_to_stop(tmp_path: Path) -> None:
    def body(one: Rank) -> int:
        assert not one.fast.stopping
        if one.rank == 1:
            signalled(signal.SIGTERM, 0.2)
        while not one.fast.stopping:
            one.step(one.fast.steps)
        return one.fast.steps

    found = values(on_ranks(perceptron, plan_of(perceptron, 3), body, on_signal="save"))
    assert len(set(found)) == 1


def test_a_later_signal_ends_a_rank_as_it_would_without(tmp_path: Path) -> None:
    def body(one: Rank) -> None:
        if one.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a launcher passed it on
            time.sleep(2.1)
            os.kill(os.getpid(), signal.SIGTERM)
        one.step(0)

    outcomes = on_ranks(perceptron, plan_of(perceptron, 2), body, on_signal="save", timeout=3)
    assert outcomes[0].status == -signal.SIGTERM
    assert outcomes[1].status in (6, 7)
    assert outcomes[1].error["details"]["first_failing_rank"] == 0


def test_what_cannot_be_heeded_is_refused() -> None:
    world = World(0, 1, torch.device("cpu"), 1.0)
    with pytest.raises(UsageError, match="it is 'save', 'stop' or None"):
        StopSignal(world, "sleep")  # type: ignore[arg-type]
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            StopSignal(world, "save")
        except UsageError as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
    before = signal.getsignal(signal.SIGTERM)
    StopSignal(world, "stop").close()
    assert signal.getsignal(signal.SIGTERM) is before

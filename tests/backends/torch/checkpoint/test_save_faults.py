"""What goes wrong while ranks save or load: all raise the same, and the last step stays."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.checkpoint import saving, training_state
from pardnn.checkpoint import directory, disk
from pardnn.checkpoint.directory import committed, piece_path, read_manifest, resolve
from pardnn.checkpoint.verify import verify
from pardnn.errors import PardnnError
from tests.backends.torch import models
from tests.backends.torch.checkpoint.training import Rank, on_ranks, plan_of, values
from tests.backends.torch.executors import perceptron
from tests.backends.torch.ranks import Outcome


def raised(call: Any) -> list[str]:
    with pytest.raises(PardnnError) as caught:
        call()
    return [caught.value.code, str(caught.value)]


def run(body: Any, size: int = 3, factory: Any = perceptron, **kwargs: Any) -> list[Outcome]:
    return on_ranks(factory, plan_of(factory, size), body, **kwargs)


def failing_on(rank: int, number: int) -> Any:
    """A writer that fails on one rank as a full or broken disk does."""
    write = disk.write_file

    def write_file(path: Path, chunks: Any, tick: Any = None) -> int:
        if path.name.startswith(f"rank-{rank:05d}"):
            raise OSError(number, os.strerror(number))
        return write(path, chunks, tick)

    return write_file


@pytest.mark.parametrize(("rank", "number"), [(0, errno.ENOSPC), (2, errno.EIO)])
def test_a_full_disk_on_one_rank_is_an_error_of_all_and_training_goes_on(
    rank: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(one: Rank) -> Any:
        one.step(0)
        one.fast.save(tmp_path)
        one.step(1)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_file", failing_on(rank, number))
            found = raised(lambda: one.fast.save(tmp_path))
        left = sorted(path.name for path in tmp_path.iterdir() if "tmp" in path.name)
        one.step(2)
        one.fast.save(tmp_path)
        return [*found, left]

    for code, text, left in values(run(body)):
        assert code == "E433"
        assert f"saving step 2 in {str(tmp_path)!r}, rank {rank}: cannot write" in text
        assert os.strerror(number) in text
        assert left == []
    assert [each.step for each in committed(tmp_path)] == [1, 3]


#: Stage of a save, the function that ends the process, and a rank that runs it.
STAGES = [
    (saving, "reserve", 0),
    (saving, "write_tensors", 0),
    (saving, "write_tensors", 1),
    (directory, "manifest_to_json", 0),
    (disk, "replace_file", 0),
    (directory, "_drop_old", 0),
]


@pytest.mark.parametrize(
    ("module", "function", "rank"), STAGES, ids=[f"{name}-{rank}" for _, name, rank in STAGES]
)
def test_a_rank_that_is_killed_while_it_saves_is_told_and_a_complete_step_stays(
    module: Any, function: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(one: Rank) -> Any:
        one.step(0)
        one.fast.save(tmp_path)
        one.step(1)
        if one.rank == rank:
            monkeypatch.setattr(module, function, lambda *_: os.kill(os.getpid(), 9))
        one.fast.save(tmp_path)

    outcomes = run(body, size=2, timeout=2)
    other = outcomes[1 - rank]
    assert outcomes[rank].status == -signal.SIGKILL
    assert other.code in ("E702", "E602"), other.error
    assert "saving step 2" in other.error["message"]
    assert other.error["details"]["peer"] == rank
    assert other.seconds < 20
    path = resolve(tmp_path)
    manifest = read_manifest(path)
    verify(path, manifest)
    assert manifest.step == (2 if function == "_drop_old" else 1)

    def load(one: Rank) -> Any:
        one.fast.load(tmp_path)
        one.fast.save(tmp_path)
        return sorted(each.name for each in tmp_path.glob("*.tmp-*"))

    assert values(run(load, size=1)) == [[]]


def test_what_ranks_save_must_be_the_same(tmp_path: Path) -> None:
    def body(one: Rank) -> Any:
        one.step(0)
        path = tmp_path / ("a" if one.rank == 0 else "b")
        found = raised(lambda: one.fast.save(path))
        torch.manual_seed(one.rank)
        return [*found, *raised(lambda: one.fast.save(tmp_path / "a"))]

    for code, text, then, why in values(run(body, size=2, factory=models.accumulation)):
        assert (code, then) == ("E521", "E518")
        assert "the ranks save different things: root" in text
        assert "random state differs" in why


def test_two_runs_do_not_save_in_one_directory(tmp_path: Path) -> None:
    def body(one: Rank) -> Any:
        lock = training_state.Lock(tmp_path) if one.rank == 1 else None
        one.step(0)
        found = raised(lambda: one.fast.save(tmp_path))
        if lock is not None:
            lock.release()
        one.step(1)
        one.fast.save(tmp_path)
        return found

    for code, text in values(run(body, size=2)):
        assert code == "E522"
        assert "another run saves" in text


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_piece_is_named_on_all_ranks_and_no_step_goes_on(tmp_path: Path) -> None:
    def body(one: Rank) -> Any:
        for i in range(2):
            one.step(i)
            one.fast.save(tmp_path, extra=one.extra())
        if one.rank == 0:
            flip(piece_path(resolve(tmp_path), 1))
        found = raised(lambda: one.load(tmp_path))
        found += raised(lambda: one.fast.save(tmp_path))
        one.load(tmp_path, step=1)
        return [*found, one.step(1)]

    def plain(one: Rank) -> Any:
        return [one.step(i) for i in range(2)][-1]

    expected = values(run(plain))
    for (code, text, then, why, loss), wanted in zip(values(run(body)), expected, strict=True):
        assert (code, then) == ("E432", "E525")
        assert "does not match its checksum" in text
        assert "Load a complete step" in why
        assert loss == wanted


def test_a_step_on_a_mixed_state_is_refused(tmp_path: Path) -> None:
    def body(one: Rank) -> Any:
        one.step(0)
        one.fast.save(tmp_path, extra=one.extra())
        if one.rank == 0:
            flip(piece_path(resolve(tmp_path), 0))
        raised(lambda: one.load(tmp_path))
        one.step(1)

    assert {outcome.code for outcome in run(body, size=2)} == {"E525"}


def wider() -> models.Entry:
    step, (_, _, x, y) = perceptron()
    model = nn.Sequential(nn.Linear(16, 48), nn.Dropout(0.3), nn.ReLU(), nn.Linear(48, 8))
    return step, (model, torch.optim.Adam(model.parameters()), x, y)


def with_momentum() -> models.Entry:
    step, (model, _, x, y) = perceptron()
    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), x, y)


def test_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    def save(one: Rank) -> None:
        one.step(0)
        one.fast.save(tmp_path, extra=one.extra())

    def load(one: Rank) -> Any:
        one.step(0)
        found = raised(lambda: one.load(tmp_path))
        one.step(1)  # nothing was changed
        return found

    values(run(save))
    for code, text in values(run(load, size=2, factory=wider)):
        assert code == "E520"
        assert "'model.0.weight' as float32" in text
    for code, text in values(run(load, size=2, factory=with_momentum)):
        assert code == "E520"
        assert "lacks 'optimizer.state.model.0.weight.momentum_buffer'" in text


def test_a_save_beside_the_steps_holds_what_was_there_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return write(*args)

    write = saving.write_tensors
    monkeypatch.setattr(saving, "write_tensors", slow)

    def body(one: Rank) -> Any:
        one.step(0)
        one.fast.save(tmp_path, extra=one.extra())
        first = one.step(1)
        begin = time.monotonic()
        one.fast.save(tmp_path, extra=one.extra(), wait=False)
        took = time.monotonic() - begin
        losses = [one.step(i) for i in (2, 3)]
        assert len(committed(tmp_path)) == 1  # still being written
        one.fast.save(tmp_path, extra=one.extra(), wait=False)  # waits for the first
        assert [each.step for each in committed(tmp_path)] == [1, 2]
        one.fast.load(tmp_path, step=2)  # waits for the second
        assert [each.step for each in committed(tmp_path)] == [1, 2, 4]
        one.load(tmp_path, step=2)
        assert took < 0.3
        return [first, losses, [one.step(i) for i in (2, 3)]]

    for _, losses, again in values(run(body)):
        assert again == losses


def test_a_save_beside_the_steps_fails_at_the_next_call_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(one: Rank) -> Any:
        one.step(0)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_file", failing_on(1, errno.ENOSPC))
            one.fast.save(tmp_path, wait=False)
            one.step(1)
            found = raised(lambda: one.fast.save(tmp_path))
        one.fast.save(tmp_path)
        return found

    for code, text in values(run(body)):
        assert code == "E433"
        assert "saving step 1" in text
    assert [each.step for each in committed(tmp_path)] == [2]

"""What a step writes to files, progress bars and writers: after each step, as eager does."""

import csv
import io
import json
import queue
import sqlite3
import sys
import threading
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.capture.numbers.test_filled_containers import each_call
from tests.backends.torch.stepping import Entry, assert_as_eager, on_ranks, telling


class Bar:
    """As a progress bar of an installed package."""

    def __init__(self, file: Any) -> None:
        self.n, self.file = 0, file

    def update(self, n: int = 1) -> None:
        self.n += n

    def set_postfix(self, **numbers: float) -> None:
        shown = ", ".join(f"{k}={v:.3g}" if isinstance(v, float) else k for k, v in numbers.items())
        self.file.write(f"{self.n} {shown}\n")

    def is_done(self) -> bool:
        return self.n > 2


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("barlib")
    package.__file__ = "/usr/lib/site-packages/barlib.py"
    monkeypatch.setitem(sys.modules, "barlib", package)
    monkeypatch.setattr(Bar, "__module__", "barlib")


def written(tell: Any) -> Any:
    """Return a maker of entries whose step tells `tell(at, loss, i)`, and what it wrote."""
    at = SimpleNamespace()

    def make() -> Entry:
        at.out, at.rows = io.StringIO(), io.StringIO()
        at.bar, at.csv = Bar(at.out), csv.writer(at.rows)
        at.named = csv.DictWriter(at.rows, ["i", "loss"])
        return telling(lambda loss, model, i: tell(at, loss, i), 0)

    return make, lambda args: [at.out.getvalue(), at.rows.getvalue(), at.bar.n]


def test_what_is_written_is_that_of_the_eager_step() -> None:
    def tell(at, loss, i):
        at.out.write(f"{i}: {loss.item():.4f}\n")
        print("loss", loss.item(), loss.detach(), sep="|", file=at.out)
        at.out.writelines(["a", f"{i}"])
        json.dump({"i": i, "loss": [loss.item(), None]}, at.out)
        at.csv.writerow([i, loss.item()])
        at.named.writerow({"i": i, "loss": loss.item() * 2})
        at.bar.update(2)
        at.bar.set_postfix(loss=loss.item()) if at.bar else None
        print(json.dumps({"loss": loss.item()}))
        sys.stdout.write(f"{loss.item():.2f}\n")

    make, state = written(tell)
    assert_as_eager(make, each_call, state, steps=3)


def test_capture_writes_nothing() -> None:
    make, state = written(lambda at, loss, i: at.out.write(f"{loss.item()}"))
    step, args = make()
    capture(step, *args)
    assert state(args) == ["", "", 0]


def test_a_rank_without_a_file_writes_nothing() -> None:
    at = SimpleNamespace()

    def make() -> Entry:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        at.out = io.StringIO() if is_first else None
        return telling(lambda loss, model: at.out.write(f"{loss.item()}\n"))

    first, second = on_ranks(make, 2, state=lambda args: at.out and at.out.tell(), steps=2)
    assert [int(state) > 0 for _, state, _ in first] == [True, True]
    assert [state for _, state, _ in second] == ["None", "None"]


def refused(tell: Any) -> str:
    make, state = written(tell)
    step, args = make()
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert state(args) == ["", "", 0]
    assert caught.value.code == "E802"
    return str(caught.value)


def test_other_uses_are_refused_and_leave_no_text(tmp_path: Path) -> None:
    def reads(at, loss, i):
        at.out.write(f"{loss.item()}")
        if at.out.tell() > 3:
            loss.item()

    def opens(at, loss, i):
        with (tmp_path / "log.txt").open("a") as file:
            file.write(f"{loss.item()}")

    def keeps(at, loss, i):
        at.out.write("x")
        at.text = f"{loss.item():.3f}"

    assert "uses 'tell' of the file 'at.out'" in refused(reads)
    assert "Open the file before the step" in refused(opens)
    assert "test_told_sinks.py" in refused(keeps)
    assert not (tmp_path / "log.txt").exists()


def opened_for_reading(path: Path) -> Any:
    path.write_text("0.5\n0.25\n")
    return path.open()


def queue_of_numbers(_path: Path) -> Any:
    numbers = queue.SimpleQueue()
    numbers.put(0.5)
    numbers.put(0.25)
    return numbers


def table_of_numbers(_path: Path) -> Any:
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table numbers (value real)")
    return base


def first_line(file: Any) -> float:
    file.seek(0)
    return float(file.readline())


OUTSIDE = {
    "a line": (opened_for_reading, first_line),
    "the next line": (opened_for_reading, lambda file: float(next(file))),
    "all lines": (opened_for_reading, lambda file: sum(float(line) for line in file)),
    "an item": (queue_of_numbers, lambda numbers: numbers.get()),
    "a row": (table_of_numbers, lambda base: len([*base.execute("select * from numbers")])),
}


@pytest.mark.parametrize("which", OUTSIDE)
def test_what_a_file_or_queue_gives_is_refused(which: str, tmp_path: Path) -> None:
    make_source, take = OUTSIDE[which]
    source = make_source(tmp_path / "numbers.txt")
    step, args = telling(lambda loss, model: model[0].weight.grad.mul_(take(source)))
    with pytest.raises(UnsupportedError, match="of the .* 'source'") as caught:
        capture(step, *args)
    assert caught.value.code == "E802"
    if hasattr(source, "close"):
        source.close()


def test_rows_go_into_a_data_base_once_a_step() -> None:
    at = SimpleNamespace()

    def make() -> Entry:
        at.base = table_of_numbers(Path())

        def tell(loss, model):
            at.base.execute("insert into numbers values (?)", (loss.item(),))

        return telling(tell)

    def state(_: Any) -> Any:
        return at.base.execute("select value from numbers").fetchall()

    assert_as_eager(make, state=state, steps=3)


def test_a_file_that_only_lies_there_is_no_obstacle(tmp_path: Path) -> None:
    with opened_for_reading(tmp_path / "numbers.txt") as file:
        at = SimpleNamespace(file=file, factor=0.5)
        step, args = telling(lambda loss, model: model[0].weight.grad.mul_(at.factor))
        assert "effects" not in capture(step, *args).step_notes
        assert file.tell() == 0


def test_other_threads_open_files_while_a_step_is_captured(tmp_path: Path) -> None:
    """The thread that looks for failed ranks ended by it, and no rank was told to stop any more."""

    begin, end = threading.Event(), threading.Event()

    def work():
        begin.wait()
        (tmp_path / "of-another-thread").write_text("x")
        end.set()

    def step(at, loss, i):
        begin.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    make, _ = written(step)
    called, args = make()
    capture(called, *args)
    thread.join()
    assert (tmp_path / "of-another-thread").exists()


def test_a_bar_that_is_asked_is_no_sink() -> None:
    def tell(at, loss, i):
        if not at.bar.is_done():
            at.bar.update(1)

    make, state = written(tell)
    step, args = make()
    graph = capture(step, *args)
    assert "effects" not in graph.step_notes
    assert [each for each, _ in graph.step_notes["host"]["writes"]] == ["at.bar.n"]
    assert state(args) == ["", "", 0]


def test_numbers_pass_for_floats_and_new_sums_begin_as_their_default() -> None:
    sums: defaultdict[str, float] = defaultdict(float)

    def tell(loss, model):
        value = loss.item()
        assert isinstance(value, (int, float))
        sums["loss"] += value
        sums["steps"] += 1

    def make() -> Entry:
        sums.clear()
        return telling(tell)

    assert_as_eager(make, state=lambda args: dict(sums), steps=3)

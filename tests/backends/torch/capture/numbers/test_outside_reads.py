"""What a step asks of files, folders and the clock is never frozen without a word."""

from __future__ import annotations

import atexit
import datetime
import email.utils
import os
import random
import secrets
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from datetime import date
from datetime import datetime as moment
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.numbers.outside_reads import APART_S, clock_set
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import small

STATE = SimpleNamespace(path=Path(), begun=0.0, spent=0.0)


def read(path: Path) -> float:
    return float(path.read_text())


def opened(path: Path) -> float:
    with open(path) as file:  # noqa: PTH123
        return float(file.read())


LOOKS: dict[str, Callable[[Path], float]] = {
    "read": read,
    "opened": opened,
    "exists": lambda path: 2.0 if os.path.exists(path) else 1.0,  # noqa: PTH110
    "is_file": lambda path: 2.0 if path.is_file() else 1.0,
    "listed": lambda path: float(len(os.listdir(path.parent))),  # noqa: PTH208
    "accessible": lambda path: 2.0 if os.access(path, os.R_OK) else 1.0,
    "by NumPy": lambda path: float(np.fromfile(path, np.uint8)[0]),
}


def stepping(factor: Callable[[], float]) -> Any:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) * factor() - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return capture(step, model, optimizer, x, y)


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_file_is_refused_with_its_path_and_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "factor.txt"
    path.write_text("2.0")
    with pytest.raises(UnsupportedError, match="accesses the file or folder") as caught:
        stepping(lambda: LOOKS[name](path))
    assert caught.value.code == "E804"
    assert caught.value.details["path"] in (str(path), str(tmp_path))
    assert "test_outside_reads.py:" in caught.value.details["source"]


def connected() -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    return 1.0


def sent() -> float:
    one, other = socket.socketpair()
    with one, other:
        one.send(b"1")
        return float(other.recv(1))


def piped() -> float:
    ends = os.pipe()
    os.write(ends[1], b"1")
    return float(len([os.close(end) for end in ends]))


ASKED: list[tuple[str, Callable[[], float]]] = [
    ("starts a program", lambda: float(subprocess.check_output(["echo", "1"]))),
    ("starts a program", lambda: 1.0 + os.system("true")),
    ("opens a connection", connected),
    ("asks for the load of the machine", lambda: os.getloadavg()[0]),
    ("counts the threads of the process", lambda: 1.0 * threading.active_count()),
    ("writes to a socket", sent),
    ("registers what is done at the exit", lambda: 1.0 if atexit.register(int) else 2.0),
    ("sends a signal", lambda: 1.0 if os.kill(os.getpid(), 0) is None else 2.0),
    ("writes to a pipe", piped),
    ("asks the system", lambda: 2.0 if os.urandom(8) == bytes(8) else 1.0),
    ("asks the system", lambda: 2.0 if uuid.uuid4().int == 0 else 1.0),
    ("asks the system", lambda: 2.0 if secrets.randbelow(10**9) == 0 else 1.0),
    ("asks the system", lambda: 2.0 if SYSTEM.random() == 0 else 1.0),
    ("asks the system", lambda: 2.0 if random.Random().random() == 0 else 1.0),
    ("asks the system", lambda: 2.0 if np.random.default_rng().random() == 0 else 1.0),
]
SYSTEM = random.SystemRandom()


@pytest.mark.parametrize(("deed", "asked"), ASKED)
def test_a_step_that_asks_the_world_is_refused_by_its_line(
    deed: str, asked: Callable[[], float]
) -> None:
    with pytest.raises(UnsupportedError, match=deed) as caught:
        stepping(asked)
    assert "test_outside_reads.py:" in caught.value.details["source"]


def test_generators_with_a_seed_of_their_own_may_be_made() -> None:
    stepping(lambda: random.Random(3).random() + np.random.default_rng(3).random())


def test_a_step_that_removes_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="accesses the file or folder"):
        stepping(lambda: float(not (tmp_path / "stop").unlink(missing_ok=True)))


def test_dates_of_numpy_that_are_given_are_what_they_are() -> None:
    def of_a_day() -> float:
        day = np.datetime64("2026-11-26")
        assert isinstance(day, np.datetime64)
        return 1.0 + float((day - np.datetime64("2026-11-25")).astype(int))

    stepping(of_a_day)


def spent() -> float:
    begun = perf_counter()
    sum(range(10_000))  # of some tens of nanoseconds two runs may take equally many
    STATE.spent += time.perf_counter() - begun
    return 1.0


def told() -> float:
    print("early" if perf_counter() - STATE.begun < 1000 else "late")
    return 1.0


def around() -> Callable[[], float]:
    from time import monotonic

    begun = monotonic()
    return lambda: 1.0 if monotonic() - begun < 1000 else 2.0


CLOCKS: dict[str, Callable[[], float]] = {
    "imported around it": around(),
    "told": told,
    "since the start": lambda: 1.0 if perf_counter() - STATE.begun < 1000 else 2.0,
    "hour": lambda: 1.0 + time.time() // 3600 % 24,
    "days": lambda: 1.0 + time.time_ns() // (86400 * 10**9) % 2**20,
    "spent": spent,
    "now": lambda: 1.0 + moment.now().year,
    "utc": lambda: 1.0 + datetime.datetime.now(datetime.UTC).timestamp() // 3600,
    "utcnow": lambda: 1.0 + moment.utcnow().year,
    "today": lambda: 1.0 + date.today().toordinal(),
    "local": lambda: 1.0 + time.localtime().tm_yday,
    "text": lambda: 1.0 + int(time.strftime("%j")),
    "inner": lambda: float(sum(moment.now().year for _ in "ab")),
    "none": lambda: 1.0 + time.localtime(None).tm_yday,
    "greenwich": lambda: 1.0 + time.gmtime().tm_yday,
    "old text": lambda: float(time.ctime()[-4:]),
    "tuple": lambda: float(time.asctime()[-4:]),
    "process": lambda: 1.0 + time.process_time() // 3600,
    "thread": lambda: 1.0 + time.thread_time() // 3600,
    "of the system": lambda: 1.0 + time.clock_gettime(time.CLOCK_REALTIME) // 3600 % 24,
    "of NumPy": lambda: 1.0 + float(np.datetime64("now").astype(int) // 3600 % 24),
    "today of NumPy": lambda: 1.0 + float(np.datetime64("today", "D").astype(int)),
    "in nanoseconds": lambda: 1.0 + time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 3600 // 10**9,
}


@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
@pytest.mark.parametrize("name", CLOCKS)
def test_a_step_that_goes_by_the_clock_is_refused(name: str) -> None:
    STATE.begun, STATE.spent = perf_counter(), 0.0
    with pytest.raises(
        UnsupportedError, match="second time|otherwise|something (else|different)|another num"
    ):
        stepping(CLOCKS[name])


BETWEEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "monotonic": (time.monotonic, 1000),
    "datetime": (lambda: moment.now(), datetime.timedelta(seconds=1000)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_the_time_between_two_lines_may_be_compared(name: str) -> None:
    clock, long = BETWEEN[name]

    def factor() -> float:
        begun = clock()
        return 3.0 if clock() - begun > long else 2.0

    assert stepping(factor).ops


def test_a_step_may_make_dates_of_its_own() -> None:
    """While the clock is set, what stands for the class makes true dates, and knows them."""
    january, plain = moment(2026, 1, 31), [type(moment(2026, 1, 31))]

    def factor() -> float:
        made = january + datetime.timedelta(days=1)
        assert made == moment.strptime("2026-02-01", "%Y-%m-%d") == moment(2026, 2, 1)
        assert type(moment(2026, 2, 1)) in plain
        assert isinstance(january, moment)
        assert isinstance(january, date)
        assert issubclass(moment, date)
        assert time.strftime("%Y", time.gmtime(0)) == "1970"
        assert moment.fromtimestamp(0, datetime.UTC).year == 1970
        return 2.0

    assert stepping(factor).ops


def test_other_threads_and_libraries_see_the_true_time() -> None:
    seen: list[float] = []
    with clock_set(3, []):
        other = threading.Thread(target=lambda: seen.append(time.time()))
        other.start()
        other.join()
        seen.append(email.utils.parsedate_to_datetime(email.utils.formatdate()).timestamp())
        later = time.time()
    now = time.time()
    assert all(abs(each - now) < 1000 for each in seen)
    assert abs(later - now - 3 * APART_S) < 1000


@pytest.mark.parametrize("is_returned", [True, False])
def test_seconds_that_a_step_returns_or_adds_up_are_called_a_clocks(is_returned: bool) -> None:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spent = {"forward": 0.0}

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        begun = perf_counter()
        loss = torch.nn.functional.mse_loss(model(x), y)
        seconds = perf_counter() - begun
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_returned:
            return {"loss": loss, "seconds": seconds}
        spent["forward"] += seconds
        return loss

    named = "it returns another number" if is_returned else "another number in 'spent.forward'"
    with pytest.raises(UnsupportedError, match=f"(?s){named}.*fast.step_s has the seconds") as e:
        capture(step, x, y)
    assert e.value.code == "E804"

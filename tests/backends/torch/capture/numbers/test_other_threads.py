"""Threads that a step starts: refused by name, whoever starts them."""

import concurrent.futures
import multiprocessing.pool
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import telling


def by_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def by_timer(work: Callable[[], Any]) -> None:
    timer = threading.Timer(0.0, work)
    timer.start()
    timer.join()


def by_executor(work: Callable[[], Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: work(), [0]))


def by_pool(work: Callable[[], Any]) -> None:
    with multiprocessing.pool.ThreadPool(1) as pool:
        pool.map(lambda _: work(), [0])


def refused(tell: Callable[..., Any]) -> UnsupportedError:
    step, args = telling(tell)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code == "E801"
    return caught.value


@pytest.mark.parametrize("start", [by_thread, by_timer, by_executor, by_pool])
def test_a_step_that_has_others_do_something_is_refused(start: Callable[..., Any]) -> None:
    done: list[int] = []
    error = refused(lambda loss, model: start(lambda: done.append(1)))
    assert "starts a thread" in error.message or "gives work to a pool" in error.message
    assert "test_other_threads.py" in error.details["source"]
    assert not done


def test_a_thread_of_a_library_that_meets_a_tensor_is_refused() -> None:
    library: dict[str, Any] = {"Thread": threading.Thread}
    exec(
        compile("def run(f):\n t = Thread(target=f)\n t.start()\n t.join()", "<library>", "exec"),
        library,
    )
    quiet, threading.excepthook = threading.excepthook, lambda _args: None
    try:
        error = refused(lambda loss, model: library["run"](lambda: loss + 1))
    finally:
        threading.excepthook = quiet
    assert "computes with a tensor in another thread" in error.message


def test_threads_that_were_there_go_on_as_they_like() -> None:
    begin, end, found = threading.Event(), threading.Event(), []

    def work() -> None:
        begin.wait()
        thread = threading.Thread(target=lambda: found.append(torch.ones(2).sum().item()))
        thread.start()
        thread.join()
        end.set()

    other = threading.Thread(target=work)
    other.start()

    def tell(loss: torch.Tensor, model: Any) -> None:
        begin.set()
        end.wait()

    step, args = telling(tell)
    capture(step, *args)
    other.join()
    assert found == [2.0]

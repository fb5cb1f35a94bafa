"""An arena: places for tensors, memory that counts while a step runs alone."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pardnn.backends.torch.arena import Arena, Layout
from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.backends.torch.runtime.memory.fixed_places import placed_arrival
from pardnn.backends.torch.runtime.memory.limits import data_bytes
from pardnn.graph.ir import Tensor

MIB = 1 << 20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory of Linux")


def layout(mib: int, most: int | None = None) -> Layout:
    """Two tensors, one in each half."""
    pair = [Tensor(name=name, bytes=mib << 19, shape=(mib << 17,), dtype="float32")
            for name in ("a", "b")]  # fmt: skip
    places = ((pair[0], 0), (pair[1], mib << 19))
    limit = None if most is None else most * MIB
    return Layout(mib * MIB, limit, places, made_bytes=0, has_room=True)


@linux
def test_places_count_while_they_are_open() -> None:
    torch.ones(8 << 20).min()  # starts torch's threads, whose stacks count
    arena, first, before = Arena(), layout(64), data_bytes()
    arena.open(first)
    a, b = arena.places["a"], arena.places["b"]
    assert b.data_ptr() - a.data_ptr() == 32 * MIB
    b.fill_(1.0)
    a.fill_(2.0)
    assert b.min() == 1.0
    assert data_bytes() - before > 60 * MIB
    arena.close()
    assert data_bytes() - before < 4 * MIB
    arena.open(first)
    assert arena.places["a"] is a


@linux
@pytest.mark.parametrize(("most", "is_kept"), [(None, True), (64, True), (63, False)])
def test_programs_take_turns_in_the_memory(most: int | None, is_kept: bool) -> None:
    arena, before = Arena(), data_bytes()
    arena.open(layout(64))
    arena.close()
    arena.open(layout(16, most))
    assert arena.places["b"].nbytes == 8 * MIB
    assert (data_bytes() - before > 60 * MIB) == is_kept
    arena.close()
    arena.open(layout(128))
    assert arena.places["b"].nbytes == 64 * MIB
    assert data_bytes() - before < 132 * MIB


@linux
def test_a_forked_process_does_not_have_it() -> None:
    arena = Arena()
    arena.open(layout(64))
    held = data_bytes()
    pid = os.fork()
    if not pid:
        os._exit(data_bytes() > held - 60 * MIB)
    assert os.waitpid(pid, 0)[1] == 0


def test_without_memory_there_are_no_places() -> None:
    arena = Arena()
    arena.open(layout(1 << 30))
    assert arena.places == {}
    arena.close()
    arena.open(layout(2))
    assert sys.platform != "linux" or set(arena.places) == {"a", "b"}


@linux
def test_between_steps_the_system_may_take_the_pages() -> None:
    def lazily_free_mib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return int(next(each.split()[1] for each in lines if each.startswith("LazyFree"))) >> 10

    arena, first, before = Arena(), layout(64), lazily_free_mib()
    arena.open(first)
    for place in arena.places.values():
        place.fill_(1.0)
    arena.close()
    assert lazily_free_mib() - before > 60


@linux
def test_a_freed_place_must_be_alone() -> None:
    arena = Arena()
    arena.open(layout(2))
    arena.check_freed(["a", "x"])
    view = arena.places["a"].view(-1, 2)
    with pytest.raises(AssertionError):
        arena.check_freed(["a"])
    del view
    assert torch.equal(arena.places["a"], arena.places["a"])
    arena.check_freed(["a"])


@linux
def test_another_thread_may_look_at_the_frames_that_had_a_place() -> None:
    """A frame that somebody holds keeps its variables after its function has returned."""
    arena, caller = Arena(), threading.get_ident()
    arena.open(layout(2))
    runs, seen = threading.Event(), threading.Event()

    def look() -> None:
        runs.wait(10)
        frame = sys._current_frames()[caller]
        seen.set()
        time.sleep(0.1)
        del frame

    def work() -> None:
        view = arena.places["a"].view(-1, 2)
        runs.set()
        assert seen.wait(10)
        assert view.dim() == 2

    thread = threading.Thread(target=look)
    thread.start()
    work()
    arena.check_freed(["a"])
    thread.join()


@linux
def test_a_message_arrives_in_its_place() -> None:
    """With gaps in the tensor, its place spans them."""
    arena, given, env = Arena(), list[Any](), dict[str, Any]()
    shape, strides, span = (4, 8), (16, 1), 4 * (3 * 16 + 8)
    tensor = Tensor(name="x", bytes=4 * 32, shape=shape, dtype="float32", strides=strides)
    spec = MessageSpec(
        number=0, tensor="x", source=1, target=0, bytes=span, dtype="float32", shape=shape,
        strides=strides, producer="x", consumer="y",
    )  # fmt: skip
    allocate = placed_arrival(spec, lambda _spec, place: given.append(place) or place, arena)
    allocate(env)
    arena.open(Layout(4096, None, ((tensor, 0),), made_bytes=0, has_room=True))
    allocate(env)
    assert given[0] is None
    assert (given[1].shape, given[1].stride()) == (shape, strides)
    assert env["x"].data_ptr() == arena.places["x"].data_ptr()
    assert arena.places["x"].untyped_storage().nbytes() == span

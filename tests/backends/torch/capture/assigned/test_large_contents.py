"""Arrays and sets beyond what is always compared: found if the step reads them, else left alone."""

import array
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.assigned import large_contents
from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.cluster import Cluster
from pardnn.errors import UnsupportedError

SIZE = 1 << 18
Scale = Callable[[], Any]


def training(scale: Scale) -> tuple[Callable[..., Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean() * scale()
        loss.backward()
        optimizer.step()
        return loss

    return step, [model, optimizer, torch.randn(8, 4)]


def read_by(scale: Scale) -> list[str]:
    step, args = training(scale)
    return pardnn.capture(step, *args).step_notes.get("contents", [])


class Slotted:
    __slots__ = ("table",)

    def __init__(self, table: Any) -> None:
        self.table = table


class OfClass:
    table: Any = None


def memory_map(path: Path) -> Any:
    return np.memmap(path / "data", dtype="float64", mode="w+", shape=(SIZE,))


def default(table: Any) -> Scale:
    def scale(held: Any = table) -> float:
        return 1 + held[5]

    return scale


def of_class(table: Any) -> Scale:
    OfClass.table = table
    held = OfClass()
    return lambda: 1 + held.table[5]


ZEROS = np.zeros(SIZE)
NUMBERS = set(range(1 << 17))
HELD, PAIR, SLOTS = SimpleNamespace(table=ZEROS), (1, ZEROS), Slotted(ZEROS)
FLAGS, CELLS = bytearray(8 * SIZE), (ctypes.c_double * SIZE)()
DOUBLES, VIEW = array.array("d", [0.0]) * SIZE, memoryview(bytearray(8 * SIZE))
READING: dict[str, Scale] = {
    "item": lambda: 1 + float(ZEROS[5]),
    "sum": lambda: 1 + float(ZEROS.sum()),
    "function": lambda: 1 + float(np.mean(ZEROS)),
    "threshold": lambda: 2.0 if (ZEROS > 3).any() else 1.0,
    "C code": lambda: 1 + float(np.asarray(ZEROS)[5]),
    "its class": lambda: 1 + float(ZEROS[5]) if isinstance(ZEROS, np.ndarray) else 1.0,
    "attribute": lambda: 1 + float(HELD.table[5]),
    "tuple": lambda: 1 + float(PAIR[1][5]),
    "slot": lambda: 1 + float(SLOTS.table[5]),
    "default": default(ZEROS),
    "class attribute": of_class(ZEROS),
    "tensor": lambda: 1 + torch.from_numpy(ZEROS[5:7]).sum(),
    "set": lambda: 2.0 if -1 in NUMBERS else 1.0,
    "intersection": lambda: 1.0 + len({-1} & NUMBERS),
    "subset": lambda: 2.0 if {-1} <= NUMBERS else 1.0,
    "bytearray": lambda: 1.0 + FLAGS[7],
    "ctypes": lambda: 1.0 + CELLS[7],
    "array": lambda: 1.0 + DOUBLES[7],
    "memoryview": lambda: 1.0 + VIEW[7],
}


@pytest.mark.parametrize("name", READING)
def test_what_a_step_reads_is_found(name: str) -> None:
    assert len(read_by(READING[name])) == 1


def test_a_memory_map_that_is_read_is_found(tmp_path: Path) -> None:
    table = memory_map(tmp_path)
    assert read_by(lambda: 1 + float(table[5])) == ["table"]


UNREAD: dict[str, Scale] = {
    "length": lambda: len(HELD.table) / SIZE,
    "shape": lambda: HELD.table.shape[0] / HELD.table.size,
    "other": lambda: 1.0 if HELD is not None and HELD.table is not None else 2.0,
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_a_step_does_not_read_is_not_compared(name: str) -> None:
    assert not read_by(UNREAD[name])
    assert HELD.table is ZEROS


def test_of_many_contents_only_those_that_are_read_are_compared() -> None:
    rows = [np.zeros(100_000, dtype=np.uint8) for _ in range(30)]
    assert read_by(lambda: 1 + float(rows[27][5]) + float(np.asarray(rows[28])[5])) == [
        "rows.27",
        "rows.28",
    ]


def test_other_threads_read_the_real_content_and_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[float] = []
    inserted = large_contents._inserted

    @contextlib.contextmanager
    def reading(*args: Any) -> Iterator[None]:
        with inserted(*args):
            thread = threading.Thread(target=lambda: found.append(float(HELD.table[5])))
            thread.start()
            thread.join()
            yield

    monkeypatch.setattr(large_contents, "_inserted", reading)
    assert not read_by(UNREAD["length"])
    assert found == [0.0]


def test_beyond_the_limit_a_step_is_refused_unless_the_array_is_read_only() -> None:
    table = np.zeros(3 << 20)
    with pytest.raises(UnsupportedError) as caught:
        read_by(lambda: 1 + float(table[5]))
    assert caught.value.code == "E801"
    assert "'table'" in str(caught.value)
    assert "24.00 MiB" in str(caught.value)
    assert caught.value.details["source"].startswith("test_large_contents.py:")
    table.flags.writeable = False
    assert not read_by(lambda: 1 + float(table[5]))


def test_the_limit_is_for_all_that_is_read() -> None:
    one, other = np.zeros(5 << 18), np.zeros(3 << 18)
    assert read_by(lambda: 1 + float(one[5]) + float(other[5])) == ["one", "other"]
    one, other = np.zeros(5 << 18), np.zeros(7 << 18)
    with pytest.raises(UnsupportedError, match="14.00 MiB, and 1 more, 24.00 MiB in all") as caught:
        read_by(lambda: 1 + float(one[5]) + float(other[5]))
    assert "'other'" in str(caught.value)


@pytest.mark.parametrize("kind", ["attribute", "tensor"])
def test_the_advised_rewrites_work(kind: str) -> None:
    table = np.zeros(3 << 20, dtype="float32")
    held = SimpleNamespace(number=float(table[5]), tensor=torch.from_numpy(table))
    assert not read_by(lambda: 1 + (held.number if kind == "attribute" else held.tensor[5]))


def test_what_is_read_is_guarded_and_of_the_rest_the_extent() -> None:
    table, rest = np.zeros(SIZE), bytearray(8 * SIZE)
    guards = Guards(lambda x: x * table[0] * len(rest), [torch.ones(2)], [0], read=["table"])
    table[5], rest[5] = 1.0, 1
    assert [each.name for each in guards.changes({})] == ["table"]
    table[5] = 0.0
    rest += b"more"
    assert [each.name for each in guards.changes({})] == ["the extent of rest"]


def test_a_change_between_calls_is_followed() -> None:
    table = np.ones(SIZE)
    losses: list[list[float]] = []
    for is_parallel in (False, True):
        step, args = training(lambda: float(table[5]))
        table[5], run = 1.0, step
        if is_parallel:
            graph = pardnn.capture(step, *args)
            plan = pardnn.plan(graph, Cluster.uniform(1), algorithm="single", costs="v100")
            fast = pardnn.parallelize(step, *args, plan=plan, costs="v100")
            run = lambda *args, fast=fast: fast(args[-1])  # noqa: E731
        losses.append([])
        for number in range(3):
            table[5] = 1.0 + number
            losses[-1].append(run(*args).item())
    assert losses[0] == losses[1]

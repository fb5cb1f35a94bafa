"""Functions of packages that a step logs to, and what packages count in their modules."""

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.user_step.guards.library import MOST_ITEMS
from pardnn.errors import PardnnError, UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, telling

TRACKER = """
rows = []

def log(row, step=None):
    rows.append([row, step])

def save_row(row):
    rows.append(row)

def last():
    return len(rows) + 1.0

class Run:
    def log(self, row):
        rows.append(row)

def begin():
    global log
    log = Run().log
"""


@pytest.fixture
def _tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A package whose module takes what it is told, as those that keep experiments have one."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "trackerlib.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("trackerlib", None)


def logs(way: str) -> Callable[..., None]:
    tracker = importlib.import_module("trackerlib")
    if way == "method":
        tracker.begin()
    holder, log = SimpleNamespace(tracker=tracker), tracker.log

    def tell(loss, model):
        if way == "held":
            holder.tracker.log({"loss": loss.item(), "text": f"{loss.item():.2f}"}, step=1)
        elif way == "function":
            log({"loss": loss.detach(), "more": [1, None, model[0].bias.norm().item()]})
        else:
            import trackerlib

            trackerlib.log({"loss": loss.item()})

    return tell


@pytest.mark.usefixtures("_tracker")
@pytest.mark.parametrize(
    ("read", "name"),
    [(lambda tracker: tracker.last(), "last"), (lambda tracker: 1.0 + len(tracker.rows), "rows")],
    ids=["function", "list"],
)
def test_what_a_step_logs_is_not_read_in_it(read: Callable[[Any], float], name: str) -> None:
    """Ranks log after each step: the second step would read what capture found."""
    tracker = importlib.import_module("trackerlib")
    model = torch.nn.Linear(2, 2)

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean() * read(tracker)
        loss.backward()
        tracker.log({"loss": loss.item()})
        return loss

    with pytest.raises(UnsupportedError, match=rf"E804 .*trackerlib\.{name}"):
        capture(step, model, torch.randn(3, 2))


@pytest.mark.usefixtures("_tracker")
@pytest.mark.parametrize("way", ["held", "function", "method", "imported"])
def test_functions_of_packages_that_log_are_called_after_each_step(way: str) -> None:
    tracker = importlib.import_module("trackerlib")

    def make() -> Entry:
        tracker.rows.clear()
        return telling(logs(way))

    assert_as_eager(make, state=lambda _: tracker.rows, steps=3)


@pytest.mark.usefixtures("_tracker")
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda lib, loss, model: lib.save_row({"loss": loss.item()}), "save_row"),
        (lambda lib, loss, model: lib.log({"image": SimpleNamespace(loss=loss)}), "log"),
    ],
)
def test_what_is_saved_and_other_objects_are_refused(call: Any, what: str) -> None:
    tracker = importlib.import_module("trackerlib")
    step, args = telling(lambda loss, model: call(tracker, loss, model))
    with pytest.raises(
        UnsupportedError, match=rf"calls trackerlib.{what} \(.*test_library_tells.py:"
    ):
        capture(step, *args)
    assert not tracker.rows


@pytest.mark.usefixtures("_tracker")
def test_a_graph_names_no_function_that_the_step_does_not_log_to() -> None:
    tracker = importlib.import_module("trackerlib")
    step, args = telling(logs("held"))
    graph = capture(step, *args)
    (told,) = (each["tell"] for each in graph.step_notes["effects"])
    assert told[:2] == ["trackerlib.log", ""]
    for other in ("trackerlib.save_row", "os.remove", "trackerlib.begin"):
        told[0] = other
        with pytest.raises(PardnnError, match=r"E505|E402"):
            Binding(step, args, graph, torch.device("cpu"))
    assert not tracker.rows


COUNTER = """
n, first, last, rows, counts, cache = 0, None, 0.0, [], {"n": 0}, {}

class Registry:
    def __init__(self):
        self.n = 0

registry = Registry()

def count():
    global n
    n += 1

def keep():
    rows.append(1)

def note():
    counts["n"] += 1

def register():
    registry.n += 1

def deeper():
    count()

def look():
    global first
    first = first or 1.0
    cache[len(cache)] = 1
"""


@pytest.mark.parametrize(
    ("called", "changed"),
    [
        ("count", "n"), ("keep", "rows"), ("note", "counts.n"), ("register", "registry.n"),
        ("deeper", "n"), ("look", None),
    ],
)  # fmt: skip
def test_what_a_package_counts_in_its_module_is_refused(
    called: str, changed: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What its first call alone sets, and dictionaries that grow, are caches."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "counterlib.py").write_text(COUNTER)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "counterlib", raising=False)
    found = getattr(importlib.import_module("counterlib"), called)
    step, args = telling(lambda loss, model: found())
    if changed is None:
        capture(step, *args)
    else:
        with pytest.raises(UnsupportedError, match=f"the step changes counterlib.{changed} of an"):
            capture(step, *args)
    sys.modules.pop("counterlib")


@pytest.mark.usefixtures("_tracker")
def test_a_function_whose_result_is_used_is_not_told() -> None:
    tracker = importlib.import_module("trackerlib")
    tracker.log = types.FunctionType(_halved.__code__, vars(tracker), "log")
    tracker.log.__module__ = "trackerlib"
    tracker.log.__code__ = _halved.__code__.replace(co_filename=tracker.__file__)
    step, args = telling(lambda loss, model: tracker.log(loss) * 2)
    assert "effects" not in capture(step, *args).step_notes


def _halved(value: Any) -> Any:
    return value / 2


def test_a_step_that_saves_is_refused(tmp_path: Path) -> None:
    step, args = telling(lambda loss, model: torch.save(model.state_dict(), tmp_path / "m.pt"))
    with pytest.raises(UnsupportedError, match=r"fast.save\(path\)") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"


@pytest.mark.usefixtures("_tracker")
def test_containers_of_packages_are_guarded() -> None:
    """A list and a dictionary of a package's module: changes between calls were not seen."""
    tracker = importlib.import_module("trackerlib")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() * tracker.rates[-1] * tracker.settings["scale"]

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss

    vars(tracker).update(rates=[1.0] * MOST_ITEMS, settings={"scale": 1.0, "other": 0.0})
    x, fast = torch.randn(3, 2), pardnn.parallelize(step)
    for change in (lambda: None, lambda: tracker.rates.__setitem__(-1, 2.0),
                   lambda: tracker.settings.update(scale=3.0)):  # fmt: skip
        change()
        expected = loss_of(x).item()
        assert fast(model, optimizer, x).item() == expected

"""Containers of classes and of other modules: filled on each rank, or refused and left as is."""

import collections
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.user_step.object_graph import walk_objects
from pardnn.backends.torch.user_step.shared_containers import shared_containers
from pardnn.errors import UnsupportedError, UserCodeError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager, small, telling


class Sum:
    def __init__(self) -> None:
        self.total, self.all = 0.0, list[float]()

    def __repr__(self) -> str:
        return f"{self.total} {self.all}"


class Slotted:
    __slots__ = ("last", "total")

    def __init__(self) -> None:
        self.total, self.last = 0.0, None

    def __repr__(self) -> str:
        return f"{self.total} {self.last}"


class Tree(dict[str, Any]):
    size = 0


class Meter:
    """Its containers are shared by all meters."""

    history: dict[str, list[Any]] = collections.defaultdict(list)  # noqa: RUF012
    epochs: dict[str, list[Any]] = {"loss": []}  # noqa: RUF012
    last: collections.deque[Any] = collections.deque(maxlen=2)  # noqa: RUF012
    made: dict[str, Any] = {}  # noqa: RUF012
    best = Sum()
    by_name: dict[str, Sum] = {"loss": Sum()}  # noqa: RUF012
    of_objects: dict[str, Sum] = collections.defaultdict(Sum)  # noqa: RUF012
    slotted = Slotted()
    counts = np.zeros(2)
    drawn = random.Random(0)
    order = collections.OrderedDict(a=1, b=2)  # noqa: RUF012
    tree = Tree()
    namespace = types.SimpleNamespace(n=0)
    module: Any = nn.Linear(1, 1)
    local: Any = threading.local()
    warned = False

    def note(self, loss: torch.Tensor) -> None:
        self.last.append(f"{loss.item():.3f}")


class Special(Meter):
    pass


settings: Any = types.ModuleType("settings_of_a_test")
settings.Sums = type("Sums", (), {"__module__": __name__, "total": 0.0, "all": []})
settings.total, settings.unused, settings.best = 0.0, [], Sum()
package: Any = types.ModuleType("package_of_a_test")
package.settings = settings
log: list[Any] = []
special: Any = Special()


def reset() -> None:
    Meter.history, Meter.epochs = collections.defaultdict(list), {"loss": [0.5]}
    Meter.last.clear()
    Meter.made.clear()
    settings.log, settings.losses = [], {"loss": []}
    settings.Sums.all.clear()
    globals()["log"] = settings.log  # as `from settings import log` binds it


def held() -> Any:
    found = Meter.history, Meter.epochs, Meter.last, Meter.made, settings.Sums.all
    objects = Meter.best, Meter.by_name, Meter.of_objects, settings.best, Meter.slotted
    of_module = settings.log, settings.losses, settings.total, hasattr(settings, "last")
    return *found, *objects, *of_module


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)
    reset()


def by_key(loss: torch.Tensor) -> None:
    Meter.history["loss"].append(loss.item())


def in_a_tuple(loss: torch.Tensor) -> None:
    Meter.epochs["loss"].append((1, None, loss.item()))


def of_a_base(loss: torch.Tensor) -> None:
    special.note(loss)


def of_a_class_in_a_module(loss: torch.Tensor) -> None:
    settings.Sums.all.append(loss.item())


def of_a_module(loss: torch.Tensor) -> None:
    settings.log.append(loss.detach())


def by_name(loss: torch.Tensor) -> None:
    log.append(loss.item())


def under_two_names(loss: torch.Tensor) -> None:
    log.append(loss.item())
    settings.log.append("by the other name")


def in_one_of_a_module(loss: torch.Tensor) -> None:
    settings.losses["loss"].append({"value": loss.item()})


def of_a_module_in_a_package(loss: torch.Tensor) -> None:
    package.settings.log.append(loss.item())


def of_a_module_imported_in_the_step(loss: torch.Tensor) -> None:
    import settings_of_a_test

    settings_of_a_test.log.append(loss.item())


def cleared_first(loss: torch.Tensor) -> None:
    settings.log.clear()
    settings.log.extend([loss.item(), 2])


FOLLOWED = [
    by_key, in_a_tuple, of_a_base, of_a_class_in_a_module, of_a_module, in_one_of_a_module,
    of_a_module_in_a_package, of_a_module_imported_in_the_step, under_two_names, cleared_first,
]  # fmt: skip


def made(note: Callable[[torch.Tensor], Any]) -> tuple[Any, tuple[Any, ...], Any]:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[Any] = []
    reset()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        more = note(loss)
        losses.append(loss.item())
        return loss, more

    return step, (model, optimizer, x, y), held


@pytest.mark.parametrize("note", FOLLOWED)
def test_what_it_puts_there_is_followed(note: Any) -> None:
    assert assert_leaves_as_eager(lambda: made(note)) == 1


def test_each_rank_fills_its_own() -> None:
    def tell(loss: torch.Tensor, _model: Any) -> None:
        for note in FOLLOWED[:-2]:
            note(loss)

    def make() -> Any:
        reset()
        return telling(tell)

    def between(i: int) -> Any:
        if i == 1:
            settings.log, Meter.epochs["loss"] = ["anew"], []
        if i == 2:
            Meter.history = collections.defaultdict(list)
        return {}

    assert_as_eager(make, between, state=lambda _: held(), sizes=(1, 2), steps=4, is_followed=True)


def test_paths_of_a_step_fill_different_ones() -> None:
    class Local:
        every: list[Any] = []  # noqa: RUF012
        at: list[Any] = []  # noqa: RUF012

    def tell(loss: torch.Tensor, _model: Any, i: int) -> None:
        if i % 3 == 2:
            Local.every.append((i, loss.item()))
        else:
            Local.at.append(loss.item())
            Meter.history["loss"].append(loss.item())

    def make() -> Any:
        reset()
        Local.every.clear()
        Local.at.clear()
        return *telling(tell, 0), lambda: [held(), Local.every, Local.at]

    assert assert_leaves_as_eager(make, 7, lambda i: {4: i}) == 3  # as for any container


def test_one_that_the_user_replaces_between_calls_is_filled_from_then_on() -> None:
    kept: list[Any] = []

    def note(loss: torch.Tensor) -> None:
        by_key(loss)
        in_a_tuple(loss)
        of_a_base(loss)
        of_a_module(loss)

    def between(i: int, _args: Any) -> None:
        if i == 2:
            kept[:] = Meter.history, Meter.epochs, Meter.last, settings.log
            Meter.history, settings.log = collections.defaultdict(list), ["anew"]
            Meter.epochs = {"loss": []}
            Meter.last = collections.deque(maxlen=3)
        if i == 4:
            Special.last = collections.deque()  # hides that of the base

    def make() -> Any:
        kept.clear()
        if "last" in vars(Special):
            del Special.last
        return *made(note)[:2], lambda: [held(), kept, Special.last]

    assert assert_leaves_as_eager(make, 6, between=between) <= 3
    del Special.last


@pytest.mark.parametrize("note", [of_a_module, by_name])
def test_one_that_is_removed_between_calls_is_missed_as_by_eager_steps(note: Any) -> None:
    step, args, _ = made(note)
    fast = parallelize(step, *args, device="cpu", decide=lambda g, k, _: random_plan(g, k))
    fast(*args[2:])
    del settings.log, globals()["log"]
    with pytest.raises(UserCodeError, match="'log'"):
        fast(*args[2:])
    fast.close()


def test_one_that_is_returned_is_the_users_own() -> None:
    def note(loss: torch.Tensor) -> Any:
        of_a_module_in_a_package(loss)
        return package.settings.log

    assert_leaves_as_eager(lambda: made(note))


def test_a_check_that_may_raise_after_it_notes_nothing_twice() -> None:
    def note(loss: torch.Tensor) -> None:
        by_key(loss)
        if loss.item() > 1e6:
            raise ValueError("too large")
        in_a_tuple(loss)

    assert_leaves_as_eager(lambda: made(note))


def read(loss: torch.Tensor) -> None:
    settings.log.append(loss.item())
    Meter.made["n"] = len(settings.log)


def sorted_again(loss: torch.Tensor) -> None:
    Meter.history["loss"].append(loss.item())
    Meter.history["loss"].sort()


def of_objects(loss: torch.Tensor) -> None:
    settings.log.append(types.SimpleNamespace(loss=loss.item()))


def of_an_object_of_a_class(loss: torch.Tensor) -> None:
    Meter.best.total += loss.item()


def of_an_object_in_a_dictionary(loss: torch.Tensor) -> None:
    Meter.by_name["loss"].all.append(loss.item())


def of_an_object_made_at_once(loss: torch.Tensor) -> None:
    Meter.of_objects["loss"].total += loss.item()


def of_an_object_of_a_module(loss: torch.Tensor) -> None:
    settings.best.total += loss.item()


def in_slots(loss: torch.Tensor) -> None:
    Meter.slotted.total += loss.item()


def a_tensor_in_slots(loss: torch.Tensor) -> None:
    Meter.slotted.last = loss.detach()


def in_an_array(loss: torch.Tensor) -> None:
    Meter.counts[0] += 1


def out_of_a_generator(loss: torch.Tensor) -> None:
    Meter.drawn.random()


def to_an_order(loss: torch.Tensor) -> None:
    Meter.order.move_to_end(next(iter(Meter.order)))


def beside_items(loss: torch.Tensor) -> None:
    Meter.tree.size += 1


def of_a_namespace(loss: torch.Tensor) -> None:
    Meter.namespace.n += 1


def of_a_module_in_a_class(loss: torch.Tensor) -> None:
    Meter.module.calls = getattr(Meter.module, "calls", 0) + 1


def of_a_thread(loss: torch.Tensor) -> None:
    Meter.local.n = getattr(Meter.local, "n", 0) + 1


def counted(loss: torch.Tensor) -> None:
    Meter.epochs["loss"][0] += loss.item()


def to_a_number_in_a_package(loss: torch.Tensor) -> None:
    package.settings.total += loss.item()


def to_a_number_imported_in_the_step(loss: torch.Tensor) -> None:
    import settings_of_a_test

    settings_of_a_test.total += loss.item()


def to_a_new_name_in_a_package(loss: torch.Tensor) -> None:
    package.settings.last = loss.item()


@pytest.mark.parametrize(
    "note",
    [
        read,
        sorted_again,
        of_objects,
        of_an_object_of_a_class,
        of_an_object_in_a_dictionary,
        of_an_object_made_at_once,
        of_an_object_of_a_module,
        in_slots,
        a_tensor_in_slots,
        in_an_array,
        out_of_a_generator,
        to_an_order,
        beside_items,
        of_a_namespace,
        of_a_module_in_a_class,
        of_a_thread,
        counted,
        to_a_number_in_a_package,
        to_a_number_imported_in_the_step,
        to_a_new_name_in_a_package,
    ],
)
def test_any_other_change_is_refused_and_taken_back(note: Any) -> None:
    step, args, _ = made(note)
    before = repr(held())
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert repr(held()) == before


def test_what_a_flag_of_a_class_lets_happen_once() -> None:
    def note(loss: torch.Tensor) -> None:
        if not Meter.warned:
            Meter.warned = True
            Meter.last.append(7)
            special.seen = loss.item()

    def make() -> Any:
        Meter.warned, special.seen = False, 0.0
        return *made(note)[:2], lambda: [Meter.warned, Meter.last, special.seen]

    assert assert_leaves_as_eager(make) == 2


@pytest.mark.parametrize("note", [of_an_object_of_a_class, in_slots, counted])
def test_the_line_that_changes_it_is_named(note: Any) -> None:
    step, args, _ = made(note)
    line = note.__code__.co_firstlineno + 1
    with pytest.raises(UnsupportedError, match=rf"test_shared_containers\.py:{line}\b"):
        capture(step, *args)


def test_numbers_of_a_class_that_only_a_module_holds_are_counted() -> None:
    def note(loss: torch.Tensor) -> None:
        package.settings.Sums.total += loss.item()

    def make() -> Any:
        settings.Sums.total = 0.0
        step, args, _ = made(note)
        return step, args, lambda: settings.Sums.total

    assert assert_leaves_as_eager(make) == 1


def test_a_table_that_the_first_step_fills_may_be_in_a_class() -> None:
    def note(_loss: torch.Tensor) -> None:
        if "table" not in Meter.made:
            Meter.made["table"] = types.SimpleNamespace(size=3)

    step, args, _ = made(note)
    capture(step, *args)
    assert Meter.made["table"].size == 3


def test_a_global_put_together_anew_and_returned_is_refused_by_name() -> None:
    model, x, y = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log: list[Any] = []

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        nonlocal log
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        log = [*log, (1, loss.item())]
        return loss, log

    with pytest.raises(UnsupportedError, match="E804"):
        capture(step, model, optimizer, x, y)


def test_only_containers_that_code_names_are_looked_at() -> None:
    Meter.epochs["inner"] = [[1], [2]]  # a list of lists is data

    def step(count: collections.Counter[str], model: nn.Module) -> None:
        settings.log.append(Special.epochs)
        model.dump_patches.append(count.most_common())

    found = shared_containers(walk_objects(step, [collections.Counter(), nn.Linear(1, 1)]))
    of_class = f"{__name__}.Meter.epochs"
    names = [name for name, _, _ in found]
    within = [f"{of_class}.{each}" for each in ("loss", "inner")]
    assert names == [*["settings_of_a_test.log"] * 2, of_class, of_class, *within]

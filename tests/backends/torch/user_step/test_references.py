"""What a step reads through weak references, members of sets, keys, shared values and modes."""

import array
import contextlib
import ctypes
import functools
import gc
import logging
import multiprocessing
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch

from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.user_step.object_graph import walk_objects, walk_value
from pardnn.errors import UnsupportedError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_leaves_as_eager, left_by, weighed


@pytest.fixture
def _new_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what is alive before a test: a look for what C++ holds goes through all objects.

    It takes seconds with what all tests import.
    """
    old, all_objects = gc.get_objects(), gc.get_objects
    ids = {*map(id, old)}  # they are kept, so no new object has any of these
    ids |= {id(old), id(ids)}

    def new() -> list[Any]:
        return [each for each in all_objects() if id(each) not in ids]

    monkeypatch.setattr(gc, "get_objects", new)


class Held:
    """An object that no attribute of the step leads to."""

    def __init__(self) -> None:
        self.scale = 1.0

    def scaled(self) -> float:
        """Return the number that changes."""
        return self.scale


def assert_follows(
    weigh: Callable[[Any], Any], change: Callable[[int], Any], steps: int = 3
) -> None:
    def between(i: int, args: Any) -> None:
        change(i)

    assert_leaves_as_eager(lambda: weighed(weigh), steps, between=between)


MADE: dict[str, Callable[[Held], Any]] = {
    "ref": weakref.ref,
    "method": lambda held: weakref.WeakMethod(held.scaled),
    "proxy": weakref.proxy,
    "WeakSet": lambda held: weakref.WeakSet([held]),
    "WeakKeyDictionary": lambda held: weakref.WeakKeyDictionary({held: 2}),
    "WeakValueDictionary": lambda held: weakref.WeakValueDictionary({"a": held}),
    "set": lambda held: {held},
    "frozenset": lambda held: frozenset([held]),
    "keys": lambda held: {held: 1},
    "array of objects": lambda held: np.array([held], dtype=object),
}
READS: dict[str, Callable[[Any], float]] = {
    "ref": lambda made: made().scale,
    "method": lambda made: made()(),
    "proxy": lambda made: made.scale,
    "WeakValueDictionary": lambda made: made["a"].scale,
}


def test_single_dispatch_is_followed_and_what_is_registered_later() -> None:
    @functools.singledispatch
    def scale(_value: Any) -> float:
        return 1.0

    scale.register(int, lambda _value: 2.0)

    def change(i: int) -> None:
        scale.register(list, lambda _value: 3.0 + i // 2)

    assert_follows(lambda loss: loss * scale([]) * scale(1), change)


def test_objects_behind_references_are_guarded() -> None:
    """Each is changed before a step of its own: one that is not guarded would be read as it was."""
    held = [Held() for _ in MADE]
    made = [make(each) for make, each in zip(MADE.values(), held, strict=True)]
    reads = [READS.get(kind, _sum) for kind in MADE]

    def weigh(loss: Any) -> Any:
        for each, read in zip(made, reads, strict=True):
            loss = loss * read(each)
        return loss

    def change(i: int) -> None:
        for k, each in enumerate(held):
            each.scale = 2.0 if k == i - 1 else 1.0

    assert_follows(weigh, change, steps=len(held) + 1)


def _sum(made: Any) -> float:
    return sum(each.scale for each in made)


def test_a_number_that_a_step_counts_behind_a_reference_is_written() -> None:
    def make() -> Any:
        held = Held()
        ref, items = weakref.ref(held), weakref.WeakKeyDictionary({held: 1.0})

        def weigh(loss: Any) -> Any:
            ref().scale += 1  # type: ignore[union-attr]
            items[held] *= 0.5
            return loss * items[held]

        step, args, _ = weighed(weigh)
        return step, args, lambda: [held.scale, list(items.values())]

    assert assert_leaves_as_eager(make, 4) == 1


def test_what_holds_bytes_is_compared_by_its_content() -> None:
    of_array, of_ctypes = array.array("d", [1.0]), ctypes.c_double(1.0)
    shared, view = multiprocessing.Value("d", 1.0), memoryview(array.array("d", [1.0]))
    assert_follows(lambda x: x * of_array[0], lambda i: of_array.__setitem__(0, 1.0 + i), 2)
    assert_follows(lambda x: x * of_ctypes.value, lambda i: setattr(of_ctypes, "value", 1.0 + i), 2)
    assert_follows(lambda x: x * shared.value, lambda i: setattr(shared, "value", 1.0 + i), 2)
    assert_follows(lambda x: x * view[0], lambda i: view.__setitem__(0, 1.0 + i), 2)


def test_a_step_that_writes_such_bytes_is_refused() -> None:
    shared = multiprocessing.Value("d", 1.0)

    def weigh(loss: Any) -> Any:
        shared.value += 1
        return loss

    with pytest.raises(UnsupportedError, match="the step changes Python state"):
        assert_follows(weigh, lambda i: None)


def test_an_event_and_the_level_of_a_logger_are_guarded() -> None:
    event, log = threading.Event(), logging.getLogger("of a step")
    log.setLevel(logging.INFO)
    assert_follows(
        lambda x: x * 2 if event.is_set() else x, lambda i: event.set() if i == 2 else event.clear()
    )
    assert_follows(
        lambda x: x * 2 if log.isEnabledFor(logging.DEBUG) else x,
        lambda i: log.setLevel(logging.DEBUG if i == 2 else logging.INFO),
    )


def test_seed_and_state_of_a_generator_are_guarded() -> None:
    generator = torch.Generator()
    assert_follows(
        lambda x: x * (1 + generator.initial_seed() % 5), lambda i: generator.manual_seed(i // 2)
    )
    assert_follows(
        lambda x: x * (1 + float(generator.get_state()[24])),
        lambda i: generator.manual_seed(5 + i // 2),
    )


def test_records_below_the_level_are_lost_and_those_above_are_told() -> None:
    class Kept(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.kept.append(record.getMessage())

    def make() -> Any:
        log = logging.getLogger("of a step that tells")
        log.setLevel(logging.INFO)
        log.handlers = [Kept()]

        def weigh(loss: Any) -> Any:
            log.debug(f"at {loss.item():.3f}")
            log.debug("also at %s", f"{loss.item()}")
            return loss

        step, args, _ = weighed(weigh)
        return step, args, lambda: log.handlers[0].kept

    def between(i: int, args: Any) -> None:
        logging.getLogger("of a step that tells").setLevel([logging.INFO, logging.DEBUG][i == 2])

    assert assert_leaves_as_eager(make, 4, between=between) == 2


def test_other_code_and_keyword_defaults_of_a_function_are_seen() -> None:
    def weigh(loss: Any, *, scale: float = 1.0) -> Any:
        return loss * scale

    def tripled(loss: Any, *, scale: float = 1.0) -> Any:
        return loss * 3 * scale

    codes = weigh.__code__, tripled.__code__
    assert_follows(lambda x: weigh(x), lambda i: setattr(weigh, "__code__", codes[i == 2]))
    defaults: dict[str, Any] = weigh.__kwdefaults__  # type: ignore[assignment]
    assert_follows(lambda x: weigh(x), lambda i: defaults.update(scale=1.0 + i), 2)


class Doubled(torch.overrides.TorchFunctionMode):
    """Doubles what `torch.tanh` gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.tanh else found


@pytest.mark.parametrize(
    "around",
    [
        Doubled,
        lambda: torch.device("cpu"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x),
    ],
)
def test_modes_around_a_call_are_seen(around: Callable[[], Any]) -> None:
    def make() -> Any:
        return weighed(lambda x: x * torch.ones(()))

    def calls(step: Any, args: Any) -> list[Any]:
        def one(i: int) -> Any:
            with around() if i == 2 else contextlib.nullcontext():
                return step(*args)

        return left_by(one, None, 4)

    step, args, _ = make()
    expected = calls(step, args)
    step, args, _ = make()
    fast = parallelize(step, *args, device="cpu", decide=lambda graph, n, _: random_plan(graph, n))
    assert calls(fast, args[2:]) == expected
    assert fast.captures == 2
    fast.close()


SCALE = {"forward": 1.0, "backward": 1.0}


@torch.library.custom_op("pardnn_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE["forward"]


def scaled_backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * SCALE["backward"]


scaled.register_fake(torch.empty_like)
scaled.register_autograd(scaled_backward)


@pytest.mark.parametrize(
    "weigh", [lambda x: scaled(x) * 2, lambda x: torch.ops.pardnn_tests.scaled(x) * 2]
)
@pytest.mark.parametrize("key", SCALE)
def test_what_a_custom_op_reads_may_change(weigh: Callable[[Any], Any], key: str) -> None:
    try:
        assert_follows(weigh, lambda i: SCALE.update({key: 1.0 + i // 2}))
    finally:
        SCALE.update(forward=1.0, backward=1.0)


def _registered() -> Callable[[float], None]:
    """Give torch a function that nothing of Python's holds; return what sets its factor."""
    factor = 1.0

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    LIBRARY.define("registered(Tensor x) -> Tensor")
    LIBRARY.impl("registered", run, "CompositeImplicitAutograd")
    return set_factor


LIBRARY = torch.library.Library("pardnn_tests_of_cpp", "DEF")


@pytest.mark.usefixtures("_new_objects_alone")
def test_what_a_function_in_a_library_of_torch_reads_may_change() -> None:
    set_factor = _registered()
    assert_follows(
        lambda x: torch.ops.pardnn_tests_of_cpp.registered(x) * 2,
        lambda i: set_factor(1.0 + i // 2),
    )


class Kernel:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


LIBRARY.define("object(Tensor x) -> Tensor")
LIBRARY.define("partial(Tensor x) -> Tensor")
LIBRARY.define("again(Tensor x) -> Tensor")


def give(name: str, kernel: Any) -> None:
    """Let torch alone hold a kernel."""
    LIBRARY.impl(name, kernel, "CompositeImplicitAutograd")


@pytest.mark.usefixtures("_new_objects_alone")
@pytest.mark.parametrize("name", ["object", "partial"])
def test_what_an_object_in_a_library_of_torch_reads_may_change(name: str) -> None:
    kernel = Kernel()
    held = weakref.ref(kernel)
    give(name, kernel if name == "object" else functools.partial(Kernel.__call__, kernel))
    del kernel
    op = {
        "object": lambda x: torch.ops.pardnn_tests_of_cpp.object(x) * 2,
        "partial": lambda x: torch.ops.pardnn_tests_of_cpp.partial(x) * 2,
    }[name]
    assert_follows(op, lambda i: setattr(held(), "factor", 1.0 + i // 2))


@pytest.mark.usefixtures("_new_objects_alone")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_kernel_given_again_is_followed() -> None:
    factors = iter([1.0, 1.0, 3.0] * 2)

    def change(_i: int) -> None:
        factor = next(factors)
        give("again", lambda x: x * factor)

    give("again", lambda x: x)
    assert_follows(lambda x: torch.ops.pardnn_tests_of_cpp.again(x) * 2, change)


def test_functions_given_to_a_custom_op_again_are_followed() -> None:
    def change(i: int) -> None:
        factor = 1.0 + i // 2
        scaled.register_autograd(lambda _context, gradient: gradient * factor)

    try:
        assert_follows(lambda x: scaled(x) * 2, change)
    finally:
        scaled.register_autograd(scaled_backward)


SETTINGS_OF_A_SCALER: dict[str, Callable[[Any], Any]] = {
    "enabled": lambda scaler: setattr(scaler, "_enabled", False),
    "growth factor": lambda scaler: scaler.set_growth_factor(3.0),
    "growth interval": lambda scaler: scaler.set_growth_interval(1),
    "backoff factor": lambda scaler: scaler.load_state_dict(
        scaler.state_dict() | {"backoff_factor": 0.25}
    ),
}


@pytest.mark.parametrize("name", SETTINGS_OF_A_SCALER)
def test_settings_of_a_gradient_scaler_may_change(name: str) -> None:
    def make() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=7.0, growth_interval=2)  # pyright: ignore[reportPrivateImportUsage]
        _, (model, optimizer, x, y), held = weighed(lambda x: x)

        def step(model: Any, optimizer: Any, x: Any, y: Any, scaler: Any) -> Any:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        left = lambda: [held, scaler._scale, scaler._growth_tracker]  # noqa: E731
        return step, (model, optimizer, x, y, scaler), left

    def between(i: int, args: Any) -> None:
        if i == 2:
            SETTINGS_OF_A_SCALER[name](args[4])

    def given(i: int) -> dict[int, Any]:
        return {2: torch.full((4, 5), float("inf"))} if i == 3 else {}

    assert_leaves_as_eager(make, 6, given, between=between)


@pytest.mark.parametrize(
    "spec",
    [
        dict,
        list,
        tuple,
        set,
        torch.Tensor,
        torch.nn.Linear,
        torch.optim.SGD,
        type,
        types.FunctionType,
    ],
)
def test_what_only_says_that_it_is_a_container_or_module_is_refused(spec: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"'held\.callback' is a Mock that says") as caught:
        walk_value({"callback": Mock(spec=spec)}, "held")
    assert caught.value.code == "E801"


def test_mocks_of_other_classes_are_objects() -> None:
    for each in (Mock(), MagicMock(), Mock(spec=logging.Logger), Mock(spec=random.Random)):
        assert id(each) in walk_value([each], "held").seen


@pytest.mark.parametrize("kind", ["ref", "WeakSet"])
def test_an_object_that_nothing_else_holds_is_gone_as_in_eager(kind: str) -> None:
    held, references = [Held()], list[Any]()

    def between(i: int, _args: Any) -> None:
        if i == 0:
            held[:] = [Held()]
            references[:] = [MADE[kind](held[0])]
        if i == 2:
            held.clear()

    def exists() -> bool:
        (found,) = references
        return len(found) > 0 if kind == "WeakSet" else found() is not None

    between(0, ())
    made = lambda: weighed(lambda loss: loss * (2 if exists() else 1))  # noqa: E731
    assert assert_leaves_as_eager(made, 4, between=between) > 1


def test_a_proxy_of_an_object_that_is_gone_is_refused() -> None:
    held = Held()
    proxy = weakref.proxy(held)
    del held
    with pytest.raises(UnsupportedError, match="'proxy' is a weak proxy of an object that is gone"):
        walk_objects(lambda: proxy.scale, [])

"""Guards on values without keys: classes, modes, the environment, what locks and caches answer."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import logging
import operator
import os
import weakref
from collections.abc import Callable, Collection, Container, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C._dynamo.guards import GlobalStateGuard
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.rng.generator import read_state
from pardnn.backends.torch.user_step.code_names import is_library_file
from pardnn.backends.torch.user_step.dict_versions import class_address
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.references import traced_functions

_DEVICES = ("cpu", "cuda")
#: Flag of a class made by a Python statement: `Py_TPFLAGS_HEAPTYPE`.
HEAP_TYPE = 1 << 9

#: Modes that TorchDynamo's guard does not compare, or not always.
_UNSEEN: dict[str, Callable[[], Any]] = {
    f"get_autocast_dtype({device!r})": functools.partial(torch.get_autocast_dtype, device)
    for device in _DEVICES
} | {
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "torch.get_default_device(), or a function mode": lambda: _function_modes(),
    "torch.autograd.graph.saved_tensors_hooks": lambda: _saved_tensors_hooks(),
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    # These decide which attention kernel is called.
    "torch.backends.cuda.math_sdp_enabled()": torch._C._get_math_sdp_enabled,
    "torch.backends.cuda.flash_sdp_enabled()": torch._C._get_flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch._C._get_mem_efficient_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch._C._get_cudnn_sdp_enabled,
}  # fmt: skip
#: Modes that are globals of torch's modules: name -> their namespace and keys.
MODE_GLOBALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "torch.backends.mha": (vars(torch.backends.mha), ["_is_fastpath_enabled"]),
}
#: Process-wide settings that decide which calls torch makes or their types, by name.
_MODES: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
} | {
    f"is_autocast_enabled({device!r})": functools.partial(torch.is_autocast_enabled, device)
    for device in _DEVICES
} | _UNSEEN  # fmt: skip


#: Quick checks that all of `_UNSEEN` is unchanged: after a step, none of the getters' code is in
#: the processor's cache, and each takes 1 to 7 us. Of function modes and hooks, which are rarely
#: set, they only tell whether there are any.
_GLANCES: tuple[Callable[[], Any], ...] = (
    torch._C._len_torch_function_stack,
    functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True),
    *(get for name, get in _UNSEEN.items() if name.startswith("torch.backends")),
    torch.is_inference_mode_enabled,
    *(
        functools.partial(torch.get_autocast_dtype, device)
        for device in _DEVICES
        if device == "cpu" or torch.backends.cuda.is_built()
    ),
)
_NOTHING_SET = [0, None]


class ModeGuards:
    """Guards on torch's modes, as they are now."""

    def __init__(self) -> None:
        self._then = {name: get() for name, get in _MODES.items()}
        self._glance = list(map(operator.call, _GLANCES))
        self._others = GlobalStateGuard()

    def changes(self) -> list[Change]:
        """Return what has changed."""
        # TorchDynamo's guard compares most in one call, but autocast's types only while it is on.
        if self._others.check():
            glance = list(map(operator.call, _GLANCES))
            if glance == self._glance and glance[:2] == _NOTHING_SET:
                return []
        others = GlobalStateGuard()
        now = {name: get() for name, get in _MODES.items()}
        found = [Change(name, then, now[name]) for name, then in self._then.items()
                 if now[name] != then]  # fmt: skip
        self._others = self._others if found else others  # it compares more than is needed here
        return found


class ClassGuards:
    """Guards on the classes of objects: `model.__class__ = Other` changes no attribute."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._objects: list[Any] = []
        self._then: list[type] = []

    def add(self, name: str, value: Any) -> None:
        """Guard the class of an object; it is left out if Python does not allow changing it.

        Args:
            name: Dotted path to it.
            value: Any object.
        """
        if type(value).__flags__ & HEAP_TYPE:
            self._names.append(name)
            self._objects.append(value)
            self._then.append(type(value))

    def pointers(self) -> list[tuple[int, int]]:
        """Return the addresses of the words that hold classes, and those of the classes."""
        return list(zip(map(class_address, self._objects), map(id, self._then), strict=True))

    def changes(self) -> Iterator[Change]:
        """Yield the objects whose class has changed."""
        now = list(map(type, self._objects))
        if now != self._then:
            for name, then, kind in zip(self._names, self._then, now, strict=True):
                if kind is not then:
                    yield Change(f"the class of {name}", then.__qualname__, kind.__qualname__)


#: What code asks of threads, processes and locks; `lock.acquire(False)` asks, too.
_OF_THREADS = ("is_set", "locked", "is_alive", "exitcode", "broken", "get_value")


def asked_of(path: str, value: Any, used: Container[str]) -> tuple[str, Callable[[], Any]] | None:
    """Return what to compare of an object without visible attributes; None for any other.

    Args:
        path: Dotted path to it.
        value: Any object.
        used: Names that the user's code mentions.
    """
    if _is_users_cache(value):
        what = f"how often {path}.cache_clear() was called, and its tensors were written"
        return what, Kept(value)
    if isinstance(value, logging.Logger):
        return f"the level of {path}", functools.partial(_level, value)
    if isinstance(value, torch.library.CustomOpDef):
        return f"the functions of {path}", functools.partial(traced_functions, value)
    if isinstance(value, BaseException):
        return f"{path}.args", functools.partial(getattr, value, "args")
    if isinstance(value, torch.Generator):  # a loader's advances at each call, and no step reads it
        if "get_state" in used:
            return f"the state of {path}", functools.partial(generator_state, value)
        return (f"{path}.initial_seed()", value.initial_seed) if "initial_seed" in used else None
    return _asked_of_threads(path, value, used)


def _asked_of_threads(
    path: str, value: Any, used: Container[str]
) -> tuple[str, Callable[[], Any]] | None:
    if not type(value).__module__.startswith(("threading", "_thread", "multiprocessing")):
        return None
    kind = type(value)
    asked = [name for name in _OF_THREADS if name in used and hasattr(kind, name)]
    if "acquire" in used and hasattr(kind, "locked"):
        asked.append("locked")
    return (f"{path}.{asked[0]}", functools.partial(_answers, value, asked)) if asked else None


def _answers(value: Any, names: list[str]) -> list[Any]:
    found = (getattr(value, name) for name in names)
    return [each() if callable(each) else each for each in found]


def generator_state(generator: torch.Generator) -> str:
    """Return a hash of the state of a random generator, even while a step is traced."""
    return hashlib.blake2b(read_state(generator), digest_size=8).hexdigest()


class Clearings:
    """Counts how often a cache was cleared, after which eager steps fill it again.

    Args:
        cache: A cache of `functools`; clearing it resets its call counts, which otherwise only
            grow.
    """

    def __init__(self, cache: Any) -> None:
        self._cache, self._calls, self._count = weakref.ref(cache), 0, 0
        _CLEARINGS.add(self)

    def look_again(self) -> None:
        """Accept the current call counts."""
        self._calls = _calls(self._cache())

    def __call__(self) -> int:
        """Return how often the cache was seen cleared since this was made."""
        calls = _calls(self._cache())
        self._count += calls < self._calls
        self._calls = calls
        return self._count


class Kept:
    """What a user does to a cache between calls: clears it, or writes into its tensors.

    A step finds the tensors that are there when it is captured, and makes those that are not.

    Args:
        cache: A cache of `functools`.
    """

    def __init__(self, cache: Any) -> None:
        if _calls(cache) < _MARK:  # on ranks that do not capture, where a clearing must show, too
            _mark(cache)
        self._cache, self._clearings = weakref.ref(cache), Clearings(cache)
        self._calls, self._tensors = -1, list[torch.Tensor]()

    def __call__(self) -> tuple[int, int]:
        """Return how often the cache was cleared, and how often its tensors were written."""
        cache = self._cache()
        if cache is not None and (calls := _calls(cache)) != self._calls:
            self._calls, self._tensors = calls, _tensors_in(cache)
        return self._clearings(), sum(each._version for each in self._tensors)


def _tensors_in(cache: Any) -> list[torch.Tensor]:
    """Return the tensors in a cache whose writes are counted, but those of a trace."""
    leaves = pytree.tree_leaves(gc.get_referents(cache))
    return [
        each
        for each in leaves
        if isinstance(each, torch.Tensor)
        and not isinstance(each, FakeTensor)
        and not each.is_inference()
    ]


#: Instances that are alive.
_CLEARINGS: weakref.WeakSet[Clearings] = weakref.WeakSet()
#: Calls that a cache counts after this package has cleared it, so that a user's clearing shows.
_MARK = 256


def _calls(cache: Any) -> int:
    if cache is None:  # it is gone, so nobody can clear it
        return 0
    hits, misses, *_ = cache.cache_info()
    return hits + misses


def clear_caches(caches: Collection[Any]) -> None:
    """Clear caches of `functools` without any guard taking it for the user's doing."""
    for each in _CLEARINGS if caches else ():
        each()
    for cache in caches:
        cache.cache_clear()
        _mark(cache)
    for each in _CLEARINGS if caches else ():
        each.look_again()


def _mark(cache: Any) -> None:
    """Make a cache count calls that run no code: their argument is none of its function's."""
    function = cache.__wrapped__
    if type(function) is FunctionType and not function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        for _ in range(_MARK):
            with contextlib.suppress(TypeError):
                cache(**{"a mark of pardnn": None})


def _is_users_cache(value: Any) -> bool:
    if not isinstance(value, functools._lru_cache_wrapper):
        return False
    code = getattr(value.__wrapped__, "__code__", None)
    return code is not None and not is_library_file(code.co_filename)


def _level(logger: logging.Logger) -> int:
    """Return the lowest level of the records that a logger takes."""
    return max(logger.getEffectiveLevel(), logger.manager.disable + 1)


def _function_modes() -> Any:
    """Return the kinds of torch's function modes; a default device counts as one, as a text."""
    count = torch._C._len_torch_function_stack()
    modes = map(torch._C._get_function_stack_at, range(count))
    return [(type(mode), str(getattr(mode, "device", ""))) for mode in modes]


def _saved_tensors_hooks() -> Any:
    """Return the code of the functions that pack what autograd saves; None without."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks and [getattr(hook, "__code__", hook) for hook in hooks]


def reads_environment(names: Collection[str]) -> bool:
    """Whether code with some names may read the environment."""
    return "environ" in names or "getenv" in names


def environment() -> dict[Any, Any]:
    """Return the variables of the environment as Python keeps them, for a guard on all of them."""
    return os.environ._data  # type: ignore[attr-defined]


def shared_values(names: Collection[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the names of values shared by all code, and functions that return them.

    Args:
        names: Texts that the code mentions: variables of the environment may be among them.
    """
    if reads_environment(names):
        for name in sorted(filter(_is_encodable, names)):
            if name.isupper() or name in os.environ:
                yield f"os.environ[{name!r}]", functools.partial(os.environ.get, name)


def _is_encodable(name: str) -> bool:
    """Whether a variable of the environment can have a name; half a surrogate pair cannot."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True

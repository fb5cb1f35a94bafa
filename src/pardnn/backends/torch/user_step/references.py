"""What values refer to besides attributes and items: weak references, members, keys, and ops.

A callback in a set, a module used as a key, an object behind a weak reference: a step may depend on
their content as on anything else. The same is true of the functions of a `torch.library.custom_op`
that run while a step is traced, which code refers to only by name; its kernel runs in each step.
Functions, partial functions and callable objects given to a `torch.library.Library` are held only
by torch's C++ code, which does not list them: they are those with one more reference than Python's
objects account for. Text from torch that counts them, and the numbers of the libraries, show when
others are registered.
"""

from __future__ import annotations

import array
import ctypes
import dis
import functools
import gc
import inspect
import sys
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch._library import autograd
from torch._library.custom_ops import OPDEFS

from pardnn.backends.torch.user_step.code_names import (
    is_library_file,
    is_library_function,
    names_in,
)
from pardnn.errors import UnsupportedError, shown
from pardnn.gc_pause import frozen_too

#: Types that change in place and hold only bytes; all values of `ctypes` share one class.
BYTES = (bytearray, array.array, memoryview, ctypes.c_int.__mro__[-2])
#: Types with no content of their own.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, torch.Tensor)
_WEAK_CONTAINERS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_TRACED = ("_abstract_fn", "_setup_context_fn", "_backward_fn")
_CONTAINERS = (dict, list, deque)
#: Methods by which a container's content is read.
_READING = ("__getitem__", "__iter__", "__len__")
_SETTING = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_CALLED = frozenset({types.FunctionType, types.MethodType, functools.partial})
#: Flag of code that takes any number of arguments.
_OPEN = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
#: Namespaces of torch's own ops.
_OWN = frozenset({"aten", "prims", "prim", "torchvision", "quantized", "inductor", "higher_order"})
#: What was registered for each op when its functions were last searched.
_told: dict[tuple[str, str], tuple[Any, ...]] = {}
#: The type of `functools.cmp_to_key`'s objects, written in C.
_KEYS = type(functools.cmp_to_key(min))
#: Classes by which walks and guards decide how to read an object.
_READ = (
    dict, list, tuple, set, frozenset, deque, torch.Tensor, torch.nn.Module, torch.optim.Optimizer,
    torch.amp.GradScaler, functools.partial, types.FunctionType, weakref.ref, np.ndarray,
    array.array, type, types.CellType,
)  # fmt: skip
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


def is_reference(value: Any) -> bool:
    """Whether a value refers to another without holding it."""
    return type(value) in _PROXIES or isinstance(value, weakref.ref)


class Existence:
    """Whether the object of a weak reference or proxy exists, without holding it.

    Args:
        value: The reference.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> bool:
        """Return whether it exists."""
        if isinstance(self._value, weakref.ref):
            return weakref.ref.__call__(self._value) is not None
        return behind_proxy(self._value) is not None


def behind_proxy(value: Any) -> Any:
    """Return the object of a weak proxy, or any other value itself; None if the object is gone."""
    if type(value) not in _PROXIES:
        return value
    try:
        return value.__sizeof__.__self__
    except ReferenceError:
        return None


def followed(value: Any, name: str) -> Any:
    """Return the object of a weak proxy, or any other value itself.

    Args:
        value: Any object but None.
        name: Dotted path to it.

    Raises:
        UnsupportedError: E801, if the proxy's object is gone, or only claims to be of its class;
            E804, if looking into it would change it.
    """
    if (found := behind_proxy(value)) is None:
        raise UnsupportedError(
            f"{shown(name)} is a weak proxy of an object that is gone: any use of it raises "
            "ReferenceError.\nSet it to None, or keep the object.",
            details={"name": name},
        )
    _check_claim(found, name)
    if _is_of_text(type(found)):
        raise UnsupportedError(
            f"{shown(name)} is of a class {type(found).__name__!r} that exec has made in a "
            "namespace without a name,\n"
            "so it passes for one of Python's own, and what it holds is not seen.\n"
            'Give the namespace a name: exec(source, {"__name__": __name__, ...}).',
            details={"name": name},
        )
    if isinstance(found, _CONTAINERS) and (method := _changing_read(type(found))) is not None:
        kind = type(found).__name__
        raise UnsupportedError(
            f"{shown(name)} is a {kind}, whose {method} sets something: items of containers are\n"
            "read at each call, to be compared, and each of these looks would do so, too.\n"
            f"Leave {method} as it is, and count in a method of another name that the step calls:\n"
            "def take(self, key): self.n += 1; return self[key].",
            code="E804",
            details={"name": name},
        )
    return found


def _changing_read(kind: type) -> str | None:
    """Return a container class's method that reads items and sets something; None without one."""
    for name in _READING:
        method = getattr(kind, name)
        is_python = isinstance(method, types.FunctionType)
        if is_python and not is_library_function(method) and _sets(method.__code__):
            return name
    return None


@functools.cache
def _sets(code: types.CodeType) -> bool:
    return any(each.opname in _SETTING for each in dis.get_instructions(code))


@functools.cache
def _is_of_text(kind: type) -> bool:
    """Whether a class made from text is one of Python's own."""
    is_own = kind.__module__ == "builtins"
    return is_own and any(isinstance(each, types.FunctionType) for each in vars(kind).values())


def _check_claim(value: Any, name: str) -> None:
    """Reject a value that claims a class whose content a walk reads, but has no such content.

    `Mock(spec=dict)` is an example. A wrapper around such a value, however, passes reads on.

    Args:
        value: Any object.
        name: Dotted path to it.

    Raises:
        UnsupportedError: E801.
    """
    claimed = value.__class__
    if claimed is type(value) or not isinstance(value, _READ):
        return
    if not issubclass(type(value), claimed) and not hasattr(value, "__wrapped__"):
        kind = type(value).__name__
        raise UnsupportedError(
            f"{shown(name)} is a {kind} that says it is a {claimed.__name__}, and holds nothing of "
            f"one: what it leads to cannot be followed.\nPut a real {claimed.__name__} in its "
            f"place, or a {kind} without a spec.",
            details={"name": name},
        )


def referred(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield references of a value other than attributes and items, with names for them.

    The order of a set's members differs between ranks, so they are named by their types.

    Args:
        value: Any object.
    """
    if getattr(type(value), "is_pardnn_recorder", False):
        return
    if isinstance(value, weakref.ref):
        found = value()
        if found is not None:
            yield type(found).__name__, found
        return
    if isinstance(value, _WEAK_CONTAINERS):
        yield "data", value.data
        return
    if type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        yield "value", value.get_obj()
        return
    if isinstance(value, types.FunctionType):
        yield from _ops_named(names_in(value.__code__))
        return
    if isinstance(value, functools._lru_cache_wrapper):
        yield "__wrapped__", value.__wrapped__
        return
    if type(value) is _KEYS:
        yield from (("cmp_to_key", each) for each in gc.get_referents(value))
        return
    if isinstance(value, torch.library.CustomOpDef):
        yield from ((key, own) for key in _TRACED if (own := getattr(value, key)) is not None)
        return
    if isinstance(value, defaultdict):
        yield "default_factory", value.default_factory
    members: Any = ()
    # By the base type's method: a container that reports its readers is read only by the walk.
    kind = next((k for k in (dict, set, frozenset) if isinstance(value, k)), None)
    if kind is not None:
        members = list(kind.__iter__(value))  # for a dictionary, the keys
    elif isinstance(value, np.ndarray) and value.dtype == object:
        members = value.flat
    yield from ((type(each).__name__, each) for each in members if not isinstance(each, _ATOMS))


def cells(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """Return the variables of a function that it shares with others, by name.

    The cache of `functools.singledispatch` is left out: it follows from the registered functions,
    which are included.
    """
    names, held = function.__code__.co_freevars, function.__closure__ or ()
    is_dispatch = function.__code__.co_filename == functools.singledispatch.__code__.co_filename
    found = zip(names, held, strict=False)
    return [(key, x) for key, x in found if not (is_dispatch and key == "dispatch_cache")]


def registrations(names: Collection[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the custom ops that code calls by name, with getters of their current functions.

    Args:
        names: The names that the user's code mentions.
    """
    if "ops" in names:
        for full in _definitions(names):
            yield f"torch.ops.{full.replace('::', '.')}", functools.partial(_definition, full)
        for space, op in _named(names):
            given = {key for key in torch.library._impls if _op_of(key) == (space, op)}
            yield f"torch.ops.{space}.{op}", functools.partial(_kernels, space, op, given)


def traced_functions(op: torch.library.CustomOpDef) -> tuple[Any, ...]:
    """Return the functions of an op that run while a step is traced."""
    return tuple(getattr(op, key) for key in _TRACED)


def _definition(full: str) -> tuple[Any, ...]:
    op = OPDEFS.get(full)
    return (op,) if op is None else (op, *traced_functions(op))


def _kernels(space: str, op: str, given: Collection[str]) -> tuple[Any, ...]:
    """Return a text of what is registered for an op, and the numbers of those libraries."""
    libraries = list(weakref.finalize._registry.values())  # type: ignore[attr-defined]
    made = (x for x in libraries if x.func is torch.library._del_library)
    numbers = tuple(x.index for x in made if not x.args[1].isdisjoint(given))
    texts = (torch._C._dispatch_dump(f"{space}::{each}") for each in _overloads(space, op))
    return *numbers, *texts


def _overloads(space: str, op: str) -> list[str]:
    found = torch._C._jit_get_operation(f"{space}::{op}")[1] or ()
    return [f"{op}.{name}" if name else op for name in found]


def _op_of(key: str) -> tuple[str, str]:
    """Return the namespace and name of a kernel's op, from its key: `mylib/op.out/CPU`."""
    space, op, _ = key.split("/")
    return space, op.partition(".")[0]


def _definitions(names: Collection[str]) -> list[str]:
    return sorted(full for full in OPDEFS if set(full.split("::")) <= set(names))


def _named(names: Collection[str]) -> list[tuple[str, str]]:
    """Return namespace and name of library ops other than `custom_op`s."""
    given = _ops_of_libraries(frozenset(torch.library._impls))
    found = [(space, op) for space, op in given if space in names and op in names]
    return sorted(each for each in found if "::".join(each) not in OPDEFS)


@functools.lru_cache(maxsize=1)  # a walk calls it for each function; torch has 2,000 ops
def _ops_of_libraries(registered: frozenset[str]) -> frozenset[tuple[str, str]]:
    found = map(_op_of, registered)
    return frozenset(each for each in found if each[0] not in _OWN)


def _ops_named(names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the custom ops that code calls by name: `torch.ops.mylib.op(x)`."""
    if "ops" in names:
        yield from ((full, OPDEFS[full]) for full in _definitions(names))
        for space, op in _named(names):
            yield from ((f"{space}::{op}", each) for each in _registered(space, op))


def _registered(space: str, name: str) -> Iterator[Any]:
    """Yield functions that C++ holds and that may be an op's, by its arguments."""
    packet = getattr(getattr(torch.ops, space), name)
    counts = {len(getattr(packet, each)._schema.arguments) for each in packet.overloads()}
    text = _kernels(space, name, torch.library._impls)
    if _told.setdefault((space, name), text) != text:  # registered again under the same keys
        _told[space, name] = text
        _held_by_cpp.cache_clear()
    functions, backwards = _held_by_cpp(frozenset(torch.library._impls))
    for function in functions:
        code = _code_of(function)
        number = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
        is_partial = isinstance(function, functools.partial)
        # Before the op's arguments, a function may take the dispatch keys and what it is bound to.
        is_open = code is None or is_partial or code.co_flags & _OPEN
        if is_open or counts & {number, number - 1, number - 2}:
            yield function
    yield from backwards


@functools.lru_cache(maxsize=1)  # a walk calls it for each function, and a search takes 0.1 s
def _held_by_cpp(_registered: frozenset[str]) -> tuple[list[Any], list[Any]]:
    """Return the user's callables that C++ holds, and the functions for gradients of ops."""
    with frozen_too():
        objects = gc.get_objects()
    running, frame = set(), sys._getframe()
    while frame is not None:
        running.add(frame.f_code)
        frame = frame.f_back
    kinds = {kind for kind in set(map(type, objects)) if kind in _CALLED or _is_called(kind)}
    found = [x for x in objects if type(x) in kinds and not _is_known(x, running)]
    infos = [x for x in objects if type(x) is autograd.Info]
    ids = set(map(id, found))
    # There are millions of references, most of them to other objects: the loop is in C.
    known = Counter(filter(ids.__contains__, map(id, gc.get_referents(*objects))))
    del objects
    # Three more: of `found`, of `x` and of the call.
    held = [x for x in found if sys.getrefcount(x) - 3 > known[id(x)]]
    of_ops = [f for info in infos for f in (info._backward_fn, info._setup_context_fn) if f]
    return held, of_ops


def _is_known(value: Any, running: Collection[types.CodeType]) -> bool:
    """Whether a function is a library's, or is running, so that its frame holds it, too."""
    code = _code_of(value)
    return code is None or code in running or is_library_file(code.co_filename)


def _is_called(kind: type) -> bool:
    """Whether calling an object of a class runs the user's code."""
    call = inspect.getattr_static(kind, "__call__", None)
    return isinstance(call, types.FunctionType) and not is_library_function(call)


def _code_of(value: Any) -> types.CodeType | None:
    """Return the code that runs when a function, partial or object is called."""
    # By type: what claims to be a partial function may have itself as its `func`.
    while type(value) in (functools.partial, types.MethodType):
        value = value.func if type(value) is functools.partial else value.__func__
    call = (
        value
        if type(value) is types.FunctionType
        else inspect.getattr_static(type(value), "__call__", None)
    )
    return getattr(call, "__code__", None)

"""Names that a step's code may use: attributes, globals and keys, found without running it.

Problem: a guard on every value that a step can reach would fail on values that the step never
reads.
Idea: a call graph by names alone, as in rapid type analysis. Code that may run is the step itself,
every function that it can reach as a value, and every method of a class of a reachable object that
such code names; `forward` and the special methods need not be named. The result is a superset of
the code that runs, equal on all ranks, and takes milliseconds. An attribute whose name is not in it
cannot have been read by name.

Deviation: code that reads attributes by computed names (`getattr` with an expression, `vars`,
`__dict__`) marks the result as open, and then all attributes count.

Complexity: O(code reached).
Source: Bacon and Sweeney, "Fast Static Analysis of C++ Virtual Function Calls", OOPSLA 1996.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import (
    OF_FUNCTIONS,
    calls_by_text,
    codes_of,
    function_of,
    given_to,
    globals_named,
    held_by,
    is_installed_file,
    is_library_function,
    is_library_module,
    lays_out_texts,
    names_in_fields,
    texts_of,
)

#: Methods that run without being named.
_IMPLICIT = frozenset({"forward"})
#: Methods of users' classes that run without being named.
RUN_UNNAMED = frozenset({
    "forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__",
    "__next__", "__contains__", "__missing__", "__bool__", "__float__", "__int__", "__index__",
    "__str__", "__repr__", "__format__", "__hash__", "__eq__", "__lt__", "__le__", "__gt__",
    "__ge__", "__add__", "__sub__", "__mul__", "__pow__", "__truediv__", "__radd__", "__rsub__",
    "__rmul__", "__rtruediv__", "__enter__", "__exit__", "__torch_function__",
})  # fmt: skip
#: Methods that run when an object is made or dropped, or a class derived, if code can reach the
#: class as a value.
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__del__", "__init_subclass__"})
#: Methods that run when an object is copied.
_COPYING = frozenset({"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"})
_COPIES = frozenset({"copy", "deepcopy", "pickle"})
#: The only special methods among others that a training step may run.
_NEVER_RUN = _MAKING | _COPYING | {"__dir__"}
#: Methods that make texts. Nobody decides by those of libraries.
_TEXTS = frozenset({"__repr__", "__str__"})
#: Types whose methods read what the graph records by other means.
_BASES = (object, torch.nn.Module, torch.optim.Optimizer)
#: Libraries whose functions get plain values and read no object of the user's.
CLOSED_LIBRARIES = frozenset({
    "torch", "numpy", "pardnn", "builtins", "functools", "typing", "math",
})  # fmt: skip
_COMPUTED_NAMES = frozenset({
    "getattr", "vars", "dir", "getmembers", "__dict__", "locals", "globals", "attrgetter",
})  # fmt: skip
#: Longer containers are data.
_MAX_ITEMS = 10_000
#: Types with code of their own, besides that of their class.
_WITH_CODE = (
    types.FunctionType, types.MethodType, types.ModuleType, type, staticmethod, classmethod,
    property, functools.cached_property, functools.partial, functools.partialmethod,
)  # fmt: skip
_CALLING = (operator.attrgetter, operator.methodcaller)
#: Types of which two objects may lead to different code.
_SINGLE = (*_WITH_CODE, *OF_FUNCTIONS, *_CALLING)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ADDED = (type, types.ModuleType, property)


@dataclass
class UsedNames:
    """The names in code that may run.

    Attributes:
        names: Attributes, globals, variables and text constants.
        of_users: The names in code outside libraries.
        functions: The user's functions whose globals may be read.
        installed: The same of installed packages.
        spaces: The user's classes and modules that code reaches, in no order.
        is_open: Whether attributes may be read by computed names, so that every name counts.
    """

    names: set[str] = field(default_factory=set)
    of_users: set[str] = field(default_factory=set)
    functions: list[types.FunctionType] = field(default_factory=list)
    installed: list[types.FunctionType] = field(default_factory=list)
    spaces: list[type | types.ModuleType] = field(default_factory=list)
    is_open: bool = False

    def __contains__(self, name: object) -> bool:
        return self.is_open or name in self.names


def used_names(step: Callable[..., Any], objects: Iterable[Any]) -> UsedNames:
    """Return the names that `step` may use on the objects that it can reach.

    Args:
        step: A function, method, partial or callable object.
        objects: All objects reachable from its arguments, closures and globals.
    """
    search = _Search()
    search.add_values((step, *objects))
    search.run()
    return search.found


def users_code(step: Callable[..., Any], objects: Iterable[Any]) -> UsedNames:
    """Return the user's functions that may run, methods among them, and classes and modules.

    Unlike `used_names`, it does not read libraries: a method that a library may call, since one of
    its classes has it, too, counts as named. Takes 1 ms for 2,500 objects.

    Args:
        step: A function, method, partial or callable object.
        objects: All objects that are known to be reachable.
    """
    search = _UsersSearch()
    search.add_values((step, *objects))
    search.run()
    return search.found


class _Search:
    """The search for a fixed point: more names make more methods run, which use more names."""

    def __init__(self) -> None:
        self.found = UsedNames()
        self._functions: dict[int, types.FunctionType] = {}
        self._waiting: list[types.FunctionType] = []
        self._classes: dict[type, None] = {}
        self._modules: dict[int, types.ModuleType] = {}
        self._helpers: dict[int, Any] = {}  # decorators and descriptors
        self._made: set[type] = set()  # the user's classes that are values, and their bases
        self._held: dict[int, Any] = {}  # what classes and modules hold
        self._followed: dict[int, set[str]] = {}  # names of classes and modules

    def add_values(self, values: Iterable[Any]) -> None:
        """Add values that code which may run can reach, except stand-ins for numbers."""
        kinds = set(_SYMBOLS)
        for value in values:
            kind = type(value)
            if kind in kinds and getattr(value, "__class__", None) is kind:
                continue
            self.add_value(value)
            if not issubclass(kind, _SINGLE) and not hasattr(kind, "__wrapped__"):
                kinds.add(kind)  # for others like it, only the class counts, too

    def add_value(self, value: Any) -> None:
        """Add a value that code which may run can reach."""
        if isinstance(value, property):
            for each in filter(None, (value.fget, value.fset, value.fdel)):
                self.add_value(each)
            return
        function = function_of(value)
        if function is not None:
            if id(function) not in self._functions:
                self._functions[id(function)] = function
                self._waiting.append(function)
        elif isinstance(value, type):
            self._add_class(value)
            self._made.update(each for each in value.__mro__ if not _is_of_library(each))
        elif isinstance(value, types.ModuleType):
            if not is_library_module(value):
                self._modules[id(value)] = value
        else:
            if isinstance(value, _CALLING):
                names = [each for each in value.__reduce__()[1] if isinstance(each, str)]
                found = {part for each in names for part in each.split(".")}
                self.found.names |= found
                self.found.of_users |= found
            self._add_class(type(value))

    def _add_class(self, kind: type) -> None:
        own = [each for each in type(kind).__mro__ if not _is_of_library(each)]
        for base in (*kind.__mro__, *own):
            if base not in _BASES and base.__module__ != "builtins":
                self._classes[base] = None

    def run(self) -> None:
        """Follow calls until nothing new is found."""
        size = -1
        while size != (size := self._size()):
            while self._waiting:
                self._read(self._waiting.pop())
            for holder in [*self._classes, *self._modules.values()]:
                followed = self._followed.setdefault(id(holder), set())
                for name, value in list(vars(holder).items()):
                    if name in followed:
                        continue
                    if name in self.found.names or self._runs(holder, name):
                        followed.add(name)
                        is_users = not (isinstance(holder, type) and _is_of_library(holder))
                        self._follow(value, is_users=is_users)
        self.found.spaces = [*self._classes, *self._modules.values()]

    def _runs(self, holder: type | types.ModuleType, name: str) -> bool:
        """Whether a class's or module's item may run without being named."""
        if not isinstance(holder, type) or (name in _TEXTS and _is_of_library(holder)):
            return False
        return runs_unnamed(name) or self._makes(holder, name)

    def _makes(self, holder: type, name: str) -> bool:
        if name in _COPYING:
            return not _is_of_library(holder) and not _COPIES.isdisjoint(self.found.of_users)
        return name in _MAKING and holder in self._made

    def _size(self) -> tuple[int, ...]:
        found = self._functions, self._classes, self._modules, self._made
        return len(self.found.names), *map(len, found)

    def _follow(self, value: Any, *, is_users: bool = True) -> None:
        """Follow what is named, and into containers and objects if the user's code names it."""
        if function_of(value) is not None or isinstance(value, _ADDED):
            self.add_value(value)
        elif is_users and _is_holder(value):
            self._look_into(value)
        elif id(value) not in self._helpers and _is_users_helper(value):
            self._helpers[id(value)] = value
            self._add_class(type(value))
            for item in getattr(value, "__dict__", {}).values():
                self._follow(item)

    def _look_into(self, start: Any) -> None:
        """Follow what an object or container in a class or module holds."""
        stack = [start]
        while stack:
            value = stack.pop()
            if not _is_holder(value):
                self._follow(value)
            elif id(value) not in self._held:
                self._held[id(value)] = value
                kind = type(value)
                if issubclass(kind, dict):
                    stack += dict.values(value)
                elif issubclass(kind, list | tuple):
                    stack += kind.__iter__(value)
                else:
                    self.add_value(value)
                    stack += vars(value).values()

    def _read(self, function: types.FunctionType) -> None:
        is_users = not is_library_function(function)
        for value in held_by(function):
            self._follow(value, is_users=is_users)
        mentioned = _mentioned(function.__code__)
        self.found.names |= mentioned
        if is_users:
            self.found.functions.append(function)
            self.found.of_users |= mentioned
            self.found.is_open |= _is_open(function, mentioned)
            for _, module in imported_modules(function):
                self._follow(module)
        elif (function.__module__ or "").partition(".")[0] in CLOSED_LIBRARIES:
            return
        elif is_installed_file(function.__code__.co_filename):
            self.found.installed.append(function)
        computed = globals_named(function) if is_users else ()
        for name in mentioned.union(computed):
            if name in function.__globals__:
                self._follow(function.__globals__[name], is_users=is_users)


def _is_open(function: types.FunctionType, mentioned: frozenset[str]) -> bool:
    """Whether a user's function may decide by attributes that it reads by computed names.

    Texts that objects make of themselves, as meters do of `__dict__`, do not count.
    """
    if function.__name__ in _TEXTS:
        return False
    code = function.__code__
    return not _COMPUTED_NAMES.isdisjoint(mentioned) or calls_by_text(code) or lays_out_texts(code)


class _UsersSearch(_Search):
    """A search through only the user's own code."""

    def add_value(self, value: Any) -> None:
        """Add a value that code which may run can reach, if it is the user's."""
        function = None if isinstance(value, property) else function_of(value)
        if function is None or not is_library_function(function):
            super().add_value(value)
        elif id(function) not in self._functions:  # a decorator's, such as `torch.no_grad`'s
            self._functions[id(function)] = function
            for held in (*held_by(function), *given_to(function)):
                if function_of(held) is not None:
                    self.add_value(held)

    def _add_class(self, kind: type) -> None:
        if kind not in self._classes and not _is_of_library(kind):
            bases = (*kind.__mro__, *type(kind).__mro__)
            self._classes |= {base: None for base in bases if not _is_of_library(base)}

    def _runs(self, holder: type | types.ModuleType, name: str) -> bool:
        if not isinstance(holder, type) or name in _NEVER_RUN:
            return isinstance(holder, type) and self._makes(holder, name)
        bases = (base for base in holder.__mro__ if _is_of_library(base) and base not in _BASES)
        return (
            self.found.is_open or runs_unnamed(name) or any(hasattr(base, name) for base in bases)
        )


@functools.cache
def _is_of_library(kind: type) -> bool:
    """Whether none of a class's code is the user's; in notebooks, a module has no file."""
    if not is_library_module(sys.modules.get(kind.__module__)):
        return False
    functions = [found for value in vars(kind).values() if (found := function_of(value))]
    wrapped = map(inspect.unwrap, functions)  # some wrap C functions
    return all(is_library_function(x) for x in wrapped if isinstance(x, types.FunctionType))


def imported_modules(function: types.FunctionType) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the modules that a function imports in its own body, by name, once they are loaded."""
    package = function.__globals__.get("__package__") or ""
    for name in _imported_names(function.__code__):
        # For `from . import a`, the code holds "" and "a": the module is the package itself.
        for full in dict.fromkeys([name, f"{package}.{name}".strip(".")]):
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType):
                yield full, module


@functools.cache
def _imported_names(code: types.CodeType) -> tuple[str, ...]:
    found = (at for each in codes_of(code) for at in dis.get_instructions(each))
    return tuple(dict.fromkeys(at.argval for at in found if at.opname == "IMPORT_NAME"))


def _is_holder(value: Any) -> bool:
    """Whether a value of a class or module may lead to other code: a container, a user's object."""
    kind = type(value)  # `isinstance` would believe a stand-in
    if getattr(kind, "is_pardnn_recorder", False):
        return False
    if issubclass(kind, dict | list | tuple):
        return 0 < len(value) <= _MAX_ITEMS
    is_plain = issubclass(kind, _WITH_CODE) or kind.__module__ == "builtins"
    return not is_plain and not _is_of_library(kind) and hasattr(value, "__dict__")


def _is_users_helper(value: Any) -> bool:
    """Whether user methods run when a value is called, or found in a class."""
    found = (getattr(type(value), name, None) for name in ("__call__", "__get__"))
    functions = (each for each in found if isinstance(each, types.FunctionType))
    return any(not is_library_function(each) for each in functions)


def runs_unnamed(name: str) -> bool:
    """Whether a method of this name may run without being named."""
    is_special = name.startswith("__") and name.endswith("__")
    return name in _IMPLICIT or (is_special and name not in _NEVER_RUN)


@functools.cache
def _mentioned(code: types.CodeType) -> frozenset[str]:
    """Return the names and texts of a function's code, and of what is defined in it."""
    found = set[str]()
    for each in codes_of(code):
        found.update(each.co_names, each.co_varnames)
    for text in texts_of(code):
        found.update((text, *names_in_fields(text)))
    return frozenset(found)

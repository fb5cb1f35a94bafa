"""Guards on parameters: their properties besides data, and other tensors in their groups.

Problem: a step depends on `requires_grad`, `grad` and hooks of every parameter, in a module or not,
    and Python reads them only one at a time.
Idea: the first two are read only after a word of memory that holds them has changed
(`tensor_words`); hooks only after any hook was registered anywhere, which torch counts.

Numbers in `param_groups` are read at each call, and tensors there, `Adam(lr=torch.tensor(0.01))`,
are sources of the graph. torch puts the same tensor into the defaults and into every group: it is
one source, even if one of these places gets another tensor later. So a tensor that several places
hold is guarded by identity, and any other only by shape and type.

Complexity: O(parameters) per call.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from pardnn.backends.torch.user_step.code_names import texts_of
from pardnn.backends.torch.user_step.guards.item import (
    VALUES,
    Change,
    ItemGuard,
)
from pardnn.backends.torch.user_step.slots import dotted
from pardnn.backends.torch.user_step.tensor_words import TensorWords
from pardnn.gc_pause import frozen_too

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: What `sys.getrefcount` returns for a node that nobody else holds.
_UNSHARED = 2
#: What is compared of each parameter, as C descriptors.
_READ: dict[str, Callable[[torch.Tensor], Any]] = {
    key: getattr(torch.Tensor, key).__get__ for key in ("requires_grad", "grad", *_HOOKS)
}


class ParameterGuards:
    """Guards on the current settings of parameters.

    Args:
        parameters: Parameters and other trained tensors with their names; the first of each counts.

    Attributes:
        words: What their gradients and `requires_grad` were when last compared.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        names: dict[torch.Tensor, str] = {}
        for name, tensor in parameters:
            names.setdefault(tensor, name)
        self._names, self._tensors = list(names.values()), list(names)
        self._num_hooks = RemovableHandle.next_id
        self.words = TensorWords(self._tensors, gradients=True)
        self._held = {key: list(map(get, self._tensors)) for key, get in _READ.items()}

    def changes(self, *, is_told: bool = False) -> list[Change]:
        """Return what has changed.

        Args:
            is_told: Whether a look in this call has shown that `words` hold.
        """
        found: list[Change] = []
        if not (is_told or self.words.hold()):
            # Noted before the getters run, so that no change goes unnoticed.
            words = TensorWords(self._tensors, gradients=True)
            found = [change for key in ("requires_grad", "grad") for change in self._changes(key)]
            self.words = self.words if found else words
        if RemovableHandle.next_id != self._num_hooks:
            num_hooks = RemovableHandle.next_id
            hooks = [change for key in _HOOKS for change in self._changes(key)]
            if (name := held_node(zip(self._names, self._tensors, strict=True))) is not None:
                hooks.append(Change(f"hooks on the gradient of {name}", "none", "some"))
            if not hooks:
                self._num_hooks = num_hooks
            found += hooks
        return found

    def _changes(self, key: str) -> list[Change]:
        held, get = self._held[key], _READ[key]
        if all(map(operator.is_, map(get, self._tensors), held)):
            return []
        return list(self._rebound(key, held))

    def _rebound(self, key: str, held: Sequence[Any]) -> Iterator[Change]:
        for name, then, now in zip(self._names, held, map(_READ[key], self._tensors), strict=True):
            if then is not now:
                yield Change(f"{name}.{key}", _short_text(then), _short_text(now))


def hook_tables(parameter: torch.Tensor) -> dict[str, Any]:
    """Return what holds the hooks of a parameter, by attribute."""
    return {key: _READ[key](parameter) for key in _HOOKS}


def held_node(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of a leaf whose gradient accumulation node Python holds.

    torch does not list the hooks of a node, and frees a node to which only its leaf refers. So
    whoever has put a hook on one holds it, in an object, a closure or a variable of a running
    function. Takes 20 us a leaf, and a pass over all objects if a node is held, which live graphs
    do, too.

    Args:
        named: Leaves, and other tensors, with their names.
    """
    names, nodes = {}, []
    for name, tensor in named:
        if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, FakeTensor):
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                node = tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            if sys.getrefcount(node) > _UNSHARED:
                nodes.append(node)
                names.setdefault(id(node), name)
    if not nodes:
        return None
    if (found := _in_a_variable(names)) is not None:
        return found
    with frozen_too():
        holders = gc.get_referrers(*nodes)
    others = (h for h in holders if h is not nodes and not isinstance(h, types.FrameType))
    held = (each for holder in others for each in gc.get_referents(holder))
    return next((names[id(each)] for each in held if id(each) in names), None)


def _in_a_variable(names: Mapping[int, str]) -> str | None:
    """Return the name of a leaf whose node a variable of a running function holds.

    The collector does not see such variables. Reading a frame's locals keeps their values, until
    they are read again, in a dictionary that the collector does see: so all frames are read first.

    Args:
        names: The names of the leaves by the id of their node.
    """
    found: list[str] = []
    for frame in sys._current_frames().values():
        at: types.FrameType | None = frame
        while at is not None:
            values = () if at.f_code in _OWN_CODE else list(at.f_locals.values())
            found += [names[id(value)] for value in values if id(value) in names]
            at = at.f_back
        del frame, at  # a frame that refers to itself would keep the nodes
    return next(iter(found), None)


_OWN_CODE = frozenset({held_node.__code__, _in_a_variable.__code__})


def _short_text(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "a tensor"  # a shard's shape differs from rank to rank
    return value if value is None or isinstance(value, bool) else f"a {type(value).__name__}"


def states_of_parameters(
    path: str,
    optimizer: torch.optim.Optimizer,
    used: Collection[str],
    written: Collection[tuple[int, Any]],
) -> Iterator[ItemGuard]:
    """Yield guards on what an optimizer holds for each parameter.

    An optimizer makes states as it needs them, and captured steps follow that. Keys that its own
    code does not contain as text are the user's: new ones count, and so do numbers that no step
    changes.

    Args:
        path: Dotted path to the optimizer.
        optimizer: The optimizer of the step.
        used: As in `tensors_of_groups`.
        written: As in `tensors_of_groups`.
    """
    name, states = f"{path}.state", optimizer.state
    own = _texts_of_class(type(optimizer)) if "state" in used else used

    def is_users(key: Any) -> bool:
        return key in used and key not in own

    def has_users(parameter: Any) -> bool:
        held = states.get(parameter)
        return isinstance(held, dict) and any(map(is_users, held))

    yield ItemGuard(name, states, list(states), has_users)
    for each in (each for each in states.values() if isinstance(each, dict)):
        keys = [
            key for key, value in each.items()
            if isinstance(value, torch.Tensor)
            or (isinstance(value, VALUES) and is_users(key) and (id(each), key) not in written)
        ]  # fmt: skip
        yield ItemGuard(name, each, keys, is_users, is_ordered=True)


@functools.cache
def _texts_of_class(kind: type) -> frozenset[str]:
    """Return the texts in the methods of a class."""
    values = (value for base in kind.__mro__ for value in vars(base).values())
    codes = [inspect.unwrap(x).__code__ for x in values if isinstance(x, types.FunctionType)]
    return frozenset(text for code in codes for text in texts_of(code))


def tensors_of_groups(
    path: str,
    optimizer: torch.optim.Optimizer,
    used: Collection[str],
    written: Collection[tuple[int, Any]],
) -> tuple[list[ItemGuard], list[tuple[str, Callable[[], Any]]]]:
    """Return guards on the tensors of all groups: on their identity and kind.

    Args:
        path: Dotted path to the optimizer.
        optimizer: The optimizer of the step.
        used: Names that the user's code mentions: a new key is a change if it is among them.
        written: Places of numbers that the step itself changes, `held_numbers.place`.
    """
    known = {key for group in optimizer.param_groups for key in group}

    def is_new(group: Any, key: Any) -> bool:
        return key in used and key not in known and (id(group), key) not in written

    named = {f"{path}.param_groups.{i}": g for i, g in enumerate(optimizer.param_groups)}
    defaults = getattr(optimizer, "defaults", {})  # a wrapper may not have called `__init__`
    held = [*defaults.values(), *(x for g in named.values() for x in g.values())]
    count = Counter(id(value) for value in held if isinstance(value, torch.Tensor))
    guards, kinds = [], []
    for name, group in named.items():
        keys = [key for key, value in group.items() if isinstance(value, torch.Tensor)]
        shared = [key for key in keys if count[id(group[key])] > 1]
        guards.append(
            ItemGuard(
                name, group, ["params", *shared], functools.partial(is_new, group), is_ordered=True
            )
        )
        kinds += [(dotted(name, k), functools.partial(_kind_at, group, k)) for k in keys]
    return guards, kinds


def tensors_held(
    path: str, optimizer: torch.optim.Optimizer, used: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the settings and in the state of an optimizer, with their names.

    Args:
        path: Dotted path to the optimizer.
        optimizer: The optimizer of the step.
        used: Names that the user's code mentions; the state is searched only if `state` is one.
    """
    for each in optimizer.state.values() if "state" in used else ():
        held = each.items() if isinstance(each, dict) else ()
        tensors = ((k, x) for k, x in held if isinstance(x, torch.Tensor))
        yield from ((f"{path}.state.{key} of a parameter", tensor) for key, tensor in tensors)
    for i, group in enumerate(optimizer.param_groups):
        tensors = ((k, each) for k, each in group.items() if isinstance(each, torch.Tensor))
        yield from ((f"{path}.param_groups.{i}.{key}", tensor) for key, tensor in tensors)


def _kind_at(group: Mapping[str, Any], key: str) -> Any:
    """Return what a graph takes for granted about a tensor in a group; other values unchanged."""
    value = group.get(key)
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.device, value.requires_grad


def own_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return what was assigned to an optimizer's `step`, below the wrapper of its schedules."""
    step = optimizer.__dict__.get("step")
    step = step.__wrapped__ if hasattr(step, "_wrapped_by_lr_sched") else step
    return None if step is type(optimizer).step else step

"""Lists and dictionaries that a step only fills: `log.append(loss.item())`.

Problem: what the step puts into them differs from step to step and keeps growing; but no later step
depends on it, unless the step reads them.

Idea: each container that the first step has filled is replaced, while the step is traced, by a
recorder: a container of the same type that notes what is put into it and holds nothing. Any other
use of a recorder ends the trace, and the step is traced again with the container itself. Code in C
that bypasses a recorder finds an item that is neither number nor tensor. If a path of the step does
not fill a container that another path fills (`if self.n % 100 == 0: log.append(...)`), it must not
read it either, because its graph would then depend on the content: a recorder shows that, too, and
it is noted that nothing is put there. A container that a step clears before filling it
(`acts.clear()`, then hooks append to it) may be read from then on: it holds only what this step has
put there.

Complexity: one more trace for each container with other uses.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import NUMBERS, slots_of
from pardnn.backends.torch.user_step.object_graph import ObjectGraph

#: Containers within containers deeper than this are not followed.
_MAX_DEPTH = 4
#: A key that is a tensor, in a name.
_OF_TENSOR = re.compile(r"<\d+>")
#: Members that a recorder takes from its type.
_OWN = frozenset({
    "__class__", "__class_getitem__", "__delattr__", "__dir__", "__doc__", "__getattribute__",
    "__hash__", "__init__", "__init_subclass__", "__new__", "__setattr__", "__sizeof__",
    "__subclasshook__",
})  # fmt: skip

#: Called with a container's name, keys into it, a method and its arguments.
Note = Callable[[str, tuple[Any, ...], str, tuple[Any, ...]], None]
#: Whether an item is what it was before a step.
IsSame = Callable[[Any, Any], bool]


class OtherUse(BaseException):
    """A step does more with a container than fill it. `except Exception` does not catch it.

    Args:
        name: The name of the container.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Filled(NamedTuple):
    """A container that the first step has filled.

    Attributes:
        holder: The container.
        content: What it held before.
        added: What the step has put into it; None if that cannot be recorded.
        is_idle: Whether only another path of the step fills it, as far as is known.
    """

    holder: Any
    content: Any
    added: Any
    is_idle: bool = False


def filled_containers(
    objects: ObjectGraph,
    without: Collection[str],
    known: Collection[str],
    stood_for: Mapping[int, torch.Tensor],
    shared: Iterable[tuple[str, Any, Any]] = (),
) -> dict[str, Filled]:
    """Return the containers that the first step has filled with results, by name.

    Args:
        objects: The object graph before it.
        without: Names of containers with other known uses.
        known: Names of those that other paths of the step fill; included if that changes nothing.
        stood_for: By the id of a placeholder, the tensor that it replaces, which is no new item.
        shared: See `shared_containers`.
    """
    is_same = functools.partial(_is_same, stood_for)
    bound = [e for e in objects.stateful if not isinstance(e.value, torch.nn.Module)]
    prefixes = tuple(f"{entry.name}." for entry in bound)
    modules = [e.value for e in objects.stateful if isinstance(e.value, torch.nn.Module)]
    tables = {id(m.__dict__[k]) for m in modules for k in ("_parameters", "_buffers", "_modules")}
    eligible = [x for x in (*objects.contents, *shared) if type(x[1]) in _RECORDERS]
    counts = Counter(name for name, _, _ in eligible)
    eligible = [
        (name, holder, content)
        for name, holder, content in eligible
        if name not in without and counts[name] == 1 and not _OF_TENSOR.search(name)
        if id(holder) not in tables and not name.startswith(prefixes)
    ]
    filled = {
        name: Filled(holder, content, _added(holder, content, is_same))
        for name, holder, content in eligible
        if _is_filled(holder, content, is_same)
    }
    idle = {
        name: Filled(holder, content, [], is_idle=True)
        for name, holder, content in eligible
        if name in known and _is_unchanged(holder, content, is_same)
    }
    return idle | filled


def alike(name: str, filled: Iterable[str]) -> set[str]:
    """Return a name and all that differ from it only in numbers, as those of other layers do."""
    of_all = re.sub(r"\d+", "#", name)
    return {name} | {other for other in filled if re.sub(r"\d+", "#", other) == of_all}


def _is_same(stood_for: Mapping[int, torch.Tensor], now: Any, then: Any) -> bool:
    """Whether an item is the old one or its placeholder."""
    if isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        return all(_is_same(stood_for, a, b) for a, b in zip(now, then, strict=True))
    return now is then or (id(now) in stood_for and stood_for[id(now)] is then)


def _is_filled(holder: Any, content: Any, is_same: IsSame) -> bool:
    """Whether a container has new items, all of which can be added after a step."""
    if isinstance(holder, dict):
        if not content.keys() <= holder.keys():
            return False
        new = dict(_added(holder, content, is_same))
        is_known = all(
            isinstance(content.get(k), NUMBERS) and _is_number(v) for k, v in new.items()
        )
        return not is_known and all(map(is_told, [*new, *new.values()]))
    is_prefix = _begins_with(holder, content, is_same)
    if isinstance(holder, list) and is_prefix:
        return len(holder) > len(content) and is_told(holder[len(content) :])
    return not (is_prefix and len(holder) == len(content)) and is_told(list(holder))


def _is_unchanged(holder: Any, content: Any, is_same: IsSame) -> bool:
    """Whether a container holds what it held, in the same order."""
    if isinstance(holder, dict):
        return [*holder] == [*content] and not _added(holder, content, is_same)
    return len(holder) == len(content) and _begins_with(holder, content, is_same)


def _added(holder: Any, content: Any, is_same: IsSame) -> Any:
    """Return the new items of a container, as a list."""
    if isinstance(holder, dict):
        return [
            x for x in holder.items() if x[0] not in content or not is_same(x[1], content[x[0]])
        ]
    is_prefix = _begins_with(holder, content, is_same)
    return list(holder)[len(content) :] if is_prefix else None


def _begins_with(holder: Any, content: Any, is_same: IsSame) -> bool:
    """Whether a sequence begins with the same objects as before."""
    return len(holder) >= len(content) and all(map(is_same, holder, content))


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) or node_of(value) is not None


def is_told(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, text or tensor, or a container of these, to a bounded depth."""
    if value is None or isinstance(value, str) or _is_number(value):
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter)
    if type(value) not in (list, tuple, dict) or depth > _MAX_DEPTH:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_told(item, depth + 1) for item in items)


@contextlib.contextmanager
def recorders_inserted(
    contents: Iterable[tuple[str, Any, Any]], filled: Mapping[str, Filled], note: Note
) -> Iterator[list[str]]:
    """Put a recorder in place of each container while the context is open.

    Args:
        contents: What the step's objects, classes and modules hold, as in `ObjectGraph.contents`.
        filled: The containers by name.
        note: Called with what the recorders note.

    Yields:
        A list that in the end names the containers that the step has not filled, except those that
        only another path fills.

    Raises:
        OtherUse: The step replaces a container, or it fills one in another way.
    """
    noted: set[str] = set()

    def noting(name: str, keys: tuple[Any, ...], method: str, args: tuple[Any, ...]) -> None:
        noted.add(name)
        note(name, keys, method, args)

    made = {name: _recorder_of(x.holder, noting, name) for name, x in filled.items()}
    slots = {n: slots_of(contents, x.holder) for n, x in filled.items()}
    for name in made:
        for slot in slots[name]:
            slot.set(made[name])
    replaced: list[str] = []
    unfilled: list[str] = []
    try:
        yield unfilled
    finally:
        for name in reversed(made):
            replaced += [name for slot in slots[name] if slot.get() is not made[name]]
            for slot in slots[name]:
                slot.set(filled[name].holder)
    # The step has run to its end.
    grown = [n for n, each in made.items() if _len(each) > 1 and not isinstance(each, _Reopened)]
    used = [*replaced, *grown]
    if used:
        raise OtherUse(used[0])
    within = tuple(f"{name}." for name in noted)
    for name in made:
        if name in noted or name.startswith(within):
            continue
        if filled[name].is_idle:
            is_dict = isinstance(filled[name].holder, dict)
            note(name, (), *(("update", ({},)) if is_dict else ("extend", ([],))))
        else:
            unfilled.append(name)


class _Hidden:
    """A recorder's only item, which only C code can see."""


_HIDDEN = _Hidden()


def _recorder_of(holder: Any, note: Note, name: str, keys: tuple[Any, ...] = ()) -> Any:
    """Return a recorder.

    Args:
        holder: The container that it stands for.
        note: Called with what it notes.
        name: The name of the container, or of the one that holds it.
        keys: The keys that lead from there to it.
    """
    kind = type(holder)
    made: Any = _RECORDERS[kind]()
    made.__dict__.update(pardnn=(note, name, keys, getattr(holder, "default_factory", None)))
    if isinstance(made, dict):
        dict.__setitem__(made, _HIDDEN, _HIDDEN)
    else:
        kind.append(made, _HIDDEN)
    return made


def recorded_name(value: Any) -> str | None:
    """Return the name of the container that a recorder stands for; None for anything else."""
    if not isinstance(value, (*_RECORDERS.values(), _Reopened)):
        return None
    _, name, keys, _ = value.pardnn
    return None if keys else name


def _kind_of(made: Any) -> type:
    """Return the type whose own members see a recorder's content."""
    return next(kind for kind in _REOPENED if isinstance(made, kind))


def _len(made: Any) -> int:
    return _kind_of(made).__len__(made)


def _other_use(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise OtherUse(self.pardnn[1])


def _noted(self: Any, method: str, *args: Any) -> None:
    note, name, keys, _ = self.pardnn
    note(name, keys, method, args)


def _append(self: Any, item: Any) -> None:
    _noted(self, "append", item)


def _append_left(self: Any, item: Any) -> None:
    _noted(self, "appendleft", item)


def _extend(self: Any, items: Any) -> None:
    _noted(self, "extend", list(items))


def _iadd(self: Any, items: Any) -> Any:
    _extend(self, items)
    return self


def _set_item(self: Any, key: Any, value: Any) -> None:
    _noted(self, "__setitem__", key, value)


def _update(self: Any, *args: Any, **kwargs: Any) -> None:
    for key, value in dict(*args, **kwargs).items():
        _set_item(self, key, value)


def _set_default(self: Any, key: Any, default: Any = None) -> Any:
    if type(default) is not list or default:
        _other_use(self)
    note, name, keys, _ = self.pardnn
    return _recorder_of(default, note, name, (*keys, key))


def _get_default(self: Any, key: Any) -> Any:
    return _other_use(self) if self.pardnn[3] is not list else _set_default(self, key, [])


class _Reopened:
    """Mixin of a cleared recorder, which holds what it notes and can be read."""


def _clear(self: Any) -> None:
    """Begin to hold what is noted, without the hidden item."""
    _noted(self, "clear")
    kind = _kind_of(self)
    kind.clear(self)
    self.__class__ = _REOPENED[kind]


def _clear_slice(self: Any, index: Any) -> None:
    if index != slice(None):
        _other_use(self)
    _clear(self)


def _noting(kind: type, name: str, note: Callable[..., Any]) -> Callable[..., Any]:
    """Return a member of a reopened container that notes what it does and does it."""
    real = getattr(kind, name)

    def member(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name in ("extend", "__iadd__"):
            args = (list(args[0]),)
        note(self, *args, **kwargs)
        return real(self, *args, **kwargs)

    return member


def _reopened_class(kind: type, members: Mapping[str, Callable[..., Any]]) -> type:
    """Return a subclass that notes and holds items; any other change is another use."""
    noting = {name: _noting(kind, name, note) for name, note in members.items()}
    others = {n: _other_use for n in _CHANGES if hasattr(kind, n)}
    clear = {"clear": _noting(kind, "clear", lambda self: _noted(self, "clear"))}
    members = {**others, **noting, **clear, "is_pardnn_recorder": True}
    return type(f"Reopened{kind.__name__}", (_Reopened, kind), members)


def _recorder_class(kind: type, members: Mapping[str, Any]) -> type:
    """Return a subclass in which every other member of the type counts as another use."""
    others = {n: _other_use for n in dir(kind) if n not in _OWN and callable(getattr(kind, n))}
    members = {**others, **members, "is_pardnn_recorder": True}  # no walk enters it
    return type(f"Recorded{kind.__name__}", (kind,), members)


#: Methods that change a container other than by filling it.
_CHANGES = ("__delitem__", "__imul__", "__ior__", "__setitem__", "extendleft", "insert", "pop",
            "popitem", "popleft", "remove", "reverse", "rotate", "setdefault", "sort")  # fmt: skip
_LIST = {"append": _append, "extend": _extend, "__iadd__": _iadd}
_DEQUE = {**_LIST, "appendleft": _append_left}
_DICT = {"__setitem__": _set_item, "update": _update}
#: A cleared `defaultdict` would make items unnoticed: that is another use.
_REOPENED: dict[type, type] = {
    list: _reopened_class(list, _LIST),
    deque: _reopened_class(deque, _DEQUE),
    dict: _reopened_class(dict, _DICT),
}
_RECORDERS: dict[type, type] = {
    list: _recorder_class(list, {**_LIST, "clear": _clear, "__delitem__": _clear_slice}),
    deque: _recorder_class(deque, {**_DEQUE, "clear": _clear}),
    dict: _recorder_class(dict, {**_DICT, "setdefault": _set_default, "clear": _clear}),
    defaultdict: _recorder_class(
        defaultdict, {**_DICT, "setdefault": _set_default, "__getitem__": _get_default}
    ),
}

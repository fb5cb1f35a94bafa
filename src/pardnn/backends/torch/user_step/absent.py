"""Tensors in place of those that other ranks keep: they read as NaN, and refuse writes by name.

Problem: for a tensor that a rank does not keep, the user's object has the shape and one element.
torch refuses most in-place writes to it, with a message about memory and without a name. It carries
out others, after which the object reads as a number (`zero_`), or foreign memory is overwritten
(`dist.broadcast`). A user's tensor that is updated with it (`ema.lerp_(p)`) is NaN from then on.
Idea: the object gets a special class, whose `__torch_function__` makes the requested call and
raises a clear error where torch cannot, and a storage that gives out no address to write to. Views
have this class, too. Code that reads, computes a new tensor or replaces the data (`p.data = x`)
works as usual, and so does code that fills, since there is nothing to fill here. What writes to a
single element, such as a count of steps, writes to a copy that nobody sees: numbers are drawn and
mistakes are raised as on the rank that holds it.

Complexity: a few microseconds more for each function and getter of such a tensor; none for others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import users_line
from pardnn.errors import MismatchError, shown

#: torch's messages about writes to expanded tensors, and to storages without an address.
_REFUSALS = ("refers to a single memory location", "Cannot access data pointer")
#: Functions named like in-place ones that write no element.
_NO_WRITES = frozenset({"requires_grad_", "detach_", "rename_", "resize_as_", "share_memory_"})
_NO_ASSIGNMENTS = frozenset({"__index__", "__int__", "__invert__"})
#: Functions that only write numbers which no rank draws or reads.
_FILLS = frozenset({"zero_", "fill_", "zeros_", "ones_", "constant_", "_foreach_zero_"})
_TEXTS = frozenset({"__repr__", "__format__"})
_ARRAYS = frozenset({"numpy", "__array__"})
#: Names by the address of the storage, which views share.
_NAMES: dict[int, str] = {}


def mark_absent(tensor: Any, name: str) -> None:
    """Mark a tensor of one element as standing for one that other ranks keep.

    Args:
        tensor: A tensor of the user's objects. One of a class that is not torch's own stays as it
            is, and so does one without elements.
        name: The name of the tensor that other ranks keep.
    """
    if type(tensor) in _CLASSES and tensor.numel():
        _NAMES[tensor.untyped_storage()._cdata] = name
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__class__ = _CLASSES[type(tensor)]


def is_absent(tensor: Any) -> bool:
    """Whether a tensor is marked and has got no data since."""
    return isinstance(tensor, _Absent)


class _Absent(torch.Tensor):
    """What both classes have in common.

    Attributes:
        present_class: The class that the object had, and has again once it has data.
    """

    present_class: type[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ == "__get__":  # a getter: nothing is written
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args)
                if isinstance(value, torch.Tensor):
                    _follow(args[:1], value)
            return value
        return _called(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), _copy(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copy(self).__reduce_ex__(protocol)


class _AbsentTensor(_Absent):
    present_class = torch.Tensor


class _AbsentParameter(_Absent, torch.nn.Parameter):
    present_class = torch.nn.Parameter


_CLASSES: dict[type, type] = {
    each.present_class: each for each in (_AbsentTensor, _AbsentParameter)
}
for _kind in _CLASSES.values():  # classes show the same name on every rank
    _kind.__name__ = _kind.__qualname__ = _kind.present_class.__name__


def _copy(tensor: _Absent) -> torch.Tensor:
    """Return a plain tensor with its own memory that reads like this one."""
    with torch._C.DisableTorchFunctionSubclass():
        copy = _as_plain(tensor, tensor.detach().clone())
    copy.__dict__.update(tensor.__dict__)
    return copy


def _as_plain(tensor: _Absent, value: torch.Tensor) -> torch.Tensor:
    if tensor.present_class is torch.nn.Parameter:
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _called(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch's that was given an absent tensor.

    Raises:
        MismatchError: E529, if it writes to one, or into another tensor what one holds.
    """
    given = (*args, *kwargs.values())
    absent = [each for each in flat(given) if isinstance(each, _Absent)]
    written = written_by(func, given, kwargs.get("out"))
    _check_reads(func, absent, written)
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        if name in _FILLS:
            return _filled(func, given[0])
        if name in _TEXTS:  # these read the class
            return func(absent[0].detach(), *args[1:])
        if name in _ARRAYS:
            args = (_copy(absent[0]), *args[1:])
        single = [x for x in written if isinstance(x, _Absent) and x.numel() == 1]
        copies = {id(each): _copy(each) for each in single}
        try:
            result = func(*_swapped(args, copies), **_swapped(kwargs, copies))
        except RuntimeError as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            target = next((each for each in written if isinstance(each, _Absent)), absent[0])
            raise _error(f"{name}() writes to", target, _WRITE) from None
        result = _swapped(result, {id(copies[id(each)]): each for each in single})
        _follow(absent, result)
    return result


def _swapped(values: Any, others: Mapping[int, Any]) -> Any:
    """Return nested values with others in the place of some, by id."""
    if not others:
        return values
    if type(values) in (list, tuple):
        return type(values)(_swapped(each, others) for each in values)
    if type(values) is dict:
        return {key: _swapped(each, others) for key, each in values.items()}
    return others.get(id(values), values)


def _check_reads(
    func: Callable[..., Any], absent: Sequence[_Absent], written: Sequence[Any]
) -> None:
    """Refuse to pass an absent tensor's content to other tensors or ranks.

    Args:
        func: A function of torch's.
        absent: The absent tensors that it is given.
        written: What it writes to.
    """
    name = getattr(func, "__name__", "")
    if getattr(func, "__module__", "").startswith("torch.distributed"):
        raise _error(f"{name}() exchanges", absent[0], _READ)
    if name == "detach" and sys._getframe(3).f_code is torch.nn.Parameter.__new__.__code__:
        raise _error("a new Parameter takes", absent[0], _READ)
    read = [each for each in absent if not any(each is other for other in written)]
    if read and not all(isinstance(each, _Absent) for each in written):
        raise _error(f"{name}() puts into another tensor", read[0], _READ)


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists and tuples among them."""
    for value in values:
        yield from flat(value) if isinstance(value, list | tuple) else (value,)


def written_by(func: Callable[..., Any], given: Sequence[Any], out: Any) -> list[Any]:
    """Return what a function writes to: `out`, or its first argument.

    Args:
        func: A function of torch's.
        given: Its arguments.
        out: The output of this name; None without.
    """
    if out is not None:
        return list(flat([out]))
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        is_write = name == "__setitem__" or (name[:3] == "__i" and name not in _NO_ASSIGNMENTS)
    else:
        is_write = name.endswith("_") and name not in _NO_WRITES
    return list(flat(given[:1])) if is_write else []


def _filled(func: Callable[..., Any], given: Any) -> Any:
    """Return the tensors to fill with numbers: those of a list that are not absent."""
    if isinstance(given, list | tuple) and (
        rest := [each for each in given if not isinstance(each, _Absent)]
    ):
        func(rest)
    return given


def _follow(absent: Sequence[Any], result: Any) -> None:
    """Mark views among the results as absent, and what has got other data as present."""
    storages = {each.untyped_storage()._cdata for each in absent}
    for each in flat([result]):
        if type(each) in _CLASSES and each.untyped_storage()._cdata in storages:
            each.__class__ = _CLASSES[type(each)]
    for each in absent:
        if _has_data(each):
            each.__class__ = each.present_class


def _has_data(tensor: torch.Tensor) -> bool:
    if tensor.numel() != 1 or tensor.untyped_storage().nbytes() > tensor.element_size():
        return tensor.untyped_storage().nbytes() > tensor.element_size()
    try:  # 20 us, so only where the size of the storage does not tell
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


_WRITE = (
    "Write it in the step, where an argument says so (`if halve: p.mul_(0.5)`), or on every rank "
    "as `p.data = p.data * 0.5`, or change fast.state_dict() on rank 0 and load that: "
    "fast.load_state_dict(...)."
)
_READ = (
    "Do it in the step, or read the whole on every rank: fast.whole(name); fast.state_dict() has "
    "it on rank 0."
)


def absent_as(given: str, tensor: Any) -> MismatchError:
    """Return the error for a tensor that other ranks hold and that is an argument of a step.

    Args:
        given: Name of the argument.
        tensor: The tensor, for which `is_absent` holds.
    """
    instead = (
        f"It became state since the step also reads it from an object. Pass a tensor of its own: "
        f"a copy ({given}.clone()), made before the step is parallelized."
    )
    return _error(f"argument {shown(given)} is", tensor, instead)


def _error(what: str, tensor: torch.Tensor, instead: str) -> MismatchError:
    with torch._C.DisableTorchFunctionSubclass():
        name = _NAMES.get(tensor.untyped_storage()._cdata, "a tensor")
    return MismatchError(
        f"{what} {shown(name)}{users_line()}, which this rank does not hold: other ranks do, and "
        f"it reads as NaN here.\n{instead}",
        code="E529",
        details={"name": name},
    )

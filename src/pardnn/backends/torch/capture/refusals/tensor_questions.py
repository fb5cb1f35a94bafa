"""Properties of tensors that may differ from call to call, which the user's code may not read.

Where a tensor is in memory, how often it was written, whether it is a view: a placeholder would
answer for itself, and the answer would be frozen. So the user's code may not read them, while
torch's own may.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.random_states import states_refused
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.code_names import (
    is_library_frame,
    names_in,
    object_question,
    users_line,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source
from pardnn.backends.torch.user_step.used_names import used_names
from pardnn.errors import UnsupportedError, shown

_METHODS = (
    "_is_view", "data_ptr", "is_conj", "is_inference", "is_neg", "is_pinned", "is_shared",
    "storage", "storage_offset", "untyped_storage",
)  # fmt: skip
_PROPERTIES = ("_base", "_version")
#: The same questions as functions of torch, by their names there.
_FUNCTIONS = ("is_conj", "is_inference", "is_neg")

#: What gives other libraries the memory of a tensor, where placeholders have none.
_EXPORTS = ((torch.Tensor, "__dlpack__"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"))


@contextlib.contextmanager
def questions_refused(tracer: Tracer, functions: Collection[types.FunctionType]) -> Iterator[None]:
    """Refuse such questions about sources and random states in the user's code.

    Args:
        tracer: The tracer of the step.
        functions: The user's functions that may run: only what they name is replaced.
    """
    named = {name for each in functions for name in names_in(each.__code__)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(states_refused(tracer.locator.line, functions))
        for name in named.intersection(_METHODS):
            new = _asked(tracer, name, getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(FakeTensor, name, new, create=True))
        for name in _FUNCTIONS:
            real = getattr(torch, name)
            new = _asked(tracer, name, real)
            for space, key in _places_of(real, functions):
                stack.callback(space.__setitem__, key, real)
                space[key] = new
        for name in named.intersection(_PROPERTIES):
            new = property(_asked(tracer, name, getattr(torch.Tensor, name).__get__))
            stack.enter_context(mock.patch.object(FakeTensor, name, new, create=True))
        for owner, name in _EXPORTS:
            new = _exported(tracer, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def _exported(tracer: Tracer, real: Callable[..., Any]) -> Callable[..., Any]:
    def export(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor):
            raise unsupported.data_dependent_branch(tracer.locator.line(), "data")
        return real(tensor, *args, **kwargs)

    return export


def _places_of(
    real: Callable[..., Any], functions: Collection[types.FunctionType]
) -> list[tuple[dict[str, Any], str]]:
    """Return where some functions find one of torch's: namespaces and keys in them."""
    spaces = {id(space): space for each in functions for space in [each.__globals__]}
    named = {name for each in functions for name in names_in(each.__code__)}
    found = [(s, key) for s in spaces.values() for key in named if s.get(key) is real]
    return [*found, *([(vars(torch), real.__name__)] if real.__name__ in named else [])]


def _asked(tracer: Tracer, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def ask(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        is_users = not is_library_frame(sys._getframe(1))
        if is_users and tracer.aliases.knows(tensor):
            storage = tracer.aliases.value(tensor).storage
            if storage is not None and storage.source:
                raise tensor_question(name, tracer.locator.line())
        return real(tensor, *args, **kwargs)

    return ask


def tensor_question(name: str, where: str | None) -> UnsupportedError:
    """Return E804: the step asks where a given tensor is in memory, or how often it was written."""
    return unsupported.error_at(
        where,
        f"the step asks for {name!r} of a tensor that it was given{unsupported.at(where)}:\n"
        "the answer may differ from call to call, and one graph must hold for all.\n"
        "Ask before the step, and pass the answer as an argument.",
        "E804",
    )


def check_told_apart(
    step: Callable[..., Any],
    objects: ObjectGraph,
    batch: Collection[int],
    tensors: Sequence[Source],
) -> None:
    """Refuse a batch tensor that the step's objects also hold, if the step may ask whether they do.

    In a graph it is a separate input, with the value that each call gives.

    Args:
        step: The user's step.
        objects: What it reaches.
        batch: Indices of the arguments that are the batch.
        tensors: The sources that are tensors.

    Raises:
        UnsupportedError: E804.
    """
    given = {id(entry.value): entry.name for entry in objects.tensors if entry.argument in batch}
    names: dict[int, list[str]] = {}
    for source in tensors:
        names.setdefault(id(source.get()), []).append(source.name)
    both = [(given[key], each) for key, each in names.items() if key in given and len(each) > 1]
    functions = used_names(step, objects.seen.values()).functions if both else ()
    for where in filter(None, (object_question(each.__code__) for each in functions)):
        name, others = both[0]
        other = next(each for each in others if each != name)
        raise unsupported.error_at(
            where,
            f"{name!r} is the tensor that the step holds as {other!r}, and the step asks which\n"
            f"object a tensor is{unsupported.at(where)}: a graph only knows the values\n"
            "of a batch's tensors.\n"
            "Ask before the step, and pass the answer as an argument; or pass a clone.",
            "E804",
        )


def given_tensor(name: str, what: str, instead: str) -> UnsupportedError:
    """Return E801: a tensor of the batch has more than its numbers.

    Args:
        name: The name of the tensor.
        what: What it is.
        instead: What to pass.
    """
    return UnsupportedError(f"{name!r} {what}.\nPass {instead} instead.", details={"tensor": name})


def through_earlier_steps(name: str) -> UnsupportedError:
    """Return E807: a backward pass that goes on into the step before.

    Args:
        name: The name of the tensor through which it goes.
    """
    return UnsupportedError(
        f"the backward pass{users_line()} goes on through {shown(name)} into the step before,\n"
        "which computed that from tensors that require gradients. The graph begins with this one.\n"
        "Cut it where the tensor is kept: self.hidden = hidden.detach().",
        code="E807",
        details={"tensor": name},
    )

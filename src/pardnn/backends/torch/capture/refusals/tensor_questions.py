"""Questions that the user's code asks of a tensor that it was given; a call may answer another.

Where a tensor lies in memory, how often it was written, whether it is a view: a placeholder tells
of itself. The answer would be frozen, so the user's code is refused it; torch's own may ask.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.code_names import is_library_file, names_in
from pardnn.errors import UnsupportedError

_METHODS = (
    "_is_view", "data_ptr", "is_conj", "is_inference", "is_neg", "is_pinned", "is_shared",
    "storage", "storage_offset", "untyped_storage",
)  # fmt: skip
_PROPERTIES = ("_base", "_version")


@contextlib.contextmanager
def questions_refused(tracer: Tracer, functions: Collection[types.FunctionType]) -> Iterator[None]:
    """Refuse what the user's code asks of the sources of a trace while the context is open.

    Args:
        tracer: Of the step.
        functions: The user's, which may run: only what they name is looked after.
    """
    named = {name for each in functions for name in names_in(each.__code__)}
    with contextlib.ExitStack() as stack:
        for name in named.intersection(_METHODS):
            new = _asked(tracer, name, getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(FakeTensor, name, new, create=True))
        for name in named.intersection(_PROPERTIES):
            new = property(_asked(tracer, name, getattr(torch.Tensor, name).__get__))
            stack.enter_context(mock.patch.object(FakeTensor, name, new, create=True))
        yield


def _asked(tracer: Tracer, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def ask(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        is_users = not is_library_file(sys._getframe(1).f_code.co_filename)
        if is_users and tracer.aliases.knows(tensor):
            storage = tracer.aliases.value(tensor).storage
            if storage is not None and storage.source:
                raise tensor_question(name, tracer.locator.line())
        return real(tensor, *args, **kwargs)

    return ask


def tensor_question(name: str, where: str | None) -> UnsupportedError:
    """Return E804: the step asks how a tensor that it was given lies in memory, or was written."""
    return unsupported.error_at(
        where,
        f"the step asks for {name!r} of a tensor that it was given{unsupported.at(where)}:\n"
        "what it is at one call, or at another, one graph cannot tell.\n"
        "Ask before the step, and pass the answer as an argument.",
        "E804",
    )


def given_tensor(name: str, what: str, instead: str) -> UnsupportedError:
    """Return E801: a tensor of the batch is more than its numbers.

    Args:
        name: Of the tensor.
        what: It is.
        instead: What to pass.
    """
    return UnsupportedError(f"{name!r} {what}.\nPass {instead} instead.", details={"tensor": name})

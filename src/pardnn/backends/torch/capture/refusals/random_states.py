"""Random states that the user's code uses as data: no graph knows them.

Problem: `torch.get_rng_state().sum()` is a constant of a trace, while each call of the step begins
in another state. Such states are also used to restore the generator (`torch.set_rng_state`), which
is followed.

Idea: the user's code gets a state of a special class, which can be set like any other but refuses
to be read. If code reads the state in another way, such as from `torch.default_generator`, two
traces differ, because each begins in another state.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.capture.numbers.namespaces import replace_globals
from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.errors import UnsupportedError

_STATES = ((torch, "get_rng_state"), (torch.random, "get_rng_state"),
           (torch.cuda, "get_rng_state"))  # fmt: skip
#: torch itself keeps states for code that it runs again, as `torch.utils.checkpoint` does.
_TORCH = str(Path(torch.__file__).parent)
#: Functions that make an equal state of one.
_COPIES = frozenset({"clone", "detach", "cpu", "contiguous", "__deepcopy__"})
#: Properties that all states share.
_KINDS = frozenset({"__get__", "size", "dim", "numel", "type", "__len__", "is_contiguous"})


class RandomState(torch.Tensor):
    """A state of a random generator, which can be set and copied.

    Attributes:
        where: Returns the user's line that runs.
        made: The line that asked for it.
        is_set: Whether the step has gone back to it; it may then keep it anywhere.
    """

    where: Callable[[], str | None]
    made: str | None
    is_set: bool = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a copy, or what all states share.

        Raises:
            UnsupportedError: E804, since anything else reads it.
        """
        state = next(each for each in args if isinstance(each, RandomState))
        if func.__name__ in _COPIES:
            return state
        if func.__name__ in _KINDS:
            with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
                return func(*args, **(kwargs or {}))
        raise state_as_data(state.where())


@contextlib.contextmanager
def states_refused(
    where: Callable[[], str | None], functions: Collection[types.FunctionType]
) -> Iterator[None]:
    """Refuse random states as data while the context is open.

    Args:
        where: Returns the user's line that runs.
        functions: The user's, which may have imported what returns a state by its name.
    """
    with contextlib.ExitStack() as stack:
        others = {}
        for owner, name in _STATES:
            real = getattr(owner, name)
            others[id(real)] = others.get(id(real)) or _returning_states(real, where)
            stack.enter_context(mock.patch.object(owner, name, others[id(real)]))
        noting = _noting(torch.random.set_rng_state)
        others[id(torch.random.set_rng_state)] = noting
        for owner in (torch, torch.random):
            stack.enter_context(mock.patch.object(owner, "set_rng_state", noting))
        replace_globals(stack, functions, others)
        yield


def _noting(real: Callable[..., Any]) -> Callable[..., Any]:
    def set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(new_state, RandomState):
            new_state.is_set = True
        return real(new_state, *args, **kwargs)

    return set_state


def _returning_states(
    real: Callable[..., torch.Tensor], where: Callable[[], str | None]
) -> Callable[..., torch.Tensor]:
    def state_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = real(*args, **kwargs)
        if sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return found
        with _disable_current_modes():
            state = found.as_subclass(RandomState)
        state.where, state.made = where, where()
        return state

    return state_of


def begin_elsewhere() -> None:
    """Advance the random generators of this process so that no two traces start alike."""
    with _disable_current_modes():
        torch.rand(1)
    random.random()
    np.random.rand()  # noqa: NPY002


def state_as_data(where: str | None) -> UnsupportedError:
    """Return E804: a step reads the state of a random generator.

    Args:
        where: "file.py:line" of the user's code; None if unknown.
    """
    return error_at(
        where,
        f"the step reads the state of a random generator{at(where)}, which\n"
        "differs at each call: one graph must hold for all. Setting it again is followed\n"
        "(torch.set_rng_state).\n"
        "Read it before the step, and pass what you compute from it as an argument; for a number\n"
        "that differs from call to call, draw one: torch.randint(2**31, ()).",
        "E804",
    )


def left_reseeded() -> UnsupportedError:
    """Return E801: a step that leaves a generator in another state than its draws would."""
    return error_at(
        None,
        "the step does not leave the random generator where its draws would: it seeds\n"
        "it (torch.manual_seed, torch.seed), sets its state, or draws and sets it back. Ranks\n"
        "follow only the draws, so the next step would draw other numbers.\n"
        "Seed between two calls of the step.",
    )

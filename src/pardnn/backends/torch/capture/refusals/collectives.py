"""The error for steps that communicate with other processes themselves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.errors import UnsupportedError


def objects_refused(where: Callable[[], str | None]) -> contextlib.AbstractContextManager[Any]:
    """Refuse collectives of objects, which torch pickles before it calls any op.

    Args:
        where: Returns the user's line that runs.

    Raises:
        UnsupportedError: E804.
    """

    def refuse(*_args: Any) -> None:
        caller: Any = sys._getframe(1)
        caller = caller.f_back if caller.f_code.co_name == "<listcomp>" else caller  # Python 3.11
        raise collective(caller.f_code.co_name, where())

    module = sys.modules.get("torch.distributed.distributed_c10d")
    if not hasattr(module, "_object_to_tensor"):
        return contextlib.nullcontext()
    return mock.patch.object(module, "_object_to_tensor", refuse)


def collective(op: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that calls a collective, or sends a tensor.

    Args:
        op: Name of the operator, or of torch's function.
        where: "file.py:line" of the user's code; None if unknown.
    """
    name = op.rpartition("::")[2].rstrip("_")
    return error_at(
        where,
        f"the step calls torch.distributed ({name}){at(where)}: a rank runs a part of\n"
        "the step, and none makes all calls of a collective.\n"
        "Leave it out: the step has the whole batch, and its losses and gradients are of all of\n"
        "it. A library that finds ranks and averages over them can be told not to:\n"
        "sync_codebook=False, say, or BatchNorm for SyncBatchNorm.",
        "E804",
    )

"""The error for steps that communicate with other processes themselves."""

from __future__ import annotations

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.errors import UnsupportedError


def collective(op: str, where: str | None) -> UnsupportedError:
    """Return E804: a step that calls a collective, or sends a tensor.

    Args:
        op: Name of the operator.
        where: "file.py:line" of the user's code; None if unknown.
    """
    name = op.partition("::")[2].rstrip("_")
    return error_at(
        where,
        f"the step calls torch.distributed ({name}){at(where)}: a rank runs a part of\n"
        "the step, and none makes all calls of a collective.\n"
        "Leave it out: the step has the whole batch, and its losses and gradients are of all of\n"
        "it. A library that finds ranks and averages over them can be told not to:\n"
        "sync_codebook=False, say, or BatchNorm for SyncBatchNorm.",
        "E804",
    )

"""The error for derivatives that get other bits in a trace than in an eager step."""

from __future__ import annotations

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.errors import UnsupportedError

_TWICE = "the gradient of a gradient of {}"
_OF_OPS = {
    "masked_fill": (
        "the gradient of the value of masked_fill",
        "Write torch.where(mask, value, x): its gradient is a sum over all items.",
    ),
    "prod": (
        "a forward-mode derivative of prod",
        "Use torch.func.jvp(f, (x,), (tangent,)), which computes alike in both.",
    ),
    "cumprod": (
        _TWICE.format("cumprod"),
        "Multiply one by one: torch.stack(list(itertools.accumulate(x.unbind(d), torch.mul)), d).",
    ),
    "det": (
        _TWICE.format("det"),
        "Write sign, log = torch.linalg.slogdet(a), and sign * log.exp() for torch.linalg.det(a).",
    ),
}


def other_derivative(op: str, where: str | None) -> UnsupportedError:
    """Return E801: a derivative whose formula torch chooses by what a tensor holds.

    Args:
        op: Whose derivative: "masked_fill", "prod", "cumprod" or "det".
        where: "file.py:line" of its call; None if unknown.
    """
    what, instead = _OF_OPS[op]
    return error_at(
        where,
        f"the step takes {what}{at(where)}.\n"
        "Torch chooses its formula by what tensors hold, which only a run knows, and no other one\n"
        "gives the same bits.\n"
        f"{instead}",
    )

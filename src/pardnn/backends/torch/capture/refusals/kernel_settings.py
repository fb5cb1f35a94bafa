"""Settings by which kernels compute other bits: `torch.backends.mkldnn.flags(enabled=False)`.

A graph runs under the settings of its caller, for all its ops. A step that leaves them otherwise
than an op of it has found them would compute that op in another way than eager steps do.

Complexity: O(convolutions and matrix products).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.errors import UnsupportedError

_Getters = dict[str, Callable[[], Any]]


def _precision(backend: str, op: str) -> Callable[[], Any]:
    return functools.partial(torch._C._get_fp32_precision_getter, backend, op)


_ONEDNN: _Getters = {"torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled}
_OF_CONVOLUTIONS: _Getters = _ONEDNN | {
    "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled,
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "torch.backends.mkldnn.conv.fp32_precision": _precision("mkldnn", "conv"),
    "torch.backends.cudnn.conv.fp32_precision": _precision("cuda", "conv"),
}
_OF_PRODUCTS: _Getters = {
    "torch.backends.mkldnn.matmul.fp32_precision": _precision("mkldnn", "matmul"),
    "torch.backends.cuda.matmul.fp32_precision": _precision("cuda", "matmul"),
}
#: Products of these types are oneDNN's if it is enabled.
_SHORT = (torch.bfloat16, torch.float16)
_OF_KIND = {
    "aten.convolution.default": _OF_CONVOLUTIONS,
    "aten.convolution_backward.default": _OF_CONVOLUTIONS,
} | {
    f"aten.{name}.default": _OF_PRODUCTS
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
}  # fmt: skip


class KernelSettings:
    """The settings that ops of a trace have found.

    Args:
        where: Returns the user's line that runs.
    """

    def __init__(self, where: Callable[[], str | None]) -> None:
        self._where = where
        self._found: list[tuple[str | None, dict[str, tuple[Callable[[], Any], Any]]]] = []

    def note(self, call: Call, results: Sequence[torch.Tensor | None]) -> None:
        """Note the settings for one call.

        Args:
            call: The call.
            results: The tensors that it returns.
        """
        getters = _OF_KIND.get(call.kind)
        if getters is None:
            return
        if getters is _OF_PRODUCTS and any(t is not None and t.dtype in _SHORT for t in results):
            getters = getters | _ONEDNN
        # A first trace names no lines.
        where = call.source or self._where()
        self._found.append((where, {name: (get, get()) for name, get in getters.items()}))

    def check(self) -> None:
        """Reject a trace if a call has found other settings than there are after it.

        Raises:
            UnsupportedError: E801.
        """
        for where, settings in self._found:
            for name, (get, then) in settings.items():
                if get() != then:
                    raise _sets(name, then, where)


def flushing_refused(
    where: Callable[[], str | None],
) -> contextlib.AbstractContextManager[Any]:
    """Refuse `torch.set_flush_denormal` while the context is open: torch does not tell what is set.

    Args:
        where: Returns the user's line that runs.

    Raises:
        UnsupportedError: E801.
    """

    def refused(mode: bool) -> bool:
        raise error_at(
            where(),
            f"the step calls torch.set_flush_denormal({mode}){at(where())}: that would happen at\n"
            "capture only. Call it before the step; each call of the step then runs under it.",
        )

    return mock.patch.object(torch, "set_flush_denormal", refused)


def _sets(name: str, then: Any, where: str | None) -> UnsupportedError:
    return error_at(
        where,
        f"an op runs under {name} = {then!r}{at(where)}, which the step sets for\n"
        "a part of itself: its graph runs under the setting of the caller, so this op would give "
        "other bits.\n"
        f"Set it between two calls, for the whole step: {name} = {then!r}.",
    )

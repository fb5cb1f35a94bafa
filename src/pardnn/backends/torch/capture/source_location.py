"""Source locations: file and line, module path and forward op of each call of a trace.

The innermost Python frame outside torch and pardnn gives the line. An op of a backward pass has
no such frame; it gets the line of the forward op whose autograd node is running, found by the
node's sequence number. Measured: 3 us an op.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.backends.torch.user_step.code_names import is_typed

#: Line numbers of rewritten functions are taken modulo this, see `choices.normal_form`.
LINES = 100_000
_INTERNAL_PACKAGES = ("torch", "numpy", "pardnn")
_STDLIB = sysconfig.get_paths()["stdlib"] + "/"


def _is_internal(module: str, filename: str) -> bool:
    is_made = filename.startswith("<") and not is_typed(filename)
    if module.split(".")[0] in _INTERNAL_PACKAGES or is_made:
        return True
    return filename.startswith(_STDLIB) and "-packages/" not in filename


def is_internal_frame(frame: FrameType) -> bool:
    """Whether a frame belongs to torch, this package or what they call, not to the user."""
    return _is_internal(frame.f_globals.get("__name__") or "", frame.f_code.co_filename)


def shown_path(filename: str, module: str) -> str:
    """Return a path that is valid on other machines, without a home directory.

    Inside an installed package it starts at the package; inside the working directory it is
    relative; elsewhere it is the module's path.
    """
    path = Path(filename)
    parts = path.parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    with contextlib.suppress(ValueError, OSError):
        return path.resolve().relative_to(Path.cwd()).as_posix()
    depth = module.count(".") + (path.stem == "__init__")
    return "/".join(parts[-depth - 1 :]) if module != "__main__" else path.name


class Locator:
    """Finds where the op that is being recorded comes from.

    Args:
        modules: Names of modules by id.
        is_silent: Whether to leave calls without a location; errors name their line anyway.
    """

    def __init__(self, modules: dict[int, str], *, is_silent: bool = False) -> None:
        self._modules = modules
        self._is_silent = is_silent
        self._modules_entered: list[str | None] = []
        self._path_of_code: dict[CodeType, str | None] = {}
        self._forward_by_node: dict[int, Call] = {}

    def line(self, frame: FrameType | None = None) -> str | None:
        """Return "file.py:line" of the user's innermost frame; None if there is none."""
        frame = frame or sys._getframe(1)
        while frame is not None:
            shown = self._users_path(frame)
            if shown is not None:
                return f"{shown}:{frame.f_lineno % LINES}"
            frame = frame.f_back
        return None

    def line_of(self, error: BaseException) -> str | None:
        """Return "file.py:line" of the user's innermost frame that an error came through."""
        found: str | None = None
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            shown = self._users_path(trace.tb_frame)
            if shown is not None:
                found = f"{shown}:{trace.tb_lineno % LINES}"
            trace = trace.tb_next
        return found

    def _users_path(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if code not in self._path_of_code:
            module = frame.f_globals.get("__name__") or ""
            internal = is_internal_frame(frame)
            self._path_of_code[code] = None if internal else shown_path(code.co_filename, module)
        return self._path_of_code[code]

    def annotate(self, call: Call) -> None:
        """Set a call's source, module and forward op, and whether it adds to a leaf's gradient."""
        if self._is_silent:
            return
        node = torch._C._current_autograd_node()
        call.sums = node is not None and node.name() == "torch::autograd::AccumulateGrad"
        # A module runs in a backward pass only to recompute a forward pass.
        if node is not None and not self._modules_entered:
            forward = self._forward_by_node.get(node._sequence_nr())
            if forward is not None:
                call.source, call.module = forward.source, forward.module
                call.backward_of = forward
                return
        call.source = self.line(sys._getframe(1))
        call.module = self._modules_entered[-1] if self._modules_entered else None
        if node is None or self._modules_entered:
            # The node of this op, if it has one, is the newest.
            self._forward_by_node.setdefault(torch.autograd._get_sequence_nr() - 1, call)

    @contextlib.contextmanager
    def tracking_modules(self) -> Iterator[None]:
        """Track which module is running while the context is open."""
        hooks = torch.nn.modules.module

        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            self._modules_entered.append(self._modules.get(id(module)))

        def leave(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            if self._modules_entered:
                self._modules_entered.pop()

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._modules_entered.clear()

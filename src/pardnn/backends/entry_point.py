"""Entry points: `FILE.py:FUNCTION`, a function that returns `(step, args)`."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pardnn.errors import UsageError, UserCodeError, did_you_mean, told

#: How often a function that does not return is reported, seconds.
NOTICE_S = 60.0
#: Prefix of the module names under which entry points are loaded.
_MODULE = "pardnn_entry_"
_LOG = logging.getLogger("pardnn")


def is_entry_point(target: str) -> bool:
    """Return whether `target` names a function in a Python file, not a graph file."""
    path, colon, function = target.rpartition(":")
    return bool(colon) and path.endswith(".py") and function.isidentifier()


def functions_of(path: Path) -> list[str]:
    """Return the functions that a Python file defines, without executing it; none on failure."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return [each.name for each in body if isinstance(each, ast.FunctionDef)]


@dataclass(frozen=True)
class EntryPoint:
    """A user's function that returns `(step, args)`; its file has been executed, once.

    Attributes:
        target: `FILE.py:FUNCTION`, as the user wrote it.
        function: FUNCTION.
    """

    target: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The target without folder and suffix, which names its graph."""
        path, _, function = self.target.rpartition(":")
        return f"{Path(path).stem}:{function}"

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function."""
        return inspect.signature(self.function).parameters

    def factory(self, batch_size: int | None = None) -> Callable[[], Any]:
        """Return a function without arguments that calls the entry point.

        Args:
            batch_size: Passed as the keyword `batch_size`, which FUNCTION must then take.

        Raises:
            UsageError: E222 (it needs arguments), E223 (it takes no `batch_size`).
        """
        path, _, function = self.target.rpartition(":")
        given = {"batch_size"} if batch_size is not None else set()
        _check_arguments(self.function, path, function, given)
        if batch_size is None:
            return _without_exit(self.function)
        if "batch_size" not in self.parameters:
            raise UsageError(
                f"{function} in {path} takes no keyword `batch_size`, so --batch-size cannot be "
                f"used.\nWrite `def {function}(batch_size=8): ...`.",
                code="E223",
            )
        return _without_exit(functools.partial(self.function, batch_size=batch_size))


def load_entry_point(target: str) -> EntryPoint:
    """Execute the file of an entry point.

    Raises:
        UsageError: E220 (form), E221 (file), E222 (function).
        UserCodeError: The file itself raised an error.
    """
    if not is_entry_point(target):
        found = functions_of(Path(target.partition(":")[0]))
        raise UsageError(
            f"{target!r:.120} is not an entry point: write FILE.py:FUNCTION, where FUNCTION "
            "returns (step, args)"
            + (f".\nFunctions of this file: {', '.join(found[:8])}" if found else ""),
            code="E220",
        )
    path, _, function = target.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path!r}", code="E221")
    found = getattr(_load(Path(path)), function, None)
    if not callable(found):
        near = did_you_mean(function, functions_of(Path(path)))
        raise UsageError(f"{path} has no function {function!r}{near}", code="E222")
    return EntryPoint(target, found)


def load_factory(target: str, batch_size: int | None = None) -> Callable[[], Any]:
    """Execute the file of an entry point; return a function that calls it without arguments.

    Args:
        target: `FILE.py:FUNCTION`.
        batch_size: Passed as the keyword `batch_size`, which FUNCTION must then take.

    Raises:
        UsageError: E220 (form), E221 (file), E222 (function), E223 (batch_size).
        UserCodeError: The file itself raised an error.
    """
    return load_entry_point(target).factory(batch_size)


def _check_arguments(found: Callable[..., Any], name: str, function: str, given: set[str]) -> None:
    """Check that a function needs no arguments other than those given."""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variable
    ]
    missing = [key for key in needed if key not in given]
    if missing:
        raise UsageError(
            f"{function} in {name} needs {', '.join(missing)}; an entry point is called without "
            "arguments.\nGive defaults, or write a function without arguments that calls it.",
            code="E222",
        )


def _without_exit(factory: Callable[[], Any]) -> Callable[[], Any]:
    """Return a factory that raises, with the exit status, if its code would end the program."""

    @functools.wraps(factory)  # its parameters are inspected
    def guarded() -> Any:
        try:
            # stdout is for results alone.
            with contextlib.redirect_stdout(sys.stderr), _told_while_it_lasts():
                return factory()
        except SystemExit as error:
            raise UserCodeError(
                f"your own code ended the program, by sys.exit({error.code!r}), instead of "
                "returning (step, args).\nRaise an exception instead, or return."
            ) from error
        except BaseException as error:
            if isinstance(error, (Exception, KeyboardInterrupt)):
                raise
            raise UserCodeError(f"while your function built the model: {told(error)}") from error

    return guarded


@contextlib.contextmanager
def _told_while_it_lasts() -> Iterator[None]:
    """Report every `NOTICE_S` that the user's function still runs, and where it is."""
    done, caller = threading.Event(), threading.get_ident()

    def tell() -> None:
        start = time.monotonic()
        while not done.wait(NOTICE_S):
            seconds, place = time.monotonic() - start, _innermost(sys._current_frames().get(caller))
            _LOG.warning("your function that builds the model runs for %.0f s%s", seconds, place)

    teller = threading.Thread(target=tell, name="pardnn-building", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _innermost(frame: FrameType | None) -> str:
    """Return ", at file.py:12": the innermost call in a file of an entry point."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_MODULE):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"


def _load(path: Path) -> Any:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE.py` does
    name = f"{_MODULE}{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and inspect look modules up by name
    try:
        with contextlib.redirect_stdout(sys.stderr):
            specification.loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[name]
        raise UserCodeError(
            f"{path} ends the program, by sys.exit({error.code!r}), when it is loaded.\n"
            'Put what it does as a script under `if __name__ == "__main__":`.'
        ) from error
    except Exception as error:
        del sys.modules[name]
        raise UserCodeError(f"while loading {path}: {told(error)}") from error
    return module

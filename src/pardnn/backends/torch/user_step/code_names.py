"""The names in code, and whose code it is."""

from __future__ import annotations

import _string
import contextlib
import dis
import functools
import re
import string
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LIBRARY_ROOTS = tuple(
    {str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib")}
)
#: Instructions on globals, in class bodies too.
_GLOBAL = frozenset({
    "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS",
})  # fmt: skip
#: File names of code typed at Python's and other prompts, or tested in documentation.
_TYPED = ("<stdin>", "<console>", "<input>", "<ipython-input", "<python-input", "<doctest")
#: Functions of `operator` that tell one object from another.
_IDENTITY = frozenset({"is_", "is_not"})
#: Python functions that run a text, or give all variables of a module.
_OF_TEXTS = frozenset({"eval", "exec", "globals"})
_FORMATS = frozenset({"format", "format_map"})
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_PACKAGE = str(Path(sys.modules["pardnn"].__file__ or "").resolve().parent) + "/"
#: Types that hold a function as `func`.
OF_FUNCTIONS = (
    functools.cached_property, functools.partial, functools.partialmethod,
    functools.singledispatchmethod,
)  # fmt: skip
_BOUND = (staticmethod, classmethod, types.MethodType)
#: Types without a function behind them: most of what a class holds besides functions.
_PLAIN = frozenset({str, int, float, bool, type(None), dict, tuple, list})


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the lambdas, generators and functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@functools.cache
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals and attributes that a function names, those of inner functions last."""
    return tuple(dict.fromkeys(name for each in codes_of(code) for name in each.co_names))


def globals_named(function: types.FunctionType) -> list[str]:
    """Return the globals that a function may read.

    If it computes names (`eval(text)`, `globals()[kind]`), these are the names in its texts,
    functions, classes, and names written like constants; other variables belong to a loop.
    """
    code, held, named = function.__code__, function.__globals__, names_in(function.__code__)
    found = [name for name in global_names(code) if name in held]
    if not (calls_by_text(code) or ("__name__" in named and "getattr" in named)):
        return found
    texts = (text for each in texts_of(code) for text in _IDENTIFIER.findall(each))
    found += [text for text in texts if text in held]
    kinds = types.FunctionType, type
    found += [key for key, x in held.items() if key.isupper() or isinstance(x, kinds)]
    return list(dict.fromkeys(found))


@functools.cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that are read or written as globals, which attributes may have, too."""
    instructions = (at for each in codes_of(code) for at in dis.get_instructions(each))
    return tuple(dict.fromkeys(at.argval for at in instructions if at.opname in _GLOBAL))


def texts_of(code: types.CodeType) -> Iterator[str]:
    """Yield the texts in a function's code, and in functions defined in it."""
    for each in codes_of(code):
        for constant in each.co_consts:
            items = constant if isinstance(constant, tuple) else (constant,)
            yield from (item for item in items if isinstance(item, str))


def calls_by_text(code: types.CodeType) -> bool:
    """Whether code calls `eval`, `exec` or `globals`; `model.eval()` does not count."""
    return not _OF_TEXTS.isdisjoint(global_names(code))


@functools.cache
def lays_out_texts(code: types.CodeType) -> bool:
    """Whether code calls `format` on a text from elsewhere, which may name attributes."""
    for each in codes_of(code):
        before = ""
        for at in dis.get_instructions(each):
            # Python 3.12 has one instruction for attributes and methods.
            is_loaded = at.opname in ("LOAD_METHOD", "LOAD_ATTR") and at.argval in _FORMATS
            if is_loaded and before not in ("LOAD_CONST", "BUILD_STRING"):
                return True
            before = at.opname
    return False


def names_in_fields(text: str) -> Iterator[str]:
    """Yield the attributes and keys in the fields of a format text: `"{0.mode}"`."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field]
        yield from (
            str(key) for each in fields for _, key in _string.formatter_field_name_split(each)[1]
        )
    except ValueError:  # it is not a format text
        return


def place_in(code: types.CodeType, at: dis.Instruction) -> str:
    """Return "file.py:line" of an instruction."""
    line = at.positions.lineno if at.positions else code.co_firstlineno
    return f"{Path(code.co_filename).name}:{line}"


def object_question(code: types.CodeType) -> str | None:
    """Return "file.py:line" where a function may test a tensor's identity; None if nowhere.

    `x is None`, `x is Mode.TRAIN` and `type(x) is Tensor` do not count: the right side is a
    constant, or has a capitalised name.
    """
    for each in codes_of(code):
        before = ""
        for at in dis.get_instructions(each):
            named = at.argval if isinstance(at.argval, str) else ""
            is_asked = at.opname == "IS_OP" and before != "LOAD_CONST"
            if is_asked or named in _IDENTITY or (at.opname == "LOAD_GLOBAL" and named == "id"):
                return place_in(each, at)
            before = "LOAD_CONST" if named[:1].isupper() else at.opname
    return None


@functools.cache
def is_library_file(filename: str) -> bool:
    """Whether a source file belongs to Python, an installed package, or pardnn itself."""
    if filename.startswith("<"):
        return not is_typed(filename)
    path = str(Path(filename).resolve())
    inside = any(path.startswith(root + "/") for root in _LIBRARY_ROOTS)
    return inside or is_installed_file(path) or path.startswith(_PACKAGE)


def is_installed_file(filename: str) -> bool:
    """Whether a source file belongs to an installed package, rather than to Python or the user."""
    return "/site-packages/" in filename


def is_library_function(function: types.FunctionType) -> bool:
    """Whether a function belongs to Python, an installed package, or pardnn itself."""
    return _is_library_code(function.__code__, function.__globals__)


def is_library_frame(frame: types.FrameType) -> bool:
    """Whether a frame's code belongs to Python, an installed package, or pardnn itself."""
    return _is_library_code(frame.f_code, frame.f_globals)


def is_own_frame(frame: types.FrameType) -> bool:
    """Whether a frame's code belongs to pardnn itself."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _is_library_code(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Whether code is a library's; code that `exec` ran from text belongs to whose names it uses.

    A dataclass also makes its methods from text, but inside a function with another name.
    """
    if not is_library_file(code.co_filename):
        return False
    is_run = code.co_filename == "<string>" and code.co_qualname.partition(".")[0] in space
    return not is_run or is_library_file(space.get("__file__") or "")


def is_typed(filename: str) -> bool:
    """Whether this is the file name of code typed at a prompt, or given by `-c`.

    Code that libraries make from text, such as that of dataclasses, is named `<string>` as well.
    """
    if filename == "<string>":
        return not hasattr(sys.modules["__main__"], "__file__")
    return filename.startswith(_TYPED)


def is_library_module(module: Any) -> bool:
    """Whether a module, or a folder of modules without its own file, belongs to a library."""
    # Its `__dict__` rather than `getattr`: `torch.classes` makes something for any name.
    held = getattr(module, "__dict__", {})
    if module is sys.modules["__main__"] and "__file__" not in held:  # see `is_typed`
        return False
    files = [held.get("__file__"), *(held.get("__path__") or ())]
    file = next((each for each in files if each), None)
    return not _is_made_by_hand(module) if file is None else is_library_file(file)


def _is_made_by_hand(module: Any) -> bool:
    """Whether a module without a file is a user's own `types.ModuleType("config")`.

    Extensions make such modules, too, within their package: `torch._C._nn`.
    """
    if type(module) is not types.ModuleType or module.__spec__ or module.__loader__:
        return False
    name, dot, _ = module.__name__.partition(".")
    return not dot or (name in sys.modules and not is_library_module(sys.modules[name]))


def is_users_code(value: Any) -> bool:
    """Whether a class or module is defined in the user's files, not in a library."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return not is_library_module(module)


def users_line() -> str:
    """Return " (file.py:12)": where the main thread is in the user's own code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and is_library_frame(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def held_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function refers to: a decorator's wrapper calls what is in its closure."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def given_to(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals that code made from text names: attrs passes factories in this way."""
    if function.__code__.co_filename.startswith("<"):
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]


def function_of(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a method, property, partial or decorator."""
    if type(value) in _PLAIN:
        return None
    for _ in range(10):
        if isinstance(value, types.FunctionType):
            return value
        if isinstance(value, _BOUND):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, OF_FUNCTIONS):
            value = value.func
        elif not isinstance(value, type) and hasattr(type(value), "__wrapped__"):
            value = value.__wrapped__
        else:
            return None
    return None

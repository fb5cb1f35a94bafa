"""Sinks of a step: open files, csv writers, progress bars, experiment writers.

A sink is an object of a library, or an open file, that only receives data: it holds no tensor that
a step could compute with, and no module holds it. Capture records the calls that a step makes on
it, and each rank makes them after each step.

Files, databases and queues may only be used as sinks: what is read from them is not guarded, and
would be frozen in the graph.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import io
import sys
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import is_library_file
from pardnn.backends.torch.user_step.held_numbers import named_places
from pardnn.backends.torch.user_step.object_graph import OPAQUE_PACKAGES, ObjectGraph, walk_value

_CSV_WRITER = type(csv.writer(io.StringIO()))
#: Packages whose objects are sinks whatever they hold; a progress bar holds the data it iterates.
_OF_SINKS = ("tqdm", "torch.utils.tensorboard", "tensorboardX")
#: Types whose content is in C, in a file or in another process.
_OUTSIDE = (
    "sqlite3.", "_queue.", "mmap.", "multiprocessing.queues.", "multiprocessing.connection.",
    "multiprocessing.managers.", "pandas.", "polars.", "pyarrow.", "h5py.", "lmdb.",
)  # fmt: skip
_NO_SINKS = (torch.Tensor, torch.nn.Module, dict, list, set, enum.Enum, BaseException)


def is_outside(value: Any) -> bool:
    """Whether the content of a value is outside Python: an open file, a database, a queue."""
    if isinstance(value, io.IOBase):
        return not value.closed
    module = f"{type(value).__module__}."
    return isinstance(value, _CSV_WRITER) or module.startswith(_OUTSIDE)


def sinks_of(objects: ObjectGraph) -> dict[str, Any]:
    """Return the sinks that a step reaches, by name.

    Args:
        objects: The object graph of the step.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    modules = tuple(f"{name}." for name in objects.modules.values() if name)
    for name, _, value in named_places(objects):
        if id(value) in seen or "<" in name:
            continue
        is_held = name.startswith(modules)
        if is_outside(value) or (not is_held and _is_librarys(value) and not _holds_tensors(value)):
            seen.add(id(value))
            found.setdefault(name, value)
    return found


def may_be_told(value: Any) -> bool:
    """Whether calls on a value may be made after a step, as for the values of `sinks_of`."""
    return is_outside(value) or (_is_librarys(value) and not _holds_tensors(value))


def _is_librarys(value: Any) -> bool:
    kind = type(value)
    module = kind.__module__
    if module.startswith(_OF_SINKS):
        return hasattr(value, "__dict__")
    if module.partition(".")[0] in OPAQUE_PACKAGES or isinstance(value, _NO_SINKS):
        return False
    if not hasattr(value, "__dict__") or isinstance(value, type) or callable(value):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_installed = "/site-packages/" in file and is_library_file(file)
    return is_installed and not dataclasses.is_dataclass(value)


def _holds_tensors(value: Any) -> bool:
    if type(value).__module__.startswith(_OF_SINKS):
        return False
    held = walk_value(value)
    return bool(held.tensors or held.stateful or held.arrays)

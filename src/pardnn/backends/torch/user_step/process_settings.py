"""What is set for a whole process, and read by code that names what asks for it."""

from __future__ import annotations

import decimal
import locale
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # removed by others
        return None


def _precision() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


#: What is set for a whole process, and read by a function or attribute of this name.
_PROCESS_SETTINGS: dict[str, Callable[[], Any]] = {
    "Decimal": _precision,
    "argv": lambda: list(sys.argv),
    "cpu_count": os.cpu_count,
    "cwd": _folder,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_interop_threads": torch.get_num_interop_threads,
    "get_num_threads": torch.get_num_threads,
    "getcwd": _folder,
    "getlocale": locale.getlocale,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "benchmark": torch._C._get_cudnn_benchmark,
    "allow_tf32": lambda: 2 * torch._C._get_cublas_allow_tf32() + torch._C._get_cudnn_allow_tf32(),
    "deterministic": torch._C._get_cudnn_deterministic,
    "enabled": torch._C._get_cudnn_enabled,
    "is_deterministic_algorithms_warn_only_enabled": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "fill_uninitialized_memory": torch._C._get_deterministic_fill_uninitialized_memory,
    "getrecursionlimit": sys.getrecursionlimit,
    "getswitchinterval": sys.getswitchinterval,
    "initial_seed": torch.initial_seed,
    "geterr": np.geterr,
    "sched_getaffinity": lambda: sorted(os.sched_getaffinity(0)),
    "warn": lambda: [each for each in warnings.filters if each[0] == "error"],
}
#: As people read them, where that is no function of this name.
_SHOWN = {
    "Decimal": "decimal.getcontext()",
    "allow_tf32": "allow_tf32",
    "argv": "sys.argv",
    "warn": "the filters of warnings that raise",
    "benchmark": "torch.backends.cudnn.benchmark",
    "deterministic": "torch.backends.cudnn.deterministic",
    "enabled": "torch.backends.cudnn.enabled",
    "fill_uninitialized_memory": "torch.utils.deterministic.fill_uninitialized_memory",
}


def process_settings(names: Collection[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the settings of the process that code asks for, and what returns each.

    Args:
        names: That the user's code mentions.
    """
    for name, get in _PROCESS_SETTINGS.items():
        if name in names:
            yield _SHOWN.get(name, f"{name}()"), get

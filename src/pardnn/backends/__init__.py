"""The interface between planning and frameworks.

The functions that planning needs from a framework are named here and loaded at first use, so `from
pardnn import backends` loads no framework. If torch is not loaded yet, it is told to put large
tensors on large pages (`torch.ops.host_allocator`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pardnn.backends.large_pages import ask_for_large_pages
from pardnn.errors import UsageError

if TYPE_CHECKING:
    from pardnn.backends.torch.capture.capture import capture
    from pardnn.backends.torch.codegen.rank_code import CODE_ORIGIN, plan_code
    from pardnn.backends.torch.connect import connect
    from pardnn.backends.torch.deferred_init.deferred import deferred
    from pardnn.backends.torch.devices import rank_memory_bytes, this_device, visible_devices
    from pardnn.backends.torch.first_call import OnFirstCall
    from pardnn.backends.torch.hugging_face import trainer_class
    from pardnn.backends.torch.launch.launcher import run_plan
    from pardnn.backends.torch.lightning import lightning_strategy
    from pardnn.backends.torch.make_step import capture_factory
    from pardnn.backends.torch.ops.verify_description import (
        call_with_values,
        in_double,
        run_call,
        sample_values,
        verify_worker_ops,
    )
    from pardnn.backends.torch.parallelize import parallelize
    from pardnn.backends.torch.profile.link_times import cached_links, measure_links
    from pardnn.backends.torch.profile.of_file import profile_file
    from pardnn.backends.torch.profile.op_times import cached_table, profile_graph
    from pardnn.backends.torch.profile.rank_links import measure_rank_links

ask_for_large_pages()

_HOME = {
    "CODE_ORIGIN": "codegen.rank_code",
    "OnFirstCall": "first_call",
    "cached_links": "profile.link_times",
    "cached_table": "profile.op_times",
    "call_with_values": "ops.verify_description",
    "capture": "capture.capture",
    "capture_factory": "make_step",
    "connect": "connect",
    "deferred": "deferred_init.deferred",
    "in_double": "ops.verify_description",
    "lightning_strategy": "lightning",
    "measure_links": "profile.link_times",
    "measure_rank_links": "profile.rank_links",
    "parallelize": "parallelize",
    "plan_code": "codegen.rank_code",
    "profile_file": "profile.of_file",
    "profile_graph": "profile.op_times",
    "rank_memory_bytes": "devices",
    "run_call": "ops.verify_description",
    "run_plan": "launch.launcher",
    "sample_values": "ops.verify_description",
    "this_device": "devices",
    "trainer_class": "hugging_face",
    "verify_worker_ops": "ops.verify_description",
    "visible_devices": "devices",
}

__all__ = [
    "CODE_ORIGIN",
    "OnFirstCall",
    "cached_links",
    "cached_table",
    "call_with_values",
    "capture",
    "capture_factory",
    "connect",
    "deferred",
    "in_double",
    "lightning_strategy",
    "measure_links",
    "measure_rank_links",
    "parallelize",
    "plan_code",
    "profile_file",
    "profile_graph",
    "rank_memory_bytes",
    "run_call",
    "run_plan",
    "sample_values",
    "this_device",
    "trainer_class",
    "verify_worker_ops",
    "visible_devices",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pardnn.backends' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"pardnn.backends.torch.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "this needs PyTorch, which is not installed: pip install 'pardnn[torch]'.\n"
            "Graph files are planned without it, under --costs of a preset such as a100.",
            code="E251",
        ) from None
    return getattr(home, name)

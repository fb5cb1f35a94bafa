"""pardnn: train a network that does not fit one device, without rewriting it.

The names below are loaded when they are first used, so that importing the package loads no
framework and no compiler.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from pardnn.version import __version__ as __version__

if TYPE_CHECKING:
    from pardnn.api.capture import capture
    from pardnn.api.parallelize import deferred, parallelize
    from pardnn.api.planning import estimate, plan
    from pardnn.api.simulate import check_plan, simulate
    from pardnn.api.tools import connect, lightning_strategy, trainer
    from pardnn.api.verify import verify
    from pardnn.cluster import Cluster
    from pardnn.errors import PardnnError
    from pardnn.graph.file import read_graph, write_graph
    from pardnn.graph.ir import Graph
    from pardnn.plan.constraints import (
        apart,
        fix_layout,
        fix_pieces,
        forbid,
        pin,
        prefer,
        read_constraints,
        together,
    )
    from pardnn.plan.file import read_plan, write_plan
    from pardnn.plan.plan import Plan
    from pardnn.plan.state_in_place import check_state_kept, state_in_place
    from pardnn.shard.tdl.registry import describe

__all__ = [
    "Cluster",
    "Graph",
    "PardnnError",
    "Plan",
    "apart",
    "capture",
    "check_plan",
    "check_state_kept",
    "connect",
    "deferred",
    "describe",
    "estimate",
    "fix_layout",
    "fix_pieces",
    "forbid",
    "lightning_strategy",
    "parallelize",
    "pin",
    "plan",
    "prefer",
    "read_constraints",
    "read_graph",
    "read_plan",
    "simulate",
    "state_in_place",
    "together",
    "trainer",
    "verify",
    "write_graph",
    "write_plan",
]

_HOME = {
    "Cluster": "pardnn.cluster",
    "Graph": "pardnn.graph.ir",
    "PardnnError": "pardnn.errors",
    "Plan": "pardnn.plan.plan",
    "apart": "pardnn.plan.constraints",
    "capture": "pardnn.api.capture",
    "check_plan": "pardnn.api.simulate",
    "check_state_kept": "pardnn.plan.state_in_place",
    "connect": "pardnn.api.tools",
    "deferred": "pardnn.api.parallelize",
    "describe": "pardnn.shard.tdl.registry",
    "estimate": "pardnn.api.planning",
    "fix_layout": "pardnn.plan.constraints",
    "fix_pieces": "pardnn.plan.constraints",
    "forbid": "pardnn.plan.constraints",
    "lightning_strategy": "pardnn.api.tools",
    "parallelize": "pardnn.api.parallelize",
    "pin": "pardnn.plan.constraints",
    "prefer": "pardnn.plan.constraints",
    "read_constraints": "pardnn.plan.constraints",
    "read_graph": "pardnn.graph.file",
    "read_plan": "pardnn.plan.file",
    "simulate": "pardnn.api.simulate",
    "state_in_place": "pardnn.plan.state_in_place",
    "together": "pardnn.plan.constraints",
    "trainer": "pardnn.api.tools",
    "verify": "pardnn.api.verify",
    "write_graph": "pardnn.graph.file",
    "write_plan": "pardnn.plan.file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pardnn' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(types.ModuleType):
    """`pardnn.plan` is the function, though there is a package of that name.

    Importing the package sets it as an attribute of its parent; here that has no effect, and
    `from pardnn.plan.check import check_plan` works as ever.
    """

    @property
    def plan(self) -> Any:
        return importlib.import_module("pardnn.api.planning").plan

    @plan.setter
    def plan(self, value: Any) -> None:
        """Ignore what the import system sets."""


sys.modules[__name__].__class__ = _Package

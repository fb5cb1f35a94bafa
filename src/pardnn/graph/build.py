"""Make a graph: check the ops, then flatten them."""

from __future__ import annotations

from collections.abc import Iterable

from pardnn.graph.check import check_ops
from pardnn.graph.csr import build_arrays
from pardnn.graph.ir import Graph, Op


def build_graph(name: str, ops: Iterable[Op]) -> Graph:
    """Return the checked graph of `ops`.

    Args:
        name: Any text.
        ops: In any order.

    Raises:
        FileError: E402, if the ops do not form a graph.
    """
    ops = tuple(ops)
    check_ops(ops, name=name)
    return Graph(name=name, ops=ops, arrays=build_arrays(ops))

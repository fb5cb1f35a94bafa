"""Checks of the graph that a plan places: cut, with state on the host, and with second calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.cut.check_partitioned_graph import partition_problems
from pardnn.plan.plan import Plan, called_once, graph_in_pieces, on_devices, planned_graph
from pardnn.plan.rewritten.check_offload import offload_problems
from pardnn.plan.rewritten.check_pieces import pieces_problems
from pardnn.plan.rewritten.check_recompute import recompute_problems


def planned_graph_problems(graph: Graph, plan: Plan, most: int) -> list[str]:
    """Return up to `most` rules that the graph of a plan breaks; later ones build on earlier ones.

    Args:
        graph: The graph that the plan is for.
        plan: Any plan.
        most: Number of problems to look for.
    """
    rules = (
        (not plan.keeps_bits, _cut_graph),
        (plan.offload is not None, _on_host),
        (plan.recompute is not None, _called_again),
    )
    for is_needed, rule in rules:
        problems = list(itertools.islice(rule(graph, plan), most)) if is_needed else []
        if problems:
            return problems
    return []


def _cut_graph(graph: Graph, plan: Plan) -> Iterator[str]:
    """Check the graph of the ops of all devices, or of all pieces of the batch."""
    what = "pieces"
    try:
        in_pieces = graph_in_pieces(graph, plan)
        what = "partition"
        on_devices(graph, plan)
    except PardnnError as error:
        yield f"{what}: {error.message}"
        return
    if plan.pieces is not None:
        problems = list(pieces_problems(graph, plan.pieces))
        yield from problems
        if problems:
            return
    if plan.partition is not None:
        yield from partition_problems(in_pieces, plan)


def _on_host(graph: Graph, plan: Plan) -> Iterator[str]:
    """Check what follows from state on the host."""
    assert plan.offload is not None
    try:
        rewritten = called_once(graph, plan)
    except PardnnError as error:
        yield error.message if "offload" in error.message else f"offload: {error.message}"
        return
    yield from offload_problems(on_devices(graph, plan), plan.offload, rewritten)


def _called_again(graph: Graph, plan: Plan) -> Iterator[str]:
    """Check what follows from the second calls of ops."""
    assert plan.recompute is not None
    try:
        rewritten = planned_graph(graph, plan)
    except PardnnError as error:
        yield error.message if "recompute" in error.message else f"recompute: {error.message}"
        return
    yield from recompute_problems(called_once(graph, plan), plan.recompute, rewritten)

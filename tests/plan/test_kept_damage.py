"""What the checker says of a rewritten plan's file with one value changed is kept as text.

Of each kind of plan that rewrites the graph: cut, with sums in place, in pieces, with state on the
host, with second calls. A number becomes the next one, a text the one before it, a list loses its
last entry. What is called valid here is so as far as order, memory and the roles of ops go: what
the ops compute is checked by `planner.check_cut`, which refuses the rest.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan
from tests.kept import assert_kept
from tests.plan.cut.test_check_partitioned_graph import sharded
from tests.plan.cut.test_check_sums_in_place import sums
from tests.plan.test_check_pieces import _graph as piecewise
from tests.plan.test_check_pieces import _pieces as pieces_of
from tests.plan.test_offload import in_order, momenta
from tests.plan.test_recompute import TWICE, chain, planned

pytestmark = pytest.mark.jit  # hundreds of plans: checked shapes would take seconds

#: What no checker reads, or what is checked beside graphs.
SKIPPED = {"checksum", "graph_fingerprint", "digests", "versions", "seed", "algorithm", "reserve"}


def in_pieces() -> tuple[Graph, Plan]:
    graph = piecewise()
    pieces = pieces_of(graph)
    names = tuple(op.name for op in pieces.ops)
    return graph, Plan(placement=dict.fromkeys(names, 0), order=(names,), pieces=pieces)


#: How to make a plan, and the part of its places that are changed, every so many.
PLANS: dict[str, tuple[Callable[[], tuple[Graph, Plan]], int]] = {
    "cut": (sharded, 2),
    "sums in place": (sums, 3),
    "in pieces": (in_pieces, 9),
    "on the host": (lambda: (momenta(), in_order(momenta(), ("a",))), 1),
    "second calls": (lambda: (chain(), planned(chain(), TWICE)), 1),
}


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each value of a file that is no object, and where it is."""
    if isinstance(data, dict):
        for key, value in cast("dict[str, Any]", data).items():
            if path or key not in SKIPPED:
                yield from places(value, (*path, key))
        return
    yield path, data
    if isinstance(data, list):
        for number, value in enumerate(cast("list[Any]", data)):
            yield from places(value, (*path, number))


def changed(value: Any, texts: list[str]) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value[:-1] if isinstance(value, list) else texts[texts.index(value) - 1]


@pytest.mark.parametrize("name", PLANS)
def test_problems_of_damaged_files_are_those_that_are_kept(name: str) -> None:
    make, step = PLANS[name]
    graph, plan = make()
    assert plan_problems(graph, plan) == []
    text = plan_to_json(plan)
    data = json.loads(text)
    texts = list(dict.fromkeys(v for _, v in places(data) if isinstance(v, str)))
    lines = [name]
    for number, (path, value) in enumerate(list(places(data))):
        if number % step or value == []:
            continue
        other = json.loads(text)
        del other["checksum"]
        at = other
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = changed(value, texts)
        try:
            problems = plan_problems(graph, plan_from_json(json.dumps(other).encode()))
        except PardnnError as error:
            problems = [f"{error.code} {error.message.splitlines()[0]}"]
        where = ".".join(map(str, path))
        lines.append(f"{where}: {problems[0] if problems else 'valid'}")
    assert_kept("damage.txt", lines)

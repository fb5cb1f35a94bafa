"""Constraints: every algorithm obeys, the checker proves it, conflicts are told exactly."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.api.advice import planned
from pardnn.errors import InfeasibleError, InvalidPlanError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.constraints import irreducible
from pardnn.plan.constraints import Constraint, constraint_to_dict, pin
from pardnn.plan.demands.check_constraints import breaking
from pardnn.plan.demands.named import Named, named
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.planner.algorithms import ALGORITHMS, SHARDED
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import suggestions
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from tests.place.grouped import grouped_graph
from tests.place.machines import cluster_of

pytestmark = pytest.mark.jit
BLOCKS = 4


def _blocks():
    """Return a chain of layers of three ops, each with a parameter."""
    ops = [_op("x", "input")]
    for i in range(BLOCKS):
        before = f"h{i - 1}.out" if i else "x"
        ops += [
            _op(f"h{i}.weight", "parameter"),
            _op(f"h{i}.in", "op", before, f"h{i}.weight", module=f"net.{i}"),
            _op(f"h{i}.out", "op", f"h{i}.in", module=f"net.{i}"),
        ]
    return build_graph("blocks", ops)


def _op(name, kind, *inputs, module=None):
    memory = "residual" if kind == "parameter" else "normal"
    return Op(
        name=name, kind=kind, inputs=inputs, outputs=(Tensor(name=name, bytes=8),), module=module,
        memory=memory, seconds={"accelerator": 0.0 if kind == "parameter" else 1.0},
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", [name for name in (*ALGORITHMS, "auto") if name != "single"])
def test_every_algorithm_obeys(algorithm: str) -> None:
    demanded = [
        pardnn.pin("layer:net.0", 2),
        pardnn.pin("h3.weight", "d0", 1),
        pardnn.forbid(1, what="op:x"),
        pardnn.together("h1.weight", "layer:net.1"),
        pardnn.apart("layer:net.1", "layer:net.2", "tensor:x"),
    ]
    plan = pardnn.plan(_blocks(), cluster_of(3), algorithm=algorithm, constraints=demanded)
    at = plan.placement
    assert {at["h0.in"], at["h0.out"]} == {2}
    assert at["h3.weight"] in (0, 1)
    assert at["x"] != 1
    assert at["h1.weight"] == at["h1.in"] == at["h1.out"]
    assert not {at["h1.in"], at["x"]} & {at["h2.in"], at["h2.out"]}
    assert at["h1.in"] != at["x"]
    assert plan.constraints == tuple(demanded)


def test_single_obeys_or_names_what_does() -> None:
    plan = pardnn.plan(_blocks(), cluster_of(2), "single", constraints=[pardnn.pin("x", 1)])
    assert {*plan.placement.values()} == {1}
    ends = [pardnn.pin("x", 1), pardnn.pin("h0.in", 0)]
    with pytest.raises(
        InfeasibleError, match="single found no plan .*: no .*\n *Use pardnn,"
    ) as caught:
        pardnn.plan(_blocks(), cluster_of(2), "single", constraints=ends)
    assert caught.value.code == "E301"
    assert caught.value.details["try"] == ["--algorithm pardnn"]


def test_an_advised_limit_was_tried_with_the_constraints() -> None:
    """No limit makes one device do for what must be on two."""
    ends = (pardnn.pin("x", 1), pardnn.pin("h0.in", 0))
    options = PlanOptions(algorithm="single", constraints=ends)
    problem = Problem(_blocks(), cluster_of(2), costs_for(_blocks(), cluster_of(2), None), options)
    assert list(suggestions(problem)) == []
    with pytest.raises(InfeasibleError) as caught:
        planned(_blocks(), cluster_of(2), dataclasses.replace(options, recompute=True))
    assert "tried: fits" not in str(caught.value)


def _demands(rng: np.random.Generator, names: list[str], k: int) -> list[Constraint]:
    found: list[Constraint] = []
    for kind in rng.choice(["pin", "forbid", "together", "apart"], rng.integers(2, 5)).tolist():
        some = rng.permutation(names).tolist()
        devices = tuple(rng.permutation(k)[: rng.integers(1, k)].tolist())
        count = int(rng.integers(1, 3)) if kind in ("pin", "forbid") else int(rng.integers(2, 4))
        told = devices if kind in ("pin", "forbid") else ()
        found.append(Constraint(kind=kind, what=tuple(some[:count]), devices=told))
    return found


def _refused(graph, cluster, demanded: list[Constraint]) -> list[Constraint] | None:
    """Return the constraints that E303 lists; None if there is a plan, which meets all of them."""
    try:
        plan = pardnn.plan(graph, cluster, "round-robin", constraints=demanded)
    except InfeasibleError as error:
        listed = error.details["constraints"] if error.code == "E303" else []
        return [each for each in demanded if constraint_to_dict(each) in listed]
    pardnn.check_plan(graph, dataclasses.replace(plan, constraints=tuple(demanded)))
    return None


def test_conflicts_are_told_exactly_and_by_no_constraint_too_many() -> None:
    """All placements of tiny graphs are tried: of what is demanded, and without each of it."""
    refused = 0
    for seed in range(40):
        graph, cluster = grouped_graph(seed), cluster_of(2 + seed % 2)
        k, names = cluster.num_devices, [op.name for op in graph.ops]
        demanded = _demands(np.random.default_rng(seed), names, k)
        groups = graph.arrays.group
        places = [
            place
            for place in itertools.product(range(k), repeat=len(names))
            if len({*zip(groups.tolist(), place, strict=True)}) == len({*groups.tolist()})
        ]

        def can_hold(rows: list[Constraint], graph=graph, cluster=cluster, places=places) -> bool:
            meant = named(rows, graph, graph, cluster, cluster.num_devices)
            return any(not any(breaking(each, place) for each in meant) for place in places)

        told = _refused(graph, cluster, demanded)
        refused += told is not None
        if told is None:
            assert can_hold(demanded)
        else:
            assert not can_hold(told)
            assert all(can_hold([e for e in told if e is not each]) for each in told)
    assert 8 < refused < 32


def test_memory_and_links_are_named_with_what_they_forbid() -> None:
    graph = _blocks()
    pins = [pardnn.pin(f"h{i}.weight", 0) for i in range(BLOCKS)]
    with pytest.raises(InfeasibleError, match="these 4 constraints cannot hold") as caught:
        pardnn.plan(graph, cluster_of(2, memory=31), reserve=0.0, constraints=pins)
    assert caught.value.code == "E303"
    one_way = dataclasses.replace(cluster_of(2), default_link=None)
    ends = [pardnn.pin("h1.in", 0), pardnn.pin("layer:net.3", 1), pardnn.pin("h1.out", 1)]
    with pytest.raises(InfeasibleError, match="these 2 constraints cannot hold") as caught:
        pardnn.plan(graph, one_way, constraints=ends)
    assert "h1.in" in str(caught.value)
    with pytest.raises(InfeasibleError, match="could not be met") as caught:
        pardnn.plan(graph, cluster_of(2, memory=40), reserve=0.0, constraints=[pardnn.forbid(0)])
    assert caught.value.exit_status == 3


def test_the_checker_proves_them_and_the_file_keeps_them() -> None:
    graph = _blocks()
    demanded = [pardnn.pin("layer:net.2", 1), pardnn.apart("h0.in", "h1.in")]
    plan = pardnn.plan(graph, cluster_of(2), "heft", constraints=demanded)
    assert plan_from_json(plan_to_json(plan)) == dataclasses.replace(
        plan, checksum=plan_from_json(plan_to_json(plan)).checksum
    )
    other = pardnn.plan(graph, cluster_of(2), "single")
    broken = dataclasses.replace(other, constraints=plan.constraints)
    with pytest.raises(InvalidPlanError, match="constraint 'pin layer:net.2 to 1' is broken"):
        pardnn.check_plan(graph, broken)
    broken = dataclasses.replace(other, constraints=(demanded[1],))
    with pytest.raises(InvalidPlanError, match="'h0.in' is on device 0 and 'h1.in' is on device 0"):
        pardnn.check_plan(graph, broken)


@pytest.mark.parametrize("algorithm", [*SHARDED, "1f1b"])
def test_what_cuts_ops_refuses_by_name(algorithm: str) -> None:
    with pytest.raises(
        UsageError, match=f"{re.escape(algorithm)} does not take constraints"
    ) as caught:
        pardnn.plan(_blocks(), cluster_of(2), algorithm, constraints=[pardnn.forbid(0)])
    assert caught.value.code == "E246"
    assert caught.value.message.endswith("Use auto, or a placement algorithm.")


@pytest.mark.parametrize("algorithm", ["heft", "auto-whole", "1f1b"])
def test_what_places_whole_ops_refuses_layouts_by_name(algorithm: str) -> None:
    with pytest.raises(UsageError, match=r"E246.*\n.*Use auto, or a cutting algorithm\."):
        pardnn.plan(_blocks(), cluster_of(2), algorithm, constraints=[pardnn.fix_layout("w", 0)])


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (lambda: pardnn.pin("layer:net.9", 0), "no layer is named 'net.9'"),
        (lambda: pardnn.pin("h0.wieght", 0), "Did you mean 'h0.weight'"),
        (lambda: pardnn.pin("x", 2), "there is no device '2'"),
        (lambda: pardnn.pin("x"), "names no device"),
        (lambda: pardnn.apart("x"), "two or more"),
    ],
)
def test_what_says_nothing_is_refused(constraint, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        pardnn.plan(_blocks(), cluster_of(2), constraints=[constraint()])
    assert caught.value.code == "E245"


@given(st.sets(st.integers(0, 40), min_size=1, max_size=4), st.sets(st.integers(0, 40), max_size=4))
def test_few_of_many_constraints_are_told(one: set[int], other: set[int]) -> None:
    """Each of those returned is needed, and the latest are told: as if one by one were left out."""
    every = [Named(pin(f"op:{i}", 0), (), frozenset()) for i in range(41)]
    number = {id(each): i for i, each in enumerate(every)}

    def fails(part: Sequence[Named]) -> bool:
        asked.append(part)
        has = {number[id(each)] for each in part}
        return one <= has or bool(other and other <= has)

    asked: list[Sequence[Named]] = []
    found = irreducible(every, fails)
    assert len(asked) <= 7 * (len(found) + 1)
    rest = every
    for each in every:
        without = [kept for kept in rest if kept is not each]
        rest = without if fails(without) else rest
    assert list(found) == rest


def test_a_file_of_constraints_says_what_was_demanded_alone() -> None:
    found = constraint_to_dict(pardnn.pin("op:x", 1))
    assert found == {"kind": "pin", "what": ["op:x"], "devices": [1]}

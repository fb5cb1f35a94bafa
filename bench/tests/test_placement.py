"""The placement benchmark: rows are drawn evenly, cases are valid, sums are what they say."""

import numpy as np
import pytest

from bench.placement import memory
from bench.placement.main import large, parsed, sampled
from bench.placement.memory import feasibility, feasibility_summary, memory_case, packs
from bench.placement.page import large_section, limits_section
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from testbed.small_graphs import FAMILIES, MOST_OPS, small_case


def test_every_family_ratio_and_number_of_devices_is_drawn() -> None:
    options = parsed(["--full", "--rows", "21"])
    rows = sampled(options)
    assert len(rows) == 63
    for size in (1000, 5000, 20000):
        mine = [row for row in rows if row[1] == size]
        assert len(set(mine)) == 21
        families = [row[0] for row in mine]
        assert {families.count(name) for name in families} == {3}
        assert {row[2] for row in mine} == {0.1, 1.0, 10.0}
        assert {row[3] for row in mine} == {2, 4, 16, 64}
    assert rows == sampled(options)
    assert rows != sampled(parsed(["--full", "--rows", "21", "--seed", "1"]))
    assert len(sampled(parsed(["--full", "--rows", "0"]))) == 7 * 3 * 3 * 4


def test_small_graphs_are_small_and_of_every_family() -> None:
    cases = [small_case(number, 3) for number in range(5 * len(FAMILIES))]
    sizes = [len(case.graph.ops) for case in cases]
    assert max(sizes) <= MOST_OPS
    assert min(sizes) >= 7
    assert len({case.cluster for case in cases}) > 5


def test_memory_cases_hold_every_kind_of_memory() -> None:
    graphs = [memory_case(number, 0).graph for number in range(12)]
    ops = [op for graph in graphs for op in graph.ops]
    assert {op.memory for op in ops} == {"normal", "residual", "reference"}
    assert any(op.workspace for op in ops)
    assert any(op.group for op in ops)


def test_packing_puts_the_largest_where_most_is_left() -> None:
    assert packs(np.array([3, 3, 2, 2]), 5, 2)
    assert not packs(np.array([3, 3, 3]), 5, 2)
    assert not packs(np.array([1]), -1, 2)


@pytest.mark.jit
def test_what_is_found_is_counted() -> None:
    rows = [feasibility(memory_case(number, 0), number) for number in range(4)]
    found = feasibility_summary(rows)
    assert [row["kind"] for row in found] == ["mixed", "training step", "all"]
    total = found[-1]
    assert total["plans"] + total["infeasible"] == 8
    assert total["over"] == total["missed"] == total["no_witness"] == 0
    assert total["plans"] > 0 < total["infeasible"]
    assert f"| all | 4 | {total['plans']} | 0 |" in "\n".join(limits_section({"limits": rows}))


def test_a_planner_that_gives_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = memory_case(1, 0)
    given = Problem(
        case.graph, Cluster.uniform(1), case.costs, PlanOptions(algorithm="single", reserve=0.0)
    )
    single = make_plan(given)

    def gives_up(problem: Problem) -> object:
        if problem.options.algorithm == "single":
            return single
        raise InfeasibleError("it says nothing of what it saw")

    monkeypatch.setattr(memory, "make_plan", gives_up)
    row = feasibility(case, 2)
    assert (row["plans"], row["infeasible"], row["no_witness"]) == (0, 2, 2)
    assert row["missed"] >= 1


@pytest.mark.jit
def test_auto_is_compared_with_heft_on_large_graphs() -> None:
    rows = large(parsed(["--large", "40", "--large-rows", "3", "--devices", "2", "--ccr", "1"]))
    assert {row["family"] for row in rows} == {"fork-join", "recurrent", "branches"}
    text = "\n".join(large_section({"large": rows}))
    assert text.count("-40-ccr1-0 | 2 |") == 3
    assert all(row["by"]["auto"]["makespan_s"] <= row["by"]["heft"]["makespan_s"] for row in rows)
    assert large_section({}) == []

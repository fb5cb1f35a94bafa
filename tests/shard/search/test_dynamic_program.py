"""The dynamic program beside trying every layout and every strategy of its tables."""

import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest

from pardnn.plan.mesh import make_mesh
from pardnn.shard.search import dynamic_program, recursion, variable_elimination
from pardnn.shard.search.coarsening import NEEDED, TRAINING
from pardnn.shard.search.cost_tables import CostTables, State
from pardnn.shard.search.dynamic_program import Solution, layout_cost, solve, solve_many
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import best_state, is_tractable, polished, recursive_search
from pardnn.shard.search.tofu import find_sharding
from pardnn.shard.search.variable_elimination import Minimum, Table, minimise
from testbed.hand_graphs import Steps, chain, matmul, mlp
from testbed.least_by_counting import least_bytes_counted

pytestmark = pytest.mark.jit


class Chance(BytesObjective):
    """Bytes, and beside them computing and layouts that cost something, whatever it is."""

    def computation(self, factor: Any, strategies: Any) -> np.ndarray:
        return np.array([chance(factor.number, axes) for axes in strategies.axes])

    def layout_cost(self, variable: Any, layouts: Any, axis_sizes: Any) -> np.ndarray:
        return np.array([chance(variable.bytes, layout) for layout in layouts])


def chance(*what: object) -> float:
    """A number up to 300 that looks drawn, always the same for the same."""
    return float(zlib.crc32(repr(what).encode()) % 300)


def terms(tables: CostTables, fixed: State, axes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Of each variable its options and their costs, of each factor its strategies' tables."""
    problem = tables.problem
    options = [
        tables.layouts(v, layout, axes)
        for v, layout in zip(problem.variables, fixed.layouts, strict=True)
    ]
    alone = [layout_cost(tables, v, o) for v, o in zip(problem.variables, options, strict=True)]
    rows = []
    for factor, loops in zip(problem.factors, fixed.axes, strict=True):
        found = tables.strategies(factor, loops, axes)
        moved = [
            (
                operand.variable,
                tables.communication([(operand, found, options[operand.variable])])[0],
            )
            for operand in factor.operands
        ]
        rows.append((len(factor.ops), found, tables.objective.computation(factor, found), moved))
    return list(zip(options, alone, strict=True)), rows


def least(tables: CostTables, fixed: State, axes: tuple[int, ...]) -> float:
    """The least cost, every combination of layouts tried."""
    variables, factors = terms(tables, fixed, axes)
    best = math.inf
    for chosen in itertools.product(*(range(len(options)) for options, _ in variables)):
        total = sum(alone[c] for (_, alone), c in zip(variables, chosen, strict=True))
        for count, _, computing, moved in factors:
            total += count * min(
                computing[s] + sum(values[s, chosen[v]] for v, values in moved)
                for s in range(len(computing))
            )
        best = min(best, float(total))
    return best


def stated(tables: CostTables, found: Solution, axes: tuple[int, ...]) -> float:
    """The cost of a state by the tables' entries."""
    variables, factors = terms(tables, found.state, axes)
    at = [o.index(layout) for (o, _), layout in zip(variables, found.state.layouts, strict=True)]
    total = sum(alone[c] for (_, alone), c in zip(variables, at, strict=True))
    for (count, strategies, computing, moved), loops in zip(factors, found.state.axes, strict=True):
        s = list(strategies.axes).index(loops)
        total += count * (computing[s] + sum(values[s, at[v]] for v, values in moved))
    return float(total)


def empty(tables: CostTables, count: int) -> State:
    problem, none = tables.problem, (None,) * count
    return State((none,) * len(problem.variables), (none,) * len(problem.factors))


CASES = [(chain(6, 4, 9), NEEDED, (2, 2)), (chain(4, 8, 4, 6), NEEDED, (2,)),
         (mlp(6, 4, 8, 10), TRAINING, (2,)), (chain(5, 4, 7, 4), NEEDED, (3,)),
         (mlp(4, 8, 4, 6), TRAINING, (2, 2)),
         (chain(6, 1, 9, 4), NEEDED, (2, 2))]  # x and w1 have one layout each  # fmt: skip


@pytest.mark.parametrize("objective", [BytesObjective, Chance])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_least_of_all_combinations_is_found(monkeypatch, number: int, objective: Any) -> None:
    graph, level, shape = CASES[number]
    tables = CostTables(make_problem(graph, level), objective(), shape)
    axes = tuple(range(len(shape)))
    start = empty(tables, len(shape))
    expected = least(tables, start, axes)
    for entries, at_once in ((1 << 16, 1 << 20), (1 << 16, 1), (0, 1)):
        # Tables of factors, one at a time; strategies as variables of their own.
        monkeypatch.setattr(dynamic_program, "FACTOR_ENTRIES", entries)
        monkeypatch.setattr(dynamic_program, "AT_ONCE", at_once)
        found = solve(tables, start, axes)
        assert found.is_exact
        assert found.cost == pytest.approx(expected) == stated(tables, found, axes)


@pytest.mark.parametrize("first", [0, 1])
def test_one_axis_is_chosen_with_the_other_as_it_is(first: int) -> None:
    tables = CostTables(make_problem(mlp(6, 4, 8, 10), TRAINING), Chance(), (2, 2))
    start = recursive_search(tables)
    assert stated(tables, start, (0, 1)) == pytest.approx(start.cost)
    found = solve(tables, start.state, [first])
    assert found.cost == pytest.approx(least(tables, start.state, (first,)))
    assert found.cost <= start.cost + 1e-9
    kept = 1 - first
    for one, other in zip(found.state.layouts, start.state.layouts, strict=True):
        assert one[kept] == other[kept]
    nothing = solve(tables, found.state, ())
    assert nothing.state == found.state
    assert nothing.cost == pytest.approx(found.cost)


def test_noise_gives_other_choices_at_their_true_cost() -> None:
    tables = CostTables(make_problem(mlp(6, 6, 6, 6), TRAINING), BytesObjective(), (2, 2))
    start = empty(tables, 2)
    best, *others = solve_many(tables, start, (0, 1), (0.0, *[0.9] * 12))
    assert best.cost == pytest.approx(least(tables, start, (0, 1)))
    assert len({each.state for each in others}) > 3
    for each in others:
        assert each.cost == pytest.approx(stated(tables, each, (0, 1)))
        assert each.cost >= best.cost


def test_polish_ends_where_no_axis_alone_can_be_better() -> None:
    tables = CostTables(make_problem(mlp(6, 12, 10, 4), TRAINING), Chance(), (2, 3))
    start = recursive_search(tables)
    found = polished(tables, start)
    assert found.cost <= start.cost
    assert not found.is_exact
    for axis in (0, 1):
        assert solve(tables, found.state, [axis]).cost == pytest.approx(found.cost)
    assert best_state(tables).cost <= found.cost + 1e-9
    one = CostTables(make_problem(matmul(6, 4, 8), NEEDED), BytesObjective(), (2,))
    alone = recursive_search(one)
    assert polished(one, alone) is alone


def test_what_is_chosen_together_is_bounded_by_strategies_and_entries(monkeypatch) -> None:
    """Two products: 3 loops each on each of two axes, 9 strategies a call; 2 x 2 dims a tensor."""
    tables = CostTables(make_problem(chain(4, 8, 6, 10), NEEDED), BytesObjective(), (2, 2))
    for count, strategies, entries in ((1, 2 * 3, 2 * 3 * 2**3), (2, 2 * 9, 2 * 9 * 4**3)):
        monkeypatch.setattr(recursion, "SMALL_STRATEGIES", strategies)
        monkeypatch.setattr(recursion, "SMALL_ENTRIES", entries)
        assert is_tractable(tables, count)
        monkeypatch.setattr(recursion, "SMALL_STRATEGIES", strategies - 1)
        assert not is_tractable(tables, count)
        monkeypatch.setattr(recursion, "SMALL_STRATEGIES", strategies)
        monkeypatch.setattr(recursion, "SMALL_ENTRIES", entries - 1)
        assert not is_tractable(tables, count)


def test_noise_is_relative_and_at_most_what_is_asked_for() -> None:
    """And drawn from the seed: the same plans in every run."""
    tables = [Table((0,), np.arange(1.0, 200.0)), Table((0, 1), np.full((3, 50), 7.0))]
    found = dynamic_program._disturbed(tables, 0.1, 5)
    for one, other in zip(tables, found, strict=True):
        ratio = other.values / one.values
        assert 1.0 <= ratio.min() < 1.02
        assert 1.08 < ratio.max() <= 1.1
    again, next_seed = (dynamic_program._disturbed(tables, 0.1, seed) for seed in (5, 6))
    assert all((a.values == b.values).all() for a, b in zip(found, again, strict=True))
    assert not any((a.values == b.values).any() for a, b in zip(found, next_seed, strict=True))
    assert dynamic_program._disturbed(tables, 0.0, 5) is tables


def test_an_op_that_cannot_be_cut_has_one_strategy(monkeypatch) -> None:
    s = Steps()
    s.source("x", (4, 6), "input")
    s.call("y", "nobody::knows.default", ["x"], (4, 6))
    tables = CostTables(make_problem(s.graph(), NEEDED), BytesObjective(), (2, 2))
    for strategies, together in ((1, True), (0, False)):
        monkeypatch.setattr(recursion, "SMALL_STRATEGIES", strategies)
        assert is_tractable(tables, 2) == together


@pytest.mark.parametrize(
    ("shape", "many", "strategies", "width"),
    [
        ((2, 2, 2), 64, 1500, 2),
        ((2, 2, 2), 0, 1500, 1),
        ((2, 2, 2), 64, 10, 1),
        ((2, 2), 64, 99, 1),
    ],
)
def test_polish_opens_two_of_three_axes_where_that_is_little_work(
    monkeypatch, shape: tuple[int, ...], many: int, strategies: int, width: int
) -> None:
    tables = CostTables(make_problem(chain(4, 8, 6, 10), NEEDED), BytesObjective(), shape)
    start, opened = recursive_search(tables), set[int]()

    def noted(tables: CostTables, state: State, axes: Any) -> Solution:
        opened.add(len(axes))
        return solve(tables, state, axes)

    monkeypatch.setattr(recursion, "solve", noted)
    monkeypatch.setattr(recursion, "MANY_FACTORS", many)
    monkeypatch.setattr(recursion, "SMALL_STRATEGIES", strategies)
    polished(tables, start)
    assert opened == {width}


def test_dims_that_nothing_can_cut_take_part_in_no_table(monkeypatch) -> None:
    """Of 6 x 1 and 1 x 9 one dim is cut: 3 strategies by 1 x 1 x 4 layouts on two axes."""
    tables = CostTables(make_problem(matmul(6, 1, 9), NEEDED), BytesObjective(), (2, 2))
    loops = 2  # the sum has one term
    monkeypatch.setattr(recursion, "SMALL_STRATEGIES", loops**2)
    for entries, together in ((loops**2 * 4, True), (loops**2 * 4 - 1, False)):
        monkeypatch.setattr(recursion, "SMALL_ENTRIES", entries)
        assert is_tractable(tables, 2) == together


def test_a_minimum_with_variables_that_were_fixed_is_the_least_around_them(monkeypatch) -> None:
    """Hence no worse than the start, which they are fixed to."""
    fixed: set[int] = set()
    plain = variable_elimination._fix

    def noted(variable: int, *rest: Any) -> list[int]:
        fixed.add(variable)
        return plain(variable, *rest)

    monkeypatch.setattr(variable_elimination, "_fix", noted)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 4, 6).tolist()
        pairs = [p for p in itertools.combinations(range(6), 2) if rng.random() < 0.8]
        tables = [Table(p, rng.random([sizes[v] for v in p])) for p in pairs]
        tables.append(Table((0,), rng.random(sizes[0])))

        def value(assignment: Any, tables: Any = tables) -> float:
            return sum(t.values[tuple(assignment[v] for v in t.variables)] for t in tables)

        start = [int(rng.integers(size)) for size in sizes]
        fixed.clear()
        bounded = minimise(sizes, tables, start, max_entries=12)
        assert not bounded.is_exact
        assert value(bounded.assignment) <= value(start) + 1e-12
        assert fixed, "or else nothing was bounded"
        others = itertools.product(
            *([start[v]] if v in fixed else range(size) for v, size in enumerate(sizes))
        )
        assert value(bounded.assignment) == pytest.approx(min(map(value, others)))
        free = minimise(sizes, tables, start)
        assert free.is_exact
        assert value(free.assignment) <= value(bounded.assignment) + 1e-12
    one = Table((0,), np.array([3.0, 1.0, 2.0]))
    assert minimise([3], [one], [2], max_entries=2) == Minimum([2], False)
    lonely = minimise([3, 2], [Table((1,), np.array([2.0, 1.0]))], [2, 0])
    assert lonely.assignment == [2, 1]


def test_a_second_cut_costs_no_less_than_the_first() -> None:
    """Theorem 2, on optima that are counted: four devices move at least twice what two move."""
    rng = np.random.default_rng(3)
    for _ in range(8):
        sizes = rng.choice([4, 8, 16, 32], size=4).tolist()
        for graph in (mlp(*sizes), chain(*sizes)):
            one, two = (least_bytes_counted(graph, axes) for axes in (1, 2))
            assert two >= 2 * one
            for axes, counted in ((1, one), (2, two)):
                assert find_sharding(graph, make_mesh((2,) * axes)).cost >= counted

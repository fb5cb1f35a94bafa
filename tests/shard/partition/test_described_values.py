"""Descriptions computed number by number, whole and in parts, beside what partitioning says.

A naive twin runs the lambdas of a description on numbers. A worker runs them over its own values
of the loop that is cut: what it reads must be the region that it is said to need, no more and no
less, where its results lie must be as said, and together they must be the whole.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.plan.mesh import cut_points, make_mesh
from pardnn.shard.cache import forget
from pardnn.shard.partition.axis_strategies import AxisStrategies, axis_strategies_of
from pardnn.shard.partition.call import Call
from pardnn.shard.partition.interning import cuttable_loops, intern_call
from pardnn.shard.partition.per_device import local_ops
from pardnn.shard.partition.regions import Region
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.partition.worker_ops import WorkerOp, partition
from pardnn.shard.tdl import registry
from pardnn.shard.tdl.interval import Affine, Floor, ceil_div, variables
from pardnn.shard.tdl.language import (
    Apply,
    At,
    Max,
    Mean,
    Min,
    Node,
    Once,
    Opaque,
    Prod,
    Range,
    Read,
    Reduction,
    Sizes,
    Sum,
    Tensor,
    index_entry,
    parameters,
    result,
)
from pardnn.shard.tdl.registry import describe
from tests.shard.partition.test_loop_cut import is_outside
from tests.strategies import examples

#: No kernels: once is enough.
pytestmark = [pytest.mark.jit, pytest.mark.usefixtures("own_registry")]

Values = dict[tuple[int, ...], float]
Reads = dict[int, tuple[Read, set[tuple[int, ...]]]]
"""At which indices the value of each access of an input is asked for."""
Runs = Mapping[str, range]
"""Of each loop, the values that it takes."""

COMBINE: Any = {
    "sum": sum, "mean": lambda v: sum(v) / len(v), "max": max, "min": min, "prod": math.prod,
}  # fmt: skip


def at(index: Affine, env: Mapping[str, int]) -> int:
    """An index in numbers."""
    total = index.constant
    for atom, factor in index.terms:
        inner = at(atom.numerator, env) // atom.divisor if isinstance(atom, Floor) else None
        total += factor * (env[atom.name] if inner is None else inner)  # type: ignore[union-attr]
    return total


class Outcome:
    """What the lambdas of a description make and read where loops take some values."""

    def __init__(self, made: Call, runs: Runs, once: bool = True) -> None:
        """Run them; `once` adds what is added once."""
        self.runs, self.once = runs, once
        rng = np.random.default_rng(0)
        self.data = {name: rng.uniform(0.5, 2.0, shape) for name, shape in made.shapes.items()}
        self.reads: dict[str, Reads] = {name: {} for name in made.shapes}
        self.outputs: list[Values] = []
        for names, node, place in lambdas(made):
            values: Values = {}
            # Places are of the innermost loops: without them each is one value.
            inner = names if place is None else (*names, *reduced(node))
            for each in itertools.product(*(runs[name] for name in inner)):
                env = dict(zip(inner, each, strict=True))
                if place is None:
                    values[each] = self.value(node, env)
                    continue
                spot = tuple(at(entry, env) for entry in place)
                values[spot] = values.get(spot, 0.0) + self.value(node, env)
            self.outputs.append(values)

    def value(self, node: Node, env: Mapping[str, int]) -> Any:
        """The value of a node."""
        match node:
            case Reduction():
                names = [name for name in node.names if name not in env]
                if not names:
                    return self.value(node.body, env)
                spots = itertools.product(*(self.runs[name] for name in names))
                each = [{**env, **dict(zip(names, spot, strict=True))} for spot in spots]
                return COMBINE[node.reducer.name]([self.value(node.body, one) for one in each])
            case At() | Once():
                found = self.value(node.value, env)
                return found if self.once or isinstance(node, At) else 0.0
            case Read():
                return self.read(node, env)
            case Apply():
                values = [self.value(operand, env) for operand in node.operands]
                if node.at:
                    return np.cumsum(values[0])[tuple(at(index, env) for index in node.at)]
                one: Any = values[0]
                other: Any = values[-1]
                return {
                    "add": lambda: one + other, "sub": lambda: one - other,
                    "mul": lambda: one * other, "truediv": lambda: one / other,
                    "pow": lambda: one**other, "neg": lambda: -one,
                }.get(node.name, lambda: math.sin(sum(np.sum(v) for v in values)))()  # fmt: skip
        return 2.0  # a number: which it is no description says

    def read(self, node: Read, env: Mapping[str, int]) -> Any:
        """What is read of an input: what is clipped counts nothing."""
        data = self.data[node.slot]
        spots = self.reads[node.slot].setdefault(id(node), (node, set()))[1]
        if any(isinstance(entry, Range) for entry in node.index):
            axes = [
                range(0 if entry.start is None else at(entry.start, env),
                      size if entry.stop is None else at(entry.stop, env))
                if isinstance(entry, Range) else [at(entry, env)]
                for entry, size in zip(node.index, data.shape, strict=True)
            ]  # fmt: skip
            each = list(itertools.product(*axes))
        else:
            each = [tuple(at(entry, env) for entry in node.index)]  # type: ignore[arg-type]
        spots.update(each)
        outside = 0.0 if node.outside == "clip" else node.fill
        found = [
            data.item(*spot) if all(0 <= e < n for e, n in zip(spot, data.shape, strict=True))
            else outside
            for spot in each
        ]  # fmt: skip
        return found[0] if len(found) == 1 else found


def lambdas(made: Call) -> list[tuple[tuple[str, ...], Node, tuple[Affine, ...] | None]]:
    """Names, value and place, None for the loops themselves, of each output of a call."""
    tensors = [Tensor(name, Sizes(shape)) for name, shape in made.shapes.items()]
    description = registry.find(made.kind)
    assert description is not None
    listed = description.function(*tensors)
    found: list[Any] = []
    functions = listed if isinstance(listed, tuple) else (listed,)
    for function, shape in zip(functions, made.outputs, strict=True):
        assert shape is not None
        names, _ = parameters(function, len(shape))
        node = result(function, names)
        inner: Any = node
        while isinstance(inner, Reduction):
            inner = inner.body
        place = tuple(map(index_entry, inner.place)) if isinstance(inner, At) else None
        found.append((names, node, place))
    return found


def reduced(node: Any) -> tuple[str, ...]:
    """Loops of the reductions that a value begins with."""
    return (*node.names, *reduced(node.body)) if isinstance(node, Reduction) else ()


def combined(reducer: str, values: list[float], weights: list[float]) -> float:
    """Partial results together; means count by their weights."""
    if reducer == "mean":
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return COMBINE[reducer](values)


def hull(spots: set[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    return tuple((min(c), max(c) + 1) for c in zip(*spots, strict=True))


def assert_needs(regions: Mapping[str, Region], part: Outcome, cut: set[str | None]) -> None:
    """Each worker needs what it reads of dims that are cut, and all of others; or nothing."""
    for slot, reads in part.reads.items():
        assert regions[slot].content == bool(reads)
        if not reads:
            assert cut == {None} or all(a == b for a, b in regions[slot].box)
            continue
        boxes: list[list[tuple[int, int]]] = []
        for node, spots in reads.values():
            boxes.append([])
            for dim, size in enumerate(part.data[slot].shape):
                entry = node.index[dim]
                ends = [entry] if isinstance(entry, Affine) else [entry.start, entry.stop]
                is_cut = any(end is not None and not cut.isdisjoint(variables(end)) for end in ends)
                first, last = hull(spots)[dim] if is_cut else (0, size)
                if node.outside == "clip":
                    first, last = (min(max(end, 0), size) for end in (first, last))
                boxes[-1].append((first, last))
        ends = (zip(*each, strict=True) for each in zip(*boxes, strict=True))
        joined = tuple((min(firsts), max(lasts)) for firsts, lasts in ends)
        assert regions[slot].box == joined, slot


def assert_parts(made: Call, extents: Mapping[str, int], loop: str, workers: int) -> bool:
    """The workers' ops are right, if there are any."""
    ops = partition(made, loop, workers)
    axis = axis_strategies_of(intern_call(made), workers)
    assert (ops is None) == (loop not in axis.places)
    assert axis.out_of_bounds == is_outside(axis, made)
    if ops is None:
        return False
    begins = [*(op.begin for op in ops), extents[loop]]
    runs = {name: range(size) for name, size in extents.items()}
    is_part = ops[0].results[0] is not None and ops[0].results[0].reducer is not None
    parts = [
        Outcome(made, runs | {loop: range(*ends)}, not number or not is_part)
        for number, ends in enumerate(itertools.pairwise(begins))
    ]
    for number, (op, part) in enumerate(zip(ops, parts, strict=True)):
        assert_needs(op.regions, part, {loop})
        assert_row(axis, axis.boxes[axis.places[loop], number].tolist(), op)
    whole = Outcome(made, runs)
    for output, expected in enumerate(whole.outputs):
        results: list[Any] = [op.results[output] for op in ops]
        made_by: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        for r, part in zip(results, parts, strict=True):
            values = part.outputs[output]
            assert r.box == hull(set(values))
            for spot, value in values.items():
                made_by.setdefault(spot, []).append((value, r.weight))
        assert sum(r.weight for r in results) == pytest.approx(1.0)
        assert made_by.keys() == expected.keys()
        reducer = results[0].reducer
        for spot, found in made_by.items():
            values, weights = map(list, zip(*found, strict=True))
            if reducer is not None:
                values = [combined(reducer.name, values, weights)]
            assert values == pytest.approx([expected[spot]] * len(values)), (loop, spot)
            assert len(values) in (1, workers)
    return True


def assert_row(axis: AxisStrategies, row: Any, op: WorkerOp) -> None:
    """What is known of the cut for all sizes says the same."""
    for slot, dims in axis.dim_slices.inputs.items():
        assert row[dims] == [list(ends) for ends in op.regions[slot].box]
    for found, dims in zip(op.results, axis.dim_slices.outputs, strict=True):
        assert dims is not None
        assert row[dims] == [list(ends) for ends in found.box]  # type: ignore[union-attr]


def call(shapes: Mapping[str, tuple[int, ...]], *outputs: tuple[int, ...]) -> Call:
    args = tuple({"tensor": name} for name in shapes)
    return Call("test::made", args, {}, dict(shapes), outputs)


f = Opaque("f")
#: Of one row of the result: its value, and which loops can be cut. `x` has dims i, k and m.
ROWS: dict[str, tuple[Any, str]] = {
    "a sum": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]), "ik"),
    "a sum, scaled": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) * y[i], "ik"),
    "scaled by a number": (lambda x, y, z, i: 2 * Sum(lambda k: x[i, k, 0]), "ik"),
    "a sum, divided": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) / y[i], "ik"),
    "divided by a sum": (lambda x, y, z, i: y[i] / Sum(lambda k: x[i, k, 0]), "i"),
    "a sum by a sum": (lambda x, y, z, i: Sum(lambda k: z[k]) / Sum(lambda m: x[i, 0, m]), "i"),
    "sums multiplied": (lambda x, y, z, i: Sum(lambda k: z[k]) * Sum(lambda m: x[i, 0, m]), "i"),
    "sums added": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) + Sum(lambda m: x[i, 0, m]), "i"),
    "a sum, negative": (lambda x, y, z, i: -Sum(lambda k: x[i, k, 0]), "ik"),
    "a mean, divided": (lambda x, y, z, i: Mean(lambda k: x[i, k, 0]) / y[i], "ik"),
    "the greatest": (lambda x, y, z, i: Max(lambda k: x[i, k, 0]), "ik"),
    "the greatest, scaled": (lambda x, y, z, i: Max(lambda k: x[i, k, 0]) * y[i], "i"),
    "the least, negative": (lambda x, y, z, i: -Min(lambda k: x[i, k, 0]), "i"),
    "a product": (lambda x, y, z, i: Prod(lambda k: x[i, k, 0]), "ik"),
    "a product, divided": (lambda x, y, z, i: Prod(lambda k: x[i, k, 0]) / y[i], "i"),
    "a sum and more": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) + y[i], "i"),
    "and once more": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) + Once(y[i], {}), "ik"),
    "once less": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) - Once(y[i], {}), "ik"),
    "from once": (lambda x, y, z, i: Once(y[i], {}) - Sum(lambda k: x[i, k, 0]), "ik"),
    "a sum, squared": (lambda x, y, z, i: Sum(lambda k: x[i, k, 0]) ** 2, "i"),
    "of a sum": (lambda x, y, z, i: f(Sum(lambda k: x[i, k, 0])), "i"),
    "a sum of": (lambda x, y, z, i: Sum(lambda k: f(x[i, k, 0])), "ik"),
    "a sum of what looks at all": (lambda x, y, z, i: Sum(lambda k: f(x[i, :, 0])[k]), "i"),
    "sums of sums": (lambda x, y, z, i: Sum(lambda k: Sum(lambda m: x[i, k, m])), "ikm"),
    "scaled inside": (lambda x, y, z, i: Sum(lambda k: z[k] * Sum(lambda m: x[i, k, m])), "ikm"),
    "added inside": (lambda x, y, z, i: Sum(lambda k: z[k] + Sum(lambda m: x[i, k, m])), "ik"),
    "both at once": (lambda x, y, z, i: Sum(lambda k, m: x[i, k, m]), "ikm"),
    "the greatest of sums": (lambda x, y, z, i: Max(lambda k: Sum(lambda m: x[i, k, m])), "ik"),
    "a mean of sums": (lambda x, y, z, i: Mean(lambda k: Sum(lambda m: x[i, k, m])), "ik"),
    "nothing in it": (lambda x, y, z, i: 3, "i"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("workers", [2, 3])
def test_loops_that_can_be_cut_and_what_their_parts_make(name: str, workers: int) -> None:
    """A partial result may be scaled and added to where that commutes, and nothing else."""
    row, loops = ROWS[name]
    describe("test::made")(lambda x, y, z: lambda i: row(x, y, z, i))
    made = call({"x": (5, 4, 3), "y": (5,), "z": (4,)}, (5,))
    assert {s.loop for s in strategies(made)} == set(loops)
    extents = {"i": 5, "k": 4, "m": 3}
    for loop in loops:
        assert assert_parts(made, extents, loop, workers)


@pytest.mark.parametrize(
    "name", ["a sum, divided", "a mean, divided", "scaled inside", "a product"]
)
def test_devices_of_a_mesh_make_the_whole_in_parts(name: str) -> None:
    """On 2 x 3 devices, cut along two loops, or one alone, or twice."""
    row, loops = ROWS[name]
    describe("test::made")(lambda x, y, z: lambda i: row(x, y, z, i))
    shape, mesh = (9, 6, 8), make_mesh((2, 3))
    made = call({"x": shape, "y": (9,), "z": (6,)}, (9,))
    extents = dict(zip("ikm", shape, strict=True))
    whole = {name: range(size) for name, size in extents.items()}
    (expected,) = Outcome(made, whole).outputs
    for axes in itertools.product((*loops, None), repeat=2):
        ops = local_ops(made, axes, mesh)
        assert ops is not None
        made_by: dict[tuple[int, ...], dict[Any, tuple[float, float]]] = {}
        for device, op in enumerate(ops):
            runs, coordinates = dict(whole), mesh.coordinates(device)
            for loop, parts, coordinate in zip(axes, mesh.parts, coordinates, strict=True):
                if loop is not None:
                    points = cut_points(len(runs[loop]), parts)
                    assert points is not None
                    runs[loop] = runs[loop][points[coordinate] : points[coordinate + 1]]
            part = Outcome(made, runs)
            assert_needs(op.regions, part, set(axes))
            (found,) = op.results
            assert found is not None
            assert found.box == hull(set(part.outputs[0]))
            share = math.prod(len(runs[loop]) / extents[loop] for loop in extents)
            assert found.weight == pytest.approx(share)
            reducers = [loop not in (None, "i") for loop in axes]
            assert [r is not None for r in found.reducers] == reducers
            key = tuple(c for c, is_part in zip(coordinates, reducers, strict=True) if is_part)
            for spot, value in part.outputs[0].items():
                made_by.setdefault(spot, {})[key] = value, found.weight
        kind = {"a product": "prod", "a mean, divided": "mean"}.get(name, "sum")
        for spot, groups in made_by.items():
            values, weights = map(list, zip(*groups.values(), strict=True))
            assert combined(kind, values, weights) == pytest.approx(expected[spot])
        assert made_by.keys() == expected.keys()


#: Of `x` of 4 x 3: the lambdas, the shapes that they make, and which loops can be cut.
PLACED: dict[str, tuple[Any, tuple[tuple[int, ...], ...], str]] = {
    "added where windows meet": (
        lambda x: lambda i: Sum(lambda j: At((i + j,), x[i, j])), ((6,),), "ij",
    ),
    "in blocks": (lambda x: lambda i, j: At((3 * i + j,), x[i, j]), ((12,),), "i"),
    "in two orders": (lambda x: (lambda i, j: x[i, j], lambda j, i: -x[i, j]),
                      ((4, 3), (3, 4)), "ij"),
    "sums of both": (lambda x: (lambda i: Sum(lambda j: x[i, j]), lambda j: Sum(lambda i: x[i, j])),
                     ((4,), (3,)), "ij"),
    "a sum and a mean": (lambda x: (lambda i: Sum(lambda j: x[i, j]),
                                    lambda: Mean(lambda i, j: x[i, j])), ((4,), ()), "ij"),
    "a block of rows": (lambda x: lambda i: f(x[2 * i : 2 * i + 2, :]), ((2,),), "i"),
    "the diagonal and beside it": (
        lambda x: lambda i: x.padded()[i, i] + x.padded()[i, i + 1], ((4,),), "i",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_places_and_several_results(name: str) -> None:
    function, outputs, loops = PLACED[name]
    describe("test::made")(function)
    made = call({"x": (4, 3)}, *outputs)
    extents = {"i": outputs[0][0] if name == "a block of rows" else 4, "j": 3}
    assert {s.loop for s in strategies(made)} == set(loops)
    for loop in loops:
        assert assert_parts(made, extents, loop, 2)


SIZES = {"i": 4, "j": 3, "k": 2}
#: Of one index: multiples of the loops, what is added, by what it is divided.
INDEX = st.tuples(
    st.dictionaries(st.sampled_from("ijk"), st.sampled_from([1, 1, 1, 2, -1]), max_size=2),
    st.integers(-2, 2), st.sampled_from([1, 1, 1, 2]), st.booleans(),
)  # fmt: skip


def index_of(form: Any, env: Mapping[str, Any]) -> Any:
    factors, added, divisor, is_up = form
    total = sum((n * env[name] for name, n in factors.items()), Affine((), added))
    if divisor == 1:
        return total
    return ceil_div(total, divisor) if is_up else total // divisor


@examples(25)
@given(
    reads=st.lists(st.tuples(INDEX, INDEX | st.none(), st.booleans()), min_size=1, max_size=2),
    workers=st.integers(2, 3),
)
def test_windows_of_an_input_are_the_hull_of_all_that_is_read(reads: Any, workers: int) -> None:
    """Of a padded or clipped input, at one place or two; None is all of a dim."""

    def function(x: Tensor) -> Any:
        def row(i: Any, j: Any) -> Any:
            def element(k: Any = SIZES["k"]) -> Any:
                env = {"i": i, "j": j, "k": k}
                total: Any = 1
                for one, other, is_clipped in reads:
                    source = x.clipped if is_clipped else x.padded(0.5)
                    rest = slice(None) if other is None else index_of(other, env)
                    total = total + f(source[index_of(one, env), rest])
                return total

            return Sum(element)

        return row

    registry.find.cache_clear()
    forget()
    describe("test::made")(function)
    made = call({"x": (5, 3)}, (4, 3))
    names = set(cuttable_loops(intern_call(made)))
    assert names <= set(SIZES)
    for loop in SIZES:
        cut = [
            {d for d, form in enumerate(read[:2]) if form is not None and loop in form[0]}
            for read in reads
        ]
        multiple = math.lcm(*(
            form[2] for read in reads for form in read[:2]
            if form is not None and loop in form[0] and any(n % form[2] for n in form[0].values())
        ))  # fmt: skip
        is_cut = all(dims == cut[0] for dims in cut) and -(-SIZES[loop] // multiple) >= workers
        assert assert_parts(made, SIZES, loop, workers) == is_cut, loop

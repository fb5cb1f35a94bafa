"""Which tensors of time steps, layers and gradients share a layout, and which ops one factor."""

import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.shard.search import coarsening
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING, OpCall, op_calls
from pardnn.shard.search.problem import Problem, make_problem
from pardnn.shard.search.tensor_classes import TensorClasses
from testbed.hand_graphs import Steps


def _with_lines(steps: Steps, of: dict[str, tuple[str, str | None]]) -> Graph:
    """The graph of some steps, with the line and the module of each op named."""
    return build_graph("by hand", [
        dataclasses.replace(op, source=of[op.name][0], module=of[op.name][1])
        if op.name in of else op
        for op in steps.ops
    ])  # fmt: skip


def unrolled(lines: Sequence[str]) -> Graph:
    """h[t+1] = relu(h[t] W): one product and one relu per time step, at the lines given."""
    s, of = Steps(), {}
    last = s.source("h0", (8, 6), "input")
    s.source("w", (6, 6))
    for t, line in enumerate(lines, 1):
        product = s.mm(f"p{t}", last, "w")
        last = s.call(f"h{t}", "aten.relu.default", [product], (8, 6))
        of |= {f"p{t}": (line, "cell"), f"h{t}": (line, "cell")}
    return _with_lines(s, of)


def _together(problem: Problem, *names: str) -> bool:
    return len({problem.classes.root[name] for name in names}) == 1


def test_time_steps_of_one_line_share_layouts_and_factors() -> None:
    """The first step reads another tensor than the others, a batch: it stays free to differ."""
    graph = unrolled(["net.py:7"] * 5)
    repeated, training = make_problem(graph, REPEATED), make_problem(graph, TRAINING)
    assert _together(repeated, "h2", "h3", "h4", "h5")
    assert not _together(training, "h2", "h3")
    assert len(training.factors) > len(repeated.factors)
    assert max(len(factor.ops) for factor in repeated.factors) >= 3


def test_equal_ops_of_other_lines_are_no_time_steps() -> None:
    repeated = make_problem(unrolled(["net.py:7", "net.py:7", "net.py:9", "net.py:7"]), REPEATED)
    assert not _together(repeated, "h2", "h3")


def test_every_second_of_equal_layers_shares_layouts() -> None:
    """So that one may be cut by columns and the next by rows."""
    s, of = Steps(), {}
    last = s.source("x", (8, 6), "input")
    for i in range(4):
        s.source(f"net.{i}.weight", (6, 6))
        last = s.mm(f"y{i}", last, f"net.{i}.weight")
        of[last] = ("net.py:7", f"net.{i}")
    repeated = make_problem(_with_lines(s, of), REPEATED)
    weights = [f"net.{i}.weight" for i in range(4)]
    assert _together(repeated, weights[0], weights[2])
    assert _together(repeated, weights[1], weights[3])
    assert not _together(repeated, weights[0], weights[1])


@pytest.mark.parametrize(("level", "is_tied"), [(NEEDED, False), (TRAINING, True)])
def test_a_tensor_is_tied_to_its_gradient_from_training_on(level: int, is_tied: bool) -> None:
    """No op is element-wise here: only that `dh` is the gradient of `h` ties the two."""
    s = Steps()
    s.source("x", (4, 6), "input")
    s.source("g", (4, 10), "input")
    s.source("w", (6, 10))
    s.mm("h", "x", "w")
    s.call("p", "aten._softmax.default", ["h", 1, False], (4, 10))
    s.call("dh", "aten.cumsum.default", ["g", 0], (4, 10), of="p")
    s.mm("dw", s.t("x.t", "x", of="h"), "dh", of="h")
    problem = make_problem(s.graph(), level)
    assert _together(problem, "h", "dh") == is_tied


def test_what_a_last_time_step_makes_shares_the_layout_of_the_others() -> None:
    """Nothing reads it, and no op is element-wise: that the calls are alike is all that ties."""
    s, of = Steps(), {}
    last = s.source("h0", (8, 6), "input")
    s.source("w", (6, 6))
    for t in range(1, 5):
        last = s.mm(f"h{t}", last, "w")
        of[last] = ("net.py:7", "cell")
    problem = make_problem(_with_lines(s, of), REPEATED)
    assert _together(problem, "h2", "h3", "h4")
    assert not _together(problem, "h1", "h2")


def test_readers_of_other_results_of_a_call_are_no_repetition() -> None:
    """The third part of what is split, and what the next call makes: neither is the other."""
    s = Steps()
    s.source("x", (3, 6, 6), "input")
    parts = ("p0", "p1", "p2")
    outputs = tuple(
        Tensor(name=name, bytes=144, shape=(6, 6), dtype="float32", alias_of="x") for name in parts
    )
    s.ops.append(Op(
        name="split", kind="aten.unbind.int", inputs=("x",), outputs=outputs, memory="reference",
        arguments={"args": [{"tensor": "x"}]},
    ))  # fmt: skip
    s.shapes |= dict.fromkeys(parts, (6, 6))
    s.call("next", "aten.relu.default", ["p0"], (6, 6))
    s.mm("one", "p2", "p2")
    s.mm("two", "next", "next")
    of: dict[str, tuple[str, str | None]] = {}
    for name in ("split", "next", "one", "two"):
        of[name] = ("m.py:2" if name in ("one", "two") else "m.py:1", "net")
    assert not _together(make_problem(_with_lines(s, of), REPEATED), "one", "two")


def naively_repeated(graph: Graph) -> set[frozenset[str]]:
    """Tensors that repetition ties, by what made them: kinds and lines as they are, no numbers.

    Sources of one kind, shape and parity are alike. So are results of the same call of the same
    line, in modules of one parity, of inputs that are of one kind of source or such results.
    """
    modules = {op.module for op in graph.ops if not op.is_source and op.module}
    sources = {op.name for op in graph.ops if op.is_source}

    def parity(name: str | None) -> Any:
        if name is None:
            return None
        row = sorted({
            tuple(map(int, re.findall(r"\d+", other)))
            for other in (modules | sources)
            if re.sub(r"\d+", "*", other) == re.sub(r"\d+", "*", name)
        })  # fmt: skip
        at = row.index(tuple(map(int, re.findall(r"\d+", name))))
        return re.sub(r"\d+", "*", name), at % 2

    shapes = {t.name: t.shape for op in graph.ops for t in op.outputs}

    def bare(value: Any) -> Any:
        """Arguments with shapes in the place of tensors."""
        if isinstance(value, list):
            return list(map(bare, value))
        return shapes[value["tensor"]] if isinstance(value, dict) else value

    made: dict[str, Any] = {}
    for op in graph.ops:
        for n, t in enumerate(op.outputs):
            if op.is_source:
                made[t.name] = (op.kind, t.shape, parity(op.name))
            else:
                args = str(bare((op.arguments or {})["args"]))
                made[t.name] = (op.kind, args, op.source, parity(op.module), n)
    alike: dict[Any, set[str]] = {}
    for op in graph.ops:
        for t in op.outputs:
            key = made[t.name], () if op.is_source else tuple(made[name] for name in op.inputs)
            alike.setdefault(key, set()).add(t.name)
    return {frozenset(names) for names in alike.values()}


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2), st.integers(0, 4)),
        min_size=4, max_size=16,
    )
)  # fmt: skip
def test_repetition_ties_what_is_made_alike_of_the_same(rows: list[tuple[int, ...]]) -> None:
    """Products, sums in halves and their parts, at a few lines of a few modules."""
    s, of = Steps(), {}
    names = [s.source(f"w.{i}", (6, 6)) for i in range(3)]
    names += [s.source("x", (6, 6), "input"), s.source("y", (6, 6), "buffer")]
    for n, (what, read, line, module) in enumerate(rows):
        one, other = names[read % len(names)], names[(read * 7 + line) % len(names)]
        if what == 0:
            made = [s.mm(f"m{n}", one, other)]
        elif what == 1:
            made = [s.call(f"r{n}", "aten.relu.default", [one], (6, 6))]
        else:  # three results; the calls of `unbind` read what is stacked
            wide = s.call(f"s{n}", "aten.stack.default", [[{"tensor": one}] * 3], (3, 6, 6))
            s.ops[-1] = dataclasses.replace(s.ops[-1], inputs=(one,))
            of[wide] = (f"m.py:{line}", f"net.{module}")
            made = [f"u{n}.{i}" for i in range(3)]
            s.shapes |= dict.fromkeys(made, (6, 6))
            outputs = tuple(
                Tensor(name=name, bytes=144, shape=(6, 6), dtype="float32", alias_of=wide)
                for name in made
            )
            s.ops.append(Op(
                name=f"u{n}", kind="aten.unbind.int", inputs=(wide,), outputs=outputs,
                memory="reference", arguments={"args": [{"tensor": wide}]},
            ))  # fmt: skip
            of[f"u{n}"] = (f"m.py:{line}", f"net.{module}")
        if what < 2:
            of[made[0]] = (f"m.py:{line}", f"net.{module}")
        names += made
    graph = _with_lines(s, of)
    shapes = {t.name: t.shape or () for op in graph.ops for t in op.outputs}
    classes = TensorClasses(shapes)
    coarsening._merge_repeated(graph, op_calls(graph), classes)
    assert {frozenset(each) for each in classes.members.values()} == naively_repeated(graph)


def test_a_write_through_a_view_that_mixes_dims_leaves_all_whole() -> None:
    """48 in a row are neither rows nor columns of 6 x 8; a row that is stretched is no base."""
    s = Steps()
    for name in ("w", "v"):
        s.source(name, (6, 8))
    s.source("row", (8,))
    s.call("flat", "aten.view.default", ["w", [48]], (48,), alias="w")
    s.call("flat.new", "aten.mul_.Scalar", ["flat", 2.0], (48,), alias="flat")
    s.call("v.new", "aten.add_.Tensor", ["v", "row"], (6, 8), alias="v")
    problem = make_problem(s.graph(), NEEDED)
    assert _together(problem, "w", "flat", "flat.new")
    assert problem.classes.dims["flat"] == (None, None)
    assert problem.variables[problem.numbers["w"]].dims == ()
    assert _together(problem, "v", "v.new")
    assert problem.classes.dims["v.new"] == (0, 1)
    assert problem.variables[problem.numbers["v"]].dims == (0, 1)


def test_only_what_shares_a_written_storage_must_be_where_it_is_owned() -> None:
    """`y` views `x`, which nothing writes, and is shaped like `w`, which is written."""
    s = Steps()
    s.source("x", (1, 6), "input")
    s.source("w", (4, 6))
    s.call("y", "aten.expand_as.default", ["x", "w"], (4, 6), alias="x")
    s.call("v", "aten.view.default", ["w", [24]], (24,), alias="w")
    s.update("w", "y")
    graph = s.graph()
    storage = coarsening.storage_of(graph)
    local = {c.op.name: coarsening.local_names(c, storage) for c in op_calls(graph)}
    assert local == {"y": set(), "v": {"v", "w"}, "w.new": {"w", "w.new"}}


def test_each_gradient_is_that_of_one_result() -> None:
    """Of three results of one shape the first has a gradient: the others are not tied to it."""
    s = Steps()
    s.source("x", (3, 6, 6), "input")
    s.source("g", (6, 6), "input")
    names = ("p0", "p1", "p2")
    outputs = tuple(
        Tensor(name=name, bytes=144, shape=(6, 6), dtype="float32", alias_of="x") for name in names
    )
    s.ops.append(Op(
        name="split", kind="aten.unbind.int", inputs=("x",), outputs=outputs, memory="reference",
        arguments={"args": [{"tensor": "x"}]},
    ))  # fmt: skip
    (split,) = op_calls(s.graph())
    classes = TensorClasses({**dict.fromkeys((*names, "g"), (6, 6)), "x": (3, 6, 6)})
    coarsening._merge_results(split, ["g", "g"], classes)
    assert sorted(map(sorted, classes.members.values())) == [["g", "p0"], ["p1"], ["p2"], ["x"]]


def are_one_factor(
    one: OpCall, other: OpCall, classes: TensorClasses, local: tuple[set[str], set[str]]
) -> bool:
    """Whether two ops make one call on the same classes, and on one tensor twice at one place."""
    if one.number != other.number:
        return False
    pairs = list(zip(one.places.values(), other.places.values(), strict=True))
    return all(
        classes.root[a] == classes.root[b]
        and classes.dims[a] == classes.dims[b]
        and (a in local[0]) == (b in local[1])
        for a, b in pairs
    ) and all((a == c) == (b == d) for (a, b), (c, d) in itertools.combinations(pairs, 2))


def test_ops_are_one_factor_where_they_read_the_same_classes_in_the_same_places() -> None:
    """`f(x, x, y)` and `f(x, y, y)` are two, though all three are of one class; 300 ops at random.

    `u` is of that class turned around, `s` of no class but its own.
    """
    shape, rng = (6, 6), random.Random(3)
    names = ["x", "y", "z", "u", "s"]
    classes = TensorClasses(dict.fromkeys([*names, *(f"r{n}" for n in range(300))], shape))
    for name, dims in (("y", (0, 1)), ("z", (0, 1)), ("u", (1, 0))):
        assert classes.merge("x", name, dims)
    s, local = Steps(), dict[str, set[str]]()
    for name in names:
        s.source(name, shape)
    for n in range(300):
        kind = rng.choice(["aten.addcmul.default", "aten.addmm.default"])
        s.call(f"r{n}", kind, rng.choices(names, [6, 6, 2, 2, 1], k=3), shape)
        classes.merge(rng.choice("xs"), f"r{n}")
        local[f"r{n}"] = {"x"} & set(s.ops[-1].inputs) if rng.random() < 0.3 else set()
    calls = op_calls(s.graph())
    keys = [coarsening.op_key(c, classes, local[c.op.name]) for c in calls]
    for (one, a), (other, b) in itertools.combinations(zip(calls, keys, strict=True), 2):
        both = local[one.op.name], local[other.op.name]
        assert (a == b) == are_one_factor(one, other, classes, both), (one.places, other.places)
    assert len(set(keys)) < 250
    assert (
        len({key for c, key in zip(calls, keys, strict=True) if len(set(c.places.values())) < 4})
        > 20
    )

"""Dims of tensors of one class: maps of another rank stay what they are."""

import random
from typing import Any

import pytest

from pardnn.errors import InfeasibleError
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tensor_classes import (
    Dims,
    TensorClasses,
    check_fixed,
    composed,
    identity,
    inverse,
)
from pardnn.shard.sharding import FixedLayouts
from testbed.hand_graphs import mlp


def test_a_map_into_more_dims_keeps_its_rank():
    assert composed(identity(2), identity(4)) == (0, 1)
    assert composed(identity(2), (1, 0, None)) == (1, 0)
    assert composed((1, None), identity(2)) == (1, None)


def test_a_tensor_with_dims_of_size_one_is_merged_with_its_gradient():
    shapes = {"view": (12, 48), "mean": (12, 48, 1, 1), "gradient": (12, 48, 1, 1)}
    classes = TensorClasses(shapes)
    assert classes.merge("view", "mean", (0, 1))
    assert classes.merge("view", "gradient", (0, 1))
    assert classes.merge("mean", "gradient")
    assert classes.dims["mean"] == classes.dims["gradient"] == (0, 1)


def test_a_view_that_lost_all_dims_is_merged_with_one_of_more_dims():
    classes = TensorClasses(
        {"flat": (1152,), "strided": (12, 96), "copy": (12, 96), "view": (12, 96, 1)}
    )
    assert classes.merge("flat", "strided", (None,), hard=True)
    assert classes.merge("view", "copy", (0, 1, None))
    assert classes.merge("copy", "strided", hard=True)
    assert len(set(classes.root.values())) == 1
    assert all(
        len(dims) == len(classes.shapes[classes.root["copy"]]) for dims in classes.dims.values()
    )


def test_a_class_whose_maps_disagree_is_not_cut_there() -> None:
    """Merged again as its transpose: a soft merge is refused, a hard one blocks both dims."""
    classes = TensorClasses({"a": (4, 6), "b": (4, 6)})
    assert classes.merge("a", "b")
    assert not classes.merge("a", "b", (1, 0))
    assert classes.blocked == {}
    assert classes.merge("a", "b", (1, 0), hard=True)
    assert classes.blocked == {"a": {0, 1}}
    classes = TensorClasses({"a": (6, 6), "b": (6, 6)})
    assert classes.merge("a", "b", (1, 0))
    assert not classes.merge("a", "b")  # the same dims, where others are already


def test_tensors_of_other_sizes_share_no_class_unless_they_must() -> None:
    """Nor does one join a class through a member that lacks a dim of it."""
    shapes = {"a": (4, 6), "b": (5, 6), "row": (6,), "other": (6,)}
    classes = TensorClasses(shapes)
    assert not classes.merge("a", "b")
    assert not classes.merge("b", "a")
    assert classes.merge("a", "row", (None, 0), hard=True)
    assert classes.blocked == {"a": {0}}
    assert not classes.merge("row", "other")
    assert classes.root["other"] == "other"
    assert classes.merge("a", "b", hard=True)
    assert classes.dims["b"] == (0, 1)


def test_what_can_be_cut_joins_nothing_that_cannot() -> None:
    """`mixed` is `w` seen as one row and again as 4 x 6: no dim is one of `w`, so none is cut."""
    for is_hard in (False, True):
        classes = TensorClasses(dict.fromkeys(("w", "mixed", "more"), (4, 6)))
        assert classes.merge("w", "mixed", (None, None), hard=True)
        assert classes.merge("mixed", "more", hard=is_hard) == is_hard
        assert (classes.root["more"] == "w") == is_hard


@pytest.mark.parametrize("seed", range(40))
def test_classes_are_those_of_a_walk_along_the_merges(seed: int) -> None:
    """Soft merges of 2 x 3, turned, with a dim of 1, and of squares; a twin keeps dims as edges.

    A merge is refused where it lacks a dim, or where a walk from either to the other says
    otherwise.
    """
    rng = random.Random(seed)
    shapes = {f"t{n}": rng.choice([(2, 3), (3, 2), (3, 3), (3, 3), (2, 1, 3)]) for n in range(9)}
    classes, links = TensorClasses(shapes), dict[str, list[Any]]()

    def walked(start: str) -> dict[str, Dims]:
        found: dict[str, Dims] = {start: tuple(range(len(shapes[start])))}
        todo = [start]
        while todo:
            name = todo.pop()
            for other, dims in links.get(name, ()):
                if other not in found:
                    found[other] = composed(found[name], dims)
                    todo.append(other)
        return found

    for _ in range(14):
        one, other = rng.sample(sorted(shapes), 2)
        left, dims = list(range(len(shapes[other]))), list[int | None]()
        for size in shapes[one]:
            fits = [d for d in left if shapes[other][d] == size]
            dims.append(rng.choice(fits) if fits and rng.random() < 0.95 else None)
            left = [d for d in left if d != dims[-1]]
        same = identity(len(dims))  # which merges look for
        dims = same if tuple(dims) == same else tuple(dims)
        known = walked(one).get(other)
        large = [d for d, n in enumerate(shapes[one]) if n > 1]
        if known is None:
            reached = {dims[d] for d in large}
            is_merged = reached == {d for d, n in enumerate(shapes[other]) if n > 1}
        else:
            is_merged = all(known[d] == dims[d] for d in large)
        assert classes.merge(one, other, dims) == is_merged
        if is_merged and known is None:
            links.setdefault(one, []).append((other, dims))
            links.setdefault(other, []).append((one, inverse(dims, len(shapes[other]))))
    for name in shapes:
        found = walked(name)
        assert set(classes.members[classes.root[name]]) == set(found)
        root = walked(classes.root[name])[name]
        for dim, size in enumerate(shapes[classes.root[name]]):
            assert size == 1 or classes.dims[name][dim] == root[dim]
    for root, blocked in classes.blocked.items():
        assert all(shapes[root][d] == 1 for d in blocked)


def test_maps_may_disagree_on_a_dim_that_nothing_can_cut() -> None:
    classes = TensorClasses({"a": (4, 1), "b": (1, 4)})
    assert classes.merge("a", "b", (1, 0))
    assert classes.merge("a", "b", (1, None))
    assert classes.blocked == {}


def test_what_a_member_lacks_or_may_not_be_cut_blocks_the_class() -> None:
    """`flat` has no dim for the second of `full`; what is blocked of `other` stays so, turned."""
    shapes = {"full": (4, 6), "more": (4, 6), "flat": (4,), "other": (6, 4), "view": (6, 4)}
    classes = TensorClasses(shapes)
    assert classes.merge("full", "more")
    assert not classes.merge("full", "flat", (0, None))
    assert classes.merge("full", "flat", (0, None), hard=True)
    assert classes.blocked == {"full": {1}}
    assert classes.merge("other", "view")
    assert classes.merge("other", "view", (None, 1), hard=True)
    assert classes.blocked == {"full": {1}, "other": {0}}
    classes.merge("full", "other", (1, 0), hard=True)
    assert classes.blocked == {"full": {1}}
    assert classes.dims["other"] == (1, 0)


def test_fixed_layouts_meet_or_are_told_of() -> None:
    """Two mesh axes of 2; -1 is free. Of a transposed tensor the dims are turned."""
    shapes = {"w": (4, 6), "t": (6, 4), "u": (4, 6), "small": (4, 1)}
    classes = TensorClasses(shapes, axis_sizes=(2, 2), fixed={"w": (0, -1), "t": (-1, 0)})
    assert classes.merge("w", "t", (1, 0))
    assert classes.fixed == {"w": (0, 1)}
    classes.fixed["u"] = (1, 1)
    assert not classes.merge("w", "u")
    assert classes.torn == []
    assert not classes.merge("w", "small", (0, 1))
    assert classes.merge("w", "u", hard=True)
    assert classes.torn == [("w", "u")]


def test_a_class_takes_the_fixed_layout_of_what_joins_it() -> None:
    """Of two against one the larger class is kept, whose dims are turned here."""
    shapes = {"a": (4, 6), "b": (4, 6), "w": (6, 4), "narrow": (6, 3)}
    classes = TensorClasses(shapes, axis_sizes=(2, 2), fixed={"w": (0, 0), "narrow": (1, 1)})
    assert classes.merge("a", "b")
    assert classes.merge("a", "w", (1, 0))
    assert classes.fixed == {"a": (1, 1), "narrow": (1, 1)}
    assert not classes.merge("narrow", "b", (1, 0))  # three columns make no four parts


@pytest.mark.parametrize(("rows", "fits"), [(4, True), (3, False)])
def test_state_that_lies_as_no_cut_can_have_it_is_refused(rows: int, fits: bool) -> None:
    """Rows of `w1` on four devices: three rows leave one without."""
    graph, fixed = mlp(8, rows, 6, 10), FixedLayouts(make_mesh((2, 2)), {"w1": (0, 0)})
    if fits:
        problem = make_problem(graph, NEEDED, fixed=fixed)
        assert problem.variables[problem.numbers["w1"]].fixed == (0, 0)
        return
    with pytest.raises(InfeasibleError, match="'w1' as") as error:
        make_problem(graph, NEEDED, fixed=fixed)
    assert error.value.code == "E301"


@pytest.mark.parametrize(
    ("blocked", "rows"), [({0}, 4), (set[int](), 3)], ids=["may not be cut", "too short"]
)
def test_either_reason_against_a_fixed_layout_is_enough(blocked: set[int], rows: int) -> None:
    """Named is the state that lies so, `w`, and not what its class is called by, `v`."""
    fixed = FixedLayouts(make_mesh((4,)), {"w": (0,)})
    classes = TensorClasses({"v": (rows, 6), "u": (rows, 6), "w": (rows, 6)}, axis_sizes=(4,))
    assert classes.merge("v", "u")
    assert classes.merge("v", "w")
    classes.fixed["v"] = (0,)
    classes.blocked["v"] = blocked
    with pytest.raises(InfeasibleError, match="the state is cut, 'w' as") as error:
        check_fixed(classes, fixed)
    assert error.value.details["state"] == ["w"]
    classes.blocked["v"], classes.fixed["v"] = {1}, (None,)
    check_fixed(classes, fixed)

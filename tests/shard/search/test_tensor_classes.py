"""Dims of tensors of one class: maps of another rank stay what they are."""

import pytest

from pardnn.errors import InfeasibleError
from pardnn.plan.mesh import make_mesh
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.tensor_classes import TensorClasses, check_fixed, composed, identity
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
    with pytest.raises(InfeasibleError, match="state lies cut, 'w' as") as error:
        check_fixed(classes, fixed)
    assert error.value.details["state"] == ["w"]
    classes.blocked["v"], classes.fixed["v"] = {1}, (None,)
    check_fixed(classes, fixed)

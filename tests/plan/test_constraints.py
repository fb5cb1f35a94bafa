"""What a placement breaks of what a user demands, on three ops."""

import dataclasses
from typing import Any

import pytest

from pardnn.cluster import Cluster
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.constraints import (
    Constraint,
    apart,
    cutting,
    fix_layout,
    fix_pieces,
    forbid,
    pin,
    placing,
    prefer,
    together,
)
from pardnn.plan.demands.check_constraints import constraint_problems
from pardnn.plan.demands.layout_demands import layout_demands, layouts_of_demands
from pardnn.plan.demands.named import Names
from pardnn.plan.mesh import make_mesh, meets
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.plan import Plan
from pardnn.plan.rewritten.recompute import SecondCall, graph_with_calls

GRAPH = build_graph("three", [
    Op(name=name, kind="aten.neg.default" if reads else "input", inputs=reads,
       outputs=(Tensor(name=name, bytes=4),))
    for name, reads in (("a", ()), ("b", ("a",)), ("c", ("b",)))
])  # fmt: skip
PLAN = Plan(placement={"a": 0, "b": 1, "c": 0}, order=(("a", "c"), ("b",)))


@pytest.mark.parametrize(
    ("demand", "broken"),
    [
        (pin("a", 1), "'a' is on device 0"),
        (pin("a", 0), None),
        (pin("b", 0, 1), None),
        (forbid(1), "'b' is on device 1"),
        (forbid(1, what="a"), None),
        (together("a", "c"), None),
        (together("c", "b"), "'c' is on device 0 and 'b' is on device 1"),
        (apart("a", "b"), None),
        (apart("a", "c"), "'a' is on device 0 and 'c' is on device 0"),
        (pin("nobody", 0), "nobody"),
        (pin("a", 7), "7"),
    ],
    ids=str,
)
def test_what_a_placement_breaks_is_said_with_the_ops(
    demand: Constraint, broken: str | None
) -> None:
    found = list(constraint_problems((demand,), GRAPH, GRAPH, PLAN, None))
    assert len(found) == (broken is not None)
    assert broken is None or broken in found[0]
    held = pin("c", 0)
    both = list(constraint_problems((held, demand), GRAPH, GRAPH, PLAN, None))
    assert both == found


def test_devices_have_names_before_numbers() -> None:
    """In a cluster whose second device is called 0, the name counts."""
    named = Cluster.uniform(2)
    devices = tuple(
        dataclasses.replace(d, name=n) for d, n in zip(named.devices, "x0", strict=True)
    )
    cluster = dataclasses.replace(named, devices=devices)
    for device, fits in (("x", True), ("0", False), (0, True), (1, False), ("1", False)):
        found = list(constraint_problems((pin("a", device),), GRAPH, GRAPH, PLAN, cluster))
        assert (found == []) == fits, device
    arabic = "\N{ARABIC-INDIC DIGIT ONE}"
    for device in (2, "9" * 9, "9" * 5000, arabic):
        with pytest.raises(UsageError) as error:
            raise_unknown(device, cluster)
        assert "There are 2 devices, 0 to 1 (x, 0)." in error.value.message
    with pytest.raises(UsageError, match=r"There are 2 devices, 0 to 1 \(no names\)\."):
        raise_unknown("x", None)


def raise_unknown(device: int | str, cluster: Cluster | None) -> None:
    from pardnn.plan.demands.named import named

    named((pin("a", device),), GRAPH, GRAPH, cluster, 2)


#: Two layers of a parameter and a product each; activations of one dim less are no parameters.
LAYERS = build_graph("layers", [
    Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=16, shape=(4,)),)),
    *(Op(name=f"w{i}", kind="parameter", module=f"net.{i}", memory="residual",
         outputs=(Tensor(name=f"w{i}", bytes=64, shape=(4, 4)),)) for i in range(2)),
    *(Op(name=f"h{i}", kind="mylib::op", module=f"net.{i}", inputs=(f"h{i - 1}" if i else "x",
         f"w{i}"), outputs=(Tensor(name=f"h{i}", bytes=16, shape=(4,)),
                            Tensor(name=f"r{i}", bytes=4, shape=()))) for i in range(2)),
])  # fmt: skip
MESH = make_mesh((2, 3))


def demanded(*constraints: Constraint) -> list[tuple[str, int, int | None]]:
    return [each[1:] for each in layout_demands(constraints, LAYERS, MESH)]


def test_a_layout_is_demanded_of_tensors_that_have_the_dim() -> None:
    assert demanded(pin("x", 0), fix_layout("w0", 1)) == [("w0", 0, 1), ("w0", 1, 1)]
    assert demanded(fix_layout("w0", "whole", 1)) == [("w0", 1, None)]
    assert demanded(fix_layout("w0", 0, "m1")) == [("w0", 1, 0)]
    assert demanded(fix_layout("layer:net.1", 1, 0)) == [("w1", 0, 1)]
    assert demanded(fix_layout("layer:net.1", "whole", 0)) == [("w1", 0, None)], "no activations"
    assert demanded(fix_layout("op:h0", 0, "0")) == [("h0", 0, 0)], "its other result has no dim"
    assert demanded(fix_layout("op:h0", "whole", 0)) == [("h0", 0, None), ("r0", 0, None)]
    assert demanded(fix_layout("tensor:r1", "whole", 0)) == [("r1", 0, None)]
    for wrong, why in (
        (fix_layout("x", 1), "'x' has no dim 1, it has 1"),
        (fix_layout("x", 0, 2), "there is no mesh axis '2'"),
        (fix_layout("x", 0, "9" * 5000), "there is no mesh axis"),
        (fix_layout("x", 0, "\N{ARABIC-INDIC DIGIT ONE}"), "there is no mesh axis"),
        (
            fix_layout("x", 0, "m2"),
            r"no mesh axis 'm2'.\nThere are, with their devices: m0 (2), m1",
        ),
    ):
        with pytest.raises(UsageError) as error:
            demanded(wrong)
        assert why.replace(r"\n", "\n") in error.value.message


def test_a_tensor_of_unknown_shape_has_no_dims() -> None:
    assert [e.dim for e in layout_demands((fix_layout("a", "whole"),), GRAPH, MESH)] == [None] * 2
    with pytest.raises(UsageError, match="'a' has no dim 0, it has 0"):
        list(layout_demands((fix_layout("a", 0),), GRAPH, MESH))


def test_layouts_are_free_where_nothing_is_demanded_and_two_demands_may_be_at_odds() -> None:
    one, other = fix_layout("w0", 1, 0), fix_layout("w1", "whole")
    found = layouts_of_demands(list(layout_demands((one, other, one), LAYERS, MESH)), MESH)
    assert found == ({"w0": (1, -1), "w1": (None, None)}, ())
    assert meets((1, 0), (1, -1))
    assert not meets((0, 1), (1, -1))
    against = fix_layout("w0", 0)
    found = layouts_of_demands(list(layout_demands((one, against), LAYERS, MESH)), MESH)
    assert found == ({}, (one, against))


def test_what_a_cut_breaks_is_said_once_for_each_constraint() -> None:
    laid = ("Replicate()", "Shard(0)")
    words: dict[str, tuple[str, ...]] = {str(name): laid for name in ("x", "w0", "w1", "h0", "h1")}
    partition = Partition(mesh=MESH, sharding=words, ops=())
    plan = Plan(placement={}, order=((),) * 6, partition=partition)
    asked = (
        fix_layout("w0", 1), fix_layout("w1", 0, 1), fix_layout("h0", "whole", 0),
        fix_layout("h1", "whole"), fix_pieces(2), pin("x", 0), fix_layout("nobody", 0),
    )  # fmt: skip
    found = list(constraint_problems(asked, LAYERS, LAYERS, plan, None))
    reasons = [each.partition("constraint ")[2] for each in found]
    assert [each.rpartition("' is ")[2] for each in reasons[1:3]] == [
        "whole (mesh axis m0)", "cut along dim 0 (mesh axis m1)",
    ]  # fmt: skip
    assert reasons[0].endswith("is broken: the plan cuts every op over all devices")
    assert "nobody" in reasons[3]
    assert reasons[4].endswith("is broken: the batch is in 1")
    assert len(found) == 5


def test_an_uncut_plan_has_all_whole() -> None:
    asked = (fix_layout("w0", 1, "m7"), fix_layout("w1", "whole", 5), fix_pieces(1))
    plan = Plan(placement={op.name: 0 for op in LAYERS.ops}, order=((),))
    (found,) = constraint_problems(asked, LAYERS, LAYERS, plan, None)
    assert "'w0' is whole (the plan cuts no op)" in found


def test_which_demands_are_of_places_and_which_cut() -> None:
    cut, whole, preferred = fix_layout("x", 0), fix_layout("x", "whole"), prefer(pin("x", 0), 1.0)
    asked = (cut, whole, preferred, pin("x", 0), fix_layout("x", 0, 0), fix_pieces(3))
    assert cutting(asked) == (cut, asked[4])
    assert placing(asked) == (asked[3],)


def test_names_mean_ops_then_tensors_then_layers() -> None:
    names = Names(LAYERS, LAYERS)
    said = pin("x", 0)
    assert names.ops("r1", said) == (4,)
    assert names.ops("net.0", said) == (0, 1, 3), "x is read there"
    assert names.ops("net", said) == (0, 1, 2, 3, 4)
    for wrong in ("op:r1", "layer:h0", "net.", "layer:"):
        with pytest.raises(UsageError):
            names.ops(wrong, said)
    with pytest.raises(
        UsageError, match=r"(?s)no op or tensor or layer is named 'net.7'.*Did you mean"
    ):
        names.ops("net.7", said)
    with pytest.raises(UsageError, match=r"(?s)no layer is named '0'.*Did you mean 'net\.0'"):
        names.ops("layer:0", said)


def test_a_layer_means_the_ops_that_a_plan_has_for_it() -> None:
    """The layer's second calls, which stand before what reads them, are of the layer too."""
    calls = (SecondCall(op="h0", readers=("h1",)),)
    planned = graph_with_calls(LAYERS, calls)
    found = Names(LAYERS, planned).ops("layer:net.0", pin("x", 0))
    assert [planned.ops[i].name for i in found] == ["x", "w0", "h0", "h0~2"]
    assert Names(LAYERS, planned).ops("h0", pin("x", 0)) == found[2:]


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (Constraint(kind="forbid", devices=(1, "b")), "forbid 1 or b"),
        (Constraint(kind="forbid", what=("a", "c"), devices=(1,)), "forbid 1 for a, c"),
        (Constraint(kind="pin", what=("a",), devices=(0, 2)), "pin a to 0 or 2"),
        (Constraint(kind="apart", what=("a", "b")), "apart a, b"),
        (Constraint(kind="pieces", count=4), "4 pieces"),
        (Constraint(kind="layout", what=("w",), dim=1), "layout w cut along dim 1"),
        (Constraint(kind="layout", what=("w",), dim=1, axis=0),
         "layout w cut along dim 1 on mesh axis 0"),
        (Constraint(kind="layout", what=("w",), dim="whole"), "layout w whole"),
    ],
)  # fmt: skip
def test_a_constraint_reads_as_it_was_asked(each: Constraint, text: str) -> None:
    assert str(each) == text


NO_DEVICE, DEVICES = "it names no device", "it takes no devices"
NO_DIM, NO_COUNT = (
    "a layout needs a dim (a number of at least 0",
    "pieces take a count and nothing else",
)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "pin", "what": ("a",)}, NO_DEVICE),
        ({"kind": "forbid"}, NO_DEVICE),
        ({"kind": "forbid", "devices": (0,)}, None),
        ({"kind": "together", "what": ("a",), "devices": (0,)}, DEVICES),
        ({"kind": "pieces", "count": 2, "devices": (0,)}, DEVICES),
        ({"kind": "pin", "devices": (0,)}, "it names no op, tensor or layer"),
        ({"kind": "together"}, "it names no op, tensor or layer"),
        ({"kind": "together", "what": ("layer:a",)}, None),
        ({"kind": "layout", "dim": 0}, "it names no op, tensor or layer"),
        ({"kind": "apart", "what": ("a",)}, "apart needs two or more names"),
        ({"kind": "apart", "what": ("a", "b")}, None),
        ({"kind": "layout", "what": ("a",)}, NO_DIM),
        ({"kind": "together", "what": ("a", "b"), "dim": 0}, NO_DIM),
        ({"kind": "together", "what": ("a", "b"), "dim": "whole"}, NO_DIM),
        ({"kind": "layout", "what": ("a",), "dim": 0}, None),
        ({"kind": "layout", "what": ("a",), "dim": "whole", "axis": 0}, None),
        (
            {"kind": "layout", "what": ("a",), "dim": -1},
            "dim is -1; it must be a number of at least 0",
        ),
        ({"kind": "pin", "what": ("a",), "devices": (0,), "axis": 0}, "only a layout has a mesh"),
        ({"kind": "pieces", "count": 2, "axis": "m0"}, "only a layout has a mesh"),
        ({"kind": "pieces"}, NO_COUNT),
        ({"kind": "pieces", "count": 2, "what": ("a",)}, NO_COUNT),
        ({"kind": "together", "what": ("a", "b"), "count": 2}, NO_COUNT),
        ({"kind": "pieces", "count": 0}, "the number of pieces is 0; it must be from 1 to 100000"),
        ({"kind": "pieces", "count": 1}, None),
        ({"kind": "pieces", "count": 100_000}, None),
        ({"kind": "pieces", "count": 100_001}, "the number of pieces is 100001"),
        ({"kind": "pieces", "count": 1, "price_s": 0.0}, "its price is 0 s; it must be"),
        ({"kind": "pieces", "count": 1, "price_s": -1.0}, "its price is -1 s"),
        ({"kind": "pieces", "count": 1, "price_s": float("inf")}, "its price is inf s"),
        ({"kind": "pieces", "count": 1, "price_s": float("nan")}, "its price is nan s"),
        ({"kind": "pieces", "count": 1, "price_s": 1e9}, None),
        ({"kind": "pieces", "count": 1, "price_s": 1.1e9}, "its price is 1.1e+09 s"),
        ({"kind": "pieces", "count": 1, "price_s": 1e-9}, None),
    ],
)
def test_a_constraint_that_says_nothing_is_refused(fields: dict[str, Any], why: str | None) -> None:
    if why is None:
        Constraint(**fields)
        return
    with pytest.raises(UsageError) as error:
        Constraint(**fields)
    assert error.value.code == "E245"
    assert f"': {why}" in error.value.message
    assert error.value.details["constraint"]["kind"] == fields["kind"]

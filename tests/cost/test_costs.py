"""Costs: who is asked first, what is infinite, what is refused."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from pardnn.cost.call import call_key, signature, tensors_by_name
from pardnn.cost.costs import (
    HOST_SIGNATURE,
    VIEW_SIGNATURE,
    graph_costs,
    measured_costs,
    preset_costs,
    roofline_costs,
)
from pardnn.cost.presets import DEVICE_MODELS
from pardnn.cost.table import CostTable, Entry, Machine
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Op
from tests.cost.helpers import call, mlp_graph, mm_graph, roofline_seconds, source, tensor

MACHINE = Machine(device="test", library="none", threads=1)


def test_the_worked_example_states_its_costs(tiny):
    graph = read_graph(tiny / "graph.json")
    costs = graph_costs(graph)
    assert list(costs.seconds) == ["accelerator"]
    expected = [(op.seconds or {})["accelerator"] for op in graph.ops]
    assert costs.seconds["accelerator"].tolist() == expected
    assert not costs.seconds["accelerator"].flags.writeable


def test_a_call_without_seconds_asks_for_a_cost_model():
    with pytest.raises(UsageError, match=r"aten.mm.default.*\n.*--costs measured") as caught:
        graph_costs(mm_graph(2, 3, 4))
    assert caught.value.code == "E230"
    assert caught.value.details["op"] == "c"


def test_sources_without_seconds_are_free_on_every_type():
    graph = build_graph(
        "two", [source("x", 4), call("y", "op", ["x"], [tensor("y", 4)], seconds={"cpu": 2.0})]
    )
    costs = graph_costs(graph)
    assert costs.seconds["cpu"].tolist() == [0.0, 2.0]


def test_a_type_that_is_absent_cannot_run_the_op():
    ops = [
        call("a", "op", [], [tensor("a", 4)], seconds={"cpu": 1.0, "accelerator": 0.5}),
        call("b", "op", ["a"], [tensor("b", 4)], seconds={"accelerator": 0.25}),
    ]
    costs = graph_costs(build_graph("mixed", ops))
    assert costs.on("cpu").tolist() == [1.0, np.inf]
    assert costs.on("accelerator", speed=2.0).tolist() == [0.25, 0.125]
    assert costs.on("tpu").tolist() == [np.inf, np.inf]


def test_a_roofline_fills_what_the_graph_does_not_state():
    graph = mlp_graph(64)
    ops = [replace(op, seconds={"accelerator": 7.0}) if op.name == "r" else op for op in graph.ops]
    graph = build_graph("mlp", ops)
    found = preset_costs(graph, "a100").seconds["accelerator"]
    expected = roofline_seconds(graph, DEVICE_MODELS["a100"])
    stated = [op.name == "r" for op in graph.ops]
    assert found[stated].tolist() == [7.0]
    assert np.array_equal(found[~np.array(stated)], expected[~np.array(stated)])


def test_models_per_device_type():
    costs = roofline_costs(
        mlp_graph(8), {"accelerator": DEVICE_MODELS["h100"], "cpu": DEVICE_MODELS["k80"]}
    )
    assert costs.source == "h100, k80"
    assert costs.seconds["accelerator"].sum() < costs.seconds["cpu"].sum()


def test_measured_costs_come_from_the_table():
    graph = mlp_graph(8)
    tensors = tensors_by_name(graph)
    calls = [op for op in graph.ops if op.name in "hrsu"]
    entries = {signature(op, tensors): Entry(seconds=1.0 + i) for i, op in enumerate(calls)}
    entries |= {VIEW_SIGNATURE: Entry(seconds=1e-6), HOST_SIGNATURE: Entry(seconds=1e-7)}
    costs = measured_costs(graph, {"accelerator": CostTable(MACHINE, entries)})
    assert costs.seconds["accelerator"].tolist() == [0.0, 0.0, 1.0, 2.0, 1e-6, 3.0, 4.0]


def test_an_op_that_was_not_measured_is_named():
    with pytest.raises(UsageError, match=r"'c' of kind 'aten.mm.default'.*was not measured"):
        measured_costs(mm_graph(2, 3, 4), {"accelerator": CostTable(MACHINE)})


def test_signatures_hold_forms_and_literals_but_no_names():
    def text(graph, name):
        op = next(op for op in graph.ops if op.name == name)
        return signature(op, tensors_by_name(graph))

    def add(left, right, alpha=1):
        ops = [source("x", 4), source("y", 4), source("z", 5)]
        output = [tensor("s", 4)]
        added = call("s", "aten.add.Tensor", [left, right], output, kwargs={"alpha": alpha})
        return text(build_graph("add", [*ops, added]), "s")

    assert add("x", "y") == add("y", "x")
    assert len({add("x", "y"), add("x", "x"), add("x", "z"), add("x", "y", 2)}) == 4
    assert text(mm_graph(2, 3, 4), "c") != text(mm_graph(2, 3, 4, "bfloat16"), "c")


def test_the_place_of_a_box_is_no_part_of_a_signature_but_its_sizes_are():
    def text(box, rows):
        fetched = call("y", "pardnn.fetch", [], [tensor("y", 8, 4)])
        fetched = dataclasses.replace(
            fetched,
            inputs=("x",),
            arguments={"args": [[8, 4], None, [[{"tensor": "x"}, box]]], "returns": ["y"]},
        )
        graph = build_graph("fetch", [source("x", rows, 4), fetched])
        return signature(graph.ops[1], tensors_by_name(graph))

    assert text([[0, 2], [0, 4]], 2) == text([[6, 8], [0, 4]], 2)
    assert text([[0, 2], [0, 4]], 2) != text([[0, 3], [0, 4]], 3)


def test_strides_are_part_of_a_signature_unless_contiguous():
    def text(strides):
        ops = [source("x", 4, 1, 3, strides=strides)]
        ops.append(call("y", "aten.exp.default", ["x"], [tensor("y", 4, 1, 3)]))
        graph = build_graph("strided", ops)
        return signature(graph.ops[1], tensors_by_name(graph))

    assert text(None) == text((3, 3, 1)) == text((3, 77, 1))
    assert text((1, 4, 4)) != text(None)


@pytest.mark.parametrize("tell", ["args", "kwargs"])
def test_calls_of_one_cost_are_asked_once_and_no_others(tell):
    """Only names differ, then a literal, its type, a form, or which arguments are one tensor."""
    ops = [source("a", 8, 8), source("b", 8, 8)]
    ops += [source("c", 8, 4), source("h", 8, 8, dtype="float16")]
    a, b, c, h = ({"tensor": name} for name in "abch")
    calls = [(a, b, 1), (b, a, 1), (a, b, 2), (a, b, True), (a, b, 1.0), (a, a, 1), (a, c, 1),
             (h, b, 1), (a, b, [1]), (a, b, None)]  # fmt: skip
    for number, (left, right, literal) in enumerate(calls):
        given = {"args": [left, right], "kwargs": {"x": literal}} if tell == "kwargs" else {
            "args": [left, right, literal]}  # fmt: skip
        inputs = tuple(dict.fromkeys([left["tensor"], right["tensor"]]))
        ops.append(Op(name=f"o{number}", kind="aten.add.Tensor", inputs=inputs,
                      outputs=(tensor(f"o{number}", 8, 8),), arguments=given))  # fmt: skip
    graph = build_graph("literals", ops)
    tensors = tensors_by_name(graph)
    keys = [call_key(op, tensors) for op in graph.ops[4:]]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1
    found = preset_costs(graph, "a100").seconds["accelerator"]
    assert found.tolist() == roofline_seconds(graph, DEVICE_MODELS["a100"]).tolist()


def test_a_part_of_an_op_is_estimated_by_the_device_that_the_op_was_timed_on():
    graph, entries = mm_graph(2, 3, 4), {}
    tensors = tensors_by_name(graph)
    for op in graph.ops:
        if not op.is_source:
            entries[signature(op, tensors)] = Entry(seconds=1.0)
    on_gpu = replace(MACHINE, threads=0)
    for machine, expected in ((MACHINE, "cpu"), (on_gpu, "a100")):
        costs = measured_costs(graph, {"accelerator": CostTable(machine, entries)})
        assert (costs.source, costs.roofline) == ("measured", expected)
    assert preset_costs(graph, "k80").roofline == "k80"
    assert preset_costs(graph, "cpu").roofline == "cpu"
    assert preset_costs(graph, "k80", ["cpu", "accelerator"]).roofline == "a100"  # of two

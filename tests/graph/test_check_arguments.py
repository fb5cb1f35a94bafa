"""The structure of `arguments`: what every reader of a graph relies on is checked once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pardnn.errors import FileError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import LOSS_KIND, Op, Tensor

X = Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=4, shape=(1,), dtype="float32"),))
Y = Op(
    name="y", kind="aten.add.Tensor", inputs=("x",),
    outputs=(Tensor(name="y", bytes=4, shape=(1,), dtype="float32"),),
)  # fmt: skip
LOSS = Op(name="loss", kind=LOSS_KIND, inputs=("y",))


def built(op: Op, arguments: Any) -> None:
    changed = dataclasses.replace(op, arguments=arguments)
    build_graph("g", [changed if each is op else each for each in (X, Y, LOSS)])


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (Y, {"args": [{"tensor": "x"}, 1, 2.5, None, True, "sum", [[0], {"tensor": "x"}]]}),
        (Y, {"args": [{"float": "inf"}, {"complex": [1, {"float": "nan"}]}]}),
        (Y, {"args": [], "kwargs": {"dtype": {"dtype": "float32"}, "d": {"device": "cpu"}}}),
        (Y, {"args": [{"tensor": "x"}], "returns": [None, "y"], "mutates": ["x"]}),
        (X, {"value": 0.1, "guard": "nonzero"}),
        (X, {"initial": {"copy_of": "w"}}),
        (X, {"data": "AAAAAA==", "shard": {"of": "x", "box": [[0, 1]]}}),
        (LOSS, {"settings": {"a": 1}, "effects": [{"set": ["a", 1]}], "schedules": ["s"]}),
        (LOSS, {"effects": [{"print": [[], " ", "", "stdout"], "unless": {"kept": "y"}}]}),
    ],
)
def test_arguments_of_a_capture_are_accepted(op: Op, arguments: Any) -> None:
    built(op, arguments)


@pytest.mark.parametrize(
    ("op", "arguments", "said"),
    [
        (Y, {"args": 3}, "arguments.args is not a list"),
        (Y, {"args": {"tensor": "x"}}, "arguments.args is not a list"),
        (Y, {"args": [], "kwargs": []}, "arguments.kwargs is not an object"),
        (Y, {"args": [{"tensor": "y"}]}, "refers to 'y', not among its inputs"),
        (Y, {"args": [[{"tensor": ["x"]}]]}, "refers to ['x'], not among its inputs"),
        (Y, {"args": [], "kwargs": {"a": {"tensor": "none"}}}, "refers to 'none'"),
        (Y, {"args": [{}]}, "expected an object with one key"),
        (Y, {"args": [{"scalar": "x"}]}, "which has no meaning"),
        (Y, {"args": [{"dtype": ["float32"]}]}, "which has no meaning"),
        (Y, {"args": [{"complex": [1, "2"]}]}, "which has no meaning"),
        (Y, {"args": [], "returns": 3}, "arguments.returns is not a list"),
        (Y, {"args": [], "returns": [["y"]]}, "which is not an output"),
        (Y, {"args": [], "returns": ["x"]}, "names 'x', which is not an output"),
        (Y, {"args": [], "returns": ["y", "y"]}, "names an output twice"),
        (Y, {"args": [], "returns": [None]}, "lacks the output 'y'"),
        (Y, {"args": [], "mutates": ["none"]}, "not a list of tensors that it reads"),
        (Y, {"args": [], "mutates": [[]]}, "not a list of tensors that it reads"),
        (Y, {"args": [], "redraws": 3}, "arguments.redraws is not a name"),
        (Y, {"arg": []}, "unknown key 'arg'"),
        (X, {"guard": "x"}, "arguments.guard is 'x'"),
        (X, {"data": "AAAA"}, "holds 3 bytes, its tensor has 4"),
        (X, {"data": 7}, "is not base64"),
        (X, {"initial": {"copy_of": 3}}, "copies no source"),
        (X, {"shard": {"of": "x", "box": [[0]]}}, "not a box of a tensor"),
        (LOSS, {"settings": []}, "arguments.settings is not an object"),
        (LOSS, {"effects": [{"set": 3}]}, "not an effect of a step"),
        (LOSS, {"effects": [{"run": []}]}, "not an effect of a step"),
        (LOSS, {"schedules": [3]}, "is not a list of names"),
        (LOSS, {"numbers": [0]}, "is not a list of names"),
    ],
)
def test_others_are_refused_by_name(op: Op, arguments: Any, said: str) -> None:
    with pytest.raises(FileError, match="E402") as caught:
        built(op, arguments)
    assert said in str(caught.value)
    assert f"'{op.name}'" in str(caught.value)


@pytest.mark.parametrize("change", [{"outputs": ()}, {"inputs": ("y",), "outputs": X.outputs}])
def test_a_source_is_one_value(change: Any) -> None:
    with pytest.raises(FileError, match="a source has no inputs and one output"):
        build_graph("g", [dataclasses.replace(X, **change), dataclasses.replace(Y, inputs=())])

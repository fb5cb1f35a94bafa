"""The ops of a partitioned graph, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pardnn.backends.torch.ops.codec import bind
from pardnn.backends.torch.rng import generator as rng
from pardnn.backends.torch.runtime.random_ops import drawn_once, is_random, measure_draws
from pardnn.errors import FileError
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.state_layout import shard_of

CPU = torch.device("cpu")


def run(kind: str, args: list[Any], env: dict[str, Any], *outputs: Tensor, **more: Any) -> Any:
    op = Op(name="op", kind=kind, inputs=tuple(env), outputs=outputs,
            arguments={"args": args, **more})  # fmt: skip
    bind(op, CPU)(env)
    return env[outputs[0].name]


def output(*shape: int, strides: tuple[int, ...] | None = None, dtype: str = "float32") -> Tensor:
    return Tensor(name="out", bytes=0, shape=shape, strides=strides, dtype=dtype)


def ref(name: str) -> dict[str, str]:
    return {"tensor": name}


def test_a_slice_is_a_view() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    out = run("pardnn.slice", [ref("x"), [[1, 3], [2, 6]]], {"x": x}, output(2, 4))
    assert torch.equal(out, x[1:3, 2:6])
    assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_adjacent_shards_are_concatenated() -> None:
    x = torch.randn(4, 6)
    shards = [[ref("a"), [[0, 4], [0, 1]]], [ref("b"), [[0, 4], [1, 6]]]]
    env = {"a": x[:, :1], "b": x[:, 1:]}
    assert torch.equal(run("pardnn.fetch", [[4, 6], None, shards], dict(env), output(4, 6)), x)
    across = run("pardnn.fetch", [[4, 6], None, shards], env, output(4, 6, strides=(1, 4)))
    assert torch.equal(across, x)
    assert across.stride() == (1, 4)


def test_a_fetch_copies_shards_anywhere_and_fills_the_rest() -> None:
    x = torch.randn(3, 3)
    shards = [[ref("a"), [[1, 3], [0, 2]]], [ref("b"), [[0, 1], [2, 3]]]]
    fill = {"float": "-inf"}
    env = {"a": x[:2, :2], "b": x[2:, 2:]}
    out = run("pardnn.fetch", [[3, 3], fill, shards], env, output(3, 3))
    expected = torch.full((3, 3), float("-inf"))
    expected[1:, :2], expected[:1, 2:] = x[:2, :2], x[2:, 2:]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sum", lambda x: (x[0] + x[1]) + x[2]), ("prod", lambda x: x[0] * x[1] * x[2]),
     ("max", lambda x: x.amax(0)), ("min", lambda x: x.amin(0))],
)  # fmt: skip
@pytest.mark.parametrize("strides", [None, (1, 4)])
def test_partial_results_are_reduced_in_order(name: str, expected: Any, strides: Any) -> None:
    x = torch.randn(3, 4, 5)
    env = {"a": x[0].clone(), "b": x[1], "c": x[2]}
    args = [name, [ref(key) for key in env], None]
    out = run("pardnn.reduce", args, env, output(4, 5, strides=strides))
    assert torch.equal(out, expected(x))
    assert torch.equal(env["a"], x[0])
    assert strides is None or out.stride() == strides


def test_a_mean_is_weighted() -> None:
    env = {"a": torch.tensor([1.0]), "b": torch.tensor([5.0])}
    args = ["mean", [ref("a"), ref("b")], [0.75, 0.25]]
    assert run("pardnn.reduce", args, env, output(1)).item() == 2.0


def test_an_update_writes_into_the_box() -> None:
    env = {"x": torch.zeros(2, 3), "s": torch.ones(2, 1)}
    out = Tensor(name="out", bytes=0, shape=(2, 3), dtype="float32", alias_of="x")
    run("pardnn.update", [ref("x"), [[0, 2], [1, 2]], ref("s")], env, out, returns=[])
    assert env["x"].tolist() == [[0, 1, 0]] * 2
    assert env["out"].untyped_storage().data_ptr() == env["x"].untyped_storage().data_ptr()


def test_two_halves_of_a_draw_are_the_draw_of_one_device() -> None:
    torch.manual_seed(3)
    mask = torch.native_dropout(torch.ones(4, 8), 0.5, True)[1]
    end = rng.read_state(torch.default_generator)
    ones = {"ones": [[4, 8], "float32", None]}
    halves = []
    for low, high in ((0, 3), (3, 8)):
        torch.manual_seed(3)
        args = ["aten.native_dropout.default", [ones, 0.5, True], {},
                [None, [[0, 4], [low, high]]]]  # fmt: skip
        out = output(4, high - low, dtype="bool")
        op = Op(name="drop@1", kind="pardnn.draw", outputs=(out,),
                arguments={"args": args, "of": "drop", "returns": [None, "out"]})  # fmt: skip
        assert is_random(op)
        assert drawn_once(op, {}) == "drop"
        env: dict[str, Any] = {}
        bind(op, CPU)(env)
        halves.append(env["out"])
        assert env["out"].untyped_storage().nbytes() == 4 * (high - low)
        assert rng.read_state(torch.default_generator) == end
        (draws,) = measure_draws([op], {}, CPU).values()
        assert draws.without_spare.count > 0
    assert torch.equal(torch.cat(halves, 1), mask)


@pytest.mark.parametrize("args", [["sum"], ["median", [ref("x")], None]])
def test_arguments_without_meaning_are_refused(args: list[Any]) -> None:
    with pytest.raises(FileError):
        run("pardnn.reduce", args, {"x": torch.ones(1)}, output(1))


def test_a_source_names_its_shard() -> None:
    whole = {"w": Op(name="w", kind="parameter", outputs=(output(4, 8),))}
    box = [[0, 4], [0, 4]]
    op = Op(name="w@0", kind="parameter", arguments={"shard": {"of": "w", "box": box}})
    assert shard_of(op, whole) == ("w", ((0, 4), (0, 4)))
    assert shard_of(whole["w"], whole) == ("w", None)

"""The code of a rank: it runs as the plan does, reads as the step does, and no name is code."""

import ast
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import pardnn
from pardnn.backends.torch.codegen.load import load_step
from pardnn.backends.torch.codegen.rank_code import plan_code, rank_code
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.memory.meter import live_bytes
from pardnn.backends.torch.runtime.program import Program
from pardnn.cluster import Cluster
from pardnn.errors import FileError, PardnnError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.plan import Plan
from tests.backends.torch import models
from tests.backends.torch.executors import (
    Factory,
    batches,
    bits,
    captured,
    eager,
    executor_of,
    misaligned,
    on_ranks,
    perceptron,
)
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import run_ranks

STEPS = 3


def written(program: Program, rank: int, folder: Path) -> Path:
    path = folder / f"rank{rank}.py"
    path.write_text(rank_code(program, rank), encoding="utf-8")
    return path


def by_code(factory: Factory, plan: Plan, folder: Path) -> list[Any]:
    """Losses of each rank's code, and the generator's last state."""
    program = Program(captured(factory), plan)

    def body(rank: int, store: str) -> list[Any]:
        executor, binding, args = executor_of(factory, program, rank, store)
        executor.run_code(load_step(written(program, rank, folder)))
        indices = tuple(k for k, arg in enumerate(args) if any(arg is e for e in binding.example()))
        torch.manual_seed(99)
        losses = []
        for i in range(STEPS):
            losses.append(bits(executor.step(binding.batch_inputs(batches(args, indices, i)))))
            binding.end_step()
        executor.world.close()
        return [losses, bits(torch.get_rng_state())]

    outcomes = run_ranks(plan.num_devices, body)
    assert [each.status for each in outcomes] == [0] * plan.num_devices, outcomes[0].error
    return [each.value for each in outcomes]


@pytest.mark.parametrize(
    "factory", [perceptron, misaligned, pytest.param(models.MODELS["gpt2"], marks=pytest.mark.long)]
)
def test_the_code_of_two_ranks_gives_the_bits_of_one_device(
    tmp_path: Path, factory: Factory
) -> None:
    """Dropout, Adam's host numbers, views, in-place updates, messages of all kinds."""
    plan = random_plan(captured(factory), 2, seed=1, num_clumps=20)
    assert by_code(factory, plan, tmp_path) == [eager(factory, None, STEPS)] * 2


@pytest.mark.parametrize("options", [{"algorithm": "tofu"},
                                     {"algorithm": "round-robin", "microbatches": 2}])  # fmt: skip
def test_plans_that_cut_ops_or_the_batch_run_as_their_actions_do(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plan = pardnn.plan(captured(perceptron), Cluster.uniform(2), costs="v100", reserve=0.0,
                       **options)  # fmt: skip
    expected = [each.value[:2] for each in on_ranks(perceptron, plan, steps=STEPS)]
    assert by_code(perceptron, plan, tmp_path) == expected


def test_the_code_holds_no_more_than_the_plan_counts(tmp_path: Path) -> None:
    """Between any two of its lines: what is freed is gone."""
    program = Program(captured(perceptron), random_plan(captured(perceptron), 1))
    step = load_step(written(program, 0, tmp_path))
    entry, args = perceptron()
    binding = Binding(entry, args, program.whole, torch.device("cpu"))
    state = binding.live_values(program.residents(0))
    peak = 0

    def trace(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal peak
        if frame.f_code is step.__wrapped__.__code__ and event == "line":
            tensors = {key: value for key, value in frame.f_locals.items() if key != "state"}
            peak = max(peak, live_bytes({**state, **{f"_{k}": v for k, v in tensors.items()}}))
        return trace

    given = binding.batch_inputs(args[2:])
    sys.settrace(trace)
    try:
        step(state, given, torch.device("cpu"))
    finally:
        sys.settrace(None)
    assert 0.9 * program.peaks[0] < peak <= program.peaks[0]


# What it reads as.


def float_tensor(name: str, **of: Any) -> Tensor:
    return Tensor(name=name, bytes=32, shape=(8,), dtype="float32", **of)


def op(name: str, kind: str, *args: Any, kwargs: Any = None, **of: Any) -> Op:
    inputs = tuple(each["tensor"] for each in args if isinstance(each, dict) and "tensor" in each)
    arguments = {"args": list(args), "kwargs": kwargs or {}}
    return Op(name=name, kind=kind, inputs=inputs, outputs=(float_tensor(name),),
              arguments=arguments, **of)  # fmt: skip


def ref(name: str) -> dict[str, str]:
    return {"tensor": name}


def small(source: str, module: str = "head") -> tuple[Graph, Plan]:
    """y = exp(relu(x + w)), the second half on another device."""
    ops = [
        Op(name="x", kind="input", outputs=(float_tensor("x"),)),
        Op(name="head.w", kind="parameter", outputs=(float_tensor("head.w"),), memory="residual"),
        op("add", "aten.add.Tensor", ref("x"), ref("head.w"), kwargs={"alpha": 2}, source=source,
           module=module),
        op("relu", "aten.relu.default", ref("add"), source=source, module=module),
        op("y", "aten.exp.default", ref("relu")),
    ]  # fmt: skip
    return planned(ops, ("x", "head.w", "add"), ("relu", "y"))


def planned(ops: list[Op], *order: tuple[str, ...], name: str = "small") -> tuple[Graph, Plan]:
    graph = build_graph(name, ops)
    placement = {name: k for k, row in enumerate(order) for name in row}
    num_devices = len(order)
    plan = random_plan(graph, num_devices, seed=0)
    for seed in range(1, 200):
        if plan.placement == placement:
            return graph, plan
        plan = random_plan(graph, num_devices, seed=seed)
    raise AssertionError(placement)


def body_of(code: str) -> list[str]:
    """The statements and comments of the step."""
    return code.split('step returns.\n    """\n')[1].splitlines()


def test_the_listing_reads_as_the_step_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f(x):\n    return (x + w).relu()\n", encoding="utf-8")
    case = small(f"{tmp_path / 'train.py'}:2")
    codes = plan_code(*case)
    assert codes == plan_code(*case)
    assert body_of(codes[0]) == [
        "    loss = None",
        "    x = laid_out(batch['x'].to(device), (1,))",
        "    head_w = state['head.w']",
        "",
        f"    # head, {tmp_path / 'train.py'}:2",
        "    #     return (x + w).relu()",
        "    add = aten.add.Tensor(x, head_w, alpha=2)",
        "    send(0, add, to=1, strides=(1,))",
        "    wait(0)",
        "    del x",
        "    del add",
        "    kept = {}",
        "    return loss, kept",
    ]
    assert "    receive(0, add, source=0)" in body_of(codes[1])


def test_only_lines_of_files_of_python_are_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key\n", encoding="utf-8")
    for source in (f"{tmp_path / 'secret'}:1", f"{tmp_path}:1", "\0.py:1", "x.py:-1", "x.py"):
        assert "a key" not in plan_code(*small(source))[0]


HOSTILE = (
    "'); __import__('os').system('x') #", '"""\nimport os\n"""', "a\rimport os", "\u2028import os",
    "torch", "print", "__class__", "", "1", "class", "x\\", "send", "loss", "\u017ftate", "a\x0cb",
    "${x}",
)  # fmt: skip
#: What code may call, besides operators and helpers.
ALLOWED = {"torch.device", "torch.no_grad", "torch.empty_strided", "float", "copy_with_strides"}


def calls_of(code: str) -> set[str]:
    """What the step calls; operators and helpers left out."""
    (step,) = [node for node in ast.parse(code).body if getattr(node, "name", "") == "step"]
    assert isinstance(step, ast.FunctionDef)
    for node in ast.walk(step):
        assert not isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.Global)
        assert not isinstance(node, ast.FunctionDef) or node is step
    found = {ast.unparse(node.func) for node in ast.walk(step) if isinstance(node, ast.Call)}
    helpers = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    return {
        name
        for name in found - helpers
        if not name.startswith("aten.") and not name.endswith((".to", ".clone"))
    }


def test_names_and_texts_of_a_hostile_file_are_data() -> None:
    names = [f"{name}{'' if name else ' '}" for name in HOSTILE]
    ops = [Op(name=names[0], kind="input", outputs=(float_tensor(names[0]),))]
    for before, name in pairwise(names):
        ops.append(op(name, "aten.gelu.default", ref(before), kwargs={"approximate": name},
                      source=f"{name}:1", module=name))  # fmt: skip
    graph = build_graph("\n".join(HOSTILE), ops)
    code = plan_code(graph, random_plan(graph, 1))[0]
    assert calls_of(code) <= ALLOWED
    body = ast.parse(code).body
    (step,) = [node for node in body if getattr(node, "name", "") == "step"]
    operators = [ast.unparse(node.func) for node in ast.walk(step) if isinstance(node, ast.Call)]
    assert operators.count("aten.gelu.default") == len(names) - 1
    stored = [n.id for n in ast.walk(step) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store]
    assert all(name.isascii() and name.isidentifier() for name in stored)
    assert {"torch", "print", "send", "state", "device"}.isdisjoint(stored)
    # The lines of the file are those of the code: no name began one.
    assert len(code.splitlines()) == code.count("\n")


def test_a_lookup_reads_as_an_index() -> None:
    found = op("y", "scalar.lookup", [0.5, -2], ref("it"))
    graph = build_graph("g", [Op(name="it", kind="input", outputs=(float_tensor("it"),)), found])
    assert " = [0.5, -2][it]" in plan_code(graph, random_plan(graph, 1))[0]


@pytest.mark.parametrize(("function", "text"), [
    ("math_pow", "math.pow(it, 2)"),
    ("numpy_cos", "float(numpy.cos(it))"),
])  # fmt: skip
def test_functions_of_modules_read_as_code_writes_them(function: str, text: str) -> None:
    args = [ref("it"), 2] if function == "math_pow" else [ref("it")]
    found = op("y", f"scalar.{function}", *args)
    graph = build_graph("g", [Op(name="it", kind="input", outputs=(float_tensor("it"),)), found])
    code = plan_code(graph, random_plan(graph, 1))[0]
    assert f" = {text}\n" in code
    assert f"import {text.removeprefix('float(').partition('.')[0]}\n" in code


@pytest.mark.parametrize("fault", [
    op("y", "scalar.add", [0.5, 1.0], 1),
    op("y", "aten.relu.default", ref("x"), kwargs={"x=1), print(": 1}),
    op("y", "aten.relu.default; import os", ref("x")),
    op("y", "aten.from_file.default", "/etc/passwd"),
    op("y", "scalar.eval", "print(1)"),
    op("y", "pardnn.print", "x"),
    op("y", "aten.to.dtype", ref("x"), {"dtype": "load"}),
])  # fmt: skip
def test_what_is_no_call_is_refused(fault: Op) -> None:
    graph = build_graph("g", [Op(name="x", kind="input", outputs=(float_tensor("x"),)), fault])
    with pytest.raises(PardnnError) as caught:
        plan_code(graph, random_plan(graph, 1))
    assert isinstance(caught.value, FileError) or caught.value.code == "E801"

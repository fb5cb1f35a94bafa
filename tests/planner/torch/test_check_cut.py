"""Cut plans that compute something else than their graph: each is refused, with op and reason.

The faults are planted in the plan's file, where somebody else could have planted them.
"""

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.api.report import report
from pardnn.api.simulate import plan_problems
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.errors import InvalidPlanError, MismatchError, PardnnError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.file import check_fingerprint, plan_from_json, plan_to_dict
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, Predicted, plan_arrays, planned_graph
from pardnn.plan.rewritten.recompute import SecondCall, graph_with_calls
from pardnn.shard.microbatch.rewrite import cut_batch
from tests.backends.torch import models

Data = dict[str, Any]
Spoil = Callable[[list[Data], Data], None]


class Net(nn.Module):
    """Products, a mean, numbers drawn, operands of one shape, and a sum over a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = torch.nn.functional.dropout(torch.tanh(h) * 0.5 - h, 0.25)
        return self.second(h).sum(1)


def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    out = model(x)
    loss = ((out - y) ** 2).mean() + torch.nn.functional.relu(out).mean()
    loss.backward()
    optimizer.step()
    return loss


def entry() -> models.Entry:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step, (model, optimizer, torch.randn(16, 8), torch.randn(16))


@functools.cache
def graph() -> Graph:
    function, args = entry()
    return capture(function, *args)


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "four devices": ("zero-3", {}),
    "data-parallel": ("zero-3", {}),
    "microbatches": ("heft", {"microbatches": 4}),
    "rows": ("owners", {"microbatches": 4}),
    "terms": ("zero-1", {"microbatches": 2}),
    "accumulator": ("contiguous", {}),
    "second calls": ("contiguous", {}),
}


@functools.cache
def planned(name: str) -> Plan:
    algorithm, options = PLANS[name]
    whole, cluster = graph(), Cluster.uniform(4 if name == "four devices" else 2, bandwidth=300e9)
    if algorithm != "contiguous":
        return pardnn.plan(whole, cluster, algorithm, costs="v100", reserve=0.0, **options)
    pieces = cut_batch(whole, 4, accumulators=1)
    cut, calls = build_graph("cut", pieces.ops), None
    if name == "second calls":
        reader = [op.name for op in cut.ops if "tanh@1" in op.inputs][-1]
        calls = (SecondCall(op="tanh@1", readers=(reader,)),)
        cut = graph_with_calls(cut, calls)
    plan = pardnn.plan(cut, cluster, algorithm, costs="v100")
    return dataclasses.replace(
        plan, pieces=pieces, recompute=calls, graph_fingerprint=None, op_digests=None
    )


def spoilt(plan: Plan, spoil: Spoil) -> Plan:
    """The plan of a file in which a fault was planted, its bytes predicted as they are then."""
    data = copy.deepcopy(plan_to_dict(plan))
    spoil((data.get("partition") or data["pieces"])["ops"], data)
    found = plan_from_json(json.dumps(data).encode())
    if found.predicted != plan.predicted:
        return found
    local = planned_graph(graph(), found)
    arrays = plan_arrays(local, found)
    sent = int(local.arrays.tensor_bytes[arrays.message_tensor].sum())
    peaks = tuple(peak_bytes(local, arrays))
    predicted = Predicted(makespan_s=0.0, peak_bytes=peaks, transfer_bytes=sent)
    return dataclasses.replace(found, predicted=predicted)


def some(ops: list[Data], wanted: Callable[[Data], Any]) -> Data:
    """The last op of a kind: the first ones are often of what is read nowhere else."""
    return [op for op in ops if wanted(op)][-1]


def kind(text: str) -> Callable[[Data], Any]:
    return lambda op: text in op["kind"]


def called(op: Data) -> list[Any]:
    return op["arguments"]["args"]


def mean_into_sum(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: kind("aten.mean")(op) or kind("mse_loss")(op))
    op["kind"] = "aten.sum.default"


def other_operand(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: op["kind"] == "aten.sub.Tensor" and len(op["inputs"]) == 2)
    first, second = called(op)[:2]
    called(op)[:2] = [second, first]


def foreign_op(ops: list[Data], data: Data) -> None:
    op = some(ops, kind("aten.tanh.default"))
    op["kind"] = "aten.sin.default"


def scalar(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: kind("aten.mul")(op) and 0.5 in called(op))
    called(op)[called(op).index(0.5)] = 0.75


def reduced_dim(ops: list[Data], data: Data) -> None:
    op = some(ops, kind("aten.sum.dim_IntList"))
    called(op)[1] = [0]


def whole_number(ops: list[Data], data: Data) -> None:
    """Equal in Python, and refused by the operator."""
    op = some(ops, kind("aten.sum.dim_IntList"))
    called(op)[1] = [float(dim) for dim in called(op)[1]]


def sum_into_max(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: op["kind"] == "pardnn.reduce" and called(op)[0] == "sum")
    called(op)[0] = "max"


def weights(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: op["kind"] == "pardnn.reduce" and called(op)[0] == "mean")
    called(op)[2][0] *= 2


def dropped_part(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: op["kind"] == "pardnn.reduce" and len(called(op)[1]) > 1)
    called(op)[1][0] = called(op)[1][1]


def counted_twice(ops: list[Data], data: Data) -> None:
    op = some(ops, kind("pardnn.reduce"))
    called(op)[1].append(called(op)[1][0])


def shifted_slice(ops: list[Data], data: Data) -> None:
    def can(op: Data) -> bool:
        return op["kind"] == "pardnn.slice" and any(begin > 0 for begin, _ in called(op)[1])

    ends = next(ends for ends in called(some(ops, can))[1] if ends[0] > 0)
    ends[:] = [ends[0] - 1, ends[1] - 1]


def shifted_view(ops: list[Data], data: Data) -> None:
    """Another box of what a random op drew."""
    op = some(ops, kind("pardnn.draw"))
    box = next(box for box in called(op)[3] if box and any(begin > 0 for begin, _ in box))
    ends = next(ends for ends in box if ends[0] > 0)
    ends[:] = [0, ends[1] - ends[0]]


def other_draw(ops: list[Data], data: Data) -> None:
    op = some(ops, kind("pardnn.draw"))
    op["arguments"]["of"] = "another"


def probability(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: kind("bernoulli")(op) or kind("pardnn.draw")(op))
    arguments = called(op)[1] if op["kind"] == "pardnn.draw" else called(op)
    found = next(i for i, value in enumerate(arguments) if isinstance(value, float))
    arguments[found] = 0.5


def bytes_of_output(ops: list[Data], data: Data) -> None:
    op = some(ops, kind("aten.mm"))
    op["outputs"][0]["bytes"] //= 2


def dtype(ops: list[Data], data: Data) -> None:
    op = some(ops, kind("aten.mm"))
    op["outputs"][0]["dtype"] = "float16"


def workspace(ops: list[Data], data: Data) -> None:
    some(ops, kind("aten.mm"))["workspace"] = 1 << 20


def strides(ops: list[Data], data: Data) -> None:
    def can(op: Data) -> bool:
        return op["kind"] == "aten.mm.default" and len(op["outputs"][0]["shape"]) == 2

    some(ops, can)["outputs"][0]["strides"] = [1, 1]


def edge(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: op.get("after"))
    del op["after"]


def rate(ops: list[Data], data: Data) -> None:
    op = some(ops, lambda op: kind("add_.Tensor")(op) and op["arguments"].get("kwargs"))
    op["arguments"]["kwargs"]["alpha"] = 0.5


def accumulated(ops: list[Data], data: Data) -> None:
    """What adds a partial result takes it times a number."""
    op = some(ops, lambda op: kind("addmm_")(op) or (kind("add_.Tensor")(op) and "@" in op["name"]))
    op["arguments"]["kwargs"] = {"alpha": 2}


def seconds(ops: list[Data], data: Data) -> None:
    data["predicted"]["makespan_s"] *= 0.5


def costs(ops: list[Data], data: Data) -> None:
    data["predicted"]["costs"] = "a100"


def transfer_bytes(ops: list[Data], data: Data) -> None:
    data["predicted"]["transfer_bytes"] += 4


def peak(ops: list[Data], data: Data) -> None:
    data["predicted"]["peak_bytes"][0] -= 4


def unused_loop(ops: list[Data], data: Data) -> None:
    data["partition"]["loops"]["nobody"] = [None] * len(data["partition"]["mesh"]["shape"])


def other_loop(ops: list[Data], data: Data) -> None:
    loops = data["partition"]["loops"]
    name = next(name for name in loops if name.startswith("mm"))
    loops[name] = ["nowhere"] * len(loops[name])


def no_loops(ops: list[Data], data: Data) -> None:
    del data["partition"]["loops"]


CUT, BATCH = ("data-parallel",), ("microbatches",)
EVERY = (*CUT, *BATCH)
FAULTS: dict[Spoil, tuple[tuple[str, ...], str]] = {
    mean_into_sum: (EVERY, r"op 'm.*sum.default.*"),
    other_operand: (EVERY, r"op 'sub"),
    foreign_op: (EVERY, r"op 'tanh.*sin"),
    scalar: (EVERY, r"op 'mul.*0.75.*0.5|op 'mul.*differ"),
    reduced_dim: (EVERY, r"op 'sum"),
    whole_number: (EVERY, r"op 'sum.*(is 1.0, expected 1|its arguments differ)"),
    weights: (CUT, r"op .*:sum@.*expected 0.5"),
    sum_into_max: (CUT, r"op .*'max', expected 'sum'"),
    dropped_part: (CUT, r"op .*:sum@"),
    counted_twice: (CUT, r"op .*:sum@"),
    shifted_slice: (CUT, r"op .*"),
    shifted_view: (CUT, r"op 'bernoulli.* is 0, expected 8"),
    other_draw: (CUT, r"op 'bernoulli.*'another', expected 'bernoulli'"),
    probability: (EVERY, r"op 'bernoulli.*(is 0.5, expected 0.75|not the aten.bernoulli)"),
    bytes_of_output: (EVERY, r"op 'mm.*bytes"),
    dtype: (EVERY, r"mm"),
    workspace: (EVERY, r"op 'mm.*workspace is 1048576"),
    strides: (EVERY, r"mm"),
    edge: (EVERY, r"op .*after is absent, expected "),
    rate: (EVERY, r"op 'add_.*(0.5|it is not the aten.add_)"),
    accumulated: ((*BATCH, "accumulator"), r"op .*"),
    seconds: (EVERY, r"predicted.makespan_s is .* by v100"),
    costs: (EVERY, r"predicted.makespan_s is .* by a100"),
    transfer_bytes: (EVERY, r"predicted.transfer_bytes is"),
    peak: (EVERY, r"predicted.peak_bytes is"),
    unused_loop: (CUT, r"'nobody' is not a call"),
    other_loop: (CUT, r"'mm.* cannot be cut along"),
    no_loops: (CUT, r"does not say along which loops"),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_without_faults_are_valid(name: str) -> None:
    again = plan_from_json(json.dumps(plan_to_dict(planned(name))).encode())
    assert plan_problems(graph(), again) == []


@pytest.mark.parametrize("name", PLANS)
def test_a_line_added_above_the_step_changes_no_plan(name: str) -> None:
    moved = [
        dataclasses.replace(op, source=None if op.source is None else f"{op.source}0", module="x")
        for op in graph().ops
    ]
    assert plan_problems(build_graph("moved", moved), planned(name)) == []


@pytest.mark.parametrize(
    ("name", "spoil"), [(name, spoil) for spoil, (names, _) in FAULTS.items() for name in names],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)  # fmt: skip
def test_a_fault_is_named(name: str, spoil: Spoil) -> None:
    problems = plan_problems(graph(), spoilt(planned(name), spoil))
    assert problems
    assert re.search(FAULTS[spoil][1], problems[0], re.DOTALL), problems


def test_parallelize_proves_the_plan_that_it_is_given() -> None:
    function, args = entry()
    cluster = Cluster.uniform(1)
    plan = pardnn.plan(graph(), cluster, "contiguous", costs="v100", microbatches=2, reserve=0.0)
    with pytest.raises(PardnnError, match=r"op 'mm.*arguments.kwargs is .'alpha': 2."):
        pardnn.parallelize(function, *args, plan=spoilt(plan, accumulated))


@pytest.mark.parametrize("tell", [pardnn.simulate, report])
def test_nothing_is_told_of_a_plan_that_computes_something_else(tell: Any) -> None:
    with pytest.raises(InvalidPlanError, match=r"op 'mul_.* is 0.75, expected 0.5"):
        tell(graph(), spoilt(planned("data-parallel"), scalar), costs="v100")


@pytest.mark.parametrize("name", ["microbatches", "data-parallel"])
def test_a_plan_of_another_graph_tells_what_differs(name: str) -> None:
    ops, plan = list(graph().ops), planned(name)
    at = next(i for i, op in enumerate(ops) if op.kind == "aten.tanh.default")
    ops[at] = dataclasses.replace(ops[at], kind="aten.sigmoid.default")
    changed = ops[at].name if name == "microbatches" else ops[at].outputs[0].name
    ops.append(Op(name="new", kind="input", outputs=(Tensor(name="new", bytes=4),)))
    with pytest.raises(MismatchError) as error:
        check_fingerprint(plan, build_graph("g", ops))
    assert error.value.details == {"added": ["new"], "removed": [], "changed": [changed]}

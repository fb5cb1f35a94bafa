"""One question about a plan, one answer."""

from __future__ import annotations

from typing import Literal

from pardnn.errors import UsageError
from pardnn.explain.anew import explain_memory, explain_time
from pardnn.explain.case import Case, opened
from pardnn.explain.layer import explain_layer, explain_layers
from pardnn.explain.op import explain_device, explain_op, explain_tensor
from pardnn.explain.subjects import subject_of
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.planner.algorithms import check_algorithm
from pardnn.report.explained import Explained

Topic = Literal["memory", "time", "layers"]


def ask(
    graph: Graph,
    plan: Plan,
    name: str | None = None,
    *,
    topic: Topic | None = None,
    algorithm: str | None = None,
    costs: str | None = None,
) -> Explained:
    """Answer a question about a plan.

    Args:
        graph: The graph that it is for.
        plan: A valid plan that names its cluster.
        name: An op, a tensor, a device or a layer. For "memory" a change of the limits, such as
            "+2GiB", and for "time" a number of additional devices, "+1"; for both, the step is
            planned again.
        topic: What to explain of the whole plan instead.
        algorithm: Of new plans; None for the best of the plan's kind.
        costs: As for `plan`.

    Raises:
        UsageError: E206, if an algorithm is named but nothing is planned; E210, if it does not
            exist; E240, if nothing is asked; E241, if nothing has that name; E242, if the cluster
            cannot be changed this way.
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid.
    """
    if (topic is None and name is None) or (topic == "layers" and name is not None):
        raise UsageError(
            "ask for one thing: pardnn explain PLAN NAME, where NAME is an op, a "
            "tensor, a device or a layer; or --memory [+2GiB], --time [+1], --layers.",
            code="E240",
        )
    if algorithm is not None:
        check_algorithm(algorithm)
        if topic not in ("memory", "time") or name is None:
            raise UsageError(
                "--algorithm would be ignored: it applies only to new plans, as with --memory "
                "+2GiB or --time +1.",
                code="E206",
            )
    case = opened(graph, plan, costs)
    if topic == "memory":
        return explain_memory(case, name, algorithm)
    if topic == "time":
        return explain_time(case, name, algorithm)
    if topic == "layers":
        return explain_layers(case)
    assert name is not None
    return _named(case, name)


def _named(case: Case, name: str) -> Explained:
    subject = subject_of(case, name)
    if subject.kind == "device":
        return explain_device(case, subject.device)
    if subject.kind == "layer":
        return explain_layer(case, name, subject.ops)
    return explain_op(case, subject) if subject.kind == "op" else explain_tensor(case, subject)

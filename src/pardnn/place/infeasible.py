"""The error that says why nothing fits: where, when, how much, and what cannot be avoided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError, shown
from pardnn.graph.ir import Graph
from pardnn.place.ordering.memory_bounded import limits
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import least_bytes, live_bytes, live_ranges, op_needs
from pardnn.units import bytes_text, size_texts

#: Tensors named in `details["alive"]`, the largest first.
MAX_ALIVE = 10


def infeasible(
    graph: Graph,
    attempt: PlanArrays,
    capacities: Sequence[int | None],
    group: Int64[ndarray, " n"],
    missing: tuple[int, int] | None = None,
    how: str = "",
) -> InfeasibleError:
    """Return E301 for the plan that came closest to fitting.

    Args:
        graph: The graph.
        attempt: A plan that exceeds a capacity.
        capacities: Usable bytes per device.
        group: Co-location group of each op.
        missing: Two ops of the plan between whose devices there is no link.
        how: What the planner has done to make it fit, for people.
    """
    a = graph.arrays
    live = live_bytes(a, attempt)
    device_of = attempt.place[attempt.order_op]
    over = live - limits(capacities)[device_of]
    worst = int(over.argmax())
    device, op = int(device_of[worst]), graph.ops[int(attempt.order_op[worst])]
    usable = capacities[device]
    needs = op_needs(a)
    largest = int(needs.argmax())
    least = least_bytes(a, len(capacities), group)
    big = graph.ops[largest]
    workspace = int(a.workspace[largest])
    made = int(a.tensor_bytes[a.output_ptr[largest] : a.output_ptr[largest + 1]].sum())
    needed, limit = size_texts(int(live[worst]), usable)
    message = (
        f"no plan fits. The closest found{how} needs {needed} on device "
        f"{device}, while {shown(op.name)}{_at(op.source)} runs; usable: {limit}.\n"
        f"Largest single op: {shown(big.name)}{_at(big.source)}: "
        f"{bytes_text(int(needs[largest]))}, of which outputs {bytes_text(made)}, workspace "
        f"{bytes_text(workspace)}.\n"
        f"Every placement of these ops needs at least {bytes_text(least)} on some device."
    )
    if missing is not None:
        message += _link_text(graph, attempt, missing)
    if not _may_fit(least, capacities):
        message += " So none can meet this limit."
    details: dict[str, Any] = {
        "device": device,
        "op": op.name,
        "source": op.source,
        "position": worst - int(attempt.order_ptr[device]),
        "bytes": int(live[worst]),
        "usable_bytes": usable,
        "alive": _alive(graph, attempt, worst),
        "largest_op": {"name": big.name, "source": big.source, "bytes": int(needs[largest])},
        "lower_bound_bytes": least,
    }
    return InfeasibleError(message, details=details)


def _link_text(graph: Graph, attempt: PlanArrays, missing: tuple[int, int]) -> str:
    before, after = (shown(graph.ops[op].name) for op in missing)
    source, target = (int(attempt.place[op]) for op in missing)
    return (
        "\n"
        f"The closest found also needs a link from device {source} to device {target}, which the "
        f"cluster does not have: {after} comes after {before}."
    )


def _at(source: str | None) -> str:
    return f" ({source})" if source else ""


def _may_fit(least: int, capacities: Sequence[int | None]) -> bool:
    return any(size is None or size >= least for size in capacities)


def _alive(graph: Graph, plan: PlanArrays, position: int) -> list[dict[str, Any]]:
    """The largest storages that the device holds while the op at a position runs."""
    a = graph.arrays
    device = plan.place[plan.order_op[position]]
    allocated, released = live_ranges(a, plan)
    tensor = np.concatenate([np.arange(a.num_tensors), plan.message_tensor])
    home = np.concatenate([plan.place[a.tensor_op], plan.message_target])
    alive = (allocated <= position) & (released >= position) & (home == device)
    found = np.flatnonzero(alive)
    largest = found[np.argsort(-a.tensor_bytes[tensor[found]], kind="stable")][:MAX_ALIVE]
    names = [t.name for op in graph.ops for t in op.outputs]
    return [
        {
            "tensor": names[tensor[s]],
            "bytes": int(a.tensor_bytes[tensor[s]]),
            "received": bool(s >= a.num_tensors),
        }
        for s in largest.tolist()
    ]


def named_op(error: InfeasibleError, graph: Graph) -> InfeasibleError:
    """Return E302 with the op by name; algorithms know numbers."""
    number = error.details.get("op")
    if error.code != "E302" or not isinstance(number, int):
        return error
    op = graph.ops[number]
    where, kinds = f" ({op.source})" if op.source else "", ", ".join(sorted(op.seconds or ()))
    return InfeasibleError(
        f"op {shown(op.name)}{where} cannot run on any device of the cluster, alone or with its "
        f"group; its `seconds` name: {kinds or 'none'}.\nAdd a device of one of these types.",
        code="E302",
        details={"op": op.name, "source": op.source},
    )

"""State that is on devices because a plan already runs, and that the next plan leaves there.

The same model at another batch size, in evaluation, or in a second step function is another graph
with a plan of its own. If both plans keep the shared parameters, buffers and optimizer states on
the same devices, in the same boxes, training continues under the second without moving a tensor.
`check_state_kept` proves that a plan does so, and that it fits next to what only other steps use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Graph, Tensor
from pardnn.plan.check import MAX_PROBLEMS, capacities
from pardnn.plan.memory import peak_bytes
from pardnn.plan.mesh import Mesh
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.plan.state_layout import STATE_KINDS, Shard, StateLayout, places_of, state_layout
from pardnn.units import size_texts


class Held(NamedTuple):
    """A state tensor, and where it is.

    Attributes:
        tensor: The whole tensor, in the graph of the plan that put it there.
        shards: By device.
        bytes: On each device.
        mesh: Of the plan that cut it; None if it is whole on one device.
    """

    tensor: Tensor
    shards: tuple[Shard, ...]
    bytes: tuple[int, ...]
    mesh: Mesh | None


@dataclass(frozen=True, kw_only=True)
class StateInPlace:
    """State on the devices of a cluster when a step is planned; see `state_in_place`.

    Attributes:
        held: The tensor of each source op of the whole graph.
        num_devices: Number of devices.
        other_bytes: On each device, for what stays but is not state, such as constants of a plan
            that remains in use; empty for none.
        near: The plan that ran last; the search starts from where it placed ops.
    """

    held: Mapping[str, Held]
    num_devices: int
    other_bytes: tuple[int, ...] = ()
    near: Plan | None = None

    @property
    def layout(self) -> StateLayout:
        """Where each tensor lies."""
        return {name: held.shards for name, held in self.held.items()}


def state_in_place(
    graph: Graph,
    plan: Plan,
    *,
    before: StateInPlace | None = None,
    other_bytes: Sequence[int] = (),
) -> StateInPlace:
    """Return the state that is on the devices once a plan runs.

    Args:
        graph: The whole graph of the step.
        plan: The plan for it.
        before: What was there when the plan was made; state that this graph lacks stays there.
        other_bytes: See `StateInPlace`.
    """
    tensors = {op.name: op.outputs[0] for op in graph.ops if op.kind in STATE_KINDS}
    planned = planned_graph(graph, plan).ops
    sizes = {op.name: op.outputs[0].bytes for op in planned if op.is_source}
    mesh = None if plan.partition is None else plan.partition.mesh
    held: dict[str, Held] = {} if before is None else dict(before.held)
    for name, shards in state_layout(graph, plan).items():
        per_device = [0] * plan.num_devices
        for shard in shards:
            per_device[shard.device] += 0 if shard.on_host else sizes[shard.op]
        held[name] = Held(tensors[name], shards, tuple(per_device), mesh)
    return StateInPlace(
        held=held, num_devices=plan.num_devices, other_bytes=tuple(other_bytes), near=plan
    )


def absent_bytes(graph: Graph, state: StateInPlace) -> list[int]:
    """Return what each device holds that no source of a graph stands for, in bytes."""
    present = {op.name for op in graph.ops if op.kind in STATE_KINDS}
    rows = [held.bytes for name, held in state.held.items() if name not in present]
    rows.append(state.other_bytes or (0,) * state.num_devices)
    return [sum(column) for column in zip(*rows, strict=True)]


def usable_beside(graph: Graph, state: StateInPlace, usable: list[int | None]) -> list[int | None]:
    """Return the bytes of each device that a step may use beside what only others use.

    Args:
        graph: Of the step.
        state: What is there.
        usable: Of each device in all; None for unlimited.
    """
    absent = absent_bytes(graph, state)
    return [None if size is None else size - a for size, a in zip(usable, absent, strict=True)]


def bytes_alone(graph: Graph, state: StateInPlace) -> StateInPlace:
    """Return state that takes the memory of what a graph lacks, and pins nothing.

    For a plan whose tensors of state are moved to where it wants them before it runs.

    Args:
        graph: Of the step.
        state: What is there.
    """
    absent = tuple(absent_bytes(graph, state))
    return dataclasses.replace(state, held={}, other_bytes=absent)


def tensor_problems(graph: Graph, state: StateInPlace) -> Iterator[str]:
    """Yield each tensor of state that has the name of one in place and is another one."""
    for op in graph.ops:
        held = state.held.get(op.name)
        if held is None or op.kind not in STATE_KINDS:
            continue
        new, old = op.outputs[0], held.tensor
        if (new.shape, new.dtype, new.strides, new.bytes) != (
            old.shape, old.dtype, old.strides, old.bytes,
        ):  # fmt: skip
            yield f"{op.kind} {shown(op.name)} is {_text(new)}; the tensor there is {_text(old)}"


def _text(tensor: Tensor) -> str:
    sizes = "" if tensor.shape is None else f"[{', '.join(map(str, tensor.shape))}]"
    strides = "" if tensor.strides is None else f" with strides {list(tensor.strides)}"
    return f"{tensor.dtype or 'a tensor'}{sizes}{strides} of {tensor.bytes} bytes"


def state_problems(
    graph: Graph, plan: Plan, state: StateInPlace, cluster: Cluster | None = None
) -> list[str]:
    """Return what a plan would move, and where it exceeds the memory that is left to it.

    Args:
        graph: The whole graph.
        plan: A valid plan for it.
        state: What is on the devices.
        cluster: Gives the limits; None for the plan's own.
    """
    if plan.num_devices != state.num_devices:
        return [f"the plan is for {plan.num_devices} devices, the state is on {state.num_devices}"]
    problems = [*tensor_problems(graph, state)]
    for name, shards in state_layout(graph, plan).items():
        held = state.held.get(name)
        if held is None:
            continue
        there, here = places_of(held.shards), places_of(shards)
        if here != there:
            problems.append(
                f"{shown(name)} is on {_where(there)}, but the plan puts it on {_where(here)}"
            )
    cluster = cluster or plan.cluster
    if cluster is None or problems:
        return problems[:MAX_PROBLEMS]
    usable = usable_beside(graph, state, capacities(cluster, plan.reserve))
    whole = planned_graph(graph, plan)
    for device, peak in enumerate(peak_bytes(whole, plan_arrays(whole, plan))):
        left = usable[device]
        if left is not None and peak > left:
            held, room = size_texts(peak, left)
            problems.append(
                f"device {device} holds up to {held}; {room} are usable next to what other steps "
                "keep there"
            )
    return problems


def _where(shards: Sequence[tuple[int, object, bool]]) -> str:
    found = [
        f"{'the host of ' * on_host}device {device}" + ("" if box is None else f" {box}")
        for device, box, on_host in shards[:4]
    ]
    return ", ".join(found) + (", ..." if len(shards) > 4 else "")


def check_state_kept(
    graph: Graph, plan: Plan, state: StateInPlace, cluster: Cluster | None = None
) -> None:
    """Raise unless a plan leaves state where it is, and fits next to what only other steps use.

    Args:
        graph: The whole graph.
        plan: A valid plan for it, see `check_plan`.
        state: What is on the devices.
        cluster: Gives the limits; None for the plan's own.

    Raises:
        InvalidPlanError: E410, with all problems in `details["problems"]`.
    """
    problems = state_problems(graph, plan, state, cluster)
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidPlanError(
            f"the plan moves state: {problems[0]}{more}", details={"problems": problems}
        )

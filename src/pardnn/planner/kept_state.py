"""What state on devices demands of the next plan: the kind of plan, pins, and memory.

To the algorithms, a pin is a source op that only one device can run. So all of them respect pins,
as they respect ops that a device type cannot run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, MismatchError, UsageError, shown
from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays
from pardnn.plan.check import capacities
from pardnn.plan.constraints import Constraint
from pardnn.plan.mesh import Box, Layout, Mesh, owned_boxes
from pardnn.plan.state_in_place import (
    Held,
    StateInPlace,
    absent_bytes,
    tensor_problems,
)
from pardnn.plan.state_layout import STATE_KINDS
from pardnn.shard.sharding import FixedLayouts
from pardnn.sim.machine import Machine, restricted
from pardnn.units import bytes_text

Kind = Literal["whole", "cut"]


def kept(graph: Graph, state: StateInPlace) -> dict[int, Held]:
    """Return the state on the devices of each source op, by number of the op."""
    return {
        i: state.held[op.name]
        for i, op in enumerate(graph.ops)
        if op.kind in STATE_KINDS and op.name in state.held
    }


def kind_of_plan(graph: Graph, state: StateInPlace) -> Kind | None:
    """Return which kind of plan leaves a graph's state where it is; None if both do.

    Raises:
        UsageError: E225, if some of it is whole and some cut, or no plan leaves it that way.
    """
    found: dict[Kind, int] = {}
    for i, held in kept(graph, state).items():
        found.setdefault("whole" if held.mesh is None else "cut", i)
    if len(found) == 2:
        whole, cut = (graph.ops[found[kind]].name for kind in ("whole", "cut"))
        raise UsageError(
            f"{shown(whole)} is whole on one device and {shown(cut)} is cut over all: no plan "
            "keeps both where they are.\n"
            "Plan all steps that share state the same way: all placed, or all cut.",
            code="E225",
            details={"whole": whole, "cut": cut},
        )
    if "cut" in found:
        fixed_layouts(graph, state)  # before an algorithm is advised that leaves none there either
    return next(iter(found), None)


def pins_of(graph: Graph, state: StateInPlace) -> Int64[ndarray, " n"]:
    """Return the device on which each op's state is whole; -1 for ops that are free."""
    pins = np.full(len(graph.ops), -1, dtype=np.int64)
    for i, held in kept(graph, state).items():
        if held.mesh is None:
            pins[i] = held.shards[0].device
    return pins


def pinned(machine: Machine, pins: Int64[ndarray, " n"]) -> Machine:
    """Return a machine on which each pinned op can run on its own device alone."""
    free = (pins < 0)[:, None]
    return restricted(machine, free | (pins[:, None] == np.arange(machine.num_devices)))


def fixed_layouts(graph: Graph, state: StateInPlace) -> FixedLayouts | None:
    """Return how state of a graph is cut, by tensor; None if none of it is.

    Raises:
        UsageError: E225, if its layout is not that of a cut on one mesh.
    """
    cut = {i: held for i, held in kept(graph, state).items() if held.mesh is not None}
    layouts: dict[str, Layout] = {}
    mesh: Mesh | None = None
    for i, held in cut.items():
        mesh = mesh or held.mesh
        layout = None if held.mesh != mesh or mesh is None else _layout_of(held, mesh)
        if layout is None:
            raise UsageError(
                f"{shown(graph.ops[i].name)} is not laid out as by a cut over all devices: no such "
                "plan leaves it there.\nUse auto, if all state is cut on submeshes of one size, or "
                "plan without the state.",
                code="E225",
            )
        layouts[graph.ops[i].outputs[0].name] = layout
    return None if mesh is None else FixedLayouts(mesh, layouts)


def _layout_of(held: Held, mesh: Mesh) -> Layout | None:
    """Return the layout that has these boxes on a mesh; None if there is none."""
    shape = held.tensor.shape or ()
    whole: Box = tuple((0, size) for size in shape)
    boxes = tuple(whole if shard.box is None else shard.box for shard in held.shards)
    if [shard.device for shard in held.shards] != list(range(mesh.size)):
        return None
    options = itertools.product((None, *range(len(shape))), repeat=len(mesh.shape))
    return next((layout for layout in options if owned_boxes(shape, layout, mesh) == boxes), None)


def check_no_layout(demanded: Sequence[Constraint]) -> None:
    """Raise if a constraint sets a layout beside state that keeps its own.

    Raises:
        UsageError: E225.
    """
    layout = next((each for each in demanded if each.kind == "layout"), None)
    if layout is not None:
        raise UsageError(
            f"state stays where it is, and constraint {shown(str(layout))} sets a layout: "
            "leave out one of them.",
            code="E225",
        )


def submesh_size(graph: Graph, state: StateInPlace) -> int | None:
    """Return the number of devices of the submeshes on which state is cut; None if it is not.

    All of it has to be cut on submeshes of one size, of consecutive devices, as mixed plans do.
    """
    there = kept(graph, state).values()
    meshes = {held.mesh for held in there}
    mesh = next(iter(meshes), None)
    if mesh is None or len(meshes) > 1 or mesh.size >= state.num_devices:
        return None
    for held in there:
        devices, first = [shard.device for shard in held.shards], held.shards[0].device
        is_submesh = devices == list(range(first, first + mesh.size)) and first % mesh.size == 0
        if not is_submesh or any(shard.on_host for shard in held.shards):
            return None
    return mesh.size


def state_inside(graph: Graph, state: StateInPlace, size: int) -> StateInPlace:
    """Return the state of submeshes as that of one of them, on which all of it is cut.

    Args:
        graph: The step, or its pieces.
        state: What is there.
        size: From `submesh_size`.
    """
    held = {}
    for i, each in kept(graph, state).items():
        first = each.shards[0].device
        shards = tuple(shard._replace(device=shard.device - first) for shard in each.shards)
        held[graph.ops[i].name] = each._replace(
            shards=shards, bytes=each.bytes[first : first + size]
        )
    return StateInPlace(held=held, num_devices=size)


def state_of_columns(graph: Graph, state: StateInPlace, size: int) -> StateInPlace:
    """Return the state of submeshes with each as one device, beside the most of what others keep.

    Args:
        graph: The step, or its pieces.
        state: What is there.
        size: Devices of a submesh.
    """
    absent = absent_bytes(graph, state)
    most = tuple(max(absent[at : at + size]) for at in range(0, len(absent), size))
    held = {}
    for i, each in kept(graph, state).items():
        row = each.shards[0].device // size
        taken = tuple(max(each.bytes) if at == row else 0 for at in range(len(most)))
        shard = each.shards[0]._replace(device=row, box=None)
        held[graph.ops[i].name] = Held(each.tensor, (shard,), taken, None)
    return StateInPlace(held=held, num_devices=len(most), other_bytes=most)


def check_state(graph: Graph, cluster: Cluster, reserve: float, state: StateInPlace) -> None:
    """Raise if it is clear in advance that no plan can leave state where it is.

    Args:
        graph: The graph to plan.
        cluster: What it runs on.
        reserve: Fraction of each device's memory that stays unused.
        state: What is there.

    Raises:
        UsageError: E225, if it is on another number of devices.
        MismatchError: E503, if a tensor differs from the graph's tensor of that name.
        InfeasibleError: E301, if ops that must share a device hold state of two, or state alone is
            too large.
    """
    if state.num_devices != cluster.num_devices:
        raise UsageError(
            f"the state is on {state.num_devices} devices, the cluster has {cluster.num_devices}: "
            "it can stay where it is only on the same devices",
            code="E225",
        )
    problem = next(tensor_problems(graph, state), None)
    if problem is not None:
        raise MismatchError(
            f"{problem}.\n"
            "A different tensor of the same name cannot take its place: rename it, or plan "
            "without `state`.",
            code="E503",
        )
    size = submesh_size(graph, state)
    if size is not None:
        lies = state_of_columns(graph, state, size)
        _check_groups(graph, pins_of(graph, lies), "submesh")
    else:
        _check_groups(graph, pins_of(graph, state), "device")
    _check_memory(graph, capacities(cluster, reserve), state)


def _check_groups(graph: Graph, pins: Int64[ndarray, " n"], where: str) -> None:
    """Raise if ops of one co-location group hold state on two devices or submeshes."""
    group = closed_arrays(graph).group
    first: dict[int, int] = {}
    for i in np.flatnonzero(pins >= 0).tolist():
        other = first.setdefault(int(group[i]), i)
        if pins[other] == pins[i]:
            continue
        one, two = graph.ops[other], graph.ops[i]
        between = next(
            (op for op, g in zip(graph.ops, group, strict=True) if g == group[i] and op.source),
            None,
        )
        which = "" if between is None else f", such as {shown(between.name)} ({between.source})"
        raise InfeasibleError(
            f"{shown(one.name)} is on {where} {pins[other]} and {shown(two.name)} on {where} "
            f"{pins[i]}, but ops of this step write or view both in place{which}: they must share "
            f"a {where}.\n"
            "Plan this step first and keep its state for the other one.",
            details={"ops": [one.name, two.name], "devices": [int(pins[other]), int(pins[i])]},
        )


def _check_memory(graph: Graph, usable: list[int | None], state: StateInPlace) -> None:
    rows = [held.bytes for held in kept(graph, state).values()]
    absent = absent_bytes(graph, state)
    here = [sum(column) for column in zip(*rows, strict=True)] if rows else [0] * len(absent)
    for device, size in enumerate(usable):
        if size is not None and here[device] + absent[device] > size:
            raise InfeasibleError(
                f"device {device} holds {bytes_text(here[device])} of this step's state and "
                f"{bytes_text(absent[device])} that other steps keep there, but only "
                f"{bytes_text(size)} are usable: "
                "no plan fits with the state where it is",
                details={"device": device, "state_bytes": here[device], "other": absent[device]},
            )


def with_state(error: InfeasibleError, graph: Graph, state: StateInPlace) -> InfeasibleError:
    """Return an error that also says what state is on the devices."""
    rows = [held.bytes for held in kept(graph, state).values()]
    absent = absent_bytes(graph, state)
    here = [sum(column) for column in zip(*rows, strict=True)] if rows else [0] * len(absent)
    text = ", ".join(
        f"device {d}: {bytes_text(a)} + {bytes_text(b)}"
        for d, (a, b) in enumerate(zip(here, absent, strict=True))
    )
    return InfeasibleError(
        f"{error.message}\n"
        f"State stays where it is (of this step + of other steps: {text}). A plan may fit "
        "without `state`, or with the state elsewhere.",
        code=error.code,
        details=error.details | {"state_bytes": here, "other_bytes": absent},
    )

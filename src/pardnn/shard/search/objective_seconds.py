"""The objective `seconds`: how long local ops take on the devices, and messages on the links.

Problem: the fewest bytes are not fastest if links differ, if small ops do not get faster when cut,
or if memory is large enough for tensors to stay whole.
Idea: a sum over ops. *Computation*: an op's duration, scaled by a roofline of its slowest local op.
*Communication*: latency + bytes / bandwidth of the slowest message on any device (all links work in
parallel), or the sum of a device's messages if the cluster has serial links. *Memory*: a price per
byte of a layout, which `tofu` raises until the plan fits.
Complexity: O(strategies x layouts x devices^2) per table.
Reference: the sum of compute and transfer times is that of Jia et al. (ICML 2018; Tofu's [14]).
Deviations from a real run: communication is not overlapped with computation, so a plan's
simulated makespan is below the sum that is minimised here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.cost.presets import device_model
from pardnn.cost.roofline import DeviceModel, op_seconds
from pardnn.graph.ir import Graph, Op, Tensor, writes
from pardnn.plan.mesh import Layout
from pardnn.shard.partition.interning import interned_call
from pardnn.shard.partition.mesh_strategies import MeshStrategies
from pardnn.shard.search.box_volumes import (
    common_volumes,
    group_numbers,
    overlaps,
    same_boxes,
    volumes,
)
from pardnn.shard.search.memory_estimate import largest_share, memory_weights
from pardnn.shard.search.objective import TableRequest, fetches
from pardnn.shard.search.problem import Factor, Operand, Problem, Variable
from pardnn.time_limit import check_time

#: Whose saturation and launch cost say how much faster a local op is than the whole one, where the
#: costs come from no model.
MODEL = "a100"


@dataclass
class SecondsObjective:
    """Sum over ops of computing and of communication, each on the slowest device.

    Attributes:
        latency: Seconds between each pair of devices.
        bandwidth: Bytes/s between each pair.
        is_serial: Whether a device's messages follow each other.
        seconds: Of each op of the graph on the slowest device, by name.
        free: Seconds of the ops that follow a variable's tensors, by root: their fixed part, and
            the rest.
        weights: Bytes of a variable that count against memory, by root.
        price: Seconds per byte of them: the Lagrange multiplier of the memory limit.
        model: For the ratio of a local op to the whole one.
    """

    latency: Float64[ndarray, "k k"]
    bandwidth: Float64[ndarray, "k k"]
    is_serial: bool
    seconds: Mapping[str, float]
    free: Mapping[str, tuple[float, float]]
    weights: Mapping[str, float]
    price: float = 0.0
    model: DeviceModel = field(default_factory=lambda: device_model(MODEL))
    may_replicate: bool = True
    are_axes_alike: bool = False

    def __post_init__(self) -> None:
        """Nothing is known yet."""
        self._ratios: dict[int, dict[int, float]] = {}

    def communication(self, requests: Sequence[TableRequest]) -> list[Float64[ndarray, "s l"]]:
        """Seconds of the slowest device's messages, for each strategy and layout."""
        return [self._communication(*request) for request in requests]

    def _communication(
        self,
        operand: Operand,
        strategies: MeshStrategies,
        owned: ndarray,
        axis_sizes: tuple[int, ...],
    ) -> Float64[ndarray, "s l"]:
        check_time()
        n = owned.shape[1]
        stride = len(self.latency) // n
        latency = self.latency[::stride, ::stride].T
        bandwidth = self.bandwidth[::stride, ::stride].T
        sent = traffic(operand, strategies, owned, axis_sizes) * operand.item / stride
        return exchange_seconds(sent, latency, bandwidth, is_serial=self.is_serial)

    def computation(self, factor: Factor, strategies: MeshStrategies) -> Float64[ndarray, " s"]:
        """Seconds of the slowest device's local op, for each strategy."""
        whole = self.seconds[factor.ops[0].op.name]
        if not whole or not len(strategies):
            return np.zeros(len(strategies))
        stride = len(self.latency) // strategies.unclipped.shape[1]
        known = self._ratios.setdefault(factor.number, {})
        base = self._seconds_of(factor, factor.number, known)
        rows = [
            max(self._seconds_of(factor, n, known) for n in set(calls))
            for calls in strategies.calls
        ]
        return whole * np.array([row / base if base else 1.0 for row in rows]) / stride

    def layout_cost(
        self, variable: Variable, layouts: Sequence[Layout], axis_sizes: tuple[int, ...]
    ) -> Any:
        """Seconds of the ops that follow a variable, and the price of its memory, by layout.

        Args:
            variable: Of the coarse graph.
            layouts: A dim, or None, per mesh axis.
            axis_sizes: Of the mesh axes.
        """
        least, rest = self.free.get(variable.root, (0.0, 0.0))
        rest += self.price * self.weights.get(variable.root, 0.0)
        if not least + rest:
            return np.zeros(len(layouts))
        stride = len(self.latency) // math.prod(axis_sizes)
        return least + rest / stride * np.array(
            [largest_share(variable, o, axis_sizes) for o in layouts]
        )

    def _seconds_of(self, factor: Factor, number: int, known: dict[int, float]) -> float:
        if number not in known:
            known[number] = op_seconds(*local_op(factor.ops[0].op, number), self.model)
        return known[number]


def local_op(op: Op, number: int) -> tuple[Op, dict[str, Tensor]]:
    """Return the local call of a device as an op for a cost model, and its tensors.

    Args:
        op: Of the graph.
        number: Of the local call, see `interned_call`.
    """
    call = interned_call(number)
    outputs = [
        _tensor(f"result {i}", shape, op.outputs[min(i, len(op.outputs) - 1)].dtype)
        for i, shape in enumerate([shape for shape in call.outputs if shape is not None])
        if op.outputs
    ]
    inputs = {
        name: _tensor(name, shape, call.dtypes.get(name)) for name, shape in call.shapes.items()
    }
    local = replace(
        op,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        # Results alias nothing here, so a write in place would pass for a view, which is free.
        memory="normal" if writes(op) else op.memory,
        arguments={"args": list(call.args), "kwargs": dict(call.kwargs)},
    )
    return local, inputs | {tensor.name: tensor for tensor in outputs}


def _tensor(name: str, shape: tuple[int, ...], dtype: str | None) -> Tensor:
    size = 2 if dtype in ("float16", "bfloat16") else 8 if "64" in (dtype or "") else 4
    size = 1 if dtype == "bool" else size
    return Tensor(name=name, bytes=size * math.prod(shape), shape=shape, dtype=dtype)


def traffic(
    operand: Operand,
    strategies: MeshStrategies,
    owned: Int64[ndarray, "l n rank 2"],
    axis_sizes: tuple[int, ...],
) -> Float64[ndarray, "s l n n"]:
    """Return the elements that are sent for an operand, by strategy, layout, receiver and sender.

    Replicas share the work: each sends an equal fraction of what is needed.

    Args:
        operand: A tensor of an op.
        strategies: Of the op.
        owned: What each of n devices owns of the tensor, in l layouts.
        axis_sizes: Devices along each mesh axis.
    """
    n = owned.shape[1]
    total = np.zeros((len(strategies), len(owned), n, n))
    alike = same_boxes(owned)
    copies = alike.sum(axis=-1)
    for regions, new in fetches(strategies, operand):
        sent = traffic_of_fetch(regions[:, None], owned[None], alike[None])
        total += sent if new is None else np.where(new[:, None, None, None], sent, 0)
    for output in operand.outputs:
        results = strategies.result(output)
        if results is not None:
            for number, flags in enumerate(strategies.reduced):
                result = results[number]
                total[number] += _results(result, flags[output], axis_sizes, owned, copies, alike)
    return total


def exchange_seconds(
    sent: Float64[ndarray, "*b n n"],
    latency: Float64[ndarray, "n n"],
    bandwidth: Float64[ndarray, "n n"],
    *,
    is_serial: bool,
) -> Float64[ndarray, "*b"]:
    """Return how long the device that waits longest has to wait.

    Args:
        sent: Bytes by receiver and sender.
        latency: Seconds, likewise.
        bandwidth: Bytes/s, likewise.
        is_serial: Whether a device's messages follow each other.
    """
    with np.errstate(invalid="ignore"):
        taken = np.where(sent > 0, latency + sent / bandwidth, 0.0)
    return (taken.sum(axis=-1) if is_serial else taken.max(axis=-1)).max(axis=-1)


def traffic_of_fetch(
    regions: Int64[ndarray, "*b n rank 2"],
    owned: Int64[ndarray, "*c n rank 2"],
    alike: Bool[ndarray, "*c n n"],
) -> Float64[ndarray, "*d n n"]:
    """Return the elements that are sent for what devices need, by receiver and sender.

    The leading dims are broadcast against each other.

    Args:
        regions: What each of n devices needs of a tensor.
        owned: What each owns of it.
        alike: Which devices own the same, see `same_boxes`: they share the work.
    """
    common = common_volumes(regions[..., :, None, :, :], owned[..., None, :, :, :])
    return np.where(alike, 0, common) / alike.sum(axis=-1)[..., None, :]


def traffic_of_result(
    result: Int64[ndarray, "n rank 2"],
    reduced: tuple[bool, ...],
    axis_sizes: tuple[int, ...],
    owned: Int64[ndarray, "n rank 2"],
) -> Float64[ndarray, "n n"]:
    """Return the elements sent to bring results to their owners, by receiver and sender.

    Args:
        result: What each of n devices computes of a tensor.
        reduced: By mesh axis, whether results along it are partial.
        axis_sizes: Of the mesh.
        owned: What each device owns.
    """
    alike = same_boxes(owned)
    rows = owned[None], alike.sum(axis=-1)[None], alike[None]
    return _results(result, reduced, axis_sizes, *rows)[0]


def _results(
    result: Int64[ndarray, "n rank 2"],
    reduced: tuple[bool, ...],
    axis_sizes: tuple[int, ...],
    owned: Int64[ndarray, "l n rank 2"],
    copies: Int64[ndarray, "l n"],
    alike: Bool[ndarray, "l n n"],
) -> Float64[ndarray, "l n n"]:
    """Return elements by layout, receiver and sender that results need to reach their owners."""
    group = group_numbers(reduced, axis_sizes)
    is_own = group[:, None] == group[None, :]
    same = same_boxes(result) & is_own
    layout_cost = same.sum(axis=-1)
    common = common_volumes(owned[:, :, None], result[None, None])
    mine = common_volumes(overlaps(owned, result[None])[:, :, None], result[None, None])
    exchanged = np.where(same[None], 0, common - mine)
    sent = np.where(is_own[None], exchanged, common) / layout_cost[None, None, :]
    if not any(reduced):
        return sent
    gathered = np.where(alike, volumes(owned)[:, :, None] / copies[:, :, None], 0.0)
    gathered *= 1 - np.eye(len(result))
    return sent / copies[:, :, None] + gathered


def seconds_objective(
    graph: Graph, problem: Problem, cluster: Cluster, costs: Costs
) -> SecondsObjective:
    """Return the objective for a graph on a cluster.

    Args:
        graph: The graph.
        problem: Made of it.
        cluster: Has the links.
        costs: Of the graph's ops.
    """
    rows = [costs.on(device.type, device.speed) for device in cluster.devices]
    slowest = np.max(rows, axis=0)
    seconds = {op.name: float(s) for op, s in zip(graph.ops, slowest, strict=True)}
    model = device_model(costs.roofline)
    free: dict[str, tuple[float, float]] = {}
    for op_call in problem.free:
        root = problem.classes.root[op_call.places[0]]
        least, rest = free.get(root, (0.0, 0.0))
        whole = seconds[op_call.op.name]
        fixed = min(whole, model.launch + model.fill / model.bandwidth)
        free[root] = least + fixed, rest + whole - fixed
    arrays = cluster.arrays
    return SecondsObjective(
        arrays.latency,
        arrays.bandwidth,
        cluster.link_model == "serial",
        seconds,
        free,
        memory_weights(graph, problem),
        model=model,
    )

"""How long each op takes on each type of device: arrays aligned with a graph.

Costs come from the graph itself (its ops' `seconds`), from a roofline, or from a table of
measurements. What an op says of itself always wins: it is the more specific knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.cost.call import call_key, is_free, is_host, is_view, signature, tensors_by_name
from pardnn.cost.host_link import host_copy_seconds, is_host_copy
from pardnn.cost.presets import PRESET_NAMES, device_model
from pardnn.cost.roofline import HOST_SECONDS, DeviceModel, op_seconds
from pardnn.cost.table import CostTable
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph, Op, Tensor

#: Seconds of an op at speed 1; None if this model does not know.
CostModel = Callable[[Op, Mapping[str, Tensor]], float | None]

#: Bytes per second at which a sharded plan's own ops move tensors, where the graph states the
#: seconds of all others: copying reads and writes. Assumed, of an accelerator's memory.
MOVING = 1e12

#: Signatures under which a table keeps what views and host arithmetic cost.
VIEW_SIGNATURE = "pardnn.view"
HOST_SIGNATURE = "pardnn.host"

#: Where costs come from that were measured before: nothing is run for them.
MEASURED_BEFORE = "measured before"


@dataclass(frozen=True)
class Costs:
    """Durations of a graph's ops.

    Attributes:
        seconds: Per device type, of each op in the order of `Graph.ops`, on a device of speed 1;
            infinite where a device of that type cannot run the op. Read-only.
        source: Where they come from: "graph", "measured", `MEASURED_BEFORE`, or the presets' names.
        timed_on: The preset of the device that calls were timed on; None if that has none.
    """

    seconds: Mapping[str, Float64[ndarray, " n"]]
    source: str
    timed_on: str | None = None

    @property
    def roofline(self) -> str:
        """The preset that says how much faster a part of an op is than the whole one."""
        return self.source if self.source in PRESET_NAMES else self.timed_on or "a100"

    @property
    def is_measured(self) -> bool:
        """Whether calls were timed."""
        return self.source in ("measured", MEASURED_BEFORE)

    def on(self, device_type: str, speed: float = 1.0) -> Float64[ndarray, " n"]:
        """Seconds of each op on one device; infinite if no op is known to run on its type."""
        if device_type in self.seconds:
            return self.seconds[device_type] / speed
        some = next(iter(self.seconds.values()), np.empty(0))
        return np.full(len(some), np.inf)


def view_signature(op: Op) -> str:
    """Return the signature under which a table keeps what views of this kind cost."""
    return f"{VIEW_SIGNATURE} {op.kind}"


def graph_costs(graph: Graph) -> Costs:
    """Return the costs that the graph's ops state themselves.

    Sources and the loss mark that state none take no time, on every type that any op names.

    Raises:
        UsageError: E230, if an op that is a call states none.
    """
    return _costs(graph, {}, "graph")


def roofline_costs(graph: Graph, models: Mapping[str, DeviceModel]) -> Costs:
    """Return costs from device models; what ops state themselves wins.

    Args:
        graph: The graph.
        models: A device model for each device type.
    """
    return _costs(
        graph,
        {kind: _roofline(model) for kind, model in models.items()},
        ", ".join(sorted({model.name for model in models.values()})),
    )


def preset_costs(
    graph: Graph, preset: str, types: Iterable[str] = ("accelerator",), *, threads: int = 1
) -> Costs:
    """Return roofline costs of a preset.

    Args:
        graph: The graph.
        preset: One of `PRESET_NAMES`.
        types: Device types to cost. The preset describes all but "cpu", which is this machine's
            (probed on first use; `threads` per op).
        threads: That an op on a CPU may use.

    Raises:
        UsageError: E231 for an unknown preset.
    """
    models = {
        kind: device_model("cpu" if kind == "cpu" else preset, threads=threads)
        for kind in dict.fromkeys(types)
    }
    return roofline_costs(graph, models)


def measured_costs(graph: Graph, tables: Mapping[str, CostTable]) -> Costs:
    """Return measured costs; what ops state themselves wins.

    Args:
        graph: The graph.
        tables: A table for each device type, as `profile_graph` returns it.

    Raises:
        UsageError: E230, naming an op that was not measured.
    """
    is_cpu = all(table.machine.threads > 0 for table in tables.values())
    found = _costs(graph, {kind: _measured(table) for kind, table in tables.items()}, "measured")
    return replace(found, timed_on="cpu" if is_cpu else None)


def _roofline(model: DeviceModel) -> CostModel:
    def seconds(op: Op, tensors: Mapping[str, Tensor]) -> float:
        # On a CPU the host's memory is the rank's own.
        is_linked = is_host_copy(op) and model.name != "cpu"
        return host_copy_seconds(op, tensors) if is_linked else op_seconds(op, tensors, model)

    return seconds


def _measured(table: CostTable) -> CostModel:
    entries = table.entries
    view = entries[VIEW_SIGNATURE].seconds if VIEW_SIGNATURE in entries else 0.0
    host = entries[HOST_SIGNATURE].seconds if HOST_SIGNATURE in entries else HOST_SECONDS

    def seconds(op: Op, tensors: Mapping[str, Tensor]) -> float | None:
        if is_free(op):
            return 0.0
        if is_view(op):
            entry = entries.get(view_signature(op))
            return view if entry is None else entry.seconds
        if op.kind.startswith("scalar."):
            return host
        entry = entries.get(signature(op, tensors))
        if entry is None and is_host(op):
            return host
        return entry.seconds if entry is not None else None

    return seconds


def _costs(graph: Graph, models: Mapping[str, CostModel], source: str) -> Costs:
    types = dict.fromkeys([*models, *_stated_types(graph)]) or {"accelerator": None}
    seconds = {kind: np.full(len(graph.ops), np.inf) for kind in types}
    known: dict[tuple[str, Any], float | None] = {}
    stated = [op.seconds is not None for op in graph.ops]
    for kind in types:
        seconds[kind][stated] = [
            op.seconds.get(kind, np.inf) for op in graph.ops if op.seconds is not None
        ]
    unstated = np.flatnonzero(~np.array(stated)).tolist()
    tensors = tensors_by_name(graph) if unstated else {}
    for index in unstated:
        op = graph.ops[index]
        is_asked = models and not is_free(op)
        key = call_key(op, tensors) if is_asked else None
        for kind in types:
            if is_free(op):
                value = 0.0
            elif not models and is_host_copy(op):
                value = host_copy_seconds(op, tensors)
            elif not models and op.kind.startswith("pardnn."):
                value = 0.0 if is_view(op) else _moving(op, tensors)
            else:
                if kind in models and (kind, key) not in known:
                    known[kind, key] = models[kind](op, tensors)
                value = known.get((kind, key))
                if value is None and (kind in models or not models):
                    raise _unknown(op, index, len(graph.ops), source)
            if value is not None:
                seconds[kind][index] = value
    for array in seconds.values():
        array.setflags(write=False)
    return Costs(seconds=seconds, source=source)


def _moving(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Return the seconds of an op that puts together what others computed."""
    moved = sum(tensors[name].bytes for name in op.inputs) + sum(t.bytes for t in op.outputs)
    return moved / MOVING


def _stated_types(graph: Graph) -> list[str]:
    """Return the device types that ops state seconds of, as they come."""
    texts = dict.fromkeys(tuple(op.seconds) for op in graph.ops if op.seconds is not None)
    return [kind for kinds in texts for kind in kinds]


def _unknown(op: Op, index: int, num_ops: int, source: str) -> UsageError:
    place = f" ({op.source})" if op.source else ""
    reason = (
        "was not measured: profile the graph on this device"
        if source == "measured"
        else "does not say how long it takes, so a cost model is needed"
    )
    return UsageError(
        f"op {op.name!r:.200} of kind {op.kind!r:.80}{place}, number {index} of {num_ops}, "
        f"{reason}.\nTry: --costs measured (timed on this machine) or --costs a100 (estimated).",
        code="E230",
        details={"op": op.name, "kind": op.kind, "source": op.source},
    )

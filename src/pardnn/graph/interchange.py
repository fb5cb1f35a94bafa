"""Inputs and splits of msr-fiddle/dnn-partitioning, from and to graphs and placements.

An input is one JSON object: `nodes` with op times in milliseconds on an accelerator ("fpga") and on
a CPU, bytes held and co-location ("color") classes, `edges` with the milliseconds that the source's
output takes between an accelerator and host memory, and the machine (`maxFPGAs`, `maxSizePerFPGA`,
`maxCPUs`). A split says which nodes each device has: `{"fpgas": [{"nodes": [0, 3]}], "cpus": []}`.

How the formats correspond:

- Node 7 is the op "n7"; its name stands in `module`, and colour class 3 is the group "color3".
- That format's memory is a static sum of sizes. So an op is residual: its output and, if its size
  is larger, a rest that no op reads live all the time. A node that is smaller than what it sends
  is a reference: it owns nothing.
- Time on a link becomes bytes at `HOST_BANDWIDTH`, the rate of the published inputs. A copy between
  two accelerators goes through host memory and takes twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pardnn import files
from pardnn.errors import FileError, MismatchError, UsageError, shown
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor, span_bytes

#: Bytes per second between an accelerator and host memory.
HOST_BANDWIDTH = 2.0 * (1 << 30)
BACKWARD = "msr.backward"
FORWARD = "msr.forward"

T = TypeVar("T")
_LENIENT = {"extra": "ignore", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, kw_only=True)
class _Node:
    __pydantic_config__ = _LENIENT
    id: int
    supportedOnFpga: bool | int
    cpuLatency: float
    fpgaLatency: float
    isBackwardNode: bool | int = False
    colorClass: int | None = None
    size: float
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Edge:
    __pydantic_config__ = _LENIENT
    sourceId: int
    destId: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class _Input:
    __pydantic_config__ = _LENIENT
    maxSizePerFPGA: float
    maxFPGAs: int
    maxCPUs: int
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]


@dataclass(frozen=True, kw_only=True)
class _Part:
    __pydantic_config__ = _LENIENT
    nodes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Split:
    __pydantic_config__ = _LENIENT
    fpgas: tuple[_Part, ...]
    cpus: tuple[_Part, ...]


@dataclass(frozen=True, kw_only=True)
class MsrMachine:
    """What an input says about devices.

    Attributes:
        accelerators: How many there are.
        accelerator_bytes: Memory of each.
        cpus: How many there are; their memory is not limited.
    """

    accelerators: int
    accelerator_bytes: int
    cpus: int


def graph_from_msr(content: bytes, what: str, name: str) -> tuple[Graph, MsrMachine]:
    """Read an input.

    Args:
        content: Of the file.
        what: Names it in errors.
        name: Of the graph.

    Raises:
        FileError: E402 (no graph), E406 (no JSON), E407 (wrong field).
    """
    data = _parsed(_Input, content, what)
    known = {node.id for node in data.nodes}
    if len(known) < len(data.nodes):
        raise _wrong(what, "$.nodes", "two nodes have the same id")
    reads: dict[int, dict[int, None]] = {node.id: {} for node in data.nodes}
    sends: dict[int, float] = {}
    for number, edge in enumerate(data.edges):
        place = f"$.edges[{number}]"
        for end in (edge.sourceId, edge.destId):
            if end not in known:
                raise _wrong(what, place, f"there is no node {end}")
        if edge.cost < 0 or sends.setdefault(edge.sourceId, edge.cost) != edge.cost:
            raise _wrong(
                what,
                f"{place}.cost",
                f"is {edge.cost} ms; it must be at least 0 and the same for all edges of node "
                f"{edge.sourceId}, whose output is one message",
            )
        reads[edge.destId][edge.sourceId] = None
    ops = [_op(node, [*reads[node.id]], sends.get(node.id, 0.0), what) for node in data.nodes]
    if data.maxFPGAs < 0 or data.maxCPUs < 0 or data.maxSizePerFPGA < 0:
        raise _wrong(what, "$", "maxFPGAs, maxCPUs and maxSizePerFPGA cannot be negative")
    machine = MsrMachine(
        accelerators=data.maxFPGAs, accelerator_bytes=int(data.maxSizePerFPGA), cpus=data.maxCPUs
    )
    return build_graph(name, ops), machine


def _op(node: _Node, reads: list[int], milliseconds: float, what: str) -> Op:
    if min(node.size, node.cpuLatency, node.fpgaLatency) < 0:
        raise _wrong(what, f"$.nodes, id {node.id}", "size and latencies cannot be negative")
    name, size = f"n{node.id}", math.ceil(node.size)
    # Times were made by dividing bytes; 1e-6 of a byte is what that rounds off.
    sent = math.ceil(milliseconds / 1e3 * HOST_BANDWIDTH - 1e-6)
    is_reference = bool(size < sent and reads)
    outputs = [Tensor(name=f"{name}:0", bytes=sent)]
    if size > sent:
        outputs.append(Tensor(name=f"{name}:rest", bytes=size - sent))
    seconds = {"cpu": node.cpuLatency / 1e3}
    if node.supportedOnFpga:
        seconds["accelerator"] = node.fpgaLatency / 1e3
    return Op(
        name=name,
        kind=BACKWARD if node.isBackwardNode else FORWARD,
        inputs=tuple(f"n{i}:0" for i in reads),
        outputs=tuple(outputs),
        memory="reference" if is_reference else "residual",
        seconds=seconds,
        group=None if node.colorClass is None else f"color{node.colorClass}",
        module=node.name,
    )


def graph_to_msr(graph: Graph, machine: MsrMachine) -> bytes:
    """Return the content of an input.

    What lives for a part of the step only counts all the time there. `cost` is that of all outputs
    of an op which others read. An op that no CPU can run gets the time of an accelerator there.

    Raises:
        UsageError: E213, if an op does not state its seconds.
    """
    ids = node_ids(graph)
    by_tensor = {tensor.name: op for op in graph.ops for tensor in op.outputs}
    read = {name for op in graph.ops for name in op.inputs}
    groups = {op.group: None for op in graph.ops if op.group is not None}
    colors = _numbers(groups, "color")
    edges: list[dict[str, Any]] = []
    for op in graph.ops:
        predecessors = {by_tensor[name].name: by_tensor[name] for name in op.inputs}
        for other in predecessors.values():
            num_bytes = sum(span_bytes(t) for t in other.outputs if t.name in read)
            edges.append(
                {
                    "sourceId": ids[other.name],
                    "destId": ids[op.name],
                    "cost": num_bytes / HOST_BANDWIDTH * 1e3,
                    "size": float(num_bytes),
                }
            )
    return files.dump_json(
        {
            "maxSizePerFPGA": float(machine.accelerator_bytes),
            "maxFPGAs": machine.accelerators,
            "maxCPUs": machine.cpus,
            "nodes": [_node(op, ids[op.name], colors) for op in graph.ops],
            "edges": edges,
        }
    )


def _node(op: Op, number: int, colors: Mapping[str, int]) -> dict[str, Any]:
    seconds = op.seconds if op.seconds is not None or not op.is_source else {"accelerator": 0.0}
    if seconds is None:
        raise UsageError(
            f"op {shown(op.name)} does not state its seconds, and that format has no costs but "
            "these.\nWrite them into the graph file's `seconds` first.",
            code="E213",
        )
    accelerator = seconds.get("accelerator")
    owned = [span_bytes(t) for t in op.outputs if t.alias_of is None and op.memory != "reference"]
    found: dict[str, Any] = {
        "id": number,
        "name": op.module or op.name,
        "supportedOnFpga": int(accelerator is not None),
        "cpuLatency": seconds.get("cpu", accelerator or 0.0) * 1e3,
        "fpgaLatency": (accelerator or 0.0) * 1e3,
        "isBackwardNode": op.kind == BACKWARD or op.backward_of is not None,
        "size": float(sum(owned)),
    }
    if op.group is not None:
        found["colorClass"] = colors[op.group]
    return found


def node_ids(graph: Graph) -> dict[str, int]:
    """Return the node of each op: 7 for "n7" where all ops have such names, else its position."""
    return _numbers([op.name for op in graph.ops], "n")


def _numbers(names: Mapping[Any, Any] | Sequence[str], prefix: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        digits = name.removeprefix(prefix)
        if digits == name or not digits.isdecimal() or str(int(digits)) != digits:
            return {name: i for i, name in enumerate(names)}
        found[name] = int(digits)
    return found


def split_to_json(graph: Graph, placement: Mapping[str, int], types: Sequence[str]) -> bytes:
    """Return the content of a split.

    Args:
        graph: Tells the nodes' ids.
        placement: Device of each op.
        types: Type of each device; those of type "cpu" are the split's `cpus`, in their order.
    """
    ids = node_ids(graph)
    parts: list[list[int]] = [[] for _ in types]
    for op in graph.ops:
        parts[placement[op.name]].append(ids[op.name])
    rows: dict[str, list[dict[str, list[int]]]] = {"fpgas": [], "cpus": []}
    for kind, part in zip(types, parts, strict=True):
        rows["cpus" if kind == "cpu" else "fpgas"].append({"nodes": part})
    return files.dump_json(rows)


def split_from_json(
    content: bytes, graph: Graph, types: Sequence[str], what: str
) -> dict[str, int]:
    """Return the device of each op, in the graph's order.

    Args:
        content: Of a split.
        graph: That it is for.
        types: Type of each device: the i-th of `fpgas` is the i-th device that is no "cpu".
        what: Names the split in errors.

    Raises:
        FileError: E406 (no JSON), E407 (wrong field, a node twice).
        MismatchError: E503 (other nodes than the graph's), E504 (more parts than devices).
    """
    data = _parsed(_Split, content, what)
    names = {number: name for name, number in node_ids(graph).items()}
    found: dict[str, int] = {}
    for key, parts in (("fpgas", data.fpgas), ("cpus", data.cpus)):
        devices = [i for i, kind in enumerate(types) if (kind == "cpu") == (key == "cpus")]
        for i, part in enumerate(parts):
            place = f"$.{key}[{i}]"
            if part.nodes and i >= len(devices):
                raise MismatchError(
                    f"{what}: {place} has nodes, but the cluster has {len(devices)} such devices.\n"
                    "Name a cluster with as many accelerators and CPUs as the split.",
                    code="E504",
                )
            for node in part.nodes:
                if node not in names:
                    raise MismatchError(f"{what}: {place}: no op has the id {node}", code="E503")
                if names[node] in found:
                    raise _wrong(what, place, f"node {node} appears twice in the split")
                found[names[node]] = devices[i]
    missing = [number for number, name in names.items() if name not in found]
    if missing:
        raise MismatchError(
            f"{what}: node {missing[0]} is missing ({len(missing)} such nodes)", code="E503"
        )
    return {op.name: found[op.name] for op in graph.ops}


def _parsed(kind: type[T], content: bytes, what: str) -> T:
    files.parse_json(content, what)
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise _wrong(what, "$" + "".join(steps), first["msg"]) from error


def _wrong(what: str, place: str, reason: str) -> FileError:
    return FileError(f"{what}: {place}: {reason}", code="E407", details={"path": place})

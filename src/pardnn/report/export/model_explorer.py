"""A plan as a graph for Model Explorer, the JSON that its page and its server open.

Layers are its namespaces, `h.0.attn` as `h/0/attn`, so that they fold; an op is a node with its
device, its simulated times and the bytes of its results. Names are text there.
Reference: google-ai-edge/model-explorer, "JSON graph format": graphs, nodes, `incomingEdges`.
"""

from __future__ import annotations

from typing import Any

from pardnn import files
from pardnn.errors import printable
from pardnn.graph.ir import Op, Tensor
from pardnn.report.page.contents import PHASES
from pardnn.report.page.modules import ELSEWHERE, numbered_modules
from pardnn.report.page.simulated import Simulated
from pardnn.report.text import seconds_text
from pardnn.units import bytes_text

Fields = dict[str, Any]


def model_explorer_json(found: Simulated) -> bytes:
    """Return the ops of a plan and the tensors between them."""
    modules, number = numbered_modules(found)
    spaces = ["" if path == ELSEWHERE else _namespace(path) for path in modules]
    makers = {
        tensor.name: (i, k)
        for i, op in enumerate(found.graph.ops)
        for k, tensor in enumerate(op.outputs)
    }
    nodes = [
        {
            "id": str(i),
            "label": printable(op.name),
            "namespace": spaces[int(number[i])],
            "attrs": _attributes(_told(found, i)),
            "incomingEdges": [_edge(*makers[name], k) for k, name in enumerate(op.inputs)],
            "outputsMetadata": [_output(str(k), each) for k, each in enumerate(op.outputs)],
        }
        for i, op in enumerate(found.graph.ops)
    ]
    name = printable(f"{found.graph.name} by {found.plan.algorithm}")
    return files.dump_json({"label": name, "graphs": [{"id": name, "nodes": nodes}]})


def _namespace(path: str) -> str:
    """Return the levels of a layer; a slash in a name does not start one, and none is empty."""
    levels = printable(path).replace("/", "\u2215").split(".")
    return "/".join(level or "(unnamed)" for level in levels)


def _told(found: Simulated, i: int) -> Fields:
    op: Op = found.graph.ops[i]
    told: Fields = {
        "kind": op.kind,
        "device": found.names[int(found.arrays.place[i])],
        "phase": PHASES[int(found.phase[i])],
    }
    if not op.is_source:
        told["start"] = seconds_text(float(found.timeline.start[i]))
        told["seconds"] = seconds_text(float(found.seconds[i]))
    told["bytes"] = bytes_text(sum(t.bytes for t in op.outputs if t.alias_of is None))
    if found.piece[i] >= 0:
        told["piece"] = str(int(found.piece[i]))
    return told | ({"source": op.source} if op.source else {})


def _attributes(told: Fields) -> list[Fields]:
    return [{"key": key, "value": printable(value)} for key, value in told.items()]


def _edge(source: int, output: int, position: int) -> Fields:
    return {
        "sourceNodeId": str(source),
        "sourceNodeOutputId": str(output),
        "targetNodeInputId": str(position),
    }


def _output(key: str, tensor: Tensor) -> Fields:
    shape = "?" if tensor.shape is None else "x".join(map(str, tensor.shape)) or "scalar"
    told = {"tensor": tensor.name, "shape": f"{tensor.dtype or '?'} {shape}",
            "bytes": bytes_text(tensor.bytes)}  # fmt: skip
    return {"id": key, "attrs": _attributes(told)}

"""The graph as text, one op a line, for people and for golden files."""

from __future__ import annotations

from collections.abc import Iterable

from pardnn.errors import shown
from pardnn.graph.ir import Graph, Op, Tensor

_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def short_dtype(dtype: str | None) -> str:
    """Shorten a dtype's name: float32 is f32."""
    for long, short in _SHORT.items():
        if dtype is not None and dtype.startswith(long) and dtype[len(long) :].isdigit():
            return short + dtype[len(long) :]
    return dtype or "?"


def name_text(name: str) -> str:
    """Return the name as it is where it is a plain word, else quoted: one op stays one line."""
    return name if name.isprintable() and 0 < len(name) <= 120 and " " not in name else shown(name)


def _names_text(names: Iterable[str]) -> str:
    return ", ".join(name_text(name) for name in names)


def tensor_text(tensor: Tensor) -> str:
    """Return `name: f32[8, 32]`, or the bytes where the shape is unknown."""
    name = name_text(tensor.name)
    if tensor.shape is None:
        return f"{name}: {tensor.bytes} B"
    alias = "" if tensor.alias_of is None else f" of {name_text(tensor.alias_of)}"
    return f"{name}: {name_text(short_dtype(tensor.dtype))}{list(tensor.shape)}{alias}"


def op_text(op: Op) -> str:
    """Return `h: f32[8, 32] = aten.mm.default(x, w)  # model.py:12`."""
    outputs = ", ".join(tensor_text(tensor) for tensor in op.outputs) or "()"
    notes = [
        *([op.memory] if op.memory != "normal" else []),
        *([f"after {_names_text(op.after)}"] if op.after else []),
        *([f"group {name_text(op.group)}"] if op.group is not None else []),
        *([f"workspace {op.workspace} B"] if op.workspace else []),
        *([name_text(op.source)] if op.source else []),
    ]
    tail = f"  # {'; '.join(notes)}" if notes else ""
    return f"{outputs} = {name_text(op.kind)}({_names_text(op.inputs)}){tail}"


def graph_text(graph: Graph) -> str:
    """Return the whole graph, one op a line, in the order of the file."""
    head = (
        f"graph {name_text(graph.name)}: {len(graph.ops)} ops, {graph.arrays.num_tensors} tensors"
    )
    return "\n".join([head, *(f"  {op_text(op)}" for op in graph.ops)])

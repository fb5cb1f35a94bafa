"""The graph as text, one op a line, for people and for golden files."""

from __future__ import annotations

from pardnn.graph.ir import Graph, Op, Tensor

_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def short_dtype(dtype: str | None) -> str:
    """Shorten a dtype's name: float32 is f32."""
    for long, short in _SHORT.items():
        if dtype is not None and dtype.startswith(long) and dtype[len(long) :].isdigit():
            return short + dtype[len(long) :]
    return dtype or "?"


def tensor_text(tensor: Tensor) -> str:
    """Return `name: f32[8, 32]`, or the bytes where the shape is unknown."""
    if tensor.shape is None:
        return f"{tensor.name}: {tensor.bytes} B"
    alias = "" if tensor.alias_of is None else f" of {tensor.alias_of}"
    return f"{tensor.name}: {short_dtype(tensor.dtype)}{list(tensor.shape)}{alias}"


def op_text(op: Op) -> str:
    """Return `h: f32[8, 32] = aten.mm.default(x, w)  # model.py:12`."""
    outputs = ", ".join(tensor_text(tensor) for tensor in op.outputs) or "()"
    notes = [
        *([op.memory] if op.memory != "normal" else []),
        *([f"after {', '.join(op.after)}"] if op.after else []),
        *([f"group {op.group}"] if op.group is not None else []),
        *([f"workspace {op.workspace} B"] if op.workspace else []),
        *([op.source] if op.source else []),
    ]
    tail = f"  # {'; '.join(notes)}" if notes else ""
    return f"{outputs} = {op.kind}({', '.join(op.inputs)}){tail}"


def graph_text(graph: Graph) -> str:
    """Return the whole graph, one op a line, in the order of the file."""
    head = f"graph {graph.name}: {len(graph.ops)} ops, {graph.arrays.num_tensors} tensors"
    return "\n".join([head, *(f"  {op_text(op)}" for op in graph.ops)])

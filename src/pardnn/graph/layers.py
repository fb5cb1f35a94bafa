"""The user's layers: which module each op works for, parameters and updates included.

A captured op of the forward or backward pass names its module. A parameter belongs to the module
that its name begins with, an optimizer's state to that of its parameter, and what is left, such as
the arithmetic of an optimizer, to the layer that alone reads it or that it writes. O(ops + edges).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pardnn.graph.ir import Graph, Op

#: What ops are said to belong to that work for no layer, or for several.
NO_LAYER = "(no layer)"

_ADDED = re.compile(r"(?<=.)([@~][0-9]+)+$")


def layers_of(graph: Graph, known: Mapping[str, str] | None = None) -> list[str]:
    """Return the module path of each op; empty where there is none.

    Args:
        graph: A graph, or what a plan made of it.
        known: Layers of ops and tensors of the graph that it was made of, by name.
    """
    a, known = graph.arrays, known or {}
    modules = {op.module for op in graph.ops if op.module}
    parameters = {op.name for op in graph.ops if op.kind in ("parameter", "buffer")}
    found = [
        op.module
        or (_known(op.name, known) if known else "")
        or _of_source(op, modules, parameters)
        for op in graph.ops
    ]
    if not any(found):
        return [""] * len(found)
    names = (tensor.name for op in graph.ops for tensor in op.outputs)
    home = dict(zip(names, a.tensor_op[a.tensor_owner].tolist(), strict=True))
    written = {number: [home[name] for name in names] for number, names in graph.overwrites}
    readers: list[int] = a.consumer_op.tolist()
    ends: list[int] = a.consumer_ptr[a.output_ptr].tolist()
    for number in reversed(a.topological.tolist()):
        if not found[number]:
            near = written.get(number) or readers[ends[number] : ends[number + 1]]
            layers = {found[i] for i in near}
            if len(layers) == 1:
                found[number] = layers.pop()
    return found


def known_layers(graph: Graph, layers: list[str]) -> dict[str, str]:
    """Return the layer of each op and tensor that has one, by name."""
    found = {t.name: layer for op, layer in zip(graph.ops, layers, strict=True) for t in op.outputs}
    found |= {op.name: layer for op, layer in zip(graph.ops, layers, strict=True)}
    return {name: layer for name, layer in found.items() if layer}


def origin(name: str) -> str:
    """Return the name without what a plan adds: "h" of "h@1", "h~2" and "h~2@1"."""
    return _ADDED.sub("", name)


def _known(name: str, known: Mapping[str, str]) -> str:
    plain = origin(name)
    return known.get(name) or known.get(plain) or known.get(plain.partition(":")[0]) or ""


def _of_source(op: Op, modules: set[str], parameters: set[str]) -> str:
    """Return the layer of a value that exists before the step."""
    if not modules or op.kind not in ("parameter", "buffer", "state"):
        return ""
    name = op.name
    if op.kind == "state":
        name = name.partition(".state.")[2].rpartition(".")[0]
        if name not in parameters:
            return ""
    return name.rpartition(".")[0]


def block_of(layer: str) -> str:
    """Return the block that a layer belongs to: its path up to the first number in it."""
    parts = layer.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return layer


def is_within(layer: str, prefix: str) -> bool:
    """Whether a module is another one or inside it."""
    return layer == prefix or layer.startswith(f"{prefix}.")

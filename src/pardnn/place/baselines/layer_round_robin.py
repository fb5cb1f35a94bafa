"""Whole layers dealt out to devices: the operator placement that Tofu is compared with.

Layer i of a model, all of its time steps, its backward ops and its weights, goes to device i mod k.
Reference: Tofu (EuroSys 2019), section 7.1, "operator placement", after Sutskever et al. (2014).
Deviations: layers are read from module paths: all paths that agree up to their first number are one
layer, such as "model.cells.3.i2h" and "model.cells.3.h2h"; a path without a number is a layer by
itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from pardnn.graph.ir import Graph, Op
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.sim.machine import Machine

_LAYER = re.compile(r"^(.*?\d+)(?=\.|$)")


def layer_of(path: str) -> str:
    """Return the layer that a module path or a parameter's name belongs to.

    >>> layer_of("model.layers.3.mlp.0")
    'model.layers.3'
    """
    found = _LAYER.match(path)
    return found.group(1) if found else path


def whole_layers(graph: Graph) -> list[str]:
    """Return the layer of each op: its own, else its producer's, else its consumer's."""
    order = graph.arrays.topological.tolist()
    made = {tensor.name: i for i, op in enumerate(graph.ops) for tensor in op.outputs}
    found: list[str | None] = [_own_layer(op) for op in graph.ops]
    for i in order:
        if found[i] is None:
            found[i] = next((found[made[n]] for n in graph.ops[i].inputs if found[made[n]]), None)
    for i in reversed(order):
        for name in graph.ops[i].inputs:
            if found[made[name]] is None:
                found[made[name]] = found[i]
    return [layer or "" for layer in found]


def _own_layer(op: Op) -> str | None:
    if op.module:
        return layer_of(op.module)
    if op.kind in ("parameter", "buffer", "state"):
        return layer_of(op.name.removeprefix("optimizer.state."))
    return None


def place_layer_round_robin(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Place layer i, in the order of first use, on device i mod K.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if this placement does not fit.
    """
    del seed
    layers = whole_layers(graph)
    number: Mapping[str, int] = _numbers(graph, layers)
    target = np.array([number[layer] % machine.num_devices for layer in layers], dtype=np.int64)
    arrays = closed_arrays(graph)
    place = legal_placement(arrays, runnable(arrays, machine), target)
    return fitted(graph, machine, place, capacities)


def _numbers(graph: Graph, layers: list[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for i in graph.arrays.topological.tolist():
        if not graph.ops[i].is_source:
            numbers.setdefault(layers[i], len(numbers))
    for layer in layers:
        numbers.setdefault(layer, len(numbers))
    return numbers

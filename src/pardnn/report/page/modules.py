"""The tree of the model's modules: time, bytes, devices and layouts of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy import ndarray

from pardnn.graph.csr import RESIDUAL
from pardnn.graph.ir import Graph
from pardnn.graph.layers import known_layers, layers_of
from pardnn.plan.plan import Plan
from pardnn.report.page.contents import ModuleRow
from pardnn.report.page.simulated import Simulated

#: Rows of the tree; deeper modules are left out until so many remain.
MOST_ROWS = 2000
#: What updates nothing of one module.
ELSEWHERE = "(no module)"
#: Phases of calls; the last one is of values that are given.
_CALLS = 4


def module_rows(found: Simulated) -> tuple[ModuleRow, ...]:
    """Return the modules depth first, each with all that is below it; the first is the step."""
    names, number = numbered_modules(found)
    tree, rows = _paths(names)
    sums = _Sums(found, number, len(names))
    words = _layouts(found.whole, found.plan)
    return tuple(
        ModuleRow(
            path=path,
            depth=path.count(".") + 1 if path else 0,
            ops=int(sums.ops[below].sum()),
            phase_s=tuple(sums.phase_s[below].sum(axis=0)[:_CALLS].tolist()),
            state_bytes=int(sums.state[below].sum()),
            made_bytes=int(sums.made[below].sum()),
            device_s=_used(sums.device_s[below].sum(axis=0)),
            layout=words.get(path, ""),
        )
        for path, below in ((path, np.array(rows[path], dtype=np.int64)) for path in tree)
    )


class _Sums:
    """Figures of each module alone."""

    def __init__(self, found: Simulated, number: ndarray, count: int) -> None:
        a, k = found.graph.arrays, found.arrays.num_devices
        is_call = (found.phase < _CALLS).astype(np.float64)
        self.ops = np.bincount(number, weights=is_call, minlength=count)
        self.phase_s = found.phase_seconds(number, count)
        used = np.bincount(
            number * k + found.arrays.place, weights=found.seconds, minlength=count * k
        )
        self.device_s = used.reshape(count, k)
        own = a.tensor_alias < 0
        is_state = own & (a.memory[a.tensor_op] == RESIDUAL)
        is_made = own & ~is_state & (found.phase[a.tensor_op] == 0)
        self.state, self.made = (
            np.bincount(number[a.tensor_op[of]], weights=a.tensor_bytes[of], minlength=count)
            for of in (is_state, is_made)
        )


def _used(seconds: ndarray) -> dict[int, float]:
    return {i: float(seconds[i]) for i in np.flatnonzero(seconds).tolist()}


def numbered_modules(found: Simulated) -> tuple[list[str], ndarray]:
    """Return the modules in the order of their calls, and the number of each op's."""
    layers = layers_of(found.whole)
    if found.graph is not found.whole:
        layers = layers_of(found.graph, known_layers(found.whole, layers))
    named = list(zip([layer or ELSEWHERE for layer in layers], found.graph.ops, strict=True))
    # Sources stand first in the file, in an order of their own.
    calls = [layer for layer, op in named if not op.is_source]
    rows = {layer: i for i, layer in enumerate(dict.fromkeys([*calls, *(of for of, _ in named)]))}
    return list(rows), np.array([rows[layer] for layer, _ in named], dtype=np.int64)


def _paths(names: list[str]) -> tuple[list[str], dict[str, list[int]]]:
    """Return the paths of the tree depth first, and the modules below each."""
    rows: dict[str, list[int]] = {"": list(range(len(names)))}
    for number, name in enumerate(names):
        for path in _above(name):
            rows.setdefault(path, []).append(number)
    depth = max((path.count(".") for path in rows), default=0)
    while len(rows) > MOST_ROWS and depth > 0:
        rows = {path: of for path, of in rows.items() if path.count(".") < depth}
        depth -= 1
    first: dict[str, int] = {path: of[0] for path, of in rows.items()}
    return sorted(rows, key=lambda path: [first[each] for each in _above(path)]), rows


def _above(name: str) -> Iterator[str]:
    """Yield the paths down to a module: "h", "h.0", "h.0.mlp"."""
    if name == ELSEWHERE:
        yield name
        return
    parts = name.split(".") if name else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _layouts(graph: Graph, plan: Plan) -> dict[str, str]:
    """Return how the weights right below each module are cut, of a plan that cuts ops."""
    found: dict[str, list[str]] = {}
    if plan.partition is None:
        return {}
    for op in graph.ops:
        words = plan.partition.sharding.get(op.outputs[0].name) if op.outputs else None
        if op.kind == "parameter" and words is not None:
            path, _, name = op.name.rpartition(".")
            found.setdefault(path, []).append(f"{name} {', '.join(words)}")
    return {path: "; ".join(words) for path, words in found.items()}

"""Tiny graphs with groups, parameters and workspaces, of which all plans can be tried."""

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor


def grouped_graph(seed: int, num_ops: int = 6) -> Graph:
    """Return a graph of a few ops, most of them in one of three groups."""
    rng = np.random.default_rng([seed, num_ops])
    ops: list[Op] = []
    made: list[str] = []
    for i in range(num_ops):
        drawn = rng.integers(0, max(len(made), 1), rng.integers(0, 4)).tolist()
        reads = {made[j] for j in drawn if made}
        is_parameter = not reads and rng.random() < 0.4
        outputs = [
            Tensor(name=f"t{i}.{j}", bytes=int(rng.integers(1, 10)))
            for j in range(1 if is_parameter else int(rng.choice([1, 1, 2])))
        ]
        is_input = not reads and len(outputs) == 1
        ops.append(
            Op(
                name=f"op{i}",
                kind="parameter" if is_parameter else "input" if is_input else "aten.mm.default",
                inputs=tuple(sorted(reads)),
                outputs=tuple(outputs),
                memory="residual" if is_parameter else "normal",
                seconds={"accelerator": float(rng.integers(1, 5))},
                workspace=int(rng.choice([0, 0, rng.integers(1, 8)])) * bool(reads),
                group=f"g{rng.integers(0, 3)}" if rng.random() < 0.6 else None,
            )
        )
        made += [tensor.name for tensor in outputs]
    return build_graph(f"grouped-{seed}", ops)

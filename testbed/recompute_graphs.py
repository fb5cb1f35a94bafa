"""Training steps for one device in which results wait long: chains with skips, random layers.

They are of the kinds that Checkmate (MLSys 2020) and MOCCASIN (ICML 2023) are measured on: a
network like U-Net, whose gradients read the results of their layers, and random graphs in layers.
"""

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor


def _op(name: str, inputs: tuple[str, ...], size: int, seconds: float) -> Op:
    made = (Tensor(name=name, bytes=size),)
    return Op(name=name, kind="op", inputs=inputs, outputs=made, seconds={"accelerator": seconds})


def unet_step(levels: int) -> Graph:
    """Down and up again with skips; bytes halve and seconds double at each level down."""
    forward: list[tuple[tuple[str, ...], int, float]] = [((), 1 << 20, 0.0)]
    down = 0
    skips = []
    for level in range(levels):
        for _ in range(2):
            forward.append(((f"f{down}",), (1 << 20) >> level, 1e-3 * (1 + level)))
            down += 1
        skips.append(down)
    for level in reversed(range(levels - 1)):
        reads = (f"f{down}", f"f{skips[level]}")
        forward.append((reads, (1 << 20) >> level, 1e-3 * (1 + level)))
        down += 1
    ops = [_op(f"f{i}", *each) for i, each in enumerate(forward)]
    gradient = {down: f"f{down}"}
    for i in range(down, 0, -1):
        reads, _, seconds = forward[i]
        ops.append(_op(f"g{i}", tuple(dict.fromkeys((gradient[i], *reads, f"f{i}"))),
                       forward[i - 1][1], 2 * seconds))  # fmt: skip
        gradient[i - 1] = f"g{i}"
    return build_graph(f"unet_{levels}", ops)


def random_layers(num_ops: int, seed: int = 0) -> Graph:
    """Ops that read some of the last 30 and some from anywhere before; bytes and seconds drawn."""
    rng = np.random.default_rng(seed)
    ops = [_op("n0", (), int(rng.integers(1, 500)) * 10, 0.0)]
    for i in range(1, num_ops):
        near = rng.integers(max(0, i - 30), i, size=int(rng.integers(1, 4)))
        far = rng.integers(0, i, size=int(rng.random() < 0.3))
        reads = tuple(f"n{j}" for j in sorted({*near.tolist(), *far.tolist()}))
        size, seconds = int(rng.integers(1, 500)) * 10, float(rng.integers(1, 1000)) * 1e-6
        ops.append(_op(f"n{i}", reads, size, seconds))
    return build_graph(f"random_{num_ops}", ops)

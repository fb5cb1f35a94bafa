"""Scale of the whole command: a graph file is read, planned, checked, and the plan written.

`python -m bench scale --files [--quick]` prints a page: processor seconds of each stage and per op,
for graphs of one shape each. What an algorithm decides is a tenth of it; the rest are walks over
names, which must be as linear. By `pardnn` on four devices without limits (up to 50,000 ops `auto`
adds local search of bounded work); kernels are compiled by a small graph first. Run in turn with
another tree's `PYTHONPATH`, it compares both.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pardnn.api.planning import plan
from pardnn.cluster import Cluster
from pardnn.graph.file import read_graph
from pardnn.plan.file import write_plan

#: Of each op by its number: numbers of the ops that it reads.
Reads = Callable[[int, int], tuple[int, ...]]

SHAPES: dict[str, Reads] = {
    "chain": lambda i, _: (i - 1,) if i else (),
    "one source, n readers": lambda i, _: (0,) if i else (),
    "n sources, one reader": lambda i, n: tuple(range(i)) if i == n - 1 else (),
    "binary tree": lambda i, _: ((i - 1) // 2,) if i else (),
    "ladder": lambda i, _: (i - 2, i - 1) if i > 1 else (0,) * i,
    "layers of 1,000": lambda i, _: (i - 1000, i - i % 1000 - 1000) if i >= 1000 else (),
}
SIZES, LARGEST = (10_000, 100_000), 1_000_000


def content(shape: Reads, num_ops: int) -> Iterator[str]:
    """Yield the lines of a graph file."""
    yield '{"format": "pardnn.graph/1", "name": "g", "ops": [\n'
    for i in range(num_ops):
        inputs = [f"t{j}" for j in dict.fromkeys(shape(i, num_ops))]
        outputs = [{"name": f"t{i}", "bytes": 1 << 20}]
        op = {"name": f"o{i}", "kind": "op", "inputs": inputs, "outputs": outputs}
        yield json.dumps(op | {"seconds": {"accelerator": 1e-3}}) + ",\n"[i == num_ops - 1 :]
    yield "]}\n"


def measure(name: str, num_ops: int, folder: Path) -> tuple[float, float, float]:
    """Return the processor seconds of reading, of planning and checking, and of writing.

    Args:
        name: Of the shape.
        num_ops: Its ops.
        folder: For the files.
    """
    path = folder / "graph.json"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(content(SHAPES[name], num_ops))
    begin = time.process_time()
    graph = read_graph(path)
    read = time.process_time()
    found = plan(graph, Cluster.uniform(4), algorithm="pardnn")
    planned = time.process_time()
    write_plan(found, folder / "plan.json")
    return read - begin, planned - read, time.process_time() - planned


def main(*, quick: bool = False) -> None:
    """Measure and print the page.

    Args:
        quick: Whether to leave out the chain of a million ops.
    """
    cases = [(name, size) for name in SHAPES for size in SIZES]
    cases += [] if quick else [("chain", LARGEST)]
    print(
        f"`python -m bench scale --files`; {platform.machine()}, Python "
        f"{platform.python_version()}. Measured, processor seconds of one thread.\n\n"
        "| graph | ops | read | plan and check | write | all | microseconds per op |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        measure("chain", 60_000, Path(folder))
        measure("ladder", 2_000, Path(folder))
        for name, size in cases:
            seconds = measure(name, size, Path(folder))
            cells = " | ".join(f"{s:.2f}" for s in (*seconds, sum(seconds)))
            print(f"| {name} | {size} | {cells} | {sum(seconds) / size * 1e6:.0f} |", flush=True)
    print(f"\nLoad average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.")

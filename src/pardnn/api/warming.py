"""Load kernels before planning is timed; where the cache is empty, compile them side by side."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pardnn.api.algorithms import ALGORITHMS, SOLVED
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor

#: A tiny step whose plan overflows two devices of this many bytes each, and yet fits.
_WARM_UP_BYTES = 80
#: Algorithms whose kernels take as long to compile as those that all plans need, 20 CPU seconds.
_APART = ("m-etf", "linear-clustering")


def _warm_up_graph() -> Graph:
    def op(i: int) -> Op:
        is_source = i % 6 == 0
        return Op(
            name=f"op{i}",
            kind="parameter" if is_source else "pardnn.warm_up",
            inputs=() if is_source else (f"t{i - 1}",),
            after=(f"op{i - 5}",) if i % 6 == 5 else (),
            outputs=(Tensor(name=f"t{i}", bytes=32 if is_source else 8),),
            memory="residual" if is_source else "normal",
            seconds={"accelerator": 1e-6},
        )

    return build_graph("warm-up", [op(i) for i in range(24)])


def warm_up(names: Iterable[str], *, limited: bool = True, polished: bool = False) -> None:
    """Compile, or load from the cache, the kernels of these algorithms on a tiny graph.

    What many algorithms need is compiled by several processes at once: on a cold cache `auto`
    takes 80 CPU seconds.

    Args:
        names: Of algorithms.
        limited: Also those that resolve overflows.
        polished: Also those of `polish`.
    """
    wanted = [name for name in names if name not in SOLVED and name in ALGORITHMS]
    if polished and _is_cold():
        apart = [name for name in wanted if name in _APART]
        shares = [([], False, True), *([(apart, limited, False)] if apart else [])]
        with _compiling(shares):
            _load([name for name in wanted if name not in apart], limited, polished=False)
    _load(wanted, limited, polished=polished)


def _load(names: Sequence[str], limited: bool, *, polished: bool) -> None:
    from pardnn.api.deciding import decide
    from pardnn.cost.costs import graph_costs
    from pardnn.place.polish import load_kernels
    from pardnn.sim.machine import machine_of

    graph = _warm_up_graph()
    costs = graph_costs(graph)
    if polished:
        load_kernels(graph, machine_of(costs, Cluster.uniform(2)))
    for memory in (None, _WARM_UP_BYTES) if limited else (None,):
        cluster = Cluster.uniform(2, memory=memory)
        for name in names:
            try:
                decide(graph, cluster, costs, algorithm=name, reserve=0.0, seed=0)
            except InfeasibleError:
                continue


def _is_cold() -> bool:
    """Whether the largest kernel is not in the cache, or older than its source."""
    from pardnn.place import polish_search

    kernel: Any = polish_search.search_kernel
    if not hasattr(kernel, "stats") or (os.cpu_count() or 1) < 2:  # kernels run as plain Python
        return False
    code, source = kernel.py_func.__code__, Path(polish_search.__file__)
    kept = Path(kernel.stats.cache_path).glob(f"{source.stem}.{code.co_name}-*.nbi")
    try:
        return max((path.stat().st_mtime for path in kept), default=0.0) < source.stat().st_mtime
    except OSError:
        return False


@contextlib.contextmanager
def _compiling(shares: Iterable[tuple[Sequence[str], bool, bool]]) -> Iterator[None]:
    """Let other processes fill the cache meanwhile; what they fail to do is done here later."""
    children: list[subprocess.Popen[bytes]] = []
    nowhere = subprocess.DEVNULL
    for share in shares:
        command = [sys.executable, "-m", __name__, json.dumps(share)]
        with contextlib.suppress(OSError):
            child = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
            children.append(child)
    try:
        yield
    except BaseException:
        for child in children:
            child.terminate()
        raise
    finally:
        for child in children:
            child.wait()


if __name__ == "__main__":
    _names, _limited, _polished = json.loads(sys.argv[1])
    _load(_names, _limited, polished=_polished)

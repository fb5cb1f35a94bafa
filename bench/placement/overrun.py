"""How far planning goes beyond its time limit: a limit x an algorithm x a model.

`python -m bench overrun [MODEL ...]` prints a page. Limit and overrun are by one clock, the
processor seconds of this process, so that what else runs on the machine changes neither. A first
call of each algorithm with a small graph loads the kernels. The overrun counts all of `plan`: the
search, what ends it, the proof of the plan that is returned.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Sequence
from unittest import mock

from pardnn.api.planning import plan
from pardnn.cluster import Cluster
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from testbed.kept_graphs import load

MODELS = ("gpt2", "wresnet_152_10", "rnn_10_8k", "word_rnn", "trn")
ALGORITHMS = ("pardnn", "tofu", "zero-3", "megatron", "auto", "auto --recompute")
LIMITS = (1.0, 3.0, 5.0, 10.0)
DEVICES = 4


def seconds_of(graph: Graph, name: str, limit: float | None, share: float = 0.5) -> float:
    """Return the processor seconds of one call of `plan`, whose limit counts them too.

    Args:
        graph: The graph.
        name: The algorithm, with ` --recompute` or without.
        limit: Seconds; None for no limit.
        share: The memory of a device, of what one device needs to hold all at once.
    """
    memory = int(sum(t.bytes for op in graph.ops for t in op.outputs) * share)
    algorithm, _, recompute = name.partition(" --")
    begin = time.process_time()
    with mock.patch("pardnn.time_limit.monotonic", time.process_time):
        try:
            plan(
                graph,
                Cluster.uniform(DEVICES, memory=memory),
                algorithm,
                costs="a100",
                time_limit=limit,
                recompute=bool(recompute),
            )
        except PardnnError as error:
            if error.code[1] not in "37":
                raise
    return time.process_time() - begin


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(prog="python -m bench overrun")
    parser.add_argument("models", nargs="*", default=MODELS)
    models = parser.parse_args(arguments).models
    print(
        f"`python -m bench overrun`; {platform.machine()}, Python {platform.python_version()}. "
        f"Measured, processor seconds of one process; {DEVICES} devices.\n\n"
        f"| model | ops | algorithm | {' | '.join(f'over {limit:g} s' for limit in LIMITS)} |\n"
        f"| --- | --- | --- |{' --- |' * len(LIMITS)}"
    )
    for name in ALGORITHMS:
        seconds_of(load("wresnet_50_4"), name, 10.0)
    most = 0.0
    for model, name in itertools.product(models, ALGORITHMS):
        graph = load(model)
        over = [max(0.0, seconds_of(graph, name, limit) - limit) for limit in LIMITS]
        most = max(most, *over)
        cells = " | ".join(f"{s:.2f}" for s in over)
        print(f"| {model} | {len(graph.ops)} | {name} | {cells} |", flush=True)
    print(f"\nThe most is {most:.2f} s. Load average at the end: {os.getloadavg()[0]:.1f}.")

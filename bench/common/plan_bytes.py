"""Fingerprints of graphs and plans: what a change that should change nothing is held against.

    python -m bench.common.plan_bytes > after.txt
    PYTHONPATH=../before/src python -m bench.common.plan_bytes > before.txt
    diff before.txt after.txt

Each line is a case and the SHA-256 of the file that it writes, or the error that it ends in. Only
the public functions are called, so both sides may be laid out in any way.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pardnn

PLACED = (
    "pardnn", "auto-whole", "heft", "contiguous", "single", "m-etf", "linear-clustering",
    "round-robin", "m-topo", "layer-round-robin", "metis", "m-sct",
)  # fmt: skip
CUT = ("tofu", "allrow-greedy", "spartan", "equal-chop", "icml18", "zero-3")
#: Usable bytes a device, as shares of what one device needs.
SHARES = (None, 0.75, 0.5)


def random_graph(seed: int, num_ops: int) -> dict[str, Any]:
    """Return a `pardnn.graph/1` document: parameters, views, groups, workspaces, order edges."""
    rng = np.random.default_rng(seed)
    ops: list[dict[str, Any]] = []
    for i in range(num_ops):
        is_source = i < 3 or rng.random() < 0.15
        size = int(rng.integers(1, 200)) * 64
        near = {int(rng.integers(max(0, i - 12), max(i, 1))) for _ in range(2)}
        inputs = [f"t{j}" for j in sorted(near)]
        op: dict[str, Any] = {
            "name": f"op{i}",
            "kind": "parameter" if is_source else "bench.op",
            "inputs": [] if is_source else inputs,
            "outputs": [{"name": f"t{i}", "bytes": size}],
            "memory": "residual" if is_source else "normal",
            "seconds": {"accelerator": 0.0 if is_source else float(rng.integers(1, 400)) * 1e-6},
        }
        if not is_source and rng.random() < 0.2:
            op["workspace"] = int(rng.integers(1, 50)) * 64
        if not is_source and rng.random() < 0.1:
            op["group"] = f"g{int(rng.integers(0, 1 + num_ops // 20))}"
        if not is_source and rng.random() < 0.1:
            op["outputs"][0]["alias_of"], op["memory"] = inputs[0], "reference"
        if i > 20 and rng.random() < 0.05:
            op["after"] = [f"op{i - 15}"]
        ops.append(op)
    return {"format": "pardnn.graph/1", "name": f"random-{seed}", "ops": ops}


def _mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(48, 12)
    )
    data = torch.randn(24, 24), torch.randint(12, (24,))
    return _classify, (model, torch.optim.Adam(model.parameters()), *data)


def _conv() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.BatchNorm2d(12), torch.nn.ReLU(),
        torch.nn.Conv2d(12, 12, 3, stride=2), torch.nn.Flatten(), torch.nn.LazyLinear(12),
    )  # fmt: skip
    data = torch.randn(12, 3, 12, 12), torch.randint(12, (12,))
    model(data[0])
    return _classify, (model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), *data)


def _gpt2() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_head=4, n_embd=48, vocab_size=96, n_positions=24, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()

    def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.AdamW(model.parameters()), torch.randint(96, (8, 24)))


def _classify(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def graphs(folder: Path) -> Iterator[tuple[str, pardnn.Graph, str | None]]:
    """Yield name, graph and preset of costs: captured, random, small to mid-sized."""
    for make in (_mlp, _conv, _gpt2):
        step, args = make()
        yield make.__name__.strip("_"), pardnn.capture(step, *args), "v100"
    for seed, num_ops in [(seed, 12 + 9 * seed) for seed in range(5)] + [(90, 400), (91, 2500)]:
        path = folder / "random.json"
        path.write_text(json.dumps(random_graph(seed, num_ops)))
        yield f"random-{num_ops}", pardnn.read_graph(path), None


def _digest(write: Callable[[Path], Any], folder: Path) -> str:
    path = folder / "written.json"
    path.unlink(missing_ok=True)
    write(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _planned(graph: pardnn.Graph, cluster: pardnn.Cluster, folder: Path, **options: Any) -> str:
    try:
        plan = pardnn.plan(graph, cluster, reserve=0.0, **options)
    except pardnn.PardnnError as error:
        return f"{error.code} {hashlib.sha256(error.message.encode()).hexdigest()[:12]}"
    return _digest(lambda path: pardnn.write_plan(plan, path), folder)


def cases(folder: Path, num_devices: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield each case's name and what came of it."""
    for name, graph, costs in graphs(folder):
        yield f"{name} graph", _digest(lambda path, g=graph: pardnn.write_graph(g, path), folder)
        one = pardnn.plan(graph, pardnn.Cluster.uniform(1), "single", costs=costs)
        assert one.predicted is not None
        peak = one.predicted.peak_bytes[0]
        algorithms = (*PLACED, "auto", *CUT) if costs else PLACED
        for k in num_devices:
            for share in SHARES:
                limit = None if share is None else int(peak * share)
                cluster = pardnn.Cluster.uniform(k, memory=limit, bandwidth=1e9, latency=5e-6)
                for algorithm in algorithms:
                    label = f"{name} {k} {share} {algorithm}"
                    options = {"algorithm": algorithm, "costs": costs}
                    yield label, _planned(graph, cluster, folder, **options)
                    if algorithm == "tofu":
                        options["objective"] = "bytes"
                        yield f"{label} bytes", _planned(graph, cluster, folder, **options)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="2,4")
    counts = tuple(int(k) for k in parser.parse_args(arguments).devices.split(","))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        # Graphs name the lines that ops come from, by a path that depends on the working directory.
        for case, result in cases(Path(folder), counts):
            print(f"{case}: {result}", flush=True)


if __name__ == "__main__":
    main()

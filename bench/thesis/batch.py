"""Kept steps at any batch size: what `pardnn.api.batch_scaling` learns from two captures, in files.

Two captures of one step at different batch sizes make the same calls; only dims, strides, bytes and
some integers among the arguments differ. What differs is kept, one small file per graph in
`testbed/graphs/batch/`. `python -m bench.thesis.batch NAME ...` captures the sizes; `--check`
adds a third one, where every number must be met.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pardnn.api.batch_scaling import Family, family_of, graph_at
from pardnn.cost.costs import Costs, preset_costs
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from testbed.kept_graphs import FOLDER, GRAPHS, ZOO, load

RULES = FOLDER / "batch"

#: Steps that compute parts of the forward pass twice, and their rules: `bench.thesis.checkpoint`.
AGAIN = FOLDER / "checkpointed"


def write_rule(family: Family, path: Path) -> None:
    """Write how a family grows: each distinct growth once, then which of them each op has."""
    data: dict[str, Any] = {"batch_size": family.size, "more": family.more}
    data["growth"], data["of"] = _shared(family.sizes)
    if any(each is not None for each in family.literals):
        data["literals"], data["literals_of"] = _shared(family.literals)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def _shared(growth: Sequence[Any]) -> tuple[list[Any], list[int]]:
    texts = [json.dumps(each) for each in growth]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return [json.loads(text) for text in numbers], [numbers[text] for text in texts]


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_rule(graph: Graph, path: Path) -> Family:
    """Read what `write_rule` wrote of the family of this graph."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    sizes, literals = (list(map(_tuples, data.get(key, [None]))) for key in ("growth", "literals"))
    return Family(
        graph=graph,
        size=data["batch_size"],
        more=data["more"],
        sizes=tuple(sizes[i] for i in data["of"]),
        literals=tuple(literals[i] for i in data.get("literals_of", [0] * len(graph.ops))),
    )


def again_paths(name: str) -> tuple[Path, Path]:
    """Return where the checkpointed form of a graph and its rule are kept."""
    return AGAIN / f"{name}.json.gz", AGAIN / f"{name}.batch.json.gz"


@cache
def captured(name: str, *, again: bool = False) -> Family:
    """Return the family of a kept graph; with `again`, of its checkpointed form."""
    if again:
        graph, rule = again_paths(name)
        return read_rule(read_graph(graph), rule)
    return read_rule(load(name), RULES / f"{name}.json.gz")


def model(
    name: str, batch_size: int, *, again: bool = False, preset: str = "v100"
) -> tuple[Graph, Costs]:
    """Return a kept graph at a batch size, and its costs on a device.

    Args:
        name: Of the captured graph.
        batch_size: Of the step.
        again: Whether parts are computed twice, by checkpointing.
        preset: Device of the costs.
    """
    graph = graph_at(captured(name, again=again), batch_size)
    return graph, preset_costs(graph, preset)


def made_family(low: Graph, low_size: int, high: Graph, high_size: int) -> Family:
    """Return the family of two captures.

    Args:
        low: Capture at the smaller batch size.
        low_size: Its batch size.
        high: Capture at the larger batch size.
        high_size: Its batch size.

    Raises:
        ValueError: If they make different calls.
    """
    family = family_of(low, low_size, high, high_size)
    if family is None:
        raise ValueError(f"{low.name}: the two captures make different calls")
    return family


def _check(family: Family, batch_size: int, third: Graph) -> None:
    made = graph_at(family, batch_size)
    for ours, theirs in zip(made.ops, third.ops, strict=True):
        if ours != theirs:
            raise ValueError(f"{made.name}: {ours} is not affine in the batch: {theirs}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Capture the named graphs at other batch sizes and write their rules. Needs torch."""
    from pardnn.api.capture import captured
    from pardnn.backends.entry_point import load_entry_point

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--check", action="store_true", help="capture a third size, compare")
    options = parser.parse_args(arguments)
    for name in options.names:
        kept = GRAPHS[name]
        entry = load_entry_point(f"{ZOO / kept.model}.py:{kept.function}")
        low, size = load(name), kept.batch_size
        family = made_family(low, size, captured(entry, 2 * size)[0], 2 * size)
        if options.check:
            _check(family, size + size // 2, captured(entry, size + size // 2)[0])
        path = RULES / f"{name}.json.gz"
        write_rule(family, path)
        print(f"{name}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()

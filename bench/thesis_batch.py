"""A captured step at any batch size: every size in it is affine in the batch.

Two captures of one step at different batch sizes make the same calls; only dims, strides and bytes
differ. What differs is kept, one small file per graph in `bench/graphs/batch/`, and a number that
is x at one batch size and y at the other is on the line through both at any other. Products of two
dims that both grow with the batch would not be; `python -m bench.thesis_batch NAME ...` captures
the two sizes and a third, where every number must be met.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.zoo_graphs import FOLDER, GRAPHS, load
from pardnn.cost.costs import Costs, preset_costs
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph, Op, Tensor

RULES = FOLDER / "batch"

#: Steps that compute parts of the forward pass twice, and their rules: `thesis_checkpoint.py`.
AGAIN = FOLDER / "checkpointed"

#: What grows in one op: workspace, then for each output bytes, shape and strides.
Growth = tuple[Any, ...]


class Rule(NamedTuple):
    """How a graph grows with the batch.

    Attributes:
        batch_size: Of the graph that the rule belongs to.
        more: Samples to which `growth` belongs.
        growth: Of each op, in the order of `Graph.ops`; None where nothing grows.
    """

    batch_size: int
    more: int
    growth: tuple[Growth | None, ...]


def _numbers(op: Op) -> Growth:
    outputs = (((t.bytes,), t.shape or (), t.strides or ()) for t in op.outputs)
    return (op.workspace, *outputs)


def _difference(low: Any, high: Any) -> Any:
    if isinstance(low, int):
        return high - low
    if len(low) != len(high):
        raise ValueError("the two captures have tensors of different rank")
    return tuple(_difference(a, b) for a, b in zip(low, high, strict=True))


def _is_zero(growth: Any) -> bool:
    return growth == 0 if isinstance(growth, int) else all(map(_is_zero, growth))


def rule_between(low: Graph, high: Graph, batch_size: int, more: int) -> Rule:
    """Return the rule of `low`, captured at `batch_size`; `high` is at `batch_size + more`.

    Raises:
        ValueError: If they make different calls.
    """
    if [op.kind for op in low.ops] != [op.kind for op in high.ops]:
        raise ValueError(f"{low.name}: the two captures make different calls")
    growth = (_difference(_numbers(a), _numbers(b)) for a, b in zip(low.ops, high.ops, strict=True))
    return Rule(batch_size, more, tuple(None if _is_zero(g) else g for g in growth))


def write_rule(rule: Rule, path: Path) -> None:
    """Write a rule: each distinct growth once, then which of them each op has."""
    numbers: dict[Growth | None, int] = {}
    of = [numbers.setdefault(growth, len(numbers)) for growth in rule.growth]
    data = {"batch_size": rule.batch_size, "more": rule.more, "growth": list(numbers), "of": of}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_rule(path: Path) -> Rule:
    """Read what `write_rule` wrote."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    growth = [_tuples(entry) for entry in data["growth"]]
    return Rule(data["batch_size"], data["more"], tuple(growth[i] for i in data["of"]))


def _grown(value: Any, growth: Any, rule: Rule, batch_size: int) -> Any:
    if isinstance(value, int):
        return value + growth * (batch_size - rule.batch_size) // rule.more
    pairs = zip(value, growth, strict=True)
    return tuple(_grown(item, part, rule, batch_size) for item, part in pairs)


def _tensor(tensor: Tensor, growth: Any, rule: Rule, batch_size: int) -> Tensor:
    (size,), shape, strides = _grown(_numbers_of(tensor), growth, rule, batch_size)
    return dataclasses.replace(
        tensor,
        bytes=size,
        shape=None if tensor.shape is None else shape,
        strides=None if tensor.strides is None else strides,
    )


def _numbers_of(tensor: Tensor) -> Growth:
    return ((tensor.bytes,), tensor.shape or (), tensor.strides or ())


def at_batch(graph: Graph, rule: Rule, batch_size: int) -> Graph:
    """Return the graph of the same step at another batch size. O(ops).

    Literal arguments stay those of the captured size: cost models read tensors.
    """
    ops = list(graph.ops)
    for i, growth in enumerate(rule.growth):
        if growth is None:
            continue
        op, (workspace, *outputs) = ops[i], growth
        ops[i] = dataclasses.replace(
            op,
            workspace=_grown(op.workspace, workspace, rule, batch_size),
            outputs=tuple(
                _tensor(tensor, part, rule, batch_size)
                for tensor, part in zip(op.outputs, outputs, strict=True)
            ),
        )
    return resized(graph, ops)


def resized(graph: Graph, ops: Sequence[Op]) -> Graph:
    """Return the graph with ops that differ in sizes only, so its edges are kept."""
    sizes = np.array([t.bytes for op in ops for t in op.outputs], dtype=np.int64)
    workspace = np.array([op.workspace for op in ops], dtype=np.int64)
    for array in (sizes, workspace):
        array.setflags(write=False)
    arrays = graph.arrays._replace(tensor_bytes=sizes, workspace=workspace)
    return Graph(graph.name, tuple(ops), arrays)


def again_paths(name: str) -> tuple[Path, Path]:
    """Return where the checkpointed form of a graph and its rule are kept."""
    return AGAIN / f"{name}.json.gz", AGAIN / f"{name}.batch.json.gz"


@cache
def captured(name: str, *, again: bool = False) -> tuple[Graph, Rule]:
    """Return a kept graph and its rule; with `again`, the checkpointed form."""
    if again:
        graph, rule = again_paths(name)
        return read_graph(graph), read_rule(rule)
    return load(name), read_rule(RULES / f"{name}.json.gz")


def model(name: str, batch_size: int, *, again: bool = False) -> tuple[Graph, Costs]:
    """Return a kept graph at a batch size, and its costs on a V100."""
    graph = at_batch(*captured(name, again=again), batch_size)
    return graph, preset_costs(graph, "v100")


def _check(name: str, low: Graph, rule: Rule, batch_size: int, third: Graph) -> None:
    made = at_batch(low, rule, batch_size)
    for ours, theirs in zip(made.ops, third.ops, strict=True):
        if _numbers(ours) != _numbers(theirs):
            raise ValueError(f"{name}: {ours.name} is not affine in the batch")


def main(arguments: Sequence[str] | None = None) -> None:
    """Capture the named graphs at other batch sizes and write their rules. Needs torch."""
    from pardnn.api.targets import captured as capture

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--check", action="store_true", help="capture a third size, compare")
    options = parser.parse_args(arguments)
    for name in options.names:
        kept = GRAPHS[name]
        target = f"{Path(__file__).parent / 'zoo' / kept.model}.py:{kept.function}"
        low, size = load(name), kept.batch_size
        rule = rule_between(low, capture(target, 2 * size)[0], size, size)
        if options.check:
            _check(name, low, rule, size + size // 2, capture(target, size + size // 2)[0])
        path = RULES / f"{name}.json.gz"
        write_rule(rule, path)
        print(f"{name}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()

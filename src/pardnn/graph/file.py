"""The graph file, `pardnn.graph/1`: JSON, gzipped if its name ends in `.gz`."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from pardnn import files
from pardnn.errors import FileError, shown
from pardnn.gc_pause import collector_paused
from pardnn.graph.build import build_arrays, reordered
from pardnn.graph.canonical import canonical_order
from pardnn.graph.check import check_ops
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import LOSS_KIND, STRICT, Graph, Op, Tensor


@dataclass(frozen=True, kw_only=True)
class GraphFile:
    """What the file holds, before it is checked as a graph."""

    __pydantic_config__ = STRICT

    format: Literal["pardnn.graph/1"] = "pardnn.graph/1"
    name: str
    ops: tuple[Op, ...]


#: Without `position`, which only a graph file has.
_FIELDS = {kind: [f for f in fields(kind) if f.compare] for kind in (Op, Tensor)}
_NAMES = {kind: tuple(f.name for f in found) for kind, found in _FIELDS.items()}
#: A field without a default is never equal to `MISSING`.
_DEFAULTS = {kind: tuple(f.default for f in found) for kind, found in _FIELDS.items()}
_VALUES = {kind: operator.attrgetter(*names) for kind, names in _NAMES.items()}
_sorted_json = json.JSONEncoder(allow_nan=False, sort_keys=True).encode
_quoted = json.encoder.encode_basestring_ascii


def op_to_dict(value: Op | Tensor) -> dict[str, Any]:
    """Return an op, or one of its outputs, as JSON types: the fields that differ from default."""
    kind = type(value)
    data: dict[str, Any] = {
        name: found
        for name, found, default in zip(
            _NAMES[kind], _VALUES[kind](value), _DEFAULTS[kind], strict=True
        )
        if found is not default and found != default
    }
    if isinstance(value, Op):
        if value.outputs:
            data["outputs"] = [op_to_dict(tensor) for tensor in value.outputs]
        if value.seconds is not None:
            data["seconds"] = dict(value.seconds)
    return data


def graph_to_json(graph: Graph) -> bytes:
    """Return the content of the graph's file.

    Each op states its position, so that the order of the list in the file carries no meaning.
    """
    ops = [op_to_dict(op) | {"position": i} for i, op in enumerate(graph.ops)]
    content = files.dump_json({"format": GraphFile.format, "name": graph.name, "ops": ops})
    return files.with_checksum(content)


@collector_paused()
def graph_from_json(content: bytes, what: str = "graph") -> Graph:
    """Parse and check the content of a graph file.

    The order in which the file lists the ops does not matter: they come by their positions, or if
    not every op states one, in an order of the graph's own (`graph/canonical.py`).

    Raises:
        FileError: E402, E406 to E408.
        MismatchError: E502.
    """
    parsed = files.parse_summed(GraphFile, content, what)
    check_ops(parsed.ops, name=parsed.name)
    ops, arrays = _in_order_of_step(parsed.ops, parsed.name)
    return Graph(name=parsed.name, ops=ops, arrays=arrays)


def _in_order_of_step(ops: tuple[Op, ...], name: str) -> tuple[tuple[Op, ...], GraphArrays]:
    positions = [op.position for op in ops if op.position is not None]
    if len(positions) < len(ops):
        arrays = build_arrays(ops)
        order = canonical_order(ops, arrays)
        return tuple(map(ops.__getitem__, order.tolist())), reordered(arrays, order)
    if len(set(positions)) < len(ops):
        twice = next(a for a, b in itertools.pairwise(sorted(positions)) if a == b)
        reason = f"two ops have the position {twice}"
        raise FileError(f"{shown(name)} is not a valid graph: {reason}", code="E402")
    if any(a > b for a, b in itertools.pairwise(positions)):
        ops = tuple(map(ops.__getitem__, sorted(range(len(ops)), key=positions.__getitem__)))
    return ops, build_arrays(ops)


def read_graph(path: str | Path) -> Graph:
    """Read a graph file."""
    return graph_from_json(files.read_bytes(path), f"graph file {str(path)!r}")


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph file."""
    files.write_bytes(path, graph_to_json(graph))


def op_digests(graph: Graph) -> dict[str, str]:
    """Return eight hex digits per op over everything that decides what it does.

    Measured durations and where the code stands do not count (`seconds`, `source`, `module`,
    `backward_of`, `step`, lines of conditions), nor the order of the ops in the file, of `after`
    and of repeated inputs.
    """
    return {op.name: hashlib.sha256(digested_text(op).encode()).hexdigest()[:8] for op in graph.ops}


def digested_text(op: Op) -> str:
    """Return the JSON of `op_to_dict` without what a fingerprint leaves out, keys sorted.

    Written out by hand, as that takes a third of the time: a graph may have a million ops.
    """
    text = f'{{"after": {_names_text(sorted(set(op.after)))}' if op.after else '{"after": []'
    if op.arguments is not None:
        text += f', "arguments": {_sorted_json(_without_lines(op))}'
    if op.group is not None:
        text += f', "group": {_quoted(op.group)}'
    inputs = dict.fromkeys(op.inputs) if len(op.inputs) > 1 else op.inputs
    text += f', "inputs": {_names_text(inputs)}, "kind": {_quoted(op.kind)}'
    if op.memory != "normal":
        text += f', "memory": {_quoted(op.memory)}'
    text += f', "name": {_quoted(op.name)}'
    if op.outputs:
        text += f', "outputs": [{", ".join(map(_tensor_text, op.outputs))}]'
    return text + (f', "workspace": {op.workspace}}}' if op.workspace else "}")


def _without_lines(op: Op) -> Any:
    """Return an op's arguments without the lines of code of the conditions of a step.

    A file may hold anything there: it is checked where the step runs.
    """
    arguments = op.arguments or {}
    host = arguments.get("host") if op.kind == LOSS_KIND else None
    if not isinstance(host, dict):
        return op.arguments
    program = cast(dict[str, Any], host)
    conditions = program.get("conditions")
    if not isinstance(conditions, list):
        return op.arguments
    rows: list[Any] = list(map(_without_line, cast(list[Any], conditions)))
    return {**arguments, "host": {**program, "conditions": rows}}


def _without_line(condition: Any) -> Any:
    return cast(list[Any], condition)[:2] if isinstance(condition, list) else condition


def _tensor_text(tensor: Tensor) -> str:
    text = "{" if tensor.alias_of is None else f'{{"alias_of": {_quoted(tensor.alias_of)}, '
    text += f'"bytes": {tensor.bytes}'
    if tensor.dtype is not None:
        text += f', "dtype": {_quoted(tensor.dtype)}'
    if tensor.misaligned_bytes:
        text += f', "misaligned_bytes": {tensor.misaligned_bytes}'
    text += f', "name": {_quoted(tensor.name)}'
    if tensor.shape is not None:
        text += f', "shape": {list(tensor.shape)}'
    return text + ("}" if tensor.strides is None else f', "strides": {list(tensor.strides)}}}')


def _names_text(names: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"


def fingerprint(graph: Graph, digests: Mapping[str, str] | None = None) -> str:
    """Return a name of what the graph computes, the same on every machine.

    Args:
        graph: The graph.
        digests: From `op_digests`, if they are known.
    """
    found = sorted((op_digests(graph) if digests is None else digests).items())
    text = ", ".join([f'[{_quoted(name)}, "{digest}"]' for name, digest in found])
    return hashlib.sha256(f"[{text}]".encode()).hexdigest()[:32]

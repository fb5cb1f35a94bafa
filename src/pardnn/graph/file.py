"""The graph file, `pardnn.graph/1`: JSON, gzipped if its name ends in `.gz`."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pardnn import files
from pardnn.gc_pause import collector_paused
from pardnn.graph.build import build_graph
from pardnn.graph.ir import STRICT, Graph, Op, Tensor


@dataclass(frozen=True, kw_only=True)
class GraphFile:
    """What the file holds, before it is checked as a graph."""

    __pydantic_config__ = STRICT

    format: Literal["pardnn.graph/1"] = "pardnn.graph/1"
    name: str
    ops: tuple[Op, ...]


_FIELDS = {kind: fields(kind) for kind in (Op, Tensor)}
_NAMES = {kind: tuple(f.name for f in found) for kind, found in _FIELDS.items()}
#: A field without a default is never equal to `MISSING`.
_DEFAULTS = {kind: tuple(f.default for f in found) for kind, found in _FIELDS.items()}
_VALUES = {kind: operator.attrgetter(*names) for kind, names in _NAMES.items()}
#: What may change without changing what runs: measured durations and where the code stands.
_NOT_IN_FINGERPRINT = ("seconds", "source", "module", "backward_of", "step")
_sorted_json = json.JSONEncoder(allow_nan=False, sort_keys=True).encode


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
    """Return the content of the graph's file."""
    ops = [op_to_dict(op) for op in graph.ops]
    return files.dump_json({"format": GraphFile.format, "name": graph.name, "ops": ops})


@collector_paused()
def graph_from_json(content: bytes, what: str = "graph") -> Graph:
    """Parse and check the content of a graph file.

    Raises:
        FileError: E402, E406 or E407.
        MismatchError: E502.
    """
    parsed = files.parse_as(GraphFile, content, what)
    return build_graph(parsed.name, parsed.ops)


def read_graph(path: str | Path) -> Graph:
    """Read a graph file."""
    return graph_from_json(files.read_bytes(path), f"graph file {str(path)!r}")


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph file."""
    files.write_bytes(path, graph_to_json(graph))


def op_digests(graph: Graph) -> dict[str, str]:
    """Return eight hex digits per op over everything that decides what it does.

    The order of the ops in the file, of `after` and of repeated inputs does not count.
    """
    digests: dict[str, str] = {}
    for op in graph.ops:
        data = op_to_dict(op)
        for name in _NOT_IN_FINGERPRINT:
            data.pop(name, None)
        data |= {"inputs": list(dict.fromkeys(op.inputs)), "after": sorted(set(op.after))}
        digests[op.name] = hashlib.sha256(_sorted_json(data).encode()).hexdigest()[:8]
    return digests


def fingerprint(graph: Graph, digests: Mapping[str, str] | None = None) -> str:
    """Return a name of what the graph computes, the same on every machine.

    Args:
        graph: The graph.
        digests: From `op_digests`, if they are known.
    """
    found = sorted((op_digests(graph) if digests is None else digests).items())
    return hashlib.sha256(_sorted_json(found).encode()).hexdigest()[:32]

"""Mutations of files: of the JSON's structure, and of bytes."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

#: What a reader must not stumble over; names with characters that a terminal would act on.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 999_999_999, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63),
    2**64, 10**39, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 1e18, "", " ", "x", "@", "w@0", "~2", "0",
    "\x1b[31mred", "\u202eabc", "a\nb", "a\r", "\u2066", "\x00", "\u0085", "\u2028", "\ud800",
    "]]>", "[bold]", "é" * 200, [], {}, [[]], [{}], {"a": {}}, [0], [None], [[0, 1]], ["x"],
    {"tensor": "x"}, {"tensor": "none"}, {"tensor": 3}, {"tensor": ["x"]}, {"scalar": "x"},
    {"float": "nan"}, {"float": "x"}, {"complex": [1, 2]}, {"dtype": "float32"},
    {"dtype": ["float32"]}, {"device": "cuda"}, {"ones": [[2], "float32", None]}, {"ones": []},
    {"box": [[0, 2]], "of": "x"}, "float32", "float64", "host.int", "int64", "aten.view.default",
    "aten.mm.default", "aten.convolution.default", "aten.select.int", "aten.as_strided.default",
    "pardnn.fetch", "pardnn.slice", "pardnn.join", "pardnn.update", "pardnn.reduce", "pardnn.draw",
    "pardnn.loss", "input", "parameter", "state", "constant", "aten.mkldnn_rnn_layer.default",
    "scalar.pow", "aten.add_.Tensor", "a::b.c", "a.b", "residual", "reference",
)  # fmt: skip
#: Keys that readers ask for.
KEYS = (
    "args", "kwargs", "returns", "mutates", "redraws", "initial", "guard", "value", "shard", "of",
    "box", "data", "device", "written", "settings", "effects", "result", "host", "collective",
    "tensor", "seconds", "strides", "alias_of", "group", "after", "workspace", "memory", "step",
    "backward_of", "module", "source", "dtype", "shape", "checksum", "links", "pieces", "partition",
    "recompute", "into", "hold_until", "speed", "schedules", "x", "\x1b]0;x\x07",
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return a file's content with one to four mutations; often still JSON."""
    if rng.random() < 0.15:
        return _of_bytes(content, rng)
    try:
        data = json.loads(content)
    except ValueError:
        return _of_bytes(content, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _of_structure(data, rng)
    if isinstance(data, dict) and rng.random() < 0.8:  # what is behind the checksums is read, too
        for key in ("checksum", "graph_fingerprint", "op_digests"):
            data.pop(key, None)
    return json.dumps(data, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")


def packed(content: bytes, rng: random.Random) -> bytes:
    """Return a gzipped form, at times with a damaged byte."""
    found = gzip.compress(content, mtime=0)
    return found if rng.random() < 0.5 else _of_bytes(found, rng)


def _of_bytes(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content or b"x")
    for _ in range(rng.choice((1, 1, 3, 10))):
        at, what = rng.randrange(len(found)), rng.randrange(5)
        if what == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            found[at] = rng.choice(b'0123456789-{}[],:"\\eE.\x00\xff')
        elif what == 2:
            del found[at : at + rng.choice((1, 1, 8, 100))]
        elif what == 3:
            found[at:at] = found[at : at + rng.choice((1, 8, 100))]
        else:
            end = rng.randrange(len(found))
            found[at:at] = found[end : end + 8]
        found = found or bytearray(b" ")
    return bytes(found)


def _nodes(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a JSON value."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(pairs):
        yield data, key
        if isinstance(value, dict | list):
            yield from _nodes(value)


def _of_structure(data: Any, rng: random.Random) -> None:
    nodes = list(_nodes(data)) if isinstance(data, dict | list) else []
    if not nodes:
        return
    holder, key = rng.choice(nodes)
    value, what = holder[key], rng.randrange(8)
    if what <= 1:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    elif what == 2:
        other, at = rng.choice(nodes)
        holder[key] = copy.deepcopy(other[at])
    elif what == 3:
        del holder[key]
    elif what == 4 and isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = rng.choice(
            (value + 1, value - 1, -value, value * 2, value * 1000, float(value))
        )
    elif what == 5 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(value))
    elif what == 6 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
    elif what == 7 and isinstance(holder, list):
        rng.shuffle(holder)
    else:
        other, at = rng.choice(nodes)
        holder[key] = [copy.deepcopy(other[at])]

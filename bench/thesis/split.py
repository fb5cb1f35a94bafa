"""The captured transformer as a tensor-parallel user writes it: what is split, and its sums.

Rules by the module that an op belongs to, backward ops by the module of their forward op:

- `own`, `cross` and their `query`, `key`, `value`: everything is split by heads, but the residual
  sum is whole, and so is the gradient of the input, a partial sum on each device.
- `inner` and `inner.widen`: likewise, split by the inner width; the output of `inner.narrow` is
  whole, a partial sum.
- The table of word pieces and all that has its rows or columns: split by pieces.
- Layer norms, residual sums, dropout on them: whole on every device.
- Parameters, their gradients and their optimizer state as the products that use them.

Sums: one all-reduce of activations per attention and per inner layer forward and backward, two more
where a decoder layer hands a gradient to the encoder, and one each for the tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pardnn.cost.call import call_of, is_free, is_view, tensors_by_name
from pardnn.cost.flops import work_of
from pardnn.cost.presets import device_model
from pardnn.cost.roofline import HOST_SECONDS, DeviceModel, work_seconds
from pardnn.graph.ir import Graph, Op, Tensor, storage_owners

_HEADS = ("own", "cross", "query", "key", "value", "widen", "inner")
#: Parameters that are whole everywhere: those of norms, and the bias added after the sum.
_WHOLE = (".norm.weight", ".norm.bias", ".narrow.bias")


def split_of(graph: Graph) -> set[str]:
    """Return the names of the tensors of which each device has its part only."""
    inputs = [op for op in graph.ops if op.kind == "parameter"]
    pieces = max(t.shape[0] for op in inputs for t in op.outputs if t.shape)
    tokens = _tokens(graph)
    owners = storage_owners(graph.ops)
    found: set[str] = set()
    for op in graph.ops:
        for tensor in op.outputs:
            owner = owners[tensor.name]
            if owner != tensor.name:
                if owner in found:
                    found.add(tensor.name)
            elif _is_split(op, tensor, found, pieces, tokens):
                found.add(tensor.name)
    return found


def _tokens(graph: Graph) -> int:
    """Return the largest number of rows that a product has on its way through a layer."""
    rows = (
        t.shape[0]
        for op in graph.ops
        if op.kind == "aten.addmm.default"
        for t in op.outputs
        if t.shape
    )
    return max(rows)


def _is_split(op: Op, tensor: Tensor, split: set[str], pieces: int, tokens: int) -> bool:
    shape = tensor.shape or ()
    if pieces in shape:
        return True
    if op.kind in ("parameter", "state"):
        return _is_split_weight(op.name, shape)
    if op.module is None or op.module == "model":
        return (
            math.prod(shape) > 1
            and any(name in split for name in op.inputs)
            and not (op.module == "model" and len(shape) > 1 and shape[-1] != pieces)
        )
    last = op.module.rsplit(".", 1)[-1]
    if last == "narrow":
        return op.backward_of is not None and len(shape) == 2 and shape[0] > 1
    if last not in _HEADS or op.kind == "aten.add.Tensor":
        return False
    partial = op.backward_of is not None and op.kind == "aten.mm.default"
    return not (partial and last != "inner" and _is_input_gradient(shape, tokens))


def _is_input_gradient(shape: tuple[int, ...], tokens: int) -> bool:
    # The target sentences are one piece shorter than the source's.
    return len(shape) == 2 and tokens * 0.9 <= shape[0] <= tokens


def _is_split_weight(name: str, shape: tuple[int, ...]) -> bool:
    path = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
    if path.endswith(_WHOLE) or len(shape) == 0:
        return False
    return any(part in path for part in (".own.", ".cross.", ".inner."))


def split_step(
    graph: Graph, split: set[str], num_devices: int
) -> tuple[list[Op], list[float], list[int]]:
    """Return one device's ops, their seconds, and the bytes of each all-reduce.

    Args:
        graph: Of the whole step.
        split: From `split_of`.
        num_devices: Over which tensors are split.
    """
    device, tensors = device_model("v100"), tensors_by_name(graph)
    ops, seconds = [], []
    for op in graph.ops:
        share = num_devices if _has_part(op, split) else 1
        seconds.append(_seconds(op, tensors, device, split, share))
        outputs = tuple(
            dataclasses.replace(tensor, bytes=-(-tensor.bytes // num_devices))
            if tensor.name in split
            else tensor
            for tensor in op.outputs
        )
        ops.append(dataclasses.replace(op, outputs=outputs))
    return ops, seconds, _sums(graph, split)


def _has_part(op: Op, split: set[str]) -> bool:
    return any(name in split for name in op.inputs) or any(t.name in split for t in op.outputs)


def _seconds(
    op: Op, tensors: Mapping[str, Tensor], device: DeviceModel, split: set[str], share: int
) -> float:
    """Seconds of a device's part of an op: its share of the FLOP, and the bytes of its parts."""
    if is_free(op) or is_view(op):
        return 0.0
    work = work_of(call_of(op, tensors))
    if work is None:
        return HOST_SECONDS
    touched = [*(tensors[name] for name in op.inputs), *op.outputs]
    whole = sum(t.bytes for t in touched)
    mine = sum(t.bytes / (share if t.name in split else 1) for t in touched)
    moved = work.bytes * (mine / whole if whole else 1.0)
    return work_seconds(work._replace(flop=work.flop / share, bytes=moved), device)


def _sums(graph: Graph, split: set[str]) -> list[int]:
    """Bytes of each sum over the devices: whole results of products of parts, added up locally."""
    found: list[int] = []
    summed: dict[tuple[str, bool], int] = {}
    products = ("aten.addmm.default", "aten.mm.default", "aten.embedding.default")
    for op in graph.ops:
        partial = op.kind in products and any(name in split for name in op.inputs)
        for tensor in op.outputs if partial else ():
            if tensor.name in split:
                continue
            # Query, key and value of one attention add up their gradients before the sum.
            path, _, last = (op.module or op.name).rpartition(".")
            joint = path if last in ("query", "key", "value") else f"{path}.{last}"
            if op.kind == "aten.embedding.default":
                found.append(tensor.bytes)
            else:
                summed[joint, last == "query" and path.endswith(".cross")] = tensor.bytes
    heads = [
        tensor.bytes
        for op in graph.ops
        if op.kind == "aten.add.Tensor"
        and op.backward_of is None
        and (op.module or "").endswith((".own", ".cross"))
        for tensor in op.outputs
    ]
    return [*found, *summed.values(), *heads]

"""The checker of graphs: independent of the code that builds them.

Every rule yields one sentence that names what breaks it. O(ops + tensors + edges).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pardnn.errors import FileError
from pardnn.graph.ir import Op, Tensor

#: Sums of bytes are int64 in kernels; a graph above this is refused, not wrapped around.
MAX_TOTAL_BYTES = 2**63 - 1


def check_ops(ops: Sequence[Op], *, name: str = "graph") -> None:
    """Raise unless `ops` form a graph.

    Raises:
        FileError: E402, with up to ten problems in `details["problems"]`.
    """
    problems: list[str] = []
    for rule in (_names, _values, _references, _aliases, _cycles):
        # Later rules assume that names resolve and that values are numbers.
        problems = [problem for _, problem in zip(range(10), rule(ops), strict=False)]
        if problems:
            break
    if not problems:
        return
    more = f"\n{len(problems) - 1} more: {problems[1]}" if len(problems) > 1 else ""
    raise FileError(
        f"{_shown(name)} is not a valid graph: {problems[0]}{more}",
        code="E402",
        details={"problems": problems},
    )


def _shown(name: str) -> str:
    """Quote a name for a message: it is data and may be long or hold control characters."""
    return repr(name if len(name) <= 120 else name[:117] + "...")


def _names(ops: Sequence[Op]) -> Iterator[str]:
    if not ops:
        yield "graph has no operations"
    seen_ops: set[str] = set()
    seen_tensors: set[str] = set()
    for op in ops:
        if op.name in seen_ops:
            yield f"two ops are named {_shown(op.name)}"
        seen_ops.add(op.name)
        for tensor in op.outputs:
            if tensor.name in seen_tensors:
                yield f"two tensors are named {_shown(tensor.name)}"
            seen_tensors.add(tensor.name)


def _values(ops: Sequence[Op]) -> Iterator[str]:
    total = 0
    for i, op in enumerate(ops):
        where = f"ops[{i}] {_shown(op.name)}"
        total += op.workspace + sum(tensor.bytes for tensor in op.outputs)
        if op.workspace < 0:
            yield f"{where}: workspace is {op.workspace} bytes"
        if op.memory not in ("normal", "residual", "reference"):
            yield f"{where}: memory is {op.memory!r}, not normal, residual or reference"
        for tensor in op.outputs:
            yield from _tensor_values(tensor, where)
        if op.seconds is not None and not op.seconds:
            yield f"{where}: seconds is empty, so no device can run it"
        for kind, seconds in (op.seconds or {}).items():
            if not (math.isfinite(seconds) and seconds >= 0):
                yield f"{where}: seconds on {_shown(kind)} is {seconds}"
    if total > MAX_TOTAL_BYTES:
        yield f"its tensors take {total} bytes together; at most 2**63 - 1 are counted exactly"


def _tensor_values(tensor: Tensor, where: str) -> Iterator[str]:
    if tensor.bytes < 0:
        yield f"{where}: tensor {_shown(tensor.name)} has {tensor.bytes} bytes"
    if tensor.shape is not None and any(size < 0 for size in tensor.shape):
        yield f"{where}: tensor {_shown(tensor.name)} has shape {list(tensor.shape)}"
    if tensor.strides is not None and len(tensor.strides) != len(tensor.shape or ()):
        yield f"{where}: tensor {_shown(tensor.name)} has strides of another rank than its shape"


def _references(ops: Sequence[Op]) -> Iterator[str]:
    producer = {tensor.name: op.name for op in ops for tensor in op.outputs}
    names = {op.name for op in ops}
    for op in ops:
        for tensor in op.inputs:
            if tensor not in producer:
                yield f"op {_shown(op.name)} reads tensor {_shown(tensor)}, which no op produces"
            elif producer[tensor] == op.name:
                yield f"op {_shown(op.name)} reads its own output {_shown(tensor)}"
        for other in op.after:
            if other not in names:
                yield f"op {_shown(op.name)} comes after op {_shown(other)}, which does not exist"
            elif other == op.name:
                yield f"op {_shown(op.name)} comes after itself"


def _aliases(ops: Sequence[Op]) -> Iterator[str]:
    parent = {t.name: t.alias_of for op in ops for t in op.outputs if t.alias_of is not None}
    tensors = {tensor.name for op in ops for tensor in op.outputs}

    def owner(name: str) -> str | None:
        seen: set[str] = set()
        while name in parent:
            if name in seen:
                return None
            seen.add(name)
            name = parent[name]
        return name

    for op in ops:
        for tensor in op.outputs:
            if tensor.alias_of is None:
                continue
            where = f"tensor {_shown(tensor.name)} of op {_shown(op.name)}"
            if tensor.alias_of not in tensors:
                yield f"{where} aliases {_shown(tensor.alias_of)}, which no op produces"
            elif owner(tensor.name) is None:
                yield f"{where} aliases itself through other tensors"
            elif owner(tensor.name) not in {owner(name) for name in op.inputs}:
                yield f"{where} aliases {_shown(tensor.alias_of)}, but its op does not read it"


def _cycles(ops: Sequence[Op]) -> Iterator[str]:
    producer = {tensor.name: i for i, op in enumerate(ops) for tensor in op.outputs}
    index = {op.name: i for i, op in enumerate(ops)}
    before = [{producer[t] for t in op.inputs} | {index[o] for o in op.after} for op in ops]
    after: list[list[int]] = [[] for _ in ops]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].append(i)
    missing = [len(earlier) for earlier in before]
    ready = [i for i, count in enumerate(missing) if count == 0]
    for i in ready:  # grows while it is read
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                ready.append(j)
    if len(ready) == len(ops):
        return
    # Walking back from a stuck op meets only stuck ops, so it must close a cycle.
    path, i = [], next(i for i, count in enumerate(missing) if count)
    while i not in path:
        path.append(i)
        i = next(j for j in sorted(before[i]) if missing[j])
    cycle = [*path[path.index(i) :], i][::-1]
    shown = [*cycle[:6], *cycle[-2:]] if len(cycle) > 9 else cycle
    yield "it has a cycle: " + " -> ".join(_shown(ops[i].name) for i in shown)

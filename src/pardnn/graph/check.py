"""The checker of graphs: independent of the code that builds them.

Every rule yields one sentence that names what breaks it. O(ops + tensors + edges).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from pardnn.errors import FileError, shown
from pardnn.graph.check_arguments import argument_faults
from pardnn.graph.ir import ALIGNMENT, FROM_HOST, TO_HOST, Op, Tensor, span_bytes, storage_owners

#: Sums of bytes are int64 in kernels; a graph above this is refused, not wrapped around.
MAX_INT64 = 2**63 - 1
_COPIES = {FROM_HOST, TO_HOST}


def check_ops(ops: Sequence[Op], *, name: str = "graph") -> None:
    """Raise unless `ops` form a graph.

    Raises:
        FileError: E402, with up to ten problems in `details["problems"]`.
    """
    problems: list[str] = []
    is_sorted = _is_sorted(ops)  # then all that is referred to exists, and there is no cycle
    rules = (_names, _values, _aliases, _on_host)
    every = (_names, _values, _references, _aliases, _on_host, _cycles)
    for rule in rules if is_sorted else every:
        # Later rules assume that names resolve and that values are numbers.
        problems = list(itertools.islice(rule(ops), 10))
        if problems:
            break
    if not problems:
        return
    more = f"\n{len(problems) - 1} more: {problems[1]}" if len(problems) > 1 else ""
    raise FileError(
        f"{shown(name)} is not a valid graph: {problems[0]}{more}",
        code="E402",
        details={"problems": problems},
    )


def _names(ops: Sequence[Op]) -> Iterator[str]:
    if not ops:
        yield "graph has no operations"
    yield from _unlike("op", (op.name for op in ops))
    yield from _unlike("tensor", (tensor.name for op in ops for tensor in op.outputs))


def _unlike(what: str, names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    names = list(names)
    if len(set(names)) == len(names) and all(map(str.isascii, names)):
        return
    for name in names:
        if name in seen:
            yield f"two {what}s are named {shown(name)}"
        seen.add(name)
        # Half a surrogate pair can stand in a Python string, but in no file.
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            yield f"{what} {shown(name)} has a name that is not Unicode text"


def _values(ops: Sequence[Op]) -> Iterator[str]:
    total, are_timed = 0, _are_timed(ops)
    spans: dict[tuple[object, ...], int] = {}  # most tensors are alike
    for i, op in enumerate(ops):
        total += op.workspace
        is_plain = op.memory == "normal" and not op.is_source
        if op.workspace or op.arguments or not (is_plain and (are_timed or op.seconds is None)):
            for fault in _op_faults(op):
                yield f"ops[{i}] {shown(op.name)}: {fault}"
        for tensor in op.outputs:
            form = (tensor.bytes, tensor.shape, tensor.strides, tensor.misaligned_bytes)
            if form in spans:
                total += spans[form]
                continue
            is_aligned = 0 <= tensor.misaligned_bytes < ALIGNMENT
            if tensor.bytes >= 0 and is_aligned and _is_sized(tensor.shape, tensor.strides):
                spans[form] = max(tensor.bytes, span_bytes(tensor))
                total += spans[form]
                continue
            for fault in _tensor_faults(tensor):
                yield f"ops[{i}] {shown(op.name)}: tensor {shown(tensor.name)} {fault}"
    if total > MAX_INT64:
        yield f"its tensors take {total} bytes together; at most 2**63 - 1 are counted exactly"


def _are_timed(ops: Sequence[Op]) -> bool:
    """Whether no seconds that ops state have faults: what `_op_faults` looks for, at once."""
    stated = [op.seconds for op in ops if op.seconds is not None]
    seconds = {value for each in stated for value in each.values()}
    return all(stated) and all(0 <= value < math.inf for value in seconds)  # never of NaN


def _op_faults(op: Op) -> Iterator[str]:
    if op.workspace < 0:
        yield f"workspace is {op.workspace} bytes"
    if op.memory not in ("normal", "residual", "reference", "host"):
        yield f"memory is {op.memory!r}, not normal, residual, reference or host"
    if op.memory == "reference" and op.outputs and not op.inputs:
        yield "memory is reference, but it reads no tensor whose storage it could share"
    if op.is_source and (len(op.outputs) != 1 or op.inputs):
        yield "a source has no inputs and one output"
    if op.seconds is not None and not op.seconds:
        yield "seconds is empty, so no device can run it"
    for kind, seconds in (op.seconds or {}).items():
        if not (math.isfinite(seconds) and seconds >= 0):
            yield f"seconds on {shown(kind)} is {seconds}"
    yield from argument_faults(op)


def _is_sized(shape: tuple[int, ...] | None, strides: tuple[int, ...] | None) -> bool:
    """Whether shape and strides have no faults: what `_tensor_faults` looks for, at once."""
    if strides is not None and len(strides) != len(shape or ()):
        return False
    sizes = (*(shape or ()), *(strides or ()))
    return not sizes or (min(sizes) >= 0 and max(sizes) <= MAX_INT64)


def _tensor_faults(tensor: Tensor) -> Iterator[str]:
    if tensor.bytes < 0:
        yield f"has {tensor.bytes} bytes"
    if not 0 <= tensor.misaligned_bytes < ALIGNMENT:
        yield f"is misaligned by {tensor.misaligned_bytes} bytes, not by less than {ALIGNMENT}"
    if tensor.shape is not None and any(not 0 <= size <= MAX_INT64 for size in tensor.shape):
        yield f"has shape {list(tensor.shape)}"
    if tensor.strides is None:
        return
    if len(tensor.strides) != len(tensor.shape or ()):
        yield "has strides of another rank than its shape"
    if any(not 0 <= stride <= MAX_INT64 for stride in tensor.strides):
        yield f"has strides {list(tensor.strides)}"


def _is_sorted(ops: Sequence[Op]) -> bool:
    """Whether every op comes after all that it reads and follows, which then exist."""
    made: set[str] = set()
    done: set[str] = set()
    for op in ops:
        if not (made.issuperset(op.inputs) and done.issuperset(op.after)):
            return False
        made.update([tensor.name for tensor in op.outputs])
        done.add(op.name)
    return True


def _references(ops: Sequence[Op]) -> Iterator[str]:
    producer = {tensor.name: op.name for op in ops for tensor in op.outputs}
    names = {op.name for op in ops}
    for op in ops:
        for tensor in op.inputs:
            if tensor not in producer:
                yield f"op {shown(op.name)} reads tensor {shown(tensor)}, which no op produces"
            elif producer[tensor] == op.name:
                yield f"op {shown(op.name)} reads its own output {shown(tensor)}"
        for other in op.after:
            if other not in names:
                yield f"op {shown(op.name)} comes after op {shown(other)}, which does not exist"
            elif other == op.name:
                yield f"op {shown(op.name)} comes after itself"


def _aliases(ops: Sequence[Op]) -> Iterator[str]:
    if all(tensor.alias_of is None for op in ops for tensor in op.outputs):
        return
    owners = storage_owners(ops)
    for op in ops:
        aliases = [
            tensor
            for tensor in op.outputs
            if tensor.alias_of is not None
            and (tensor.alias_of not in op.inputs or owners[tensor.name] is None)
        ]
        if not aliases:
            continue
        read = {owners[name] for name in op.inputs}
        for tensor in aliases:
            where = f"tensor {shown(tensor.name)} of op {shown(op.name)}"
            alias = shown(str(tensor.alias_of))
            if tensor.alias_of not in owners:
                yield f"{where} aliases {alias}, which no op produces"
            elif owners[tensor.name] is None:
                yield f"{where} aliases itself through other tensors"
            elif owners[tensor.name] not in read:
                yield f"{where} aliases {alias}, but its op does not read it"


def _on_host(ops: Sequence[Op]) -> Iterator[str]:
    """Check that what is on the host is state, and that copies alone read it."""
    if "host" not in {op.memory for op in ops} and _COPIES.isdisjoint({op.kind for op in ops}):
        return
    there = {tensor.name for op in ops if op.memory == "host" for tensor in op.outputs}
    for op in ops:
        if op.memory == "host" and op.kind != "state":
            yield f"op {shown(op.name)} ({shown(op.kind)}) is on the host, but is not a state"
        reads = [name for name in op.inputs if name in there]
        if op.kind in _COPIES:
            if reads != list(op.inputs[:1]):
                yield f"op {shown(op.name)} copies no tensor of the host"
        elif reads:
            yield f"op {shown(op.name)} reads {shown(reads[0])}, which is on the host"


def _cycles(ops: Sequence[Op]) -> Iterator[str]:
    producer = {tensor.name: i for i, op in enumerate(ops) for tensor in op.outputs}
    index = {op.name: i for i, op in enumerate(ops)}
    before = [[*(producer[t] for t in op.inputs), *(index[o] for o in op.after)] for op in ops]
    after: list[list[int]] = [[] for _ in ops]
    for i, predecessors in enumerate(before):
        for j in predecessors:
            after[j].append(i)
    missing = [len(predecessors) for predecessors in before]
    ready = [i for i, count in enumerate(missing) if count == 0]
    for i in ready:  # grows while it is read
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                ready.append(j)
    if len(ready) < len(ops):
        yield "it has a cycle: " + _cycle_text(ops, before, missing)


def _cycle_text(ops: Sequence[Op], before: list[list[int]], missing: list[int]) -> str:
    # Walking back from a stuck op meets only stuck ops, so it must close a cycle.
    visited: dict[int, None] = {}
    i = next(i for i, count in enumerate(missing) if count)
    while i not in visited:
        visited[i] = None
        i = min(j for j in before[i] if missing[j])
    path = list(visited)
    cycle = [*path[path.index(i) :], i][::-1]
    if len(cycle) <= 9:
        return " -> ".join(shown(ops[i].name) for i in cycle)
    head, tail = (" -> ".join(shown(ops[i].name) for i in part) for part in (cycle[:6], cycle[-2:]))
    return f"{head} -> ({len(cycle) - 8} more) -> {tail}"

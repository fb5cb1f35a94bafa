"""Random graphs that mean something: in-place ops come after the readers of the old value.

`graphs()` for hypothesis (small, shrinks well), `random_graph(seed, n, family)` for sizes and
benchmarks. Both decide rows, and `ops_of` turns rows into ops. Times are multiples of 1/4 s and
bytes are small, so that sums of times are exact in any order.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor

#: Of the profile `default` in `conftest.py`.
USUAL_EXAMPLES = 25
ROLES = ("compute", "input", "parameter", "view", "inplace")
FAMILIES = ("layered", "fork-join", "chain", "in-tree", "out-tree", "transformer")


def examples(number: int) -> settings:
    """Return another number of examples for a property, which grows with that of the profile."""
    usual = settings().max_examples
    return settings(max_examples=max(1, number * usual // USUAL_EXAMPLES))


class Row(NamedTuple):
    """One op, before names. What cannot be done with what exists becomes the next best thing."""

    role: str = "compute"
    reads: tuple[int, ...] = ()  # earlier ops that have outputs, modulo their number
    quarters: int = 4  # of a second
    bytes: int = 8
    workspace: int = 0
    after: tuple[int, ...] = ()  # earlier ops, modulo their number
    num_outputs: int = 1
    types: int = -1  # bit mask of the device types that can run it; the first always can


class _Storage(NamedTuple):
    """Who may read what: only `newest` of a storage, once it has been written to."""

    members: list[int]  # ops that produce a tensor on it
    readers: list[int]  # since it was last written to
    newest: list[str]  # one name


def ops_of(rows: Iterable[Row], types: Sequence[str] = ("accelerator",)) -> list[Op]:
    """Return ops for `rows`, in a topological order; in-place writers are ordered and grouped."""
    ops: list[Op] = []
    first_outputs: list[str] = []  # of the ops that have any
    storages: dict[str, _Storage] = {}  # by name of the owner
    owner: dict[str, str] = {}  # of each tensor
    mutated: list[str] = []
    for i, row in enumerate(rows):
        sources = [first_outputs[j % len(first_outputs)] for j in row.reads if first_outputs]
        if row.role in ("input", "parameter"):
            sources = []
        inputs = [storages[owner[name]].newest[0] for name in sources]
        inputs = list(dict.fromkeys(inputs))
        role = row.role if inputs or row.role in ("input", "parameter") else "input"
        after = {ops[j % i].name for j in row.after} if i and role not in ROLES[1:3] else set()
        shares = role in ("view", "inplace")
        outputs = [
            Tensor(name=f"t{i}.{j}", bytes=row.bytes + j, alias_of=inputs[0] if shares else None)
            for j in range(1 if role != "compute" else row.num_outputs)
        ]
        if role == "inplace":
            storage = storages[owner[inputs[0]]]
            after |= {ops[j].name for j in storage.readers}
            mutated.append(owner[inputs[0]])
            storage.readers.clear()
            storage.newest[0] = outputs[0].name
        for name in inputs:
            storages[owner[name]].readers.append(i)
        for tensor in outputs:
            owner[tensor.name] = owner[inputs[0]] if shares else tensor.name
            storage = storages.setdefault(owner[tensor.name], _Storage([], [], [tensor.name]))
            storage.members.append(i)
        first_outputs += [tensor.name for tensor in outputs[:1]]
        ops.append(
            Op(
                name=f"op{i}",
                kind=_KINDS.get(role, role),
                inputs=tuple(inputs),
                after=tuple(sorted(after)),
                outputs=tuple(outputs),
                memory=_MEMORY.get(role, "normal"),
                seconds={
                    kind: row.quarters / 4 * (1 + k)
                    for k, kind in enumerate(types)
                    if k == 0 or row.types >> k & 1
                },
                workspace=0 if role != "compute" else row.workspace,
            )
        )
    return _grouped(ops, [storages[name].members for name in mutated])


_KINDS = {"compute": "aten.mm.default", "view": "aten.view.default", "inplace": "aten.add_.Tensor"}
_MEMORY = {"parameter": "residual", "view": "reference", "inplace": "reference"}


def _grouped(ops: list[Op], together: list[list[int]]) -> list[Op]:
    """Put ops that share a mutated storage into one group; an op may share several."""
    group = list(range(len(ops)))
    for members in together:
        merged = {group[i] for i in members}
        group = [min(merged) if number in merged else number for number in group]
    members = {i for part in together for i in part}
    return [
        dataclasses.replace(op, group=f"g{group[i]}") if i in members else op
        for i, op in enumerate(ops)
    ]


def _rows(memory: bool, max_bytes: int, num_types: int) -> st.SearchStrategy[Row]:
    index = st.integers(0, 30)
    return st.builds(
        Row,
        role=st.sampled_from(ROLES if memory else ROLES[:1]),
        reads=st.lists(index, max_size=3).map(tuple),
        quarters=st.integers(0, 8),
        bytes=st.integers(0, max_bytes),
        workspace=st.integers(0, max_bytes) if memory else st.just(0),
        after=st.lists(index, max_size=1).map(tuple),
        num_outputs=st.sampled_from([1, 1, 2, 0]) if memory else st.just(1),
        types=st.integers(0, 2**num_types - 1),
    )


@st.composite
def graphs(
    draw: st.DrawFn,
    min_ops: int = 1,
    max_ops: int = 12,
    *,
    memory: bool = True,
    types: Sequence[str] = ("accelerator",),
    max_bytes: int = 100,
    shuffled: bool = False,
) -> Graph:
    """Draw a graph.

    Args:
        draw: Given by hypothesis.
        min_ops: At least one.
        max_ops: More than about 20 makes drawing slow; take `random_graph` then.
        memory: Whether there are views, in-place ops, residuals, workspaces, several outputs.
        types: Device types; every op can run on the first.
        max_bytes: Of a tensor, and of a workspace.
        shuffled: Whether the ops stand in any order, not in a topological one.
    """
    rows = draw(st.lists(_rows(memory, max_bytes, len(types)), min_size=min_ops, max_size=max_ops))
    ops = ops_of(rows, types)
    return build_graph("random", draw(st.permutations(ops)) if shuffled else ops)


def _predecessors(rng: np.random.Generator, n: int, family: str) -> list[tuple[int, ...]]:
    if family == "chain":
        return [(i - 1,) if i else () for i in range(n)]
    if family == "out-tree":
        return [(int(rng.integers(max(0, i - 8), i)),) if i else () for i in range(n)]
    if family == "in-tree":
        reads: list[list[int]] = [[] for _ in range(n)]
        for i in range(n - 1):
            reads[int(rng.integers(i + 1, min(n, i + 9)))].append(i)
        return [tuple(row) for row in reads]
    if family == "fork-join":
        width, length = 6, 4
        block = width * length + 1
        return [
            ()
            if i == 0
            else tuple(range(i - width, i))  # the join, which is the next fork too
            if i % block == 0
            else (i - i % block,)
            if i % block <= width
            else (i - width,)
            for i in range(n)
        ]
    if family != "layered":
        raise ValueError(f"no family {family!r}")
    width = max(2, round(n**0.5 / 2))
    return [
        tuple({int(j) for j in rng.integers(i - i % width - width, i - i % width, 1 + i % 3)})
        if i >= width
        else ()
        for i in range(n)
    ]


def _transformer(rng: np.random.Generator, n: int) -> list[Row]:
    """A chain of layers with skips, its backward pass, and an in-place update per parameter."""
    layers = max(1, n // 4)
    quarters = [int(q) for q in rng.integers(1, 9, layers)]
    sizes = [int(b) for b in rng.integers(8, 100, layers)]
    rows = [Row("input", bytes=16, quarters=0)]
    rows += [Row("parameter", bytes=size, quarters=0) for size in sizes]
    weights = range(1, layers + 1)
    forward: list[int] = [0]
    for w, q in zip(weights, quarters, strict=True):
        skip = forward[-3:-2] if w % 3 == 0 else []
        rows.append(Row("compute", (w, forward[-1], *skip), q, 32, workspace=q))
        forward.append(len(rows) - 1)
    gradient = forward[-1]
    for w, q in reversed(list(zip(weights, quarters, strict=True))):
        rows.append(Row("compute", (gradient, forward[w - 1], w), 2 * q, 32, num_outputs=2))
        gradient = len(rows) - 1
        rows.append(Row("inplace", (w, gradient), 1, sizes[w - 1]))
    return rows


def random_graph(
    seed: int,
    n: int,
    family: str = "layered",
    *,
    memory: bool = True,
    types: Sequence[str] = ("accelerator",),
) -> Graph:
    """Return a graph of about `n` ops, the same for the same arguments on every machine."""
    rng = np.random.default_rng(seed)
    if family == "transformer":
        return build_graph(f"transformer-{n}-{seed}", ops_of(_transformer(rng, n), types))
    rows: list[Row] = []
    for reads in _predecessors(rng, n, family):
        role = "compute"
        if memory and rng.random() < 0.25:
            role = str(rng.choice(["view", "inplace"] if reads else ["input", "parameter"]))
        quarters, size, workspace, mask = (int(x) for x in rng.integers(0, [9, 100, 50, 256]))
        rows.append(Row(role, reads, quarters, size, workspace * memory, types=mask))
    return build_graph(f"{family}-{n}-{seed}", ops_of(rows, types))

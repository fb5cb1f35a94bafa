"""What a run in context keeps: within its budget, and dropped as Belady's rule has it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pardnn.backends.torch.profile.evictions import Visit, visits
from pardnn.graph.ir import Graph, Op, Tensor
from tests.strategies import graphs


def naive(ops: Sequence[Op], budget: int) -> list[Visit]:
    """The same by looking through the whole run at every question."""
    size = {tensor.name: tensor.bytes for op in ops for tensor in op.outputs}
    storage_of: dict[str, str] = {}

    def next_use(storage: str, at: int) -> int | None:
        names = {name for name, own in storage_of.items() if own == storage}
        return next((i for i in range(at, len(ops)) if names & {*ops[i].inputs}), None)

    def drop(storages: Sequence[str]) -> tuple[str, ...]:
        names = [n for s in storages for n, own in storage_of.items() if own == s]
        for name in names:
            del storage_of[name]
        return tuple(names)

    def unread(names: Sequence[str], at: int) -> tuple[str, ...]:
        storages = dict.fromkeys(storage_of[n] for n in names if n in storage_of)
        return drop([s for s in storages if next_use(s, at + 1) is None])

    found = []
    for at, op in enumerate(ops):
        if op.is_source:
            found.append(Visit(False, (), (), ()))
            continue
        made = tuple(n for n in dict.fromkeys(op.inputs) if n not in storage_of)
        own = [t.name for t in op.outputs if t.alias_of is None]
        new = sum(size[n] for n in (*made, *own)) + op.workspace
        used = {storage_of[n] for n in op.inputs if n in storage_of}
        if new + sum(size[s] for s in used) > budget:
            found.append(Visit(False, (), (), unread(op.inputs, at)))
            continue
        evicted: list[str] = []
        while new + sum(size[s] for s in {*storage_of.values()}) > budget:
            others = sorted({*storage_of.values()} - used)
            evicted += drop([max(others, key=lambda s: next_use(s, at) or 0)])
        storage_of.update({name: name for name in made})
        for tensor in op.outputs:
            base = tensor.alias_of
            if base is not None and base not in storage_of:
                base = op.inputs[0]
            storage_of[tensor.name] = tensor.name if base is None else storage_of[base]
        ended = unread([*op.inputs, *(t.name for t in op.outputs)], at)
        found.append(Visit(True, tuple(evicted), made, ended))
    return found


@given(graph=graphs(max_ops=16), budget=st.integers(0, 500))
def test_as_looking_through_the_whole_run(graph: Graph, budget: int) -> None:
    assert visits(graph.ops, budget) == naive(graph.ops, budget)


def op(name: str, *inputs: str, size: int = 10) -> Op:
    return Op(
        name=name, kind="aten.mm.default", inputs=inputs, outputs=(Tensor(name=name, bytes=size),)
    )


def test_the_value_read_last_is_dropped_and_made_up_again() -> None:
    """Room for three values of four: of `a` and `b`, `a` is read later."""
    ops = [op("a"), op("b"), op("c"), op("d"), op("e", "b", "d"), op("f", "a", "c")]
    run = visits(ops, 30)
    assert [visit.evicted for visit in run] == [(), (), (), ("a",), ("c",), ()]
    assert run[5].made == ("a", "c")
    assert all(visit.is_run for visit in run)


def test_an_op_that_never_fits_is_not_run() -> None:
    assert [v.is_run for v in visits([op("a", size=40), op("b", "a")], 45)] == [True, False]


def test_a_value_that_such_an_op_reads_can_still_be_dropped() -> None:
    ops = [op("a"), op("big", "a", size=40), op("b"), op("c", "b"), op("d", "a", "c")]
    assert [v.evicted for v in visits(ops, 25)] == [(), (), (), ("a",), ()]

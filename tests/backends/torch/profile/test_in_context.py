"""Calls timed where they stand: each gets a time, in order, whatever some of them refuse."""

import itertools

import pytest
import torch

from pardnn.backends.torch.profile import cpu_clock, in_context
from pardnn.backends.torch.profile.cpu_clock import undisturbed
from pardnn.backends.torch.profile.in_context import profile_in_context
from pardnn.backends.torch.profile.synthetic_inputs import index_bounds
from pardnn.cost.call import signature, tensors_by_name
from pardnn.cost.costs import VIEW_SIGNATURE, view_signature
from pardnn.graph.build import build_graph
from tests.cost.helpers import call, mlp_graph, source, tensor

LIBRARY = torch.library.Library("pardnn_rehearsal_test", "FRAGMENT")
LIBRARY.define("seen(Tensor x, int at) -> Tensor")
LIBRARY.define("refuse(Tensor x) -> Tensor")
SEEN: list[tuple[int, float]] = []


@torch.library.impl(LIBRARY, "seen", "CPU")
def _seen(x, at):
    SEEN.append((at, float(x.sum())))
    return x + 1


@torch.library.impl(LIBRARY, "refuse", "CPU")
def _refuse(x):
    raise RuntimeError("only real data will do")


def seen(name, reads, at):
    return call(name, "pardnn_rehearsal_test::seen.default", [reads, at], [tensor(name, 8)])


def entries(graph, end=0.0):
    return profile_in_context(graph, end)


def test_values_flow_from_call_to_call():
    SEEN.clear()
    graph = build_graph("g", [source("x", 8), seen("a", "x", 0), seen("b", "a", 1)])
    found = entries(graph)
    assert [at for at, _ in SEEN] == [0, 1, 0, 1]  # once to warm up, once timed
    assert all(b[1] == pytest.approx(a[1] + 8) for a, b in zip(SEEN[::2], SEEN[1::2], strict=True))
    assert all(found[signature(op, tensors_by_name(graph))].seconds > 0 for op in graph.ops[1:])


def test_a_piece_runs_as_far_as_it_goes_before_the_next_one():
    """So a rank runs them: at the second piece, the caches hold what the first one ended with."""
    SEEN.clear()
    graph = build_graph("g", [
        source("x", 8),
        seen("a@0", "x", 0), seen("a@1", "x", 1), seen("b@0", "a@0", 2), seen("b@1", "a@1", 3),
        seen("c", "b@0", 4),
    ])  # fmt: skip
    entries(graph)
    assert [at for at, _ in SEEN[:5]] == [0, 2, 4, 1, 3]


def test_what_reads_a_refused_call_is_timed_all_the_same():
    SEEN.clear()
    refusing = call("r", "pardnn_rehearsal_test::refuse.default", ["x"], [tensor("r", 8)])
    graph = build_graph("g", [source("x", 8), refusing, seen("a", "r", 0)])
    found = entries(graph)
    texts = {op.name: signature(op, tensors_by_name(graph)) for op in graph.ops[1:]}
    assert texts["a"] in found
    assert texts["r"] not in found
    assert len(SEEN) == 2


def test_kinds_of_views_are_told_apart():
    graph = mlp_graph(8)
    found = entries(graph)
    views = {view_signature(op) for op in graph.ops if op.memory == "reference" and op.inputs}
    assert views
    assert views & set(found) == {each for each in found if each.startswith(VIEW_SIGNATURE + " ")}
    assert VIEW_SIGNATURE in found


def layers(count, size):
    """A chain, and back along it, as a backward pass reads what the forward pass has made."""

    def op(name, kind, *reads):
        return call(name, kind, list(reads), [tensor(name, size)])

    forth = [op(f"x{i + 1}", "aten.add.Tensor", f"x{i}", f"x{i}") for i in range(count)]
    turn = op(f"g{count}", "aten.neg.default", f"x{count}")
    back = [op(f"g{i - 1}", "aten.mul.Tensor", f"g{i}", f"x{i - 1}") for i in range(count, 0, -1)]
    return build_graph("chain", [source("x0", size), *forth, turn, *back])


@pytest.mark.parametrize("memory", [1 << 20, 4096 * 12, 4096 * 4])
def test_a_graph_that_does_not_fit_is_run_within_the_memory(memory, monkeypatch):
    graph = layers(20, 1024)  # 41 tensors of 4 KiB
    held = []
    run = in_context.bind

    def watched(op, device):
        bound = run(op, device)

        def call_it(env):
            bound(env)
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                        for t in env.values()}  # fmt: skip
            held.append(sum(storages.values()))

        return call_it

    monkeypatch.setattr(in_context, "bind", watched)
    found = profile_in_context(graph, 0.0, memory)
    assert {signature(op, tensors_by_name(graph)) for op in graph.ops[1:]} == set(found)
    assert max(held) <= memory
    assert len(held) == 2 * 41


def test_a_call_that_exceeds_the_memory_by_itself_is_left_out():
    big = call("big", "aten.cat.default", [["x", "x"]], [tensor("big", 4096)])
    small = call("small", "aten.neg.default", ["x"], [tensor("small", 2048)])
    after = call("after", "aten.slice.Tensor", ["big", 0, 0, 8],
                 [tensor("after", 8, alias_of="big")], memory="reference")  # fmt: skip
    graph = build_graph("g", [source("x", 2048), big, small, after])
    tensors = tensors_by_name(graph)
    found = profile_in_context(graph, 0.0, 4 * 2048 * 2)
    assert signature(graph.ops[2], tensors) in found
    assert signature(graph.ops[1], tensors) not in found


def test_indices_behind_a_view_are_bounded_by_what_they_index():
    weight, index = source("w", 40, 6), source("i", 5, 2, dtype="int64")
    flat = call("f", "aten.view.default", ["i", [10]],
                [tensor("f", 10, dtype="int64", alias_of="i")])  # fmt: skip
    rows = call("y", "aten.embedding.default", ["w", "f"], [tensor("y", 10, 6)])
    graph = build_graph("g", [weight, index, flat, rows])
    assert index_bounds(graph, tensors_by_name(graph)) == {"i": 40}
    assert signature(rows, tensors_by_name(graph)) in entries(graph)


def test_a_wait_for_a_core_does_not_count(monkeypatch):
    counted = itertools.count(0, 30_000_000)  # 30 ms more at every look
    monkeypatch.setattr(cpu_clock, "_waited", lambda _: next(counted))
    with undisturbed() as timed:
        assert timed(lambda: torch.mm(torch.ones(8, 8), torch.ones(8, 8))) < 0.03
        monkeypatch.setattr(cpu_clock, "_wall", lambda call: 0.05)
        assert timed(lambda: None) == pytest.approx(0.02)


def test_without_the_system_s_count_the_wall_clock_counts(monkeypatch):
    monkeypatch.setattr(cpu_clock, "_SCHEDSTAT", "/nowhere")
    monkeypatch.setattr(cpu_clock, "_wall", lambda call: 0.05)
    with undisturbed() as timed:
        assert timed(lambda: None) == 0.05

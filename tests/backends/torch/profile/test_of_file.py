"""Calls of a graph file run only if asked for, from a list, with the results that it declares."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import pytest

from pardnn import backends
from pardnn.backends.large_pages import LARGE_PAGES
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.profile import of_file
from pardnn.backends.torch.profile.of_file import Allowed, may_run, profile_file
from pardnn.backends.torch.profile.op_times import cached_table, profile_graph
from pardnn.cluster import Cluster
from pardnn.cost.call import tensors_by_name
from pardnn.cost.table import Entry
from pardnn.errors import FileError, UnsupportedError
from pardnn.graph.build import build_graph
from pardnn.graph.file import graph_from_json, graph_to_json
from pardnn.graph.ir import Graph
from pardnn.planner.costs import costs_for, described_kinds
from tests.backends.torch import models
from tests.cost.helpers import call, mm_graph, source, tensor
from tests.long_cases import long_but


def one_call(kind: str, args: list[object], *shape: int) -> Graph:
    op = call("y", kind, ["x", *args], [tensor("y", *shape)])
    return build_graph("one", [source("x", 2, 2), op])


def test_the_calls_of_a_file_are_not_run_unless_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("profile_graph", "profile_file"):
        monkeypatch.setattr(backends, name, lambda *_, **__: pytest.fail("run"), raising=False)
    step, args = models.small()
    captured = capture(step, *args)
    read = graph_from_json(graph_to_json(captured), "a file")
    assert captured.is_captured
    assert not read.is_captured
    assert costs_for(read, Cluster.uniform(2)).source == "a100"


@pytest.mark.parametrize("kind", ["aten.mm.default", "aten.add_.Tensor", "scalar.add"])
def test_what_capture_emits_may_run(kind: str) -> None:
    assert may_run(kind, described_kinds(one_call(kind, [], 2, 2)))


@pytest.mark.parametrize(
    "kind",
    ["inductor::_alloc_from_pool.default", "inductor::_reinterpret_tensor.default",
     "aten.from_file.default", "aten.set_.source_Storage_storage_offset"],
)  # fmt: skip
def test_what_reaches_beyond_its_arguments_may_not_run(kind: str) -> None:
    with contextlib.suppress(UnsupportedError):  # forbidden in any graph, or not in this torch
        assert not may_run(kind, described_kinds(one_call(kind, [], 2, 2)))


@pytest.mark.parametrize(
    ("args", "shape", "says"),
    [([[1 << 31]], (4,), "2147483648"),
     ([[2, 3]], (3, 2), r"\[2, 3\]")],
)  # fmt: skip
def test_a_call_whose_results_are_not_those_declared_does_not_run(
    args: list[object], shape: tuple[int, ...], says: str
) -> None:
    graph = one_call("aten.new_ones.default", args, *shape)
    admit = Allowed(["aten.new_ones.default"], tensors_by_name(graph))
    with pytest.raises(UnsupportedError, match=says):
        admit(graph.ops[1])


@pytest.mark.long
def test_every_call_of_a_captured_step_is_what_it_declares() -> None:
    step, args = models.gpt2()
    graph = capture(step, *args)
    admit = Allowed(described_kinds(graph), tensors_by_name(graph))
    refused = set()
    for op in graph.ops:
        if not (op.is_source or op.kind in ("loss", "pardnn.loss")):
            try:
                admit(op)
            except (RuntimeError, UnsupportedError) as error:
                refused.add((op.kind, str(error)[:120]))
    assert refused == set()


def test_a_child_measures_what_may_run_and_estimates_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("PARDNN_CACHE", str(tmp_path))
    # Set by what capture loads; a command that only reads a file has loaded none of it.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    bad = call("y", "aten.new_ones.default", ["c", [1 << 31]], [tensor("y", 4)])
    graph = build_graph("both", [*mm_graph(64, 64, 64).ops, bad])
    _, stats = profile_file(graph, allowed=["aten.mm.default", "aten.new_ones.default"])
    assert stats.measured == 1
    assert [kind for _, kind, _ in stats.estimated] == ["aten.new_ones.default"]


@pytest.mark.parametrize("pages", long_but([None], [None, "1"]))
def test_a_child_keeps_what_is_known_of_this_process_s_pages(
    pages: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Plans were made with it; alone, calls are timed with their inputs in the caches."""
    monkeypatch.setenv("PARDNN_CACHE", str(tmp_path))
    monkeypatch.delenv(LARGE_PAGES, raising=False)  # torch was loaded first
    if pages:
        monkeypatch.setenv(LARGE_PAGES, pages)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    known, _ = profile_graph(mm_graph(8, 8, 8), threads=1)
    found, stats = profile_file(mm_graph(8, 8, 8), allowed=["aten.mm.default"])
    assert (stats.measured, found.entries) == (0, known.entries)
    more = call("f", "aten.mm.default", ["d", "e"], [tensor("f", 4, 4)])
    other = build_graph("two", [*mm_graph(8, 8, 8).ops, source("d", 4, 4), source("e", 4, 4), more])
    found, stats = profile_file(other, allowed=["aten.mm.default"])
    assert stats.measured == 1
    assert known.entries.items() < found.entries.items()


def test_what_a_child_answers_does_not_replace_what_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("PARDNN_CACHE", str(tmp_path))
    known, stats = profile_graph(mm_graph(8, 8, 8), threads=1)
    slow = {text: asdict(Entry(seconds=9.0, repetitions=1)) for text in known.entries}
    answer = {"entries": slow, "stats": asdict(stats) | {"estimated": []}}
    monkeypatch.setattr(of_file, "_asked", lambda *_: answer)
    found, _ = profile_file(mm_graph(8, 8, 8), allowed=["aten.mm.default"])
    assert found.entries == known.entries
    assert cached_table(threads=1).entries == known.entries


def test_a_child_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_file, "GRACE_SECONDS", 0.0)
    with pytest.raises(FileError, match="longer than"):
        profile_file(mm_graph(2, 2, 2), allowed=[], budget_seconds=0.05)

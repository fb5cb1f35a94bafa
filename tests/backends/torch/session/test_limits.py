"""Memory limits under `parallelize`: those of the cluster bind, and the device's own by default."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch import parallelize
from pardnn.backends.torch.devices import rank_memory_bytes
from pardnn.backends.torch.ops import host_allocator, out_forms
from pardnn.backends.torch.runtime.memory import limits as memory_limits
from pardnn.backends.torch.runtime.memory.limits import HeapGuard, data_bytes
from pardnn.errors import InfeasibleError, RankError
from pardnn.planner import next_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

MIB = 1 << 20


def step(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made(width: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, width)


def in_child(body: Any) -> Any:
    """Limits are of the process, so each test has one of its own."""

    def connected(rank: int, path: str) -> Any:
        connect(rank, 1, path, 20).close()
        return body()

    (outcome,) = run_ranks(1, connected, limit_s=200.0)  # 2 s, where nothing else runs
    assert outcome.status == 0, outcome.error
    return outcome.value


@pytest.mark.parametrize(
    ("memory", "has_places", "keeps"),
    long_but(
        [("324MiB", False, False), ("324MiB", True, True)],
        [("640MiB", False, True), ("324MiB", False, False), ("324MiB", True, True)],
    ),
)
def test_a_step_keeps_freed_blocks_where_its_limit_has_room(
    memory: str, has_places: bool, keeps: bool
) -> None:
    """Of 144 MiB of weights and as much of gradients; the heap is looked at before their ops.

    With places for the gradients, all else is small.

    That is 92 MiB too little room for the second limit: heaps of threads that other tests left
    shrink by 26 MiB and more, when one of their blocks is freed.
    """
    begin = HeapGuard.begin

    def grown(guard: HeapGuard, made_bytes: int | None) -> None:
        begin(guard, made_bytes)
        guard._end = 0

    def body() -> Any:
        out_forms.LEAST_BYTES = out_forms.LEAST_BYTES if has_places else 1 << 40
        gc.collect()  # what other tests left would be room that is freed beside the step
        cluster = pardnn.Cluster.uniform(1, memory=memory)
        model, optimizer, x = made(6144)
        fast = pardnn.parallelize(step, model, optimizer, x, cluster=cluster, costs="v100")
        found = []
        for each in (begin, grown):
            HeapGuard.begin = each  # pyright: ignore[reportAttributeAccessIssue]
            fast(x)
            found.append(host_allocator._keeps_all)
        fast.close()
        return found

    assert in_child(body) == [keeps, False]


def test_without_a_limit_the_end_of_a_step_does_not_trim_the_heap() -> None:
    def body() -> Any:
        given_back = 128 << 10
        host_allocator._set(host_allocator._GIVEN_BACK)  # as glibc begins
        fast = pardnn.parallelize(step, *made(64), costs="v100")
        fast(made(64)[2])
        blocks = [torch.empty(3 << 20, dtype=torch.uint8) for _ in range(16)]
        held = data_bytes()
        blocks.clear()
        fast.close()
        return held - data_bytes() < given_back

    assert in_child(body)


def test_the_limit_of_the_cluster_is_enforced_in_the_users_process() -> None:
    def body() -> Any:
        cluster = pardnn.Cluster.uniform(1, memory="64MiB")
        fast = pardnn.parallelize(step, *made(256), cluster=cluster, costs="v100")
        first = fast(made(256)[2]).item()
        try:
            torch.ones(800 * MIB // 4)
        except RuntimeError as error:
            refused = memory_limits.is_out_of_memory(error)
        else:
            refused = False
        fast.close()
        torch.ones(200 * MIB // 4)  # lifted again
        return [first > 0, refused, fast.plan.cluster.devices[0].memory]

    assert in_child(body) == [True, True, 64 * MIB]


def test_what_does_not_fit_the_limit_is_no_plan() -> None:
    def body() -> Any:
        cluster = pardnn.Cluster.uniform(1, memory="1MiB")
        with pytest.raises(InfeasibleError):
            pardnn.parallelize(step, *made(1024), cluster=cluster, costs="v100")
        return True

    assert in_child(body)


def test_without_a_cluster_the_devices_own_memory_is_the_limit() -> None:
    def body() -> Any:
        fast = pardnn.parallelize(step, *made(64), costs="v100")
        fast.close()
        return fast.plan.cluster.devices[0].memory

    assert in_child(body) == rank_memory_bytes()


def test_what_is_held_to_a_limit_plans_in_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*_: Any, **__: Any) -> Any:
        raise InfeasibleError("no", details={"process": os.getpid()})

    def body() -> Any:
        cluster = pardnn.Cluster.uniform(1, memory="64MiB")
        with pytest.raises(InfeasibleError) as caught:
            pardnn.parallelize(step, *made(64), cluster=cluster, costs="v100")
        return caught.value.details["process"] == os.getpid()

    monkeypatch.setattr(next_plan, "next_plan", planned)
    assert in_child(body) is False


@pytest.mark.parametrize("memory", [24, 240])
def test_the_limit_holds_while_the_state_is_made(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a deferred model; parameters of 144 MiB exceed the smaller limit, its allowance of 48 and
    what a process of this size has freed.
    """

    def body() -> Any:
        with pardnn.deferred():
            model, optimizer, _ = made(6144)
        cluster = pardnn.Cluster.uniform(1, memory="800MiB")
        maker_of = parallelize.Maker.__call__

        def limited(*args: Any) -> Any:
            variant = maker_of(*args)
            variant.executor.limit_bytes = (memory - 16) * MIB
            return variant

        monkeypatch.setattr(parallelize.Maker, "__call__", limited)
        try:
            pardnn.parallelize(
                step, model, optimizer, torch.randn(4, 6144), cluster=cluster, costs="v100"
            ).close()
        except RankError as error:
            return [error.code, error.message]
        return []

    outcome = in_child(body)
    if memory == 240:
        assert outcome == []
    else:
        assert outcome[0] == "E603"
        assert "rank 0 ran out of memory while taking its share of the state" in outcome[1]

"""The links between the ranks of a run, measured before it is planned."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import pardnn
from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.backends.torch.profile import ping_pong, rank_links, rank_sharing
from pardnn.backends.torch.profile.ping_pong import Messages
from pardnn.backends.torch.profile.rank_links import ThisCluster, this_cluster, tournament
from pardnn.backends.torch.profile.rank_sharing import doubled, filled
from pardnn.backends.torch.session import live_state
from pardnn.cluster import Cluster, cluster_to_dict
from pardnn.report.text import cluster_text
from tests.backends.torch import models
from tests.backends.torch.ranks import connect, run_ranks

LATENCY, BANDWIDTH = 5e-3, 50e6


@pytest.mark.parametrize(
    "nodes", [(0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 0, 0, 1, 2, 2, 3), tuple(range(9))]
)
def test_each_two_nodes_meet_once_and_none_twice_in_a_round(nodes: tuple[int, ...]) -> None:
    rounds = tournament(nodes)
    for pairs in rounds:
        busy = [node for a, b in pairs for node in {nodes[a], nodes[b]}]
        assert len(busy) == len(set(busy))
    met = [frozenset((nodes[a], nodes[b])) for pairs in rounds for a, b in pairs]
    several = {node for node in nodes if nodes.count(node) > 1}
    expected = {frozenset(two) for two in itertools.combinations(set(nodes), 2)}
    assert len(met) == len(set(met))
    assert set(met) == expected | {frozenset((node,)) for node in several}
    assert len(rounds) <= len(set(nodes)) + 1


def slow_between(nodes: tuple[int, ...], patch: pytest.MonkeyPatch) -> None:
    """Make messages between nodes as slow as LATENCY and BANDWIDTH say."""
    wait = Channel.wait

    def slow(channel: Channel, spec: MessageSpec) -> Any:
        value = wait(channel, spec)
        if nodes[spec.source] != nodes[spec.target] and spec.target == channel.rank:
            time.sleep(LATENCY + spec.bytes / BANDWIDTH)
        return value

    patch.setattr(Channel, "wait", slow)


def measured(
    nodes: tuple[int, ...], folder: Path, cores: set[int] | None = None, **kwargs: Any
) -> list[Any]:
    """Return what each rank finds, as JSON types."""

    def body(rank: int, store: str) -> Any:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        world = connect(rank, len(nodes), store, 20.0)
        world.nodes = nodes
        with pytest.MonkeyPatch.context() as patch:
            slow_between(nodes, patch)
            found = this_cluster(world, folder=folder, **kwargs)
        world.close()
        return [cluster_to_dict(found.cluster), found.pairs, found.seconds, found.num_nodes]

    outcomes = run_ranks(len(nodes), body)
    assert all(each.status == 0 for each in outcomes), [each.error for each in outcomes]
    return [each.value for each in outcomes]


def rates(row: Any) -> dict[str, float]:
    """Return bytes per second of each pair of devices."""
    a = Cluster(
        devices=tuple(rank_links.Device(name=each["name"]) for each in row["devices"]),
        links=tuple(
            rank_links.Link(source=each["from"], target=each["to"],
                            bandwidth=each["bandwidth"], latency=each["latency"])
            for each in row["links"]
        ),
        default_link=rank_links.Rate(**row["default_link"]),
    ).arrays  # fmt: skip
    pairs = itertools.combinations(range(len(row["devices"])), 2)
    return {f"{i}{j}": a.bandwidth[i, j] for i, j in pairs} | {
        f"latency {i}{j}": a.latency[i, j]
        for i, j in itertools.combinations(range(len(row["devices"])), 2)
    }


@pytest.mark.parametrize("every", [False, True])
def test_all_ranks_learn_which_links_are_slow(every: bool, tmp_path: Path) -> None:
    found = measured((0, 0, 1), tmp_path, every=every)
    assert [each[0] for each in found] == [found[0][0]] * 3
    assert found[0][1] == (3 if every else 2)
    assert all(seconds < 5 for _, _, seconds, _ in found)
    assert found[0][3] == 2
    assert found[0][0]["link_model"] == "serial"
    rate = rates(found[0][0])
    for pair in ("02", "12"):
        assert 0.1 * BANDWIDTH < rate[pair] < 2 * BANDWIDTH
        assert 0.8 * LATENCY < rate[f"latency {pair}"] < 10 * LATENCY
    assert rate["01"] > 2 * BANDWIDTH
    assert rate["latency 01"] < LATENCY
    assert all(each["memory"] > 0 for each in found[0][0]["devices"])
    assert not list(tmp_path.iterdir())  # of several nodes nothing is kept


def test_on_one_node_what_was_measured_before_counts(tmp_path: Path) -> None:
    first, *_ = measured((0, 0), tmp_path)
    again, *_ = measured((0, 0), tmp_path)
    assert first[1] == 1
    assert again[1] == 0
    assert again[0] == first[0]
    anew, *_ = measured((0, 0), tmp_path, every=True)
    assert anew[1] == 1
    last, *_ = measured((0, 0), tmp_path)
    assert last[0] == anew[0]  # measuring anew replaces what is kept
    more, *_ = measured((0, 0, 0), tmp_path)
    assert more[1] == 1  # of another number of ranks nothing is known


def test_times_that_do_not_grow_still_make_a_link() -> None:
    rate = rank_links._rate({64: 2e-3, 4096: 1.5e-3, 65536: 1e-3})
    assert rate.latency == 1e-3
    assert rate.bandwidth == pytest.approx(65.5e6)


def test_without_a_cluster_a_step_is_planned_for_the_links_between_its_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a second step on the same models, without measuring again."""
    step, args = models.small()

    def body(rank: int, store: str) -> Any:
        connect(rank, 2, store, 20.0).close()
        monkeypatch.setenv("RANK", str(rank))
        count: list[int] = []

        def measure(world: Any) -> ThisCluster:
            count.append(1)
            rate = rank_links.Rate(bandwidth=1e6, latency=1.0)
            cluster = Cluster.uniform(2, bandwidth=rate.bandwidth, latency=rate.latency)
            return ThisCluster(cluster, 2, None, rate, 1, 0.1)

        monkeypatch.setattr(live_state, "this_cluster", measure)
        plans = []
        for _ in range(2):
            fast: Any = pardnn.parallelize(
                step, *args, costs="v100", algorithm="round-robin", timeout=20.0
            )
            plans.append(fast.plan)
        a = plans[0].cluster.arrays
        told = [each.message for each in caplog.records if "measured" in each.message]
        return [a.latency[0, 1], a.bandwidth[0, 1], plans[1].cluster == plans[0].cluster,
                len(count), len(told)]  # fmt: skip

    outcomes = run_ranks(2, body)
    assert [each.error for each in outcomes] == [{}, {}]
    assert [each.value for each in outcomes] == [[1.0, 1e6, True, 1, 1], [1.0, 1e6, True, 1, 0]]


def test_what_was_measured_is_said_on_one_line() -> None:
    from pardnn.api.parallelize import links_text

    cluster = Cluster.uniform(4)
    within = rank_links.Rate(bandwidth=3.1e9, latency=21e-6)
    between = rank_links.Rate(bandwidth=118e6, latency=1.2e-3)
    text = links_text(ThisCluster(cluster, 2, within, between, 2, 0.41))
    assert text.startswith(
        "links of 4 ranks on 2 nodes measured in 0.4 s: 3.1 GB/s + 21 us within a node and "
        "118 MB/s + 1.2 ms between nodes;"
    )


def test_what_ranks_share_is_said_too() -> None:
    from pardnn.api.parallelize import links_text

    rate = rank_links.Rate(bandwidth=3.1e9, latency=21e-6)
    shared = rank_links.Sharing(slowdown=(1.0, 1.0, 1.5, 2.04), overhead=rate)
    cluster = dataclasses.replace(Cluster.uniform(4), sharing=shared)
    text = links_text(ThisCluster(cluster, 1, rate, None, 1, 0.41))
    assert "within a node; ops take 2.04 times as long when all compute; the plan" in text
    assert "4 x gpu without limit, ops take 2.04 times as long" in cluster_text(cluster)


@pytest.mark.parametrize(("kind", "names"), [("cpu", "cpu:0 cpu:1"), ("cuda", "gpu:0 gpu:1")])
def test_ranks_are_called_after_what_they_run_on(kind: str, names: str) -> None:
    world: Any = types.SimpleNamespace(device=torch.device(kind), nodes=(0, 0))
    messages = Messages({64: 1e-5, 1 << 20: 1e-3}, {64: 1e-5, 1 << 20: 1e-4})
    slowdown = (1.0, 1.5) if kind == "cpu" else ()
    found = rank_links._Found({(0, 1): messages}, slowdown)
    cluster, *_ = rank_links._made(world, [1, 1], found)
    assert [device.name for device in cluster.devices] == names.split()
    assert (cluster.sharing is None) == (kind == "cuda")


def test_how_much_slower_some_ranks_compute_follows_from_a_few_measurements() -> None:
    assert [doubled(size) for size in (2, 3, 4, 6)] == [
        [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6],
    ]  # fmt: skip
    assert filled([1, 2, 4], [2.0, 2.0, 5.0]) == (1.0, 1.0, 1.75, 2.5)
    assert filled([1, 2, 4], [2.0, 1.8, 1.9]) == (1.0, 1.0, 1.0, 1.0)  # chance, not speed
    assert filled([1, 2, 3], [1.0, 1.3, 1.2]) == (1.0, 1.3, 1.3)


def test_ranks_work_one_two_and_so_on_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1.0, 1.2, 2.5, 2.0, 3.0, 3.3])  # by windows, of which the fastest count
    monkeypatch.setattr(rank_sharing, "_mean_seconds", lambda _: next(seconds))
    row, *_ = measured((0, 0, 0), tmp_path)[0]
    # Rank 1 begins where two work, and rank 2 where three do; the mean of those at work counts.
    two = (2.0 + 1.2) / 2
    three = (3.0 + 2.5 + 1.0) / 3
    assert row["sharing"]["slowdown"] == [1.0, two, pytest.approx(three, abs=0.005)]


def test_ranks_on_one_core_find_out(tmp_path: Path) -> None:
    row, pairs, *_ = measured((0, 0, 0), tmp_path, cores={min(os.sched_getaffinity(0))})[0]
    first, *others = row["sharing"]["slowdown"]
    assert first == 1.0
    assert others == sorted(others)
    assert others[-1] > 1.0  # by themselves three take 3 times as long
    again, known, *_ = measured((0, 0, 0), tmp_path)[0]
    assert (pairs, known) == (1, 0)
    assert again["sharing"] == row["sharing"]


def test_the_work_of_a_window_is_timed() -> None:
    assert 0.005 <= rank_sharing._mean_seconds(lambda: time.sleep(0.005)) < 0.1


def test_overhead_is_what_rounds_with_messages_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def lot(_end: Any, lot: Any) -> list[float]:
        asked.append(lot)
        message = 1e-4 + lot.size * 1e-9 if lot.size else 0.0
        return [1e-3 * lot.work + 2 * message] * lot.count

    monkeypatch.setattr(ping_pong, "_lot", lot)
    end: Any = None
    found = ping_pong._overhead(end, {64: 1e-3, 4096: 2e-3, 65536: 4.5e-3, 1 << 20: 0.02})
    assert found == pytest.approx({64: 1e-4 + 64e-9, 65536: 1e-4 + 65536e-9})
    assert {lot.work for lot in asked[1:]} == {9}  # as long as two of the longest
    assert ping_pong._overhead(end, {64: 1e-3, 65536: 0.02}) == {}  # the link is what takes time


def test_one_pair_of_each_kind_measures_overheads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def messages(world: Any, pair: Any, _share: float, *, overhead: bool) -> Any:
        number = 1.0 + pair[0]  # tells who has measured, and the largest counts
        own = {64: number, 65536: number} if overhead else {}
        return Messages({64: 1e-5, 65536: 1e-3}, own) if world.rank == pair[0] else None

    monkeypatch.setattr(rank_links, "_messages", messages)
    row, pairs, *_ = measured((0, 0, 1, 1), tmp_path)[0]
    assert pairs == 3
    assert row["sharing"]["overhead"]["latency"] == pytest.approx(1.0, rel=0.01)

"""The cluster formed by the ranks of a run: their memory, and the measured links between them.

Problem: the cost of a message between two nodes is a thousand times that between two GPUs of a
node, and a plan for the wrong number is slower than one device.
Idea: before planning, the ranks play ping-pong. Links between the same two nodes are alike, and so
are those within one node, so one pair represents all. Pairs of different nodes are measured at the
same time, in the rounds of a tournament (the circle method), so that no two share a node's
interface; 16 nodes take 16 rounds. Each round has its share of `BUDGET_S`, and every rank gets all
numbers, so that all have the same cluster.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pardnn.backends.torch.comm.joining import join, leave, rank_device
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import rank_memory_bytes, this_device
from pardnn.backends.torch.profile.op_times import machine_of
from pardnn.backends.torch.profile.ping_pong import End, Messages, follow, lead
from pardnn.backends.torch.profile.rank_sharing import slowdowns
from pardnn.cluster import MEASURED_LINKS, Cluster, Device, Link, Rate, Sharing
from pardnn.cost.links import fit_link
from pardnn.cost.table import CostTable, Entry, Machine, cache_folder, load_table, save_table
from pardnn.errors import PardnnError, UsageError

#: Seconds for all measurements at the start of a run; longest share of one round.
BUDGET_S, ROUND_S = 1.2, 0.6
_MESSAGE, _OVERHEAD, _SLOWDOWN = "pardnn.message.", "pardnn.overhead.", "pardnn.slowdown."
Pair = tuple[int, int]


class ThisCluster(NamedTuple):
    """The cluster of the ranks of a run.

    Attributes:
        cluster: A device per rank, in order of rank, and the links between them.
        num_nodes: Number of nodes on which they run.
        within: The link of two ranks of one node, the slowest; None if no node has two.
        between: The link of two nodes, the slowest; None with a single one.
        pairs: How many pairs of ranks were measured now; 0 if all were known before.
        seconds: Duration of measuring.
    """

    cluster: Cluster
    num_nodes: int
    within: Rate | None
    between: Rate | None
    pairs: int
    seconds: float


class _Found(NamedTuple):
    """What was measured: messages of pairs of ranks, and `Sharing.slowdown` of CPUs."""

    messages: Mapping[Pair, Messages]
    slowdown: tuple[float, ...]


def this_cluster(world: World, *, every: bool = False, folder: Path | None = None) -> ThisCluster:
    """Measure the links between the ranks; all ranks call it once and get the same result.

    On one node, earlier measurements count, for the same machine, transport and number of ranks.

    Args:
        world: This rank's connections, of at least two ranks.
        every: Measure every pair, one after the other, whatever is cached.
        folder: The folder of the cost cache; the user's if absent.

    Raises:
        RankError: E602, if a rank was lost.
        StuckError: E701, E702, if a rank does not come.
    """
    begin = time.perf_counter()
    folder = folder or cache_folder()
    is_one = len(set(world.nodes)) == 1
    known = _known(world, folder) if is_one and not every else None
    found = _measured(world, every=every) if known is None else known
    if known is None and is_one and world.rank == 0:
        _keep(world, folder, found)
    memory = world.all_gather("memory", rank_memory_bytes())
    cluster, within, between = _made(world, memory, found)
    pairs = len(found.messages) if known is None else 0
    nodes = len(set(world.nodes))
    return ThisCluster(cluster, nodes, within, between, pairs, time.perf_counter() - begin)


def _measured(world: World, *, every: bool) -> _Found:
    """Measure messages between ranks, and how much slower they compute when several do."""
    rounds = every_pair(world.size) if every else tournament(world.nodes)
    share = ROUND_S if every else min(ROUND_S, BUDGET_S / max(1, len(rounds)))
    mine, crossing = list[Any](), [world.nodes[a] != world.nodes[b] for (a, b), *_ in rounds]
    for number, pairs in enumerate(rounds):
        # What messages take of their ends depends on the transport alone. One pair measures it:
        # more ranks than cores would wait for each other.
        is_new = crossing[number] not in crossing[:number]
        mine += [
            [*pair, _messages(world, pair, share, overhead=is_new and pair == pairs[0])]
            for pair in pairs
            if world.rank in pair
        ]
        if every:  # no other message is in flight
            world.all_gather(f"links {number}", None)
    told = world.all_gather("links", mine)
    messages = {(a, b): _by_size(row) for rows in told for a, b, row in rows if row}
    return _Found(messages, slowdowns(world) if world.device.type == "cpu" else ())


def measure_rank_links(timeout_s: float = 60.0) -> ThisCluster:
    """Measure every pair of the ranks that torchrun has started, of which this process is one.

    Args:
        timeout_s: Longest wait for one message, seconds.

    Raises:
        RankError: E602, E605, if the ranks do not find each other, or one is lost.
        StuckError: E701, E702, if a rank does not come.
    """
    device = rank_device(this_device(), int(os.environ.get("LOCAL_RANK", "0")))
    world = join(device, timeout_s=timeout_s)
    world.detect_failures()
    try:
        return this_cluster(world, every=True)
    except PardnnError as error:
        raise world.report_failure(error) from error.__cause__
    finally:
        leave([world])


def every_pair(size: int) -> list[list[Pair]]:
    """Return rounds in which every pair of ranks is measured alone."""
    return [[(a, b)] for a in range(size) for b in range(a + 1, size)]


def tournament(nodes: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which any two nodes, and two ranks of each node, are measured.

    Args:
        nodes: The number of each rank's node.

    Returns:
        Pairs of ranks; in a round no node is in two of them.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    inside = [(each[0], each[1]) for each in ranks.values() if len(each) > 1]
    ring = [each[0] for each in ranks.values()]
    ring += [-1] * (len(ring) % 2)  # a node paired with -1 rests
    rounds = [inside]
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _messages(world: World, pair: Pair, share_s: float, *, overhead: bool) -> Messages | None:
    """Measure a pair as one of its ranks; return what the first of them has found."""
    assert world.channel is not None
    if world.rank == pair[0]:
        return lead(End(world.channel, pair[1]), share_s, overhead=overhead)
    follow(End(world.channel, pair[0]))
    return None


def _by_size(rows: Sequence[Mapping[str, float]]) -> Messages:
    """Return messages as they were measured, in order of their bytes: a fit depends on it."""
    by_size = ({int(size): each for size, each in row.items()} for row in rows)
    return Messages(*(dict(sorted(row.items())) for row in by_size))


def _rate(seconds: Mapping[int, float]) -> Rate:
    """Fit a link to messages, to three digits: no more are known."""
    try:
        fit = fit_link(list(seconds), list(seconds.values()))
        latency, bandwidth = fit.latency, fit.bandwidth
    except UsageError:  # measurements were disturbed: long messages were as fast as short ones
        latency = min(seconds.values())
        bandwidth = max(size / max(each, 1e-9) for size, each in seconds.items())
    return Rate(latency=float(f"{latency:.3g}"), bandwidth=float(f"{bandwidth:.3g}"))


def _sharing(found: _Found) -> Sharing | None:
    """Return what ranks take from each other; None if it was not measured."""
    if not found.slowdown:
        return None
    overhead = _overhead(found)
    return Sharing(slowdown=found.slowdown, overhead=_rate(overhead) if overhead else None)


def _overhead(found: _Found) -> Mapping[int, float]:
    """Return what messages take of their ends: of the pair from which they take most."""
    told = (each.overhead for each in found.messages.values())
    return max(told, key=lambda row: row[max(row)] if row else 0.0)


def _rates_of_all(nodes: Sequence[int], measured: Mapping[Pair, Rate]) -> dict[Pair, Rate]:
    """Return the link of each pair of ranks: its own, or that of a pair on the same nodes."""
    by_nodes = {frozenset((nodes[a], nodes[b])): rate for (a, b), rate in measured.items()}
    size = len(nodes)
    return {
        (a, b): measured.get((a, b)) or by_nodes[frozenset((nodes[a], nodes[b]))]
        for a in range(size)
        for b in range(a + 1, size)
    }


def _made(
    world: World, memory: Sequence[int], found: _Found
) -> tuple[Cluster, Rate | None, Rate | None]:
    """Return the cluster, and the slowest links within a node and between two."""
    name, nodes = "cpu" if world.device.type == "cpu" else "gpu", world.nodes
    rates = _rates_of_all(nodes, {pair: _rate(row.seconds) for pair, row in found.messages.items()})
    devices = tuple(Device(name=f"{name}:{i}", memory=size) for i, size in enumerate(memory))
    default = Counter(rates.values()).most_common(1)[0][0]
    links = tuple(
        Link(source=devices[a].name, target=devices[b].name,
             bandwidth=rate.bandwidth, latency=rate.latency)
        for (a, b), rate in rates.items() if rate != default
    )  # fmt: skip
    cluster = Cluster(
        devices=devices, links=links, default_link=default, link_model=MEASURED_LINKS,
        sharing=_sharing(found),
    )  # fmt: skip
    within = [rate for (a, b), rate in rates.items() if nodes[a] == nodes[b]]
    between = [rate for (a, b), rate in rates.items() if nodes[a] != nodes[b]]
    return cluster, _slowest(within), _slowest(between)


def _slowest(rates: Sequence[Rate]) -> Rate | None:
    return min(rates, key=lambda rate: rate.bandwidth, default=None)


# Earlier measurements on one node.


def _machine(world: World) -> Machine:
    assert world.channel is not None
    transport = "sockets" if world.channel.local is not None else world.channel.backend
    torch = importlib.metadata.version("torch")
    device = machine_of(world.device)
    library = f"torch {torch}, {transport}, {world.size} ranks of one node"
    return Machine(device=device.device, library=library, threads=device.threads)


def _known(world: World, folder: Path) -> _Found | None:
    """Return what rank 0 knows about these ranks, on all ranks; None if anything is missing."""
    mine = None
    if world.rank == 0:
        entries = load_table(_machine(world), folder).entries
        parts = [
            {text.removeprefix(kind): each.seconds for text, each in entries.items()
             if text.startswith(kind)}
            for kind in (_MESSAGE, _OVERHEAD, _SLOWDOWN)
        ]  # fmt: skip
        counts = world.size if world.device.type == "cpu" else 0
        if len(parts[0]) > 1 and len(parts[2]) == counts:
            mine = parts
    (first, *_) = world.all_gather("links known", mine)
    if first is None:
        return None
    slowdown = [first[2][f"{count}"] for count in range(1, 1 + len(first[2]))]
    return _Found({(0, 1): _by_size(first[:2])}, tuple(slowdown))


def _keep(world: World, folder: Path, found: _Found) -> None:
    """Cache the median pair's messages, and the slowdown."""
    rows = sorted(found.messages.values(), key=lambda row: row.seconds[max(row.seconds)])
    middle, numbers = rows[len(rows) // 2], enumerate(found.slowdown, 1)
    # Always by the same bytes: others would stay in the cache beside those of a new measurement.
    own = _rate(_overhead(found)) if _overhead(found) else None
    overhead = {size: own.latency + size / own.bandwidth for size in (0, 1 << 20)} if own else {}
    parts = {_MESSAGE: middle.seconds, _OVERHEAD: overhead, _SLOWDOWN: dict(numbers)}
    entries = {
        f"{kind}{number}": Entry(seconds=each)
        for kind, part in parts.items()
        for number, each in part.items()
    }
    save_table(CostTable(_machine(world), entries), folder)

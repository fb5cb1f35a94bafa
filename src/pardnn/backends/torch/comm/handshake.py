"""What all ranks must agree on before the first step, and how they find out.

Gloo writes a short message into a long buffer without a word, and reads one type as another, so
every rank puts what it is about to do into the store and compares it with what all others say:
versions, world size, graph, plan, the table of messages, and the order in which each rank posts
them. All ranks read the same entries, so all of them refuse together, before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError, State
from pardnn.backends.torch.comm.wire_format import Wire, first_difference, wire_text
from pardnn.errors import MismatchError, StuckError
from pardnn.graph.file import fingerprint
from pardnn.graph.ir import Graph
from pardnn.plan.actions import Action, Receive, Send
from pardnn.plan.file import plan_to_json
from pardnn.plan.plan import Plan

Facts = dict[str, Any]


def check_world(size: int, plan: Plan) -> None:
    """Refuse to start with another number of ranks than the plan has devices.

    Raises:
        MismatchError: E511.
    """
    if size != plan.num_devices:
        raise MismatchError(
            f"the plan is for {plan.num_devices} devices, but {size} ranks were started.\n"
            f"Start {plan.num_devices} (torchrun --nproc-per-node {plan.num_devices}), or plan "
            f"for {size} devices.",
            code="E511",
            details={"world_size": size, "num_devices": plan.num_devices},
        )


def make_facts(
    graph: Graph, plan: Plan, wires: Sequence[Wire], actions: Sequence[Action], size: int
) -> Facts:
    """Return what one rank is about to do, as JSON."""
    return {
        "torch version": torch.__version__,
        "world size": size,
        "graph": fingerprint(graph),
        "plan": hashlib.sha256(plan_to_json(plan)).hexdigest()[:32],
        "num_ops": len(graph.ops),
        "wires": [list(wire) for wire in wires],
        "posts": [
            [isinstance(action, Send), action.message]
            for action in actions
            if isinstance(action, Send | Receive)
        ],
    }


def exchange(
    store: dist.Store,
    key: str,
    rank: int,
    size: int,
    data: Any,
    timeout_s: float,
    failed: Callable[[], State | None],
) -> list[Any]:
    """Give every rank what each rank says under `key`.

    Args:
        store: Shared by all ranks.
        key: Used once.
        rank: This rank.
        size: Number of ranks.
        data: What this rank says, as JSON types.
        timeout_s: Longest wait, seconds.
        failed: Tells of a rank that has failed meanwhile.

    Raises:
        StuckError: E702, naming the ranks that said nothing within `timeout_s`.
        LostError: If a rank has failed meanwhile.
    """
    store.set(f"{key}/{rank}", json.dumps(data))
    keys = [f"{key}/{other}" for other in range(size)]
    wait_for(store, keys, rank, list(range(size)), timeout_s, failed)
    return [json.loads(store.get(each)) for each in keys]


def wait_for(
    store: dist.Store,
    keys: Sequence[str],
    rank: int,
    sayers: Sequence[int],
    timeout_s: float,
    failed: Callable[[], State | None],
) -> None:
    """Wait until all keys are in the store; `sayers` are the ranks that put them there.

    Raises:
        StuckError: E702, after `timeout_s`.
        LostError: If a rank has failed meanwhile.
    """
    end = time.monotonic() + timeout_s
    missing = dict(zip(keys, sayers, strict=True))
    pause = 0.001
    while missing:
        missing = {key: sayer for key, sayer in missing.items() if not store.check([key])}
        if not missing:
            return
        failure = failed()
        if failure is not None:
            raise LostError(
                f"rank {failure['rank']} failed before the first step",
                details={"rank": rank, "first_failing_rank": failure["rank"]},
            )
        if time.monotonic() > end:
            late = sorted(missing.values())
            raise StuckError(
                f"rank {rank} waited {timeout_s:g} s for {_ranks(late)} before the first step "
                f"({min(missing).split('/')[0]}).\n"
                "Look at what they printed last; they may have ended, or still be loading.",
                code="E702",
                details={"rank": rank, "missing": late, "peer": late[0]},
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def check_agreement(facts: Sequence[Facts]) -> None:
    """Compare what all ranks are about to do.

    Raises:
        MismatchError: E510, naming the ranks and the first field in which they differ.
    """
    problem = next(_differences(facts), None)
    if problem is not None:
        raise MismatchError(
            f"the ranks are not about to do the same thing: {problem}.\n"
            "Give all ranks one graph, one plan and one version of torch.",
            code="E510",
        )


def _differences(facts: Sequence[Facts]) -> Iterator[str]:
    tables = [[_wire(row) for row in each["wires"]] for each in facts]
    for field in ("torch version", "world size"):
        yield from _unequal(facts, field)
    for rank, table in enumerate(tables):
        yield from _table_difference(rank, tables[0], table)
    for field in ("num_ops", "graph", "plan"):
        yield from _unequal(facts, field)
    yield from _post_problems([each["posts"] for each in facts], tables[0])


def _unequal(facts: Sequence[Facts], field: str) -> Iterator[str]:
    others = [rank for rank, each in enumerate(facts) if each[field] != facts[0][field]]
    if others:
        found = facts[others[0]][field]
        yield f"{field} is {facts[0][field]} on rank 0 and {found} on {_ranks(others)}"


def _wire(row: Sequence[Any]) -> Wire:
    return Wire(*(tuple(cell) if isinstance(cell, list) else cell for cell in row))


def _table_difference(rank: int, mine: list[Wire], theirs: list[Wire]) -> Iterator[str]:
    for here, there in zip(mine, theirs, strict=False):
        if here != there:
            field = first_difference(here, there)
            yield f"rank 0 and rank {rank} differ on {wire_text(here)}: {field}"
            return
    if len(mine) != len(theirs):
        yield f"rank 0 has {len(mine)} messages and rank {rank} has {len(theirs)}"


def _post_problems(posts: Sequence[Sequence[Any]], wires: Sequence[Wire]) -> Iterator[str]:
    """Check that each message is posted once by each end, in the global order."""
    expected: list[list[list[Any]]] = [[] for _ in posts]
    for wire in wires:
        expected[wire.source].append([True, wire.number])
        expected[wire.target].append([False, wire.number])
    for rank, (found, due) in enumerate(zip(posts, expected, strict=True)):
        if list(found) == due:
            continue
        for i in range(max(len(found), len(due))):
            has = _post_text(found[i]) if i < len(found) else "nothing"
            needs = _post_text(due[i]) if i < len(due) else "nothing"
            if has != needs:
                yield f"post {i} of rank {rank} is {has}, but must be {needs}"
                return


def _post_text(post: Sequence[Any]) -> str:
    return f"the {'send' if post[0] else 'receive'} of message {post[1]}"

"""The handshake: before the first step all ranks compare what they are about to run.

Gloo writes a short message into a long buffer without an error, and reads one type as another. So
every rank puts its facts into the shared store and compares them with those of all others:
versions, world size, graph, plan, the specs of all messages, and the order in which each rank posts
them. All ranks read the same entries, so all of them fail together, before anything is allocated.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError, State
from pardnn.backends.torch.comm.secret import SignedStore
from pardnn.backends.torch.comm.wire_format import MessageSpec, first_difference, spec_text
from pardnn.errors import MismatchError, StuckError
from pardnn.graph.file import fingerprint
from pardnn.graph.ir import Graph
from pardnn.plan.actions import Action, Receive, Send
from pardnn.plan.file import plan_to_json
from pardnn.plan.plan import Plan

Facts = dict[str, Any]


def check_world(size: int, plan: Plan) -> None:
    """Check that there are as many ranks as the plan has devices.

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
    graph: Graph, plan: Plan, specs: Sequence[MessageSpec], actions: Sequence[Action], size: int
) -> Facts:
    """Return what one rank is about to run, as JSON types.

    Args:
        graph: The graph of the whole step.
        plan: The plan for that graph.
        specs: The specs of all messages, in their global order.
        actions: The actions of this rank.
        size: Number of ranks.
    """
    return {
        "torch version": torch.__version__,
        "world size": size,
        "graph": fingerprint(graph),
        "plan": hashlib.sha256(plan_to_json(plan)).hexdigest()[:32],
        "num_ops": len(graph.ops),
        "messages": [list(spec) for spec in specs],
        "posts": [
            [isinstance(action, Send), action.message]
            for action in actions
            if isinstance(action, Send | Receive)
        ],
    }


class Watch(NamedTuple):
    """How a rank that waits on the store learns that its wait is in vain.

    Attributes:
        rank: This rank.
        timeout_s: Longest wait, seconds.
        failed: Returns the record of a rank that has failed in the meantime, or None.
        closed: Returns the ranks whose connections have closed.
        progress: Returns how far a rank has come; a wait starts over if one makes progress.
        tell: Called with the ranks that have not written yet.
    """

    rank: int
    timeout_s: float
    failed: Callable[[], State | None]
    closed: Callable[[], Collection[int]] = tuple
    progress: Callable[[int], int] = lambda _rank: 0
    tell: Callable[[Sequence[int]], None] = lambda _late: None


def wait_for(
    store: dist.Store | SignedStore,
    keys: Sequence[str],
    writers: Sequence[int],
    watch: Watch,
    doing: str,
) -> None:
    """Wait until all keys are in the store.

    Args:
        store: Shared by all ranks.
        keys: The keys to wait for.
        writers: The rank that writes each key.
        watch: Ends a wait that is in vain.
        doing: The occasion, in words: "before the first step", "while saving step 12".

    Raises:
        StuckError: E702, after the timeout, naming the ranks that wrote nothing.
        LostError: E602, if a rank has failed meanwhile, or a writer has ended.
    """
    missing, pause = dict(zip(keys, writers, strict=True)), 0.001
    end, come = time.monotonic() + watch.timeout_s, dict.fromkeys(writers, 0)
    while True:
        failure, closed = watch.failed(), watch.closed()
        # Checked after those keys, as a rank may write and then end.
        missing = {key: writer for key, writer in missing.items() if not store.check([key])}
        if not missing:
            return
        late = sorted(set(missing.values()))
        watch.tell(late)
        _check_alive(failure, [rank for rank in late if rank in closed], watch.rank, doing)
        if time.monotonic() > end:
            now = {rank: watch.progress(rank) for rank in late}
            if all(now[rank] <= come[rank] for rank in late):
                raise _stuck(late, watch, doing)
            come |= now
            end = time.monotonic() + watch.timeout_s
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _check_alive(failure: State | None, gone: Sequence[int], rank: int, doing: str) -> None:
    """Raise E602 if a rank has failed, or an awaited one has ended."""
    if failure is not None:
        raise LostError(
            f"rank {failure['rank']} failed {doing}",
            details={"rank": rank, "first_failing_rank": failure["rank"]},
        )
    if gone:
        raise LostError(
            f"rank {gone[0]} ended before its work was done: rank {rank} lost it {doing}.\n"
            f"Look at what rank {gone[0]} printed last; a signal (out of memory, kill) leaves no "
            "message of its own.",
            details={"rank": rank, "peer": gone[0], "first_failing_rank": gone[0]},
        )


def _stuck(late: Sequence[int], watch: Watch, doing: str) -> StuckError:
    return StuckError(
        f"rank {watch.rank} waited {watch.timeout_s:g} s for {_ranks(late)} {doing}.\nEvery rank "
        "has to make the same calls between the same two steps. Look at what they printed last; "
        "they may have ended, or still be loading.",
        code="E702",
        details={"rank": watch.rank, "missing": list(late), "peer": late[0]},
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def check_agreement(facts: Sequence[Facts]) -> None:
    """Compare the facts of all ranks.

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
    tables = [[_spec_of(row) for row in each["messages"]] for each in facts]
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


def _spec_of(row: Sequence[Any]) -> MessageSpec:
    return MessageSpec(*(tuple(cell) if isinstance(cell, list) else cell for cell in row))


def _table_difference(
    rank: int, mine: list[MessageSpec], theirs: list[MessageSpec]
) -> Iterator[str]:
    for here, there in zip(mine, theirs, strict=False):
        if here != there:
            field = first_difference(here, there)
            yield f"rank 0 and rank {rank} differ on {spec_text(here)}: {field}"
            return
    if len(mine) != len(theirs):
        yield f"rank 0 has {len(mine)} messages and rank {rank} has {len(theirs)}"


def _post_problems(posts: Sequence[Sequence[Any]], specs: Sequence[MessageSpec]) -> Iterator[str]:
    """Yield each rank's first post that is out of the global order of messages."""
    expected: list[list[list[Any]]] = [[] for _ in posts]
    for spec in specs:
        expected[spec.source].append([True, spec.number])
        expected[spec.target].append([False, spec.number])
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

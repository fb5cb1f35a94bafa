"""Whether all ranks have seen the same values change since the last call."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.runtime.notices import told
from pardnn.backends.torch.user_step.guards.item import VALUES, Change
from pardnn.errors import MismatchError, PardnnError, RankError, StuckError


@contextlib.contextmanager
def telling_changes(world: World, what: str, changes: Sequence[Change]) -> Iterator[None]:
    """Tell a rank that is stuck elsewhere why this one waits, while the context is open.

    Args:
        world: This rank's connections.
        what: What this rank does, in words.
        changes: Why it does that; none for the first capture.
    """
    before, text = world.describe, told(changes)
    if changes:
        world.describe = lambda: {
            "text": f"{what}, since {text}", "waits_for": None, "messages": [], "changed": text,
        }  # fmt: skip
    try:
        yield
    except (MismatchError, RankError, StuckError):
        raise  # a rank that is stuck elsewhere may yet ask
    except PardnnError:
        world.describe = before
        raise
    world.describe = before


def check_same_changes(world: World, key: str, changes: Sequence[Change]) -> None:
    """Compare what has changed on all ranks; each of them calls it, or the others find out.

    Args:
        world: This rank's connections.
        key: Distinguishes this exchange from others of these ranks.
        changes: What this rank has seen.

    Raises:
        MismatchError: E519, if ranks have seen other changes, or none.
    """
    if world.store is None:
        return
    # Hooks are counted per process, including those of captures.
    names = [re.sub(r"_hooks\.\d+", "_hooks", each.name) for each in changes[:20]]
    mine = [
        [name, _text(each.then), _text(each.now)]
        for name, each in zip(names, changes, strict=False)
    ]
    try:
        found = world.all_gather(f"changes{key}", [mine, told(changes)])
    except StuckError as error:
        late = error.details["missing"][0]
        raise MismatchError(
            f"rank {world.rank} saw that {told(changes)}; rank {late} did not, and made "
            "another call.\nEvery rank has to make the same calls, with the same flags, "
            "modes and shapes.",
            code="E519",
            details={"rank": world.rank, "peer": late},
        ) from error
    others = [rank for rank, (theirs, _) in enumerate(found) if theirs != found[0][0]]
    if others:
        raise MismatchError(
            f"the ranks saw other changes: rank 0 that {found[0][1]}; rank {others[0]} that "
            f"{found[others[0]][1]}.\nEvery rank has to make the same calls, with the same "
            "flags, modes and shapes.",
            code="E519",
            details={"ranks": others},
        )


def _text(value: Any) -> str:
    """Return a text for a value, the same on every rank."""
    is_tensor_kind = type(value).__name__ == "TensorKind"
    return repr(value) if is_tensor_kind or isinstance(value, VALUES) else type(value).__name__

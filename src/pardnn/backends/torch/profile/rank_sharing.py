"""How much slower the ranks of a run compute when several do: on CPUs they share what there is.

Problem: four ranks on two cores do not compute four times as fast as one, and two ranks with a core
each not twice as fast where they share caches and memory. A plan over all ranks may then take
longer than one on a few.
Idea: before planning, one rank does some work that is like a step's, then two at a time, then four,
and so on. All ranks count, whichever nodes they say that they are on.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pardnn.backends.torch.comm.world import World

#: Seconds for which ranks work at a time. Its middle half counts, as they do not begin together.
WINDOW_S = 0.12
#: Rows and columns of layers whose weights no core's own cache holds; elements of other tensors.
_ROWS, _WIDTH, _LAYERS, _ELEMENTS = 64, 768, 3, 1 << 19


def slowdowns(world: World) -> tuple[float, ...]:
    """Return `cluster.Sharing.slowdown` of the ranks; all call it once and get the same.

    Args:
        world: This rank's connections, of at least two ranks.

    Raises:
        RankError: E602, if a rank was lost.
        StuckError: E702, if a rank does not come.
    """
    counts, work = doubled(world.size), _work()
    means: list[float] = []
    for count in counts:
        world.all_gather(f"sharing {count}", None)
        mine = _mean_seconds(work) if world.rank < count else None
        told = world.all_gather(f"sharing {count} took", mine)
        means.append(statistics.mean(each for each in told if each is not None))
    return filled(counts, means)


def doubled(size: int) -> list[int]:
    """Return 1, 2, 4 and so on up to a number, which is the last."""
    return [*itertools.takewhile(lambda n: n < size, (1 << i for i in itertools.count())), size]


def filled(counts: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return times relative to the first, never falling, for every number from 1 to the last.

    Args:
        counts: For which there are measurements, from 1 on.
        seconds: Those.
    """
    every = np.interp(np.arange(1, counts[-1] + 1), counts, np.asarray(seconds) / seconds[0])
    return tuple(float(f"{each:.3g}") for each in np.maximum.accumulate(np.maximum(every, 1.0)))


def _work() -> Callable[[], None]:
    """Return what takes caches, memory and processors about as a step does."""
    rows = torch.ones(_ROWS, _WIDTH)
    weights = [torch.ones(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    state, gradient = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS)

    def work() -> None:
        for weight in weights:
            torch.relu(rows @ weight)
        state.lerp_(gradient, 0.1)

    work()
    return work


def _mean_seconds(work: Callable[[], None]) -> float:
    """Return the mean duration of what is done in the middle half of a window."""
    begin = now = time.perf_counter()
    taken: list[float] = []
    while now < begin + WINDOW_S:
        work()
        last, now = now, time.perf_counter()
        if begin + 0.25 * WINDOW_S <= last and now <= begin + 0.75 * WINDOW_S:
            taken.append(now - last)
    return statistics.mean(taken) if taken else now - last

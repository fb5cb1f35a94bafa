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
#: Windows per number of ranks; the fastest counts, as other programs only make them slower.
WINDOWS = 2
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
    counts, work = doubled(world.size), like_a_step()
    means: list[float] = []
    for count in counts:
        windows: list[float] = []
        for number in range(WINDOWS):
            world.all_gather(f"sharing {count} {number}", None)
            mine = _mean_seconds(work) if world.rank < count else None
            told = world.all_gather(f"sharing {count} {number} took", mine)
            windows.append(statistics.mean(each for each in told if each is not None))
        means.append(min(windows))
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


def like_a_step() -> Callable[[], None]:
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
    """Return the mean duration of the work in the middle half of a window."""
    ends = [time.perf_counter()]
    while ends[-1] < ends[0] + WINDOW_S:
        work()
        ends.append(time.perf_counter())
    quarters = ends[0] + np.array([0.25, 0.75]) * WINDOW_S
    done = np.interp(quarters, ends, np.arange(len(ends)))
    return float(0.5 * WINDOW_S / (done[1] - done[0]))

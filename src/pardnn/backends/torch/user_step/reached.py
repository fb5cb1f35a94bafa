"""Which tensors of a graph's state the step still reaches.

A graph that does not run any more may still say where state is that the last one does not read,
such as the momentum of a layer that is frozen for now. But if the user has put another optimizer
or layer in place of what held it, nothing trains with that state, and others may have its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source


def unreached(
    names: Iterable[str], sources: Mapping[str, Source], objects: ObjectGraph
) -> set[str]:
    """Return the names of state that has been deleted, or whose holder was replaced.

    Args:
        names: Names of parameters, buffers and states.
        sources: The sources of the graph that has them, by name.
        objects: What the step reaches now.
    """
    reached = {id(entry.value) for entry in objects.tensors}
    return {name for name in names if id(_kept(sources[name])) not in reached}


def replaced(
    names: Iterable[str], before: Mapping[str, Source], after: Mapping[str, Source]
) -> set[str]:
    """Return the names that stand for other tensors in one graph than in another one.

    Args:
        names: Names of parameters, buffers and states.
        before: The sources of one graph, by name.
        after: Those of the other.
    """
    both = (name for name in names if name in before and name in after)
    return {name for name in both if _kept(before[name]) is not _kept(after[name])}


def _kept(source: Source) -> Any:
    """Return a source's tensor; of a gradient, which comes and goes, its parameter."""
    return source.get() if source.parameter is None else source.parameter

"""Initial numbers of states, as in `torch.full_like(p, group["lr"])`: frozen in the graph.

A graph contains the number that fills a state, but not its origin. So an optimizer setting that had
this number at capture must still have it at the first call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Graph


class StartingNumbers:
    """The settings from which a state may start.

    Args:
        graph: The graph of the step.
        sources: The sources of the step, by name, before any state is created.
        objects: The objects that the step reaches, as it was captured.
    """

    def __init__(self, graph: Graph, sources: Mapping[str, Source], objects: ObjectGraph) -> None:
        initial = {op.name: (op.arguments or {}).get("initial") for op in graph.ops if op.is_source}
        states = {
            number: name
            for name, number in initial.items()
            if isinstance(number, float) and number and sources[name].get() is None
        }
        settings = [e for e in objects.numbers if isinstance(e.owner, torch.optim.Optimizer)]
        self._found = [
            (entry, states[entry.value])
            for entry in settings
            if entry.slot is not None and type(entry.value) is float and entry.value in states
        ]

    def check(self) -> None:
        """Compare the settings; call it before the first step, after which they may change.

        Raises:
            MismatchError: E528, if one differs from that at capture.
        """
        for entry, state in self._found:
            assert entry.slot is not None
            now = entry.slot.get()
            if now != entry.value:
                raise MismatchError(
                    f"{shown(entry.name)} was {entry.value} when the step was captured and is "
                    f"{now} at its first call.\n{shown(state)} was filled with {entry.value} too, "
                    "and may start from it.\nSet it before `parallelize`; a schedule of the "
                    "learning rate is made before it as well.",
                    code="E528",
                    details={"name": entry.name, "captured": entry.value, "now": now,
                             "state": state},
                )  # fmt: skip

"""Whether the user's objects still hold what they held at a walk, told without another one.

Problem: whoever reads state between two calls gets what the user's objects hold now, and only a
walk tells where that is. One `whole` of each of 800 tensors took 50 s.
Idea: as guards do, look at the version tags of all dictionaries that a walk has met, and at the
words of its lists; and at the tensors themselves, since gradients lie in no container.

Complexity: O(containers) to note a walk; then, in C, a look at each.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict

from pardnn.backends.torch.capture.restore import is_as_noted
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.guards.item import ItemGuard, Snapshot, any_key
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import GlobalName, items_of

#: Containers that answer by themselves: nobody can change their classes.
_OWN = frozenset({dict, OrderedDict, defaultdict, list})
_VARIABLES = types.CellType | GlobalName


class Settled:
    """What a walk has found, between two steps. It keeps all of that alive.

    Args:
        program: What runs.
        binding: The binding of its sources.
        objects: What the step reaches now.
    """

    def __init__(self, program: Program, binding: Binding, objects: ObjectGraph) -> None:
        self._of, self._tensors = (program, binding), _tensors(program, binding)
        guards, self._others = list[ItemGuard](), list[tuple[object, object]]()
        for name, holder, content in objects.contents:
            items = None if isinstance(holder, _VARIABLES) else items_of(holder)
            if type(items) in _OWN:
                keys = range(len(items)) if isinstance(items, list) else items
                guards.append(ItemGuard(name, items, list(keys), any_key))
            else:
                self._others.append((holder, content))
        self._containers = Snapshot(guards)

    def holds(self, program: Program, binding: Binding) -> bool:
        """Whether the same program runs, and everything is as it was."""
        if self._of[0] is not program or self._of[1] is not binding:
            return False
        now = _tensors(program, binding)
        return (
            all(a is b for a, b in zip(now, self._tensors, strict=True))
            and self._containers.holds()
            and all(is_as_noted(holder, content) for holder, content in self._others)
        )


def _tensors(program: Program, binding: Binding) -> list[object]:
    return [binding.sources[name].get() for name in program.state]

"""Whether a step can be cut with the layouts of state that stays where it is."""

from __future__ import annotations

from pardnn.errors import InfeasibleError, shown
from pardnn.plan.mesh import placements
from pardnn.shard.search.tensor_classes import TensorClasses, is_possible
from pardnn.shard.sharding import FixedLayouts


def check_fixed(classes: TensorClasses, fixed: FixedLayouts) -> None:
    """Raise if tensors that must have one layout cannot have one that is fixed.

    Args:
        classes: Tensors that share a layout.
        fixed: What is fixed.

    Raises:
        InfeasibleError: E301, naming the tensors.
    """
    for one, other in classes.torn[:1]:
        raise _torn(classes, fixed, one, other)
    for root, layout in classes.fixed.items():
        blocked = classes.blocked.get(root, set())
        for member in classes.members[root]:
            form = classes.shapes[member], classes.dims[member]
            if not blocked.isdisjoint(layout) or not is_possible(*form, layout, fixed.mesh.shape):
                raise _torn(classes, fixed, root, member)


def _torn(classes: TensorClasses, fixed: FixedLayouts, one: str, other: str) -> InfeasibleError:
    members = classes.members[classes.root[one]]
    state = [name for name in (one, other, *members) if name in fixed.layouts]
    words = " and ".join(
        f"{shown(name)} as ({', '.join(placements(fixed.layouts[name]))})"
        for name in list(dict.fromkeys(state))[:2]
    )
    return InfeasibleError(
        f"state lies cut, {words}, but {shown(one)} and {shown(other)} are of one storage that "
        "the step writes, and have to be cut alike: no cut leaves the state where it is.\nPlan "
        "this step first and keep its state for the other one.",
        details={"state": state[:2], "tensors": [one, other]},
    )

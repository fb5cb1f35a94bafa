"""Guards on tensors among an optimizer's hyperparameters, `Adam(lr=torch.tensor(0.01))`.

Problem: numbers in `param_groups` are read at each call, and tensors are sources of the graph.
torch leaves one tensor in the defaults and in every group: it is one source, whichever of these
places is given another tensor later.

Idea: a tensor that several places hold is guarded by identity. Of any other the present one is read
at each call, so only its shape and type are guarded.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.user_step.item_guards import ItemGuard
from pardnn.backends.torch.user_step.object_graph import dotted


def tensors_of_groups(
    path: str, optimizer: torch.optim.Optimizer
) -> tuple[list[ItemGuard], list[tuple[str, Callable[[], Any]]]]:
    """Return guards on the tensors of all groups: on which they are, and on what kind they are.

    Args:
        path: Dotted path to the optimizer.
        optimizer: Of the step.
    """
    named = {f"{path}.param_groups.{i}": g for i, g in enumerate(optimizer.param_groups)}
    defaults = getattr(optimizer, "defaults", {})  # a wrapper may not have called `__init__`
    held = [*defaults.values(), *(x for g in named.values() for x in g.values())]
    count = Counter(id(value) for value in held if isinstance(value, torch.Tensor))
    guards, kinds = [], []
    for name, group in named.items():
        keys = [key for key, value in group.items() if isinstance(value, torch.Tensor)]
        shared = [key for key in keys if count[id(group[key])] > 1]
        guards.append(ItemGuard(name, group, ["params", *shared]))
        kinds += [(dotted(name, k), functools.partial(_kind_at, group, k)) for k in keys]
    return guards, kinds


def _kind_at(group: Mapping[str, Any], key: str) -> Any:
    """Return what a graph takes for granted of a tensor in a group; other values themselves."""
    value = group.get(key)
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.device, value.requires_grad

"""Optimizer state in dictionaries that a step has replaced by others.

Problem: `optimizer.state.clear()`, `optimizer.state.pop(p)` and `optimizer.state = {}` drop the
dictionaries in which capture has put placeholders, and the optimizer makes new ones. The old ones
have not changed, so the step would continue to train with the state that it has dropped.

Idea: follow the path to each state again after the step. The tensor found there is the new state;
ranks write it to where the state was.

Complexity: O(objects that the step reaches).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pardnn.backends.torch.capture.refusals.changed_state import removed_state
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import GlobalName
from pardnn.backends.torch.user_step.sources import sources_of

Contents = Sequence[tuple[str, Any, Any]]


def follow_replaced(trace: StepTrace, before: ObjectGraph, after: ObjectGraph) -> Contents:
    """Make the sources of a trace follow states to where the step has left them.

    Args:
        trace: The trace of the step; the slots of its sources are replaced.
        before: The object graph before the step.
        after: The object graph after it.

    Returns:
        `before.contents`, with the new dictionaries in place of those that were replaced.

    Raises:
        UnsupportedError: E804, if the step leaves nothing in the place of a state.
    """
    gone = [s for s in trace.sources.values() if s.kind == "state" and _is_gone(s.slots, after)]
    if gone:
        found = {source.name: source for source in sources_of(after, ())}
        for source in gone:
            if source.name not in found:
                raise removed_state(source.name)
            trace.sources[source.name] = replace(source, slots=found[source.name].slots)
    now = {name: holder for name, holder, _ in after.contents if _is_of_optimizer(name)}
    contents: list[tuple[str, Any, Any]] = []
    for name, holder, then in before.contents:
        if _is_of_optimizer(name) and not _is_held(holder, after):
            holder = now.get(name, holder)
        contents.append((name, holder, then))
    return contents


def _is_gone(slots: Sequence[Any], after: ObjectGraph) -> bool:
    return bool(slots) and not any(_is_held(slot.holder, after) for slot in slots)


def _is_held(holder: Any, after: ObjectGraph) -> bool:
    return isinstance(holder, types.CellType | GlobalName) or id(holder) in after.seen


def _is_of_optimizer(name: str) -> bool:
    """Whether a path leads through a tensor as key, or into the groups of an optimizer."""
    return "<" in name or ".param_groups" in f".{name}"

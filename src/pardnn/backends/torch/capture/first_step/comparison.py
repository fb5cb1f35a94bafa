"""Whether the first step does the same as every later one.

Problem: the graph is the step that repeats, and it also runs the first step, from the initial
states. Some first steps do something else: ADOPT only squares the first gradient; a model that
builds a mask may scale its input in the same branch. No initial values would make the repeating
calls compute that.

Idea: everything that both leave and return gets a number by how it was computed (`value_numbers`),
and these numbers must agree: for loss, parameters, states, results, numbers, prints and the state
of the generator.

Complexity: O(calls).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from pardnn.backends.torch.capture.assigned.contents import Leaf
from pardnn.backends.torch.capture.first_step.numbering import Numbering
from pardnn.backends.torch.capture.first_step.value_numbers import NumberedTrace
from pardnn.backends.torch.capture.numbers.effects import told_numbers
from pardnn.backends.torch.capture.numbers.failing_way import of_a_check
from pardnn.backends.torch.capture.numbers.first_numbers import IN_A_CONTAINER, Numbers
from pardnn.backends.torch.capture.refusals.first_step import (
    irregular_initial_state,
    leaves_once,
    takes_another_way,
)
from pardnn.backends.torch.capture.restore import is_arithmetic
from pardnn.backends.torch.capture.result import structured
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.errors import UnsupportedError

#: Marks the names of what an optimizer holds for a parameter.
_OF_STATE = ".state."


def check_carried(trace: StepTrace, irregular: Mapping[str, str], left: Collection[str]) -> None:
    """Reject a step whose first call makes states for another path, as one chosen by a count.

    Args:
        trace: The trace of the step that repeats, from the first values.
        irregular: Why states have no first value, by name.
        left: Names of tensors that its graph does not carry on.

    Raises:
        UnsupportedError: E806.
    """
    states = {name for name, source in trace.sources.items() if source.kind == "state"}
    lost = sorted(states.intersection(irregular, left))
    if lost and trace.tracer.scalars.conditions:
        raise irregular_initial_state(lost[0], irregular[lost[0]])


def first_difference(
    first: StepTrace, trace: StepTrace, irregular: Collection[str], numbers: Numbers
) -> UnsupportedError | None:
    """Return E806 if the first step cannot run like the later ones; None if it can.

    The objects of the step are as `trace` left them.

    Args:
        first: Trace of the first step.
        trace: The trace of the step that repeats, from the first values.
        irregular: Names of states without a first value, which get another error.
        numbers: The numbers that objects hold before and after the first step.
    """
    if left := _left_once(first, trace, numbers):
        return leaves_once(min(left))
    if nested := numbers.within & trace.changed.keys():
        return irregular_initial_state(min(nested), IN_A_CONTAINER)
    numbering = Numbering()
    starts = {
        name: (value.call.arguments or {})["initial"]
        for name, value in trace.values.items()
        if "initial" in (value.call.arguments or {}) and name not in first.values
    }
    one, other = NumberedTrace(first, numbering, {}), NumberedTrace(trace, numbering, starts)
    mine, its = dict(_outcomes(first, one)), dict(_outcomes(trace, other))
    its |= {
        f"tensor {name}": other.of(source.get())
        for name, source in trace.sources.items()
        if isinstance(source.get(), torch.Tensor)
        and not (name in irregular or _is_within(name, trace.assigned))
    }
    mine |= (filled := _filled_at_first(first, one))
    its |= {name: x for name, x in _filled(trace, other, first.filled).items() if name in filled}
    mine |= {f"tensor {n}": one.of_value(v) for n, v in first.left.items() if f"tensor {n}" in its}
    for name in _counted(first, trace):
        then, now = first.changed.get(name), trace.changed.get(name)
        mine[f"number {name}"] = one.of(then.now) if then else numbers.after.get(name)
        its[f"number {name}"] = other.of(now.now) if now else None
    for name in first.assigned.keys() & trace.assigned.keys():
        contents = first.assigned[name].content, trace.assigned[name].content
        mine[f"left {name}"] = _with_leaves(contents[0], one)
        its[f"left {name}"] = _with_leaves(contents[1], other)
    changed = [name for name in (*its, *mine) if its.get(name) != mine.get(name)]
    return takes_another_way(_differing(one, other)) if changed else None


def _is_within(name: str, places: Collection[str]) -> bool:
    """Whether a place, or a container around it, is among some: a new list has other items."""
    return any(f"{name}.".startswith(f"{each}.") for each in places)


def _left_once(first: StepTrace, trace: StepTrace, numbers: Numbers) -> set[str]:
    """Return what only the first step leaves in optimizer state: a flag, constant or text.

    No graph of the repeating step would leave it, and one captured later, say for another batch
    shape, would start as the first step did. Flags elsewhere say that hooks or caches exist, which
    a graph of the first step alone would not leave.
    """
    made = {each for each in numbers.after.keys() - numbers.before.keys() if _OF_STATE in each}
    made |= numbers.texts.keys()
    return made - trace.changed.keys() - first.assigned.keys() - trace.assigned.keys()


def _outcomes(trace: StepTrace, numbered: NumberedTrace) -> Iterator[tuple[str, Any]]:
    """Yield by name what a step returns, outputs and leaves, except tensors of sources."""
    yield "result", _with_numbers(structured(trace.result, None, numbered.of, trace.held))
    yield "generator", numbered.generator
    told = [each for each in trace.effects.noted if not {"call", "no_nan"} & each.keys()]
    yield "told", told_numbers(told, numbered.of_value)


def _counted(first: StepTrace, trace: StepTrace) -> set[str]:
    """Return the names of numbers that either step changes by arithmetic."""
    changed = (*first.changed.items(), *trace.changed.items())
    return {name for name, change in changed if is_arithmetic(change)}


def _filled_at_first(first: StepTrace, numbered: NumberedTrace) -> dict[str, set[str]]:
    """Return the numbers that the first step puts into each container, if they are known."""
    found: dict[str, set[str]] = {}
    for name, added in first.filled.items():
        leaves = set() if added is None else _leaves(added, numbered)
        found.setdefault(_outermost(name, first.filled), set()).update(leaves)
    untold = {_outermost(name, first.filled) for name, x in first.filled.items() if x is None}
    return {f"filled {name}": x for name, x in found.items() if name not in untold}


def _outermost(name: str, names: Collection[str]) -> str:
    """Return the outermost container around one: its recorder gets what both are given."""
    return min((n for n in names if name.startswith(f"{n}.")), key=len, default=name)


def _filled(
    trace: StepTrace, numbered: NumberedTrace, names: Collection[str]
) -> dict[str, set[str]]:
    """Return the numbers that a step puts into each container that it only fills.

    Numbers of a failing check do not count, since the first trace has not run it.
    """
    found: dict[str, dict[Any, set[str]]] = {}
    for number, effect in enumerate(trace.effects.noted):
        if "call" not in effect or of_a_check(effect):
            continue
        name, keys, method, args = effect["call"]
        leaves = set[str]().union(*(_told_leaves(each, numbered) for each in (*keys, *args)))
        if method == "clear":
            found[name] = {}
        # What is set twice under one key is there once.
        place = (str(keys), str(args[0])) if method == "__setitem__" else number
        found.setdefault(name, {})[place] = leaves
    told: dict[str, set[str]] = {}
    for name, each in found.items():
        told.setdefault(f"filled {_outermost(name, names)}", set()).update(*each.values())
    return told


def _told_leaves(content: Any, numbered: NumberedTrace) -> set[str]:
    """Return the numbers in effects; texts may hold marks of numbers."""
    if isinstance(content, list):
        return {leaf for item in content for leaf in _told_leaves(item, numbered)}
    ((kind, held),) = content.items()
    if kind in ("list", "tuple", "size", "dict"):
        return _told_leaves(held, numbered)
    if kind == "text":
        return set()
    return {str(numbered.of_value(held) if kind == "kept" else held)}


def _leaves(data: Any, numbered: NumberedTrace) -> set[str]:
    """Return the numbers in containers."""
    if isinstance(data, dict):
        data = [*data.items()]
    if isinstance(data, list | tuple):
        return {leaf for item in data for leaf in _leaves(item, numbered)}
    return set() if isinstance(data, str) else {str(numbered.of(data))}


def _with_leaves(content: Any, numbered: NumberedTrace) -> Any:
    """Return a content with numbers for its leaves; literals and symbols compare equal."""
    if isinstance(content, Leaf):
        return {"value": numbered.of(content.value)}
    if isinstance(content, list):
        return [_with_leaves(item, numbered) for item in content]
    if isinstance(content, dict):
        return {key: _with_leaves(item, numbered) for key, item in content.items()}
    return content


def _with_numbers(data: Any) -> Any:
    """Return a structure in which literals and symbols of the same number are equal."""
    if isinstance(data, list):
        return [_with_numbers(item) for item in data]
    if isinstance(data, dict):
        return {"value" if k == "kept" else k: _with_numbers(x) for k, x in data.items()}
    return data


def _differing(one: NumberedTrace, other: NumberedTrace) -> str | None:
    """Return the line of the first call of the later steps that the first one does not make."""
    known = {*one.made.values()}
    calls: Iterator[Call] = (call for call, made in other.made.items() if made not in known)
    return next((call.source for call in calls if call.source), None)

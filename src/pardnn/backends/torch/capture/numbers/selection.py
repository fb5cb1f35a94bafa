"""Which Python numbers of a step become symbols in a trace, and which stay numbers.

Floats of arguments and optimizer groups are symbols, and so are ints unless Python needs the
number, and numbers of objects that the step changes: these are written back after it.

A number that the first step creates (`state["step"] = 0`) gets the initial value from which the
repeating step computes what the first step left, calls included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pardnn.backends.torch.capture.numbers.containers import OtherUse
from pardnn.backends.torch.capture.numbers.first_numbers import Numbers, guesses_of
from pardnn.backends.torch.capture.numbers.rows import host_rows
from pardnn.backends.torch.capture.numbers.schedules import schedule_numbers
from pardnn.backends.torch.capture.refusals.changed_state import changed_state, number_without_name
from pardnn.backends.torch.capture.refusals.first_step import first_step_differs
from pardnn.backends.torch.capture.restore import Changed, is_arithmetic, is_filled
from pardnn.backends.torch.capture.same_calls import is_part_of
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.ops.host_program import read_program, same_number
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import all_numbers, numbers_by_name
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source
from pardnn.graph.ir import is_in_group


@dataclass(frozen=True)
class Selection:
    """Which numbers are symbols.

    Attributes:
        floats: Whether floats of arguments and groups are.
        ints: Whether ints of arguments and groups are, and numbers of objects.
        frozen: Names of ints that are not symbols, and of floats with one value for the graph.
        held: Names of numbers of objects that are symbols.
        live: Names among `held` of numbers that the step only reads and that change between calls.
        start: Values to trace with, by name, instead of those that the first trace left.
        created: Names among `held` of numbers that the first step creates.
        defaults: What a `defaultdict` or `Counter` gives for numbers that the first step creates.
        tables: Lists and tuples that symbols index; None before any was used as an index.
        decided: Names among those of `held` that stay symbols without `ints`.
        is_first: Whether the first step is traced, which creates states.
    """

    floats: bool = True
    ints: bool = True
    frozen: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()
    start: Mapping[str, Any] = field(default_factory=dict)
    created: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Any] | None = None
    decided: frozenset[str] = frozenset()
    is_first: bool = False

    def sources(
        self, found: Iterable[Source], objects: ObjectGraph, names: Mapping[int, str]
    ) -> list[Source]:
        """Return the sources of the numbers that become symbols.

        Args:
            found: Sources of the step.
            objects: The object graph of the step.
            names: The names of tensors by id.
        """
        chosen = [source for source in found if self._is_symbol(source)]
        held = self.held if self.ints else self.decided
        places = all_numbers(objects, names) if held else {}
        wanted = sorted((held & places.keys()) - {source.name for source in chosen})
        return chosen + [Source(n, "input", (places[n][0],)) for n in wanted]

    def _is_symbol(self, source: Source) -> bool:
        value = source.get()
        is_int = type(value) is int and self.ints and source.name not in self.frozen
        return is_int or (isinstance(value, float) and self.floats)

    def set_start(self, objects: ObjectGraph, names: Mapping[int, str]) -> None:
        """Put the start values into the places of the numbers.

        Args:
            objects: The object graph of the step.
            names: The names of tensors by id.
        """
        places = numbers_by_name(objects.contents, names)
        for name in self.start.keys() & places.keys():
            places[name][0].set(self.start[name])

    def without_live(self, names: frozenset[str]) -> Selection:
        """Return the selection in which numbers that are only read stay numbers."""
        return replace(self, held=self.held - names, live=self.live - names)

    def plain(self, trace: StepTrace) -> Selection:
        """Return the selection with symbols only for floats and for what data decides.

        Args:
            trace: Made with this selection.
        """
        nodes = {name: node_of(each.now) for name, each in trace.changed.items()}
        decided = self.held & {n for n, node in nodes.items() if node and node.hint is None}
        return replace(self, ints=False, tables=(), decided=decided)


NO_SYMBOLS = Selection(floats=False, ints=False, is_first=True)
#: The selection of a first step that becomes a graph of its own.
OPENING = Selection(ints=False, is_first=True)


def first_selection(objects: ObjectGraph, numbers: Numbers, live: frozenset[str]) -> Selection:
    """Return the selection with which the repeating step is traced first.

    Args:
        objects: What the step reaches after its first trace.
        numbers: Held before and after that.
        live: Names of numbers of objects that change between calls.
    """
    # A step changes no class and no module.
    shared = live & all_numbers(objects, {}).keys() - numbers.after.keys() if live else live
    read = numbers.unchanged(live) | shared
    return Selection(held=schedule_numbers(objects) | read, live=read, defaults=numbers.defaults)


def narrowed(chosen: Selection, found: Iterable[Source]) -> Selection | None:
    """Return a failed selection without tables, `live` numbers, ints or floats; None without any.

    Floats of an optimizer's settings stay. Its ints go first: SGD's 1 - dampening is left out if 1.
    """
    if chosen.tables:
        return replace(chosen, tables=())
    inputs = [each for each in found if each.kind == "input" and each.name not in chosen.frozen]
    ints = {each.name for each in inputs if type(each.get()) is int}
    if of_groups := {*filter(is_in_group, ints)}:
        return replace(chosen, frozen=chosen.frozen | of_groups)
    if chosen.live:
        others = frozenset(name for name in chosen.frozen if not is_in_group(name))
        return replace(chosen.without_live(chosen.live), frozen=others)
    floats = {each.name for each in inputs if isinstance(each.get(), float)}
    fixed = ints or {name for name in floats if not is_in_group(name)}
    return replace(chosen, frozen=chosen.frozen | fixed) if fixed else None


def restarted(chosen: Selection, numbers: Numbers) -> Selection | None:
    """Return the selection in which numbers start from before the first step; None if all do.

    An example is `if n > self.n: self.n, self.table = n, build(n)`: the table is put back as well.
    """
    reset = numbers.replaced(chosen.held)
    return _started(chosen, reset) if reset else None


def _started(chosen: Selection, start: Mapping[str, Any]) -> Selection:
    """Return the selection in which more numbers are symbols, with their first values."""
    return replace(chosen, held=chosen.held | start.keys(), start={**chosen.start, **start})


def reconsidered(
    chosen: Selection, trace: StepTrace, first: StepTrace, numbers: Numbers
) -> Selection | None:
    """Return another selection that a trace requires; None if this one is right.

    Args:
        chosen: What the trace was made with.
        trace: The trace of the repeating step.
        first: That of the first step.
        numbers: Held before and after the first step.

    Raises:
        OtherUse: The selection is right, and the first step alone fills a container.
        UnsupportedError: E804, if the step changes Python values in ways that no symbol follows.
    """
    found = _other(chosen, trace, first, numbers)
    if found is None and trace.unfilled:
        raise OtherUse(trace.unfilled[0])
    return found


def _other(
    chosen: Selection, trace: StepTrace, first: StepTrace, numbers: Numbers
) -> Selection | None:
    """Return another selection, see `reconsidered`."""
    if [*map(id, trace.tables)] != [*map(id, chosen.tables or ())]:
        return replace(chosen, tables=trace.tables)
    if fixed := _needed(trace) & chosen.live:
        return chosen.without_live(fixed)
    needed = _needed_ints(trace) - chosen.held
    if needed:
        return replace(chosen, frozen=chosen.frozen | needed)
    if reset := _reset_numbers(chosen, trace, numbers):
        return _started(chosen, reset)
    written = written_numbers(trace, chosen)
    changed = {name: each for name, each in written.items() if not is_filled(each)}
    others = [name for name in changed if name not in trace.sources]
    unknown = [n for n in others if is_arithmetic(changed[n]) and n in numbers.after]
    # A step may depend on a count that is not yet a symbol: `if self.n % 100 == 0: ...`.
    if others and not unknown:
        raise changed_state([*changed])
    start = {name: numbers.before[name] for name in changed if name in numbers.before}
    if unknown:
        return replace(chosen, held=chosen.held | {*unknown}, start={**chosen.start, **start})
    plain = [
        n
        for n, each in changed.items()
        if node_of(each.now) is None and each.now not in (0, 1)
        and not same_number(each.now, numbers.after.get(n))
    ]  # fmt: skip
    if plain:  # a number may restart, but what differs in each trace would be frozen
        raise changed_state(plain)
    created = frozenset(name for name in changed if name not in numbers.before)
    if {*changed} <= chosen.start.keys():
        if created and not _agrees(trace, first):
            raise first_step_differs(sorted(created))
        return None
    start |= _first_values(trace, changed, sorted(created), start, numbers)
    return replace(chosen, start={**chosen.start, **start}, created=created)


def _reset_numbers(chosen: Selection, trace: StepTrace, numbers: Numbers) -> dict[str, Any]:
    """Return the first values of numbers that the first step sets and this one does not.

    `self.total = 0.0` changes nothing in a trace that starts from what the first step left.
    """
    return numbers.replaced({*trace.changed, *trace.sources, *chosen.held})


def check_constants(one: StepTrace, other: StepTrace) -> None:
    """Reject a step that leaves a different plain number in each trace, as from a clock.

    Raises:
        UnsupportedError: E804.
    """
    for name, change in one.changed.items():
        if is_arithmetic(change) and node_of(change.now) is None:
            again = other.changed.get(name, change).now
            if node_of(again) is None and again != change.now:
                raise changed_state([name])


def tell_numbers(trace: StepTrace, chosen: Selection) -> None:
    """Note the numbers of objects that data changes: `self.total += loss.item()`.

    Args:
        trace: The trace of the step that repeats.
        chosen: What it was made with.
    """
    overwritten = _overwritten(trace)
    if lost := [name for name, change in overwritten.items() if not is_arithmetic(change)]:
        raise changed_state(lost)
    told = {n: each for n, each in overwritten.items() if node_of(each.now) is not None}
    for name, change in (written_numbers(trace, chosen) | told).items():
        if _hint(change) is None:
            trace.effects.changed(name, change.now)


def _agrees(trace: StepTrace, first: StepTrace) -> bool:
    """Whether the repeating step, from the first values, gives the first step's numbers."""
    tracer = trace.tracer
    return is_part_of(tracer.calls, tracer.scalars.hints, first.tracer.calls)


def _hint(change: Changed) -> Any:
    """Return the new value in the trace; None where no symbol follows it."""
    node = node_of(change.now)
    return None if node is None else node.hint


def _needed(trace: StepTrace) -> frozenset[str]:
    """Return the names of numbers whose value Python itself needed."""
    guards = trace.tracer.scalars.guards
    return frozenset(n for n, v in trace.values.items() if guards.get(v) == "exact")


def _needed_ints(trace: StepTrace) -> frozenset[str]:
    """Return the names of ints among them that ops read."""
    exact = {name for name in _needed(trace) if trace.values[name].kind is int}
    read = {value for call in trace.tracer.calls for value in call.inputs} if exact else set()
    return frozenset(name for name in exact if trace.values[name] in read)


def written_numbers(trace: StepTrace, chosen: Selection) -> dict[str, Changed]:
    """Return the plain values that the step changes, by name; see `_overwritten`.

    Args:
        trace: The trace of the step.
        chosen: What it was made with.
    """
    return {
        name: change
        for name, change in trace.changed.items()
        if name in chosen.held
        or not (name in trace.assigned or _is_overwritten_before_read(trace, name))
    }


def _overwritten(trace: StepTrace) -> dict[str, Changed]:
    """Return the settings of optimizers, such as `group["lr"]`, that a step sets and never reads.

    This graph never reads what the last step left there, but another graph or a person may.
    """
    return {
        name: change
        for name, change in trace.changed.items()
        if name not in trace.assigned and _is_overwritten_before_read(trace, name)
    }


def _is_overwritten_before_read(trace: StepTrace, name: str) -> bool:
    value = trace.values.get(name)
    scalars = trace.tracer.scalars
    if value is None or value.kind is None or value in scalars.guards:
        return False
    return not any(value in call.inputs for call in trace.tracer.calls)


def _first_values(
    trace: StepTrace,
    changed: Mapping[str, Changed],
    created: list[str],
    start: Mapping[str, Any],
    numbers: Numbers,
) -> dict[str, Any]:
    """Return the first value of each number that the first step creates.

    Raises:
        UnsupportedError: E806, if none is found.
    """
    new_values = {name: each.now for name, each in changed.items() if _hint(each) is not None}
    program = read_program(host_rows(trace.tracer.scalars, [], new_values, {}))
    hints = trace.tracer.scalars.hints
    known = {name: hints[trace.values[name]] for name in program.inputs} | start
    if any(_hint(changed[name]) is None for name in created):
        raise changed_state(created)
    guesses = {name: guesses_of(numbers.after[name], _hint(changed[name])) for name in created}
    found = {name: guess[0] for name, guess in guesses.items() if name in known}

    def is_right(name: str) -> bool:
        values = program.run(known | found)
        return same_number(program.written(values)[name], numbers.after[name])

    values = program.written(program.run(known | found))
    wrong = [name for name in found if not same_number(values[name], numbers.after[name])]
    for name in wrong:
        for guess in guesses[name]:
            found[name] = guess
            if is_right(name):
                break
    if any(not is_right(name) for name in wrong):
        raise first_step_differs(wrong)
    return {name: found.get(name, numbers.after[name]) for name in created}


def _check_keys(trace: StepTrace, created: Iterable[str]) -> None:
    """Reject numbers that the first step creates in places without a name.

    Raises:
        UnsupportedError: E804.
    """
    for name in sorted(created):
        slot = trace.changed[name].slot if name in trace.changed else None
        if slot is not None and not isinstance(slot.key, str):
            raise number_without_name(name, slot.key)


def granted(trace: StepTrace, chosen: Selection) -> dict[str, Any]:
    """Return the values on which the graph relies and those that it writes, for its loss op.

    Args:
        trace: The trace of the step that repeats.
        chosen: What it was made with.
    """
    scalars = trace.tracer.scalars
    exact = {value for value, guard in scalars.guards.items() if guard == "exact"}
    live = {n for n, v in trace.values.items() if v.kind is int and v not in exact}
    own = {trace.values[name] for name in (live | chosen.held) & trace.values.keys()}
    written = {n: c for n, c in written_numbers(trace, chosen).items() if _hint(c) is not None}
    _check_keys(trace, {*chosen.created, *chosen.defaults})
    written |= {
        name: change
        for name, change in _overwritten(trace).items()
        if _hint(change) is not None or node_of(change.now) is None
    }
    host = host_rows(
        scalars,
        [value for value in scalars.guards if value in own],
        {name: change.now for name, change in written.items()},
        {name: chosen.start[name] for name in sorted(chosen.created)} | dict(chosen.defaults),
    )
    read = {value for call in trace.tracer.calls for value in call.inputs}
    read.update(scalars.guards, scalars.conditions)
    # An optimizer setting that no call reads may be read by a first step.
    ours = {n for n in live if trace.values[n] in read or ".param_groups." not in f".{n}"}
    settings = {name: value for name, value in trace.settings.items() if name not in ours}
    unread = sorted(n for n in chosen.live if trace.values[n] not in read)
    notes = {"settings": settings, "host": host, "unread": unread}
    return {name: note for name, note in notes.items() if note}

"""Capture: one training step, exactly as the user wrote it, as a graph of ATen calls.

The step is traced three times over fake tensors, more often where it counts in Python, so nothing
is computed and no tensor data is allocated:

1. To let optimizers create their state, and to create gradients.
2. With new placeholders for every source and with symbols for every number that may change: this
   is the step that repeats, and its trace becomes the graph.
3. To compare: what differs between two traces would be frozen at one of its values.

Then everything is restored: tensors, gradients, optimizer state and its keys, settings, Python
attributes, the state of the random generators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn.backends.torch.capture.assigned.assignments import Assignments, assigns
from pardnn.backends.torch.capture.assigned.key_orders import note_orders
from pardnn.backends.torch.capture.assigned.large_contents import large_contents_read
from pardnn.backends.torch.capture.assigned.repetition import is_repeated
from pardnn.backends.torch.capture.choices.flags import Flags
from pardnn.backends.torch.capture.fake_cache import FakeCache
from pardnn.backends.torch.capture.first_step.comparison import check_carried, first_difference
from pardnn.backends.torch.capture.first_step.first_use import (
    NOTHING_KEPT,
    CreatedTensors,
    KeptTensors,
    changed_tensors,
    check_lasting,
    created_tensors,
    without_first_value,
)
from pardnn.backends.torch.capture.first_step.gradients import gradient_names
from pardnn.backends.torch.capture.first_step.opening import (
    NotFollowed,
    created_numbers,
    created_states,
    left_gradients,
)
from pardnn.backends.torch.capture.numbers.class_attributes import class_attributes_restored
from pardnn.backends.torch.capture.numbers.containers import OtherUse
from pardnn.backends.torch.capture.numbers.effects import check_same_effects
from pardnn.backends.torch.capture.numbers.first_numbers import Numbers, numbers_around, put_back
from pardnn.backends.torch.capture.numbers.recorders import Recorders
from pardnn.backends.torch.capture.numbers.schedules import stepped
from pardnn.backends.torch.capture.numbers.selection import (
    NO_SYMBOLS,
    OPENING,
    Selection,
    check_constants,
    first_selection,
    granted,
    reconsidered,
    restarted,
    tell_numbers,
)
from pardnn.backends.torch.capture.placeholders import fake_mode_of
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.changed_state import changed_state, raises_again
from pardnn.backends.torch.capture.restore import is_filled, restore
from pardnn.backends.torch.capture.result import loss_of, named_result, recorded_result
from pardnn.backends.torch.capture.source_updates import (
    left_over,
    ordered_live_calls,
    source_updates,
    tensor_notes,
    uncarried,
)
from pardnn.backends.torch.capture.step_trace import StepTrace, accelerator_of, gradients_of_batch
from pardnn.backends.torch.capture.to_graph import Captured, graph_of, with_contents
from pardnn.backends.torch.capture.trace_checks import (
    as_refused,
    check_objects,
    check_same,
    check_same_twice,
    check_shared_storage,
    check_trains,
    difference,
    is_not_twice,
    shared_sources,
)
from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.backends.torch.capture.traces import Traces
from pardnn.backends.torch.rng.generator import generators_restored
from pardnn.backends.torch.user_step.access import access_allowed
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.sources import (
    WholeOf,
    batch_indices,
    is_whole,
    sources_of,
    tensor_names,
)
from pardnn.errors import PardnnError, UnsupportedError, UserCodeError
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph

#: How often a step is traced until its numbers are settled; each trace tells more of them.
_MAX_TRACES = 10


def capture(step: Callable[..., Any], *args: Any, name: str | None = None) -> Graph:
    """Return the graph of one training step.

    Args:
        step: The user's step; `step(*args)` runs forward, backward and update, and returns the
            loss. It is run three times over fake tensors, never over real ones.
        *args: Models, optimizers and an example batch, real tensors or fake ones.
        name: The name of the graph; the step's own name by default.

    Returns:
        A graph whose source ops have the names of `user_step.sources`. In `arguments`, state that
        does not exist yet has its first value as "initial" (a number, or {"copy_of": source}), and
        numbers that are read at every step have "value" and "guard" (None, "nonzero" or "exact").
        The loss op lists the plain values on which the graph relies as "settings".

    Raises:
        UnsupportedError: E801 to E807, if the step cannot be captured; it names the line.
        UsageError: E201, if the step trains nothing.
        UserCodeError: E110, if the step itself raises.
    """
    return capture_step(step, args, name=name).graph


def capture_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    name: str | None = None,
    whole_of: WholeOf = is_whole,
    must_train: bool = True,
    has_loss: bool = True,
    filled: Collection[str] = (),
    live: Collection[str] = (),
    flags: Collection[str] = (),
    presumed: Collection[str] = (),
) -> Captured:
    """Capture a step, including one whose tensors are sharded over ranks.

    Args:
        step: The user's step.
        args: Its arguments.
        name: The name of the graph.
        whole_of: Returns the geometry of the whole tensor if a live tensor is a shard.
        must_train: Whether it must change a parameter, which other paths of the step need not.
        has_loss: Whether it must return a loss; an evaluation need not.
        filled: Names of containers that other paths of the same step only fill.
        live: Names of numbers of objects that change between calls; inputs if it reads them.
        flags: Names of buffers that other paths of the same step treat as constants.
        presumed: Names of parameters that are taken to have a gradient, although it is None.

    Raises:
        PardnnError: As `capture` does.
    """
    arguments = list(args)
    original = walk_objects(step, arguments)
    batch, recorders = batch_indices(args), Recorders(original, filled)
    check_objects(original, batch, trains=has_loss)
    mode = fake_mode_of(entry.value for entry in original.tensors)
    taken = Flags(original, batch, whole_of, flags)
    traces = Traces(step, arguments, batch, mode, FakeCache(mode), whole_of, recorders, taken)
    traces.presume(presumed)
    session = _Session(traces, original, must_train, has_loss, frozenset(live))
    with (
        generators_restored(), collector_paused(), access_allowed(),
        class_attributes_restored(original),
    ):  # fmt: skip
        try:
            return session.noted(session.captured(name or getattr(step, "__name__", "step")))
        except PardnnError as error:
            raise as_refused(error)  # noqa: B904 (it is that error, or stands for it)
        finally:
            traces.note_caches()  # also of a first step that alone calls a cached function
            traces.clear_caches()
            restore(original.contents)


@dataclass(repr=False)
class _Session:
    """One capture.

    Attributes:
        traces: The traces of the step.
        original: What the objects of the step held before the first trace.
        must_train: Whether the step must change a parameter.
        has_loss: Whether it must return a loss.
        live: Names of numbers of objects that change between calls.
        first: Trace of the first step.
        repeated: Traces the step that was captured again, and such a trace and where it began.
    """

    traces: Traces
    original: ObjectGraph
    must_train: bool
    has_loss: bool
    live: frozenset[str]
    first: StepTrace | None = None
    repeated: Any = None

    def captured(self, name: str) -> Captured:
        """Return the step as a graph; try again if a container is not only filled."""
        while True:
            self.traces.recorders.begin()
            try:
                return self._captured(name)
            except (OtherUse, UnsupportedError, UserCodeError) as error:
                if isinstance(error, PardnnError) and error.code == "E806":
                    try:
                        return self._opening(name)
                    except (NotFollowed, UnsupportedError, UserCodeError) as other:
                        error = other if is_not_twice(other) else error
                    restore(self.original.contents)
                self._learn(error)
            self.traces.note_caches()
            restore(self.original.contents)

    def _learn(self, error: OtherUse | PardnnError) -> None:
        """Learn from an error how to trace the step differently; raise it if nothing is left."""
        try:
            if not self.traces.forms.learn(error):
                self.traces.recorders.learn(error)
        except UnsupportedError as refused:
            self.traces.flags.learn(refused)
        except UserCodeError as raised:
            locator = None if self.first is None else self.first.tracer.locator
            raise raises_again(raised, locator) from raised.__cause__

    def _captured(self, name: str) -> Captured:
        """Trace the step three times and return the second trace as a graph."""
        sharing = shared_sources(sources_of(self.original, self.traces.batch), self.traces.whole_of)
        first, settled, numbers, (initial, irregular, constants), assignments = self._first_step()
        chosen = first_selection(settled, numbers, self.live)
        for _ in range(_MAX_TRACES):
            try:
                trace = self.traces.trace(chosen, initial=initial, constants=constants)
                constants = constants.without(changed := changed_tensors(trace))
                if assignments.unkeep([*changed, *trace.assigned], settled) or changed:
                    restore(settled.contents)
                    continue
                if assignments.unmake(settled, trace) or assignments.settle(settled, trace):
                    continue
                other = reconsidered(chosen, trace, first, numbers)
                if other is None and (left := left_over(first, trace)):
                    self.traces.carried |= {name: self.traces.held[name] for name in left}
                    other = chosen
                elif other is None:
                    again = functools.partial(self._again, chosen, initial, constants)
                    if not assignments.is_settled(trace, settled, again):
                        continue
                    irregular = without_first_value(first, trace, initial, irregular)
                    difference = first_difference(first, trace, irregular, numbers)
                    if difference and assignments.unkeep(constants.values, settled):
                        constants = NOTHING_KEPT
                        continue
                    assignments.tell(trace)
                    found = self._finished(name, trace, first, chosen, irregular, sharing)
                    assignments.check_resized(trace)
                    self._check_repeatable(trace, chosen, initial, constants, settled, difference)
                    return found._replace(made_anew=constants.origins(trace))
            except (UnsupportedError, UserCodeError) as error:
                if isinstance(error, UserCodeError) and assignments.settle(settled):
                    continue
                restore(settled.contents)
                other = restarted(chosen, numbers) if isinstance(error, UserCodeError) else None
                other = other or self.traces.otherwise(error, chosen, first)
            chosen = other
            restore(settled.contents)
        raise changed_state(sorted(chosen.held))

    def _finished(
        self, name: str, trace: StepTrace, first: StepTrace, chosen: Selection,
        irregular: dict[str, str], sharing: dict[str, list[str]],
    ) -> Captured:  # fmt: skip
        """Return a trace as a graph, see `_assembled`, and what it does not carry."""
        graph = self._assembled(name, trace, first, chosen, irregular, sharing)
        left = uncarried(trace, first, graph)
        check_carried(trace, irregular, left)
        self.traces.keep_cached()
        found = gradients_of_batch(trace), trace.tracer.constants(), self.traces.flags.taken
        gradients = gradient_names(trace, first, graph, left)
        return Captured(graph, tuple(left), gradients, {}, chosen.live, *found)

    def _again(
        self, chosen: Selection, initial: dict[str, Any], constants: KeptTensors, trace: StepTrace
    ) -> tuple[StepTrace | None, bool]:
        """Trace the step again, for `Assignments`."""
        try:
            again = self.traces.trace(chosen, initial=initial, constants=constants, locate=False)
        except (OtherUse, Exception):  # C code that meets a stand-in may raise anything
            return None, False
        return again, is_repeated(trace, again)

    def _opening(self, name: str) -> Captured:
        """Return the first step as a graph of its own: the later ones do something else.

        Raises:
            NotFollowed: It leaves more than a graph can.
        """
        traces = self.traces
        live, batch = sources_of(self.original, traces.batch), traces.batch
        sharing = shared_sources(live, traces.whole_of)
        restore(self.original.contents)
        again = traces.trace(OPENING, locate=False)
        self.repeated = functools.partial(traces.trace, OPENING, locate=False), again, self.original
        restore(self.original.contents)
        trace = traces.trace(OPENING)
        check_same_twice(trace, again)
        if self.first is not None and difference(trace, self.first):
            raise NotFollowed  # state that no walk reaches is not restored, and would leak
        if trace.effects.texts.untold is not None:
            raise unsupported.text_of_a_number(*trace.effects.texts.untold)
        after = traces.objects()
        found = sources_of(after, batch)
        chosen = created_numbers(trace, found, after, self.original, live)
        note_orders(trace.effects.noted, trace.orders, {})
        states = created_states(trace, found, after, {source.name for source in live})
        graph = self._assembled(name, trace, None, chosen, {}, sharing, states)
        left = left_gradients(found, graph)
        gradients = gradient_names(trace, None, graph, left)
        return Captured(graph, tuple(left), gradients, constants=trace.tracer.constants())

    def _first_step(self) -> tuple[StepTrace, ObjectGraph, Numbers, CreatedTensors, Assignments]:
        """Trace the first step; return its trace, what the objects then hold, and what it made."""
        live = sources_of(self.original, self.traces.batch)
        before = self.original, tensor_names(live)
        first = self.first = self.traces.trace(NO_SYMBOLS, locate=False)
        first.filled = self.traces.recorders.take_filled(first.stood_for)
        created = created_tensors(first, self.traces.objects(), self.traces.batch, live)
        defaults = put_back(self.original.contents)
        kept = {*created[0], *created[2].values}
        assignments, settled = Assignments(first, kept, self.traces.objects), self.traces.objects()
        after = settled, tensor_names(sources_of(settled, self.traces.batch))
        return first, settled, numbers_around(before, after, defaults), created, assignments

    def _assembled(
        self, name: str, trace: StepTrace, first: StepTrace | None, chosen: Selection,
        irregular: dict[str, str], sharing: dict[str, list[str]], states: Sequence[Call] = (),
    ) -> Graph:  # fmt: skip
        """Return a trace as a graph; the objects of the step are as the trace left them.

        Args:
            name: The name of the graph.
            trace: The trace of the step that repeats.
            first: That of the first step; None of a first step that is a graph of its own.
            chosen: What it was made with.
            irregular: Why states have no first value, by name.
            sharing: Sources that share a storage with others, by name.
            states: Calls that fill the states created by the first step.
        """
        returned = loss_of(trace.result, trace.roots) if self.has_loss else None
        loss, result, copies = recorded_result(trace.tracer, trace.result, returned, trace.held)
        updated = source_updates(trace, irregular, is_opening=first is None)
        tell_numbers(trace, chosen)
        outputs = [*updated, *states, *copies, *trace.effects.calls]
        if self.must_train and first is not None:
            check_trains(trace)
        trace.choices.check([loss])
        held, trains = chosen.held, self.has_loss
        calls = ordered_live_calls(trace, loss, outputs, irregular, held, sharing, trains=trains)
        check_shared_storage(trace, calls, sharing)
        taken = granted(trace, chosen) | stepped(trace.schedules) | tensor_notes(trace, first)
        taken |= {"effects": named_result(told)} if (told := trace.effects.noted) else {}
        taken |= {"opening": True} if first is None else {}
        return graph_of(name, calls, loss, taken, accelerator_of(trace), named_result(result))

    def _check_repeatable(
        self, trace: StepTrace, chosen: Selection, initial: dict[str, Any],
        constants: KeptTensors, settled: ObjectGraph, difference: UnsupportedError | None,
    ) -> None:  # fmt: skip
        """Reject a step whose next trace with plain ints differs, or whose first trace does."""
        if assigns(trace) or chosen.held or any(map(is_filled, trace.changed.values())):
            restore(settled.contents)
        plain, traces = chosen.plain(trace), self.traces
        kept: dict[str, Any] = {"initial": initial, "constants": constants, "locate": False}
        repeat = functools.partial(traces.trace, plain, **kept)
        again = repeat()
        check_same(trace, again)
        check_constants(trace, again)
        check_same_effects(trace.effects, again.effects)
        if difference is not None:
            raise difference
        self.repeated = repeat, again, settled
        restore(self.original.contents)
        check_lasting(constants, functools.partial(traces.trace, chosen), traces.sources)

    def noted(self, found: Captured) -> Captured:
        """Return what was captured, with a note of the large contents that the step reads."""
        its = self.traces.step, self.traces.args, self.traces.batch
        read = large_contents_read(*its, *self.repeated)
        return found._replace(graph=with_contents(found.graph, read))

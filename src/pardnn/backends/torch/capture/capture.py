"""Capture: one training step, exactly as the user wrote it, as a graph of ATen calls.

The step is traced three times over fake tensors, more often where it counts in Python, so nothing
is computed and no tensor data is allocated:

1. To let optimizers create their state and gradients come into being.
2. With new placeholders for every source and with symbols for every number that may change: this
   is the step that repeats, and its trace becomes the graph.
3. To compare: what differs between two traces would be frozen at one of its values.

Then everything is restored: tensors, gradients, optimizer state and its keys, settings, Python
attributes, the state of the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import fake_tensor

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.fake_cache import FakeCache
from pardnn.backends.torch.capture.first_step.comparison import check_first_step
from pardnn.backends.torch.capture.first_step.first_use import (
    NOTHING_KEPT,
    CreatedTensors,
    KeptTensors,
    caches_with_fakes,
    changed_tensors,
    created_tensors,
    is_made_of_constants,
    new_caches,
    written_at_first,
)
from pardnn.backends.torch.capture.numbers.assigned import Assignments, assigns
from pardnn.backends.torch.capture.numbers.class_attributes import class_attributes_restored
from pardnn.backends.torch.capture.numbers.containers import OtherUse
from pardnn.backends.torch.capture.numbers.effects import check_same_effects
from pardnn.backends.torch.capture.numbers.questions import Check, NoCheck, Questions
from pardnn.backends.torch.capture.numbers.recorders import Recorders
from pardnn.backends.torch.capture.numbers.schedules import schedule_numbers, stepped
from pardnn.backends.torch.capture.numbers.selection import (
    NO_SYMBOLS,
    Numbers,
    Selection,
    check_constants,
    granted,
    put_back_data,
    put_defaults,
    reconsidered,
    tell_numbers,
    without_ints,
)
from pardnn.backends.torch.capture.placeholders import (
    fake_mode_of,
    insert_gradient_placeholders,
    insert_placeholders,
)
from pardnn.backends.torch.capture.restore import is_filled, restore
from pardnn.backends.torch.capture.result import loss_of, named_result, recorded_result
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.source_updates import (
    Captured,
    StepTrace,
    accelerator_of,
    check_same,
    check_shared_storage,
    check_trains,
    left_over,
    ordered_live_calls,
    shared_sources,
    source_updates,
    symbols_inserted,
    uncarried,
)
from pardnn.backends.torch.capture.to_graph import graph_of
from pardnn.backends.torch.capture.traced_run import run_noted
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.rng.generator import generators_restored
from pardnn.backends.torch.user_step.access import access_allowed
from pardnn.backends.torch.user_step.held_numbers import values_by_name
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.sources import (
    WholeOf,
    batch_indices,
    gradient_source,
    held_gradients,
    is_whole,
    outside,
    settings_of,
    sources_of,
    tensor_names,
)
from pardnn.errors import PardnnError, UnsupportedError, UserCodeError
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph

#: A step is traced with other numbers as symbols until the trace agrees; each time more are known.
_MAX_TRACES = 10


def capture(step: Callable[..., Any], *args: Any, name: str | None = None) -> Graph:
    """Return the graph of one training step.

    Args:
        step: The user's step; `step(*args)` runs forward, backward and update, and returns the
            loss. It is run three times over fake tensors, never over real ones.
        *args: Models, optimizers and an example batch, real tensors or fake ones.
        name: Of the graph; the step's own name by default.

    Returns:
        A graph whose source ops have the names of `user_step.sources`. In `arguments`, state that
        does not exist yet has its first value as "initial" (a number, or {"copy_of": source}), and
        numbers that are read at every step have "value" and "guard" (None, "nonzero" or "exact").
        The loss op lists the plain values that the graph takes for granted as "settings".

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
) -> Captured:
    """Capture a step, also one whose tensors ranks hold in shards.

    Args:
        step: The user's step.
        args: Its arguments.
        name: Of the graph.
        whole_of: Returns the geometry of the whole, where a live tensor is a shard.
        must_train: Whether it must change a parameter; another path of the same step need not.
        has_loss: Whether it must return a loss; an evaluation need not.

    Raises:
        PardnnError: As `capture` does.
    """
    arguments = list(args)
    original = walk_objects(step, arguments)
    scripted = [e.name for e in original.stateful if isinstance(e.value, torch.jit.ScriptModule)]
    if scripted:
        raise unsupported.scripted(scripted[0])
    batch = batch_indices(args)
    mode = fake_mode_of(entry.value for entry in original.tensors)
    cache = FakeCache(mode)
    session = _Session(
        step, arguments, batch, mode, cache, original, whole_of, must_train, has_loss,
        Recorders(original),
    )  # fmt: skip
    with (
        generators_restored(), collector_paused(), access_allowed(),
        class_attributes_restored(original),
    ):  # fmt: skip
        try:
            return session.captured(name or getattr(step, "__name__", "step"))
        except PardnnError:
            session.caches += [cache for cache, _ in caches_with_fakes(mode)]
            raise
        finally:
            session.clear_caches()
            restore(original.contents)


@dataclass(repr=False)
class _Session:
    """One capture.

    Attributes:
        step: The user's step.
        args: Its arguments; the items are replaced while tracing.
        batch: Indices of the arguments that are the batch.
        mode: Of the fake tensors.
        fake_cache: Fake results that all traces share.
        original: What the objects of the step held before the first trace.
        whole_of: Returns the geometry of the whole, where a live tensor is a shard.
        must_train: Whether the step must change a parameter.
        has_loss: Whether it must return a loss.
        recorders: Stand for what the step only fills or tells.
        checks: Known branches on data that only raise, of the first step and of the others.
        caches: Of `functools`, in which a trace has left fake tensors.
        held: Gradients that were there before the first trace, by name.
        carried: Those of them that the step reads: each call hands them on to the next.
    """

    step: Callable[..., Any]
    args: list[Any]
    batch: tuple[int, ...]
    mode: fake_tensor.FakeTensorMode
    fake_cache: FakeCache
    original: ObjectGraph
    whole_of: WholeOf
    must_train: bool
    has_loss: bool
    recorders: Recorders
    checks: dict[bool, tuple[Check, ...]] = field(default_factory=lambda: {True: (), False: ()})
    caches: list[Any] = field(default_factory=list)
    held: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)

    def clear_caches(self) -> None:
        """Clear the caches in which a trace has left fake tensors."""
        for cache in self.caches:
            cache.cache_clear()

    def captured(self, name: str) -> Captured:
        """Return the step as a graph, and try again where a container is not only filled."""
        while True:
            self.recorders.begin()
            try:
                return self._captured(name)
            except (OtherUse, UnsupportedError, UserCodeError) as error:
                self.recorders.learn(error)
            restore(self.original.contents)

    def _captured(self, name: str) -> Captured:
        """Trace the step three times and return the second trace as a graph."""
        sharing = shared_sources(sources_of(self.original, self.batch), self.whole_of)
        first, settled, numbers, (initial, irregular, constants), assignments = self._first_step()
        chosen = Selection(held=schedule_numbers(settled), defaults=numbers.defaults)
        for _ in range(_MAX_TRACES):
            other: Selection | None
            try:
                trace = self._trace(chosen, initial=initial, constants=constants)
                if changed := changed_tensors(trace):
                    constants = constants.without(changed)
                    restore(settled.contents)
                    continue
                if assignments.settle(settled, trace):
                    continue
                other = reconsidered(chosen, trace, first, numbers)
                if other is None and (left := left_over(first, trace)):
                    self.carried = {name: self.held[name] for name in left}
                    other = chosen
                elif other is None:
                    irregular |= written_at_first(first, trace, initial)
                    assignments.tell(trace)
                    graph = self._assembled(name, trace, first, chosen, irregular, sharing)
                    left = uncarried(trace, first, graph)
                    self._check_repeatable(trace, chosen, initial, constants, settled)
                    return Captured(graph, tuple(left))
            except (UnsupportedError, UserCodeError) as error:
                if isinstance(error, UserCodeError) and assignments.settle(settled):
                    continue
                restore(settled.contents)
                caches = new_caches(self.mode, self.caches)
                if not all(is_made_of_constants(first.tracer, fakes) for _, fakes in caches):
                    raise
                if caches:
                    continue
                found = sources_of(walk_objects(self.step, self.args), self.batch)
                other = without_ints(chosen, found)
                if other is None:
                    raise
            chosen = other
            restore(settled.contents)
        raise unsupported.changed_state(sorted(chosen.held))

    def _first_step(self) -> tuple[StepTrace, ObjectGraph, Numbers, CreatedTensors, Assignments]:
        """Trace the first step; return its trace, what the objects hold after it, what it made."""
        live = sources_of(self.original, self.batch)
        before = values_by_name(self.original.contents, tensor_names(live))
        first = self._trace(NO_SYMBOLS, locate=False)
        self.recorders.take_filled()
        created = created_tensors(first, walk_objects(self.step, self.args), self.batch, live)
        put_back_data(self.original.contents)
        defaults = put_defaults(self.original.contents)
        assignments = Assignments(first, lambda: walk_objects(self.step, self.args))
        settled = walk_objects(self.step, self.args)
        names = tensor_names(sources_of(settled, self.batch))
        after = values_by_name(settled.contents, names)
        return first, settled, Numbers(before | defaults, after, defaults), created, assignments

    def _assembled(
        self, name: str, trace: StepTrace, first: StepTrace, chosen: Selection,
        irregular: dict[str, str], sharing: dict[str, list[str]],
    ) -> Graph:  # fmt: skip
        """Return a trace as a graph; the objects of the step are as the trace left them.

        Args:
            name: Of the graph.
            trace: Of the step that repeats.
            first: That of the first step.
            chosen: What it was made with.
            irregular: Why states have no first value, by name.
            sharing: Sources that share a storage with others, by name.
        """
        returned = loss_of(trace.result) if self.has_loss else None
        loss = None if returned is None else trace.tracer.aliases.fresh_value(returned)
        updated = source_updates(trace, irregular)
        result, copies = recorded_result(trace.tracer, trace.result, returned)
        tell_numbers(trace, chosen)
        told = trace.effects.noted
        outputs = [*updated, *copies, *trace.effects.calls]
        if self.must_train:
            check_trains(trace)
        trace.choices.check([loss])
        calls = ordered_live_calls(trace, loss, outputs, irregular, chosen.held)
        check_first_step(first, trace, {*calls})
        check_shared_storage(trace, calls, sharing)
        taken = granted(trace, chosen) | stepped(trace.schedules)
        taken |= {"effects": named_result(told)} if told else {}
        return graph_of(name, calls, loss, taken, accelerator_of(trace), named_result(result))

    def _check_repeatable(
        self, trace: StepTrace, chosen: Selection, initial: dict[str, Any],
        constants: KeptTensors, settled: ObjectGraph,
    ) -> None:  # fmt: skip
        """Reject a step whose next trace, with plain ints, differs.

        Args:
            trace: Of the step that repeats.
            chosen: What it was made with.
            initial: First values of the states that the first step created, by name.
            constants: What that step made of constants, and keeps.
            settled: What the objects of the step held after the first step.
        """
        if assigns(trace) or chosen.held or any(map(is_filled, trace.changed.values())):
            restore(settled.contents)
        again = self._trace(chosen.plain(), initial=initial, constants=constants, locate=False)
        check_same(trace, again)
        check_constants(trace, again)
        check_same_effects(trace.effects, again.effects)

    def _trace(
        self,
        chosen: Selection,
        *,
        initial: dict[str, Any] | None = None,
        constants: KeptTensors = NOTHING_KEPT,
        locate: bool = True,
    ) -> StepTrace:
        """Run the step over new placeholders and record it; again where a branch may be a check."""
        start = walk_objects(self.step, self.args).contents
        is_first = chosen is NO_SYMBOLS
        questions = Questions(self.checks[is_first], trial=True)
        while True:
            error: BaseException = NoCheck()
            try:
                trace = self._traced_once(chosen, questions, initial, constants, locate)
                if not questions.is_trying:
                    self.checks[is_first] = questions.checks
                    return trace
            except (UserCodeError, UnsupportedError, NoCheck) as caught:
                if not questions.is_trying:
                    raise
                error = caught
            questions = questions.learned(error)
            restore(start)

    def _traced_once(
        self,
        chosen: Selection,
        questions: Questions,
        initial: dict[str, Any] | None,
        constants: KeptTensors,
        locate: bool,
    ) -> StepTrace:
        """Run the step once over new placeholders and record it."""
        self.clear_caches()
        objects = walk_objects(self.step, self.args)
        sources = sources_of(objects, self.batch)
        names = tensor_names(sources)
        if chosen.start:
            chosen.set_start(objects, names)
            objects = walk_objects(self.step, self.args)
        made_anew = {s.name: s for s in sources if s.name in constants.values}
        found = outside(self.recorders.filled, (s for s in sources if s.name not in made_anew))
        gradients = held_gradients(found)
        tensors = [source for source in found if isinstance(source.get(), torch.Tensor)]
        numbers = chosen.sources(found, objects, names)
        kept = self.carried | {source.name: source.get() for source in gradients}
        self.held = kept if chosen is NO_SYMBOLS else self.held
        placeholders = insert_placeholders(objects, tensors, self.mode, self.whole_of)
        gradients = [gradient_source(s) for s in tensors if f"{s.name}.grad" in kept]
        tracer = Tracer(self.mode, Locator(objects.modules, is_silent=not locate), self.fake_cache)
        tracer.scalars.questions = questions
        trace = StepTrace(tracer, {}, {}, {}, settings_of(objects, self.batch), None)
        for source in tensors:
            trace.add(source, placeholders[source.name], initial)
        made = insert_gradient_placeholders(gradients, kept, self.mode, self.whole_of)
        trace.gradients = made
        for source in gradients:
            trace.add(source, made[source.name], initial)
        names = {id(tensor): name for name, tensor in placeholders.items()}
        trace.made_anew = constants.make(made_anew, tracer, self.mode)
        with symbols_inserted(trace, numbers):
            run_noted(trace, self.step, self.args, self.mode, self.recorders, names, chosen)
        return trace

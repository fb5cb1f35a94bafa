"""Traces of a step: each runs it once more over new placeholders, with symbols for its numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import fake_tensor

from pardnn.backends.torch.capture.choices.flags import Flags
from pardnn.backends.torch.capture.choices.normal_forms import NormalForms
from pardnn.backends.torch.capture.fake_cache import FakeCache
from pardnn.backends.torch.capture.first_step.cached_tensors import Made, check_cached, keep_cached
from pardnn.backends.torch.capture.first_step.first_use import (
    NOTHING_KEPT,
    KeptTensors,
    is_made_of_constants,
    new_caches,
)
from pardnn.backends.torch.capture.numbers.questions import Check, NoCheck, Questions
from pardnn.backends.torch.capture.numbers.recorders import Recorders
from pardnn.backends.torch.capture.numbers.selection import Selection, narrowed
from pardnn.backends.torch.capture.placeholders import (
    insert_gradient_placeholders,
    insert_placeholders,
)
from pardnn.backends.torch.capture.refusals.random_states import RandomState, begin_elsewhere
from pardnn.backends.torch.capture.refusals.tensor_questions import check_told_apart
from pardnn.backends.torch.capture.restore import restore
from pardnn.backends.torch.capture.rewrites.tables import tables_inserted, tables_of
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.step_trace import StepTrace, symbols_inserted
from pardnn.backends.torch.capture.trace_checks import check_constants
from pardnn.backends.torch.capture.traced_run import run_noted
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.guards.content import clear_caches
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.sources import (
    Source,
    WholeOf,
    gradient_source,
    held_gradients,
    outside,
    registration,
    setting_entries,
    sources_of,
    tensor_names,
)
from pardnn.errors import PardnnError, UnsupportedError, UserCodeError


@dataclass(repr=False)
class Traces:
    """What all traces of one capture share.

    Attributes:
        step: The user's step.
        args: Its arguments; the items are replaced while tracing.
        batch: Indices of the arguments that are the batch.
        mode: The mode of the fake tensors.
        fake_cache: Fake results that all traces share.
        whole_of: Returns the geometry of the whole tensor if a live tensor is a shard.
        recorders: Replace the objects that the step only fills or writes to.
        flags: Buffers that are treated as constants.
        checks: Known branches on data that only raise, of the first step and of the others.
        caches: The caches of `functools`, in which a trace has left fake tensors.
        cached: How the tensors in them are made.
        held: Gradients that existed before the first trace, by name.
        carried: Gradients that each trace finds, by name, or what they are like.
        presumed: First values of gradients that are taken to be there, by name.
        number: The number of the last trace.
        forms: Functions that run in normal form.
    """

    step: Callable[..., Any]
    args: list[Any]
    batch: tuple[int, ...]
    mode: fake_tensor.FakeTensorMode
    fake_cache: FakeCache
    whole_of: WholeOf
    recorders: Recorders
    flags: Flags
    checks: dict[bool, tuple[Check, ...]] = field(default_factory=lambda: {True: (), False: ()})
    caches: list[Any] = field(default_factory=list)
    cached: Made = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    presumed: dict[str, Any] = field(default_factory=dict)
    number: int = -1
    forms: NormalForms = field(default_factory=NormalForms)

    def presume(self, parameters: Collection[str]) -> None:
        """Take parameters to have a gradient before each trace, like themselves."""
        if parameters:
            found = [each for each in self.sources() if each.name in parameters]
            self.carried |= {f"{each.name}.grad": each.get() for each in found}
            self.presumed = {f"{each.name}.grad": 0.0 for each in found}

    def clear_caches(self) -> None:
        """Clear the caches in which a trace has left fake tensors."""
        clear_caches(self.caches)

    def note_caches(self) -> None:
        """Note the caches that a repeated trace fills."""
        new_caches(self.mode, self.caches)

    def keep_cached(self) -> None:
        """Note what later eager steps would find in the caches."""
        keep_cached(self.cached)

    def objects(self) -> ObjectGraph:
        """Return what the step reaches now."""
        found = self.flags.without(walk_objects(self.step, self.args))
        found.tensors = [e for e in found.tensors if not isinstance(e.value, RandomState)]
        return found

    def sources(self) -> tuple[Source, ...]:
        """Return the sources of the step as of now."""
        return sources_of(self.objects(), self.batch)

    def trace(
        self,
        chosen: Selection,
        *,
        initial: dict[str, Any] | None = None,
        constants: KeptTensors = NOTHING_KEPT,
        locate: bool = True,
    ) -> StepTrace:
        """Run the step over new placeholders and record it, again if a branch may be a check.

        Args:
            chosen: Which numbers are symbols.
            initial: First values of the states that the first step created, by name.
            constants: What that step made from constants and keeps.
            locate: Whether the calls get the user's lines.

        Raises:
            PardnnError: As `run_noted` does.
        """
        objects = self.objects()
        shared = self.recorders.shared if chosen.is_first else ()
        start = [*objects.contents, *shared]
        self.number += 1
        begin_elsewhere()
        questions = Questions(self.checks[chosen.is_first], trial=True)
        while True:
            error: BaseException = NoCheck()
            try:
                trace = self._traced_once(chosen, objects, questions, initial, constants, locate)
                if not questions.is_trying:
                    if locate:  # to name the line
                        check_constants(trace.tracer)
                    self.checks[chosen.is_first] = questions.checks
                    return trace
            except (UserCodeError, UnsupportedError, NoCheck) as caught:
                if not questions.is_trying:
                    raise
                error = caught
            self.forms.forget()
            self.note_caches()
            questions = questions.learned(error)
            restore(start)
            objects = self.objects()

    def otherwise(self, error: PardnnError, chosen: Selection, first: StepTrace) -> Selection:
        """Return the selection to try after a trace has failed; raise its error if none is left."""
        caches = new_caches(self.mode, self.caches)
        if not all(is_made_of_constants(first.tracer, fakes) for _, fakes in caches):
            raise error
        other = chosen if caches else narrowed(chosen, self.sources())
        if other is None:
            raise error
        return other

    def _settings(self, objects: ObjectGraph) -> dict[str, Any]:
        held = setting_entries(objects, self.batch)
        return {name: entry.value for name, entry in held.items()}

    def _traced_once(
        self,
        chosen: Selection,
        objects: ObjectGraph,
        questions: Questions,
        initial: dict[str, Any] | None,
        constants: KeptTensors,
        locate: bool,
    ) -> StepTrace:
        """Run the step once over new placeholders and record it; `objects` is what it reaches."""
        self.forms.forget()
        if self.caches:  # what only they hold is freed, so weak references no longer lead to it
            self.clear_caches()
            objects = self.objects()
        sources = sources_of(objects, self.batch)
        names = tensor_names(sources)
        if chosen.start:
            chosen.set_start(objects, names)
            objects = self.objects()
        made_anew = {s.name: s for s in sources if s.name in constants.values}
        found = outside(self.recorders.filled, (s for s in sources if s.name not in made_anew))
        gradients = held_gradients(found)
        tensors = [source for source in found if isinstance(source.get(), torch.Tensor)]
        check_told_apart(self.step, objects, self.batch, tensors)
        numbers = chosen.sources(found, objects, names)
        kept = self.carried | {source.name: source.get() for source in gradients}
        self.held = kept if chosen.is_first else self.held
        live = {source.name: source.get() for source in tensors}
        placeholders = insert_placeholders(objects, tensors, self.mode, self.whole_of)
        gradients = [gradient_source(s) for s in tensors if f"{s.name}.grad" in kept]
        tracer = Tracer(self.mode, Locator(objects.modules, is_silent=not locate), self.fake_cache)
        tracer.scalars.questions, tracer.aliases.caches = questions, self.caches
        tracer.flags = self.flags.asked
        trace = StepTrace(tracer, {}, {}, {}, self._settings(objects), None)
        trace.stood_for = {id(placeholders[name]): tensor for name, tensor in live.items()}
        _add_sources(trace, tensors, placeholders, initial, objects)
        trace.gradients = insert_gradient_placeholders(gradients, kept, self.mode, self.whole_of)
        _add_sources(trace, gradients, trace.gradients, (initial or {}) | self.presumed, objects)
        names = {id(tensor): name for name, tensor in placeholders.items()}
        trace.made_anew = constants.make(made_anew, tracer, self.mode)
        inserted = tables_inserted(objects, chosen.tables or ())
        with symbols_inserted(trace, numbers, chosen.frozen), inserted as trace.tables:
            run_noted(
                trace, self.step, self.args, self.mode, self.recorders, names, chosen, self.forms,
                0 if locate else self.number + 1,  # a kept trace sees the true time
            )  # fmt: skip
        check_cached(tracer, self.caches, self.cached)
        if chosen.tables is None and tracer.scalars.is_index_asked:
            trace.tables = tables_of(objects)
        return trace


def _add_sources(
    trace: StepTrace,
    sources: Iterable[Source],
    made: Mapping[str, torch.Tensor],
    initial: Mapping[str, Any] | None,
    objects: ObjectGraph,
) -> None:
    """Make the placeholder of each source its value in the trace."""
    trace.placeholders.update(made)
    for source in sources:
        trace.add(source, made[source.name], _first_value(source, initial, objects))


def _first_value(
    source: Source, initial: Mapping[str, Any] | None, objects: ObjectGraph
) -> dict[str, Any] | None:
    """Return the arguments of a source that the first step creates; None for any other."""
    if source.name not in (initial or {}):
        return None
    assert initial is not None
    return {"initial": initial[source.name]} | registration(source, objects)

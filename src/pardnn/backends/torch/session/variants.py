"""Variants: the captured graphs of one step, each for the Python values with which it was captured.

Problem: a graph is one path through the user's Python, and the values that decide the path may
change between calls.
Idea: keep the graphs captured so far, with their guards. A call takes the graph whose guards hold;
if there is none, the step is captured and planned again, with the state where it is. All ranks see
the same values, so they choose the same graph without messages, and check that they did
(`agreement.py`); a new capture begins on all ranks together.

Complexity: a call compares O(guarded values) with the variant that ran last; a switch compares with
each one in turn, shapes of the batch first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pardnn.backends.torch.deferred_init.initialise import Recording
from pardnn.backends.torch.runtime.agreement import Agreement
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.effects import tell
from pardnn.backends.torch.runtime.executor import Executor, History
from pardnn.backends.torch.runtime.failures import naming_out_of_memory
from pardnn.backends.torch.runtime.input_checks import Batch
from pardnn.backends.torch.runtime.notices import Made, Notices, told
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.results import with_held
from pardnn.backends.torch.runtime.same_values import check_same_batch, check_same_state
from pardnn.backends.torch.session.carried import check_carried, check_left
from pardnn.backends.torch.session.constants import Constants
from pardnn.backends.torch.session.held_elsewhere import Replaced
from pardnn.backends.torch.session.left_gradients import LeftGradients, TakenGradients
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.backends.torch.session.made_parameters import following_parameters
from pardnn.backends.torch.session.new_tensors import NewTensors
from pardnn.backends.torch.session.rebound import KeptData, has_replaced
from pardnn.backends.torch.session.reset_gradients import GradientsOf, gradients_of
from pardnn.backends.torch.session.same_changes import check_same_changes, telling_changes
from pardnn.backends.torch.session.settled import Settled
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.reached import unreached
from pardnn.errors import MismatchError, RankError, StuckError, UnsupportedError

#: How many variants are kept, the last used ones; each takes some kilobytes an op on the host.
MAX_VARIANTS = 64


@dataclass(eq=False)
class Variant:
    """One captured graph and the values for which it holds.

    Attributes:
        number: The number in the order of capture; the same on all ranks.
        executor: Runs it; variants of equal graphs share one.
        binding: Its sources and guards.
        uncarried: Names of tensors that it does not leave as eager calls would.
        made: How long capture and planning took.
        holds_for: What had changed when it was captured, in words.
        constants: Real tensors with the content for which its graph holds.
        taken: What it does with gradients that earlier calls have left.
        gradients: The gradients that it keeps.
    """

    number: int
    executor: Executor
    binding: Binding
    uncarried: frozenset[str]
    made: Made
    holds_for: str
    taken: TakenGradients = field(default_factory=TakenGradients)
    constants: Constants = field(default_factory=Constants)
    gradients: GradientsOf = field(default_factory=GradientsOf)

    def changes(
        self, batch: Batch, left: LeftGradients, *, is_told: bool = False
    ) -> Iterator[Change]:
        """Yield what differs from the values for which it holds.

        Args:
            batch: The batch of this call.
            left: The gradients that earlier calls have left.
            is_told: As for `Binding.changes`.
        """
        yield from self.binding.changes(batch, is_told=is_told)
        yield from self.gradients.changes()
        yield from left.changes(self.taken)
        if not self.constants.is_empty:
            yield from self.constants.changes()

    def finished(self) -> Any:
        """Carry out the prints, logs and checks of the step that has run; return its result."""
        held = self.binding.end_step(self.executor.effects)
        tell(self.executor.effects, self.binding.sinks())
        result = self.executor.result
        return with_held(result, held) if held else result


Make = Callable[[int, Sequence[Any], Sequence[Change]], Variant]


class Variants:
    """The variants of one step on this rank.

    Args:
        state: What the ranks hold.
        history: The history of the steps of this rank.
        make: Captures and plans again, on all ranks: of the variant's number, the arguments of the
            step, and what has changed.
        first: The variant that runs first.
        recording: The recording of models without data.
        announce: Called with each new program and its binding, before the user's objects are
            guarded.

    Attributes:
        current: The variant that ran last.
        num_made: How often the step was captured.
        num_moved: How many tensors of state have moved from rank to rank.
        replaced: Tensors whose new data no graph so far can take.
        stale: Names of tensors that the calls so far have not left as eager calls would.
    """

    def __init__(
        self,
        state: LiveState,
        history: History,
        make: Make,
        first: Variant,
        recording: Recording | None = None,
        announce: Callable[[Program, Binding], None] = lambda _program, _binding: None,
    ) -> None:
        self._announce = announce
        self._world, self._state, self._history, self._make = state.world, state, history, make
        self.current = first
        self._known: list[Variant] = [first]
        self.stale: set[str] = set()
        self._version = -1
        state.holds_for[first.number] = first.holds_for
        self.num_made, self.num_moved, self._num_taken = 1, 0, 0
        self.replaced: list[Change] = []
        self._settled: Settled | None = None
        self._notices = Notices(history.what, is_silent=state.world.rank != 0)
        self.enter(first, recording)

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._known)

    def step(self, values: Sequence[Any]) -> Variant:
        """Run one step with a batch, using the variant that holds for it.

        Args:
            values: The arguments that are neither model nor optimizer.

        Returns:
            The variant that ran.

        Raises:
            PardnnError: As `Parallel.__call__` does.
        """
        self._settled = None  # it keeps what the user may have replaced
        try:
            with self._state.left_gradients.ours():
                self.refresh()
                is_told = self.follow_data()
                batch = self.current.binding.read(values)
                variant = self._choose(batch, is_told=is_told)
                check_left(self._state.left_gradients.used(variant.taken))
            self._agree(variant)
            self._world.describe = variant.executor.describe
            if self._replaced.spare(each.binding.guards for each in self._known):
                self._version = self._state.version
        except (MismatchError, RankError, StuckError) as error:
            raise self._world.report_failure(error) from error.__cause__
        variant.executor.step(lambda: self._inputs(variant, batch))
        self._replaced.finish(variant.executor.effects)
        self.stale |= variant.uncarried
        self._state.reset_gradients.note(variant.gradients)
        self._state.left_gradients.note(variant.taken, variant.gradients.reset)
        return variant

    def refresh(self) -> None:
        """Take the state again if another step on it has moved what this one reads."""
        if self._version != self._state.version:
            self.enter(self.current)

    def follow_data(self) -> bool:
        """Take over data given to tensors of the state since the last call: `p.data = x`.

        Returns:
            Whether that has shown, too, that the words of its guards on parameters hold.

        Raises:
            MismatchError: E527, if that is impossible.
        """
        if self._state.spread.is_whole:
            return False
        try:
            self.replaced += self._kept.follow()
        except MismatchError as error:
            raise self._world.report_failure(error) from error.__cause__
        return self._kept.are_parameters_told

    def settle(self) -> bool:
        """Take over new data, between two steps.

        Returns:
            Whether the user's objects may hold something else than at the last time.

        Raises:
            MismatchError: E527, if only a step can take it over.
        """
        self.refresh()
        self.follow_data()
        if self.replaced:
            raise MismatchError(
                f"{told(self.replaced)}: the next step captures that; until then, the ranks hold "
                "the old data.\nCall the step first.",
                code="E527",
            )
        of = self.current.executor.program, self.current.binding
        if self._state.spread.is_whole:
            return True
        if self._settled is not None and self._settled.holds(*of):
            return False
        objects = self.current.binding.objects()
        if has_replaced(self._state, *of, objects):
            self._state.version += 1  # other steps have the old ones, too
            self.enter(self.current)
        self._settled = Settled(*of, objects)
        return True

    def _inputs(self, variant: Variant, batch: Batch) -> dict[str, Any]:
        inputs = variant.binding.batch_inputs(batch)
        key = f" {variant.number}" if variant.number else ""
        check_same_batch(self._world, inputs, len(self._history.step_s), key)
        return inputs

    def _choose(self, batch: Batch, *, is_told: bool) -> Variant:
        left = self._state.left_gradients
        changes = [*self.replaced, *self.current.changes(batch, left, is_told=is_told)]
        if not changes:
            return self.current
        self._check_opened(told(changes))
        for variant in () if self.replaced else self._known:
            reset = self._state.reset_gradients
            undo = reset.arrange(variant.gradients, variant.taken.replaced)
            is_same = variant is self.current and undo is None
            found = changes if is_same else list(variant.changes(batch, left))
            new = self._taken(variant, found, batch)
            if new is not None:
                if found or variant is not self.current:
                    self.enter(variant)
                for each in (x.binding.guards for x in self._known if found):
                    if each is not None:
                        each.accept(new.exchanged(found))
                return variant
            if undo is not None:
                undo()
        variant = self._add(batch.values, changes)
        self.replaced = []
        moved = self.enter(variant)
        self._notices.captured(variant.made, changes, len(self._history.step_s), moved)
        return variant

    def _taken(
        self, variant: Variant, changes: Sequence[Change], batch: Batch
    ) -> NewTensors | None:
        """Return the new tensors with which a variant holds; None if it does not hold."""
        new = NewTensors(self._state, variant.executor.program, variant.binding, variant.constants)
        found = new.accepted(changes, batch)
        if found is not None and changes:
            self._num_taken += 1
            key = f" taken {variant.number} {self._num_taken}"
            with telling_changes(self._world, "taking new tensors", changes):
                check_same_changes(self._world, key, changes)
                unknown = [(n, x) for n, x in found.items() if self._state.held(x) is None]
                check_same_state(self._world, unknown, is_random=False, key=key)
            self._state.version += 1  # other steps have the old ones
        return None if found is None else new

    def not_carried(self, variant: Variant | None = None) -> set[str]:
        """Return which state of a variant, or the last one, calls left unlike eager ones."""
        variant = variant or self.current
        left, parameters = self._state.left_gradients, variant.binding.sources
        return {
            name
            for name in variant.executor.program.state
            if (name in self.stale if (p := parameters[name].parameter) is None else p in left)
        }

    def enter_widest(self) -> None:
        """Switch to the variant that reads most of the state; all ranks call it."""
        objects, readers = self.current.binding.objects(), list[Variant]()
        for each in self._known:
            names = each.executor.program.state.keys()
            if not self.not_carried(each) and not unreached(names, each.binding.sources, objects):
                readers.append(each)
        self.enter(max(readers, key=lambda v: len(v.executor.program.state), default=self.current))

    def prepare(self, values: Sequence[Any]) -> None:
        """Capture and plan ahead for an example batch if no variant holds for it.

        Args:
            values: As for `step`.
        """
        self._check_opened("other shapes are to be captured before it")
        batch = self.current.binding.read(values)
        left = self._state.left_gradients
        if all(next(each.changes(batch, left), None) is not None for each in self._known):
            self._add(values, list(self.current.changes(batch, left))).binding.watch()

    def _add(self, values: Sequence[Any], changes: Sequence[Change]) -> Variant:
        """Capture and plan again; the variants so far stay usable if that fails."""
        args = self.current.binding.arguments(values)
        number, self.num_made = self._state.next_number(), self.num_made + 1
        variant = self._make(number, args, changes)
        self._state.holds_for[number] = variant.holds_for
        self._known.append(variant)
        return variant

    def enter(self, variant: Variant, recording: Recording | None = None) -> list[str]:
        """Switch to a variant, with the current state; all ranks call it.

        Args:
            variant: One of the known variants.
            recording: The recording of models without data, for the first one.

        Returns:
            The names of the tensors of state that had to move from rank to rank.

        Raises:
            UnsupportedError: E808, if it reads what earlier variants did not carry on.
        """
        with self._state.left_gradients.ours():
            return self._entered(variant, recording)

    def _entered(self, variant: Variant, recording: Recording | None) -> list[str]:
        check_carried(self.stale, variant.executor.program, variant.binding)
        if len(self._state.users) == (self._version >= 0):  # no other step takes them over
            variant.taken.drop()
        binding, executor = variant.binding, variant.executor
        self._world.describe = lambda: {
            "text": f"moving state for {variant.holds_for}", "waits_for": None, "messages": [],
            "changed": variant.holds_for,
        }  # fmt: skip
        self.current.executor.detach()
        version, present = self._state.version, gradients_of(executor.program, binding)
        sharing = naming_out_of_memory(self._world, "taking its share of the state")
        with sharing, following_parameters(binding):
            values, moved = self._state.take(executor.program, binding, recording)
        if self._state.version != version:
            for other in self._state.executors:
                other.detach()  # moved tensors are no longer theirs
        executor.attach(values)
        self._state.executors.add(executor)
        self._version = self._state.version
        if binding.guards is None:
            # Only from here on, since what was put in place above is not a user's change.
            binding.mark_stepped()
            self._announce(executor.program, binding)
            binding.watch()
        variant.gradients = gradients_of(executor.program, binding)
        self._state.reset_gradients.note_new(variant.gradients, present)
        self._kept = KeptData(self._state, executor, binding)
        self._replaced = Replaced(self._state, executor, binding, self._kept)
        self._world.describe = executor.describe
        self.current, self.num_moved = variant, self.num_moved + len(moved)
        rest = [each for each in self._known if each is not variant]
        self._known = [variant, *rest][:MAX_VARIANTS]
        return moved

    def _agree(self, variant: Variant) -> None:
        """Make the ranks compare which graph runs, once there are several."""
        executor, state = variant.executor, self._state
        if self._world.size > 1 and state.has_several_graphs:
            agreement = executor.agreement
            if agreement is None or agreement.number != variant.number:
                describe = state.holds_for.get
                executor.agreement = Agreement(self._world, variant.number, describe)

    def check_opened(self) -> None:
        """Refuse other state if the first step has a separate graph that has not run yet.

        Raises:
            UnsupportedError: E806.
        """
        self._check_opened("the state is to be loaded before it")

    def _check_opened(self, what: str) -> None:
        if self.current.binding.must_open:
            raise UnsupportedError(
                "the first step of these objects does something different from later ones, and "
                f"{what}.\nRun one step of your own before `parallelize`: the step then is one of "
                "the later ones. `load` takes any state after that.",
                code="E806",
            )

"""`parallelize`: a training step as a function on all ranks of torchrun, in the user's script."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.checkpoint.checkpointed import Checkpointed
from pardnn.backends.torch.checkpoint.contents import guard_spread_objects, root_modules
from pardnn.backends.torch.checkpoint.training_state import TrainingState
from pardnn.backends.torch.checkpoint.unread import UnreadState
from pardnn.backends.torch.comm.joining import join, rank_device
from pardnn.backends.torch.comm.pending_loss import settle_loss
from pardnn.backends.torch.comm.stop_signal import OnSignal, StopSignal
from pardnn.backends.torch.deferred_init.deferred import recording_for, recording_of
from pardnn.backends.torch.devices import this_device
from pardnn.backends.torch.ops.host_allocator import grow_heap, pin_allocator
from pardnn.backends.torch.profile.rank_links import ThisCluster
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.executor import Executor, History
from pardnn.backends.torch.runtime.gather import resident_names, whole_source
from pardnn.backends.torch.runtime.memory import limits as memory_limits
from pardnn.backends.torch.runtime.memory.meter import live_bytes
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.session.evaluation import Evaluation
from pardnn.backends.torch.session.live_state import LiveState, live_state_of
from pardnn.backends.torch.session.new_variant import Decide, Maker, Prove
from pardnn.backends.torch.session.recording import Recording
from pardnn.backends.torch.session.variants import Variants
from pardnn.backends.torch.user_step.object_graph import walk_objects
from pardnn.backends.torch.user_step.sources import batch_indices
from pardnn.checkpoint.directory import check_steps
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan


class Parallel(Checkpointed):
    """The step on this rank; call it with the args that are neither model nor optimizer.

    Changes between two calls are followed: for other shapes, flags, modes and other values that the
    graph depends on, the step is captured and planned again, with parameters and states where they
    are. If a graph captured earlier fits the call, it runs.

    Args:
        state: What the ranks hold.
        variants: The captured graphs.
        history: The steps of this rank.
        decide: Plans the graphs of evaluations.
        recording: Writes what the ranks measure; None does not.
    """

    def __init__(
        self,
        state: LiveState,
        variants: Variants,
        history: History,
        decide: Decide | None,
        recording: Recording | None = None,
    ) -> None:
        self._state, self._world = state, state.world
        self._variants, self._history, self._decide = variants, history, decide
        self._recording = recording
        first = variants.current
        program, live = first.executor.program, first.executor.live_values
        key = f" {first.number}" if first.number else ""
        self._training = TrainingState(
            program, self._world, first.binding, live, state.spread, key, state.most_held,
            UnreadState(self._world, state.held, state.keep),
            lambda: [(each.executor.program.whole, each.binding) for each in variants],
        )  # fmt: skip
        state.users.append(self._training)
        self._models = tuple(root_modules(first.binding.stateful()).values())
        self._evaluations: dict[Any, Evaluation] = {}

    def __call__(self, *batch: Any) -> Any:
        """Run one step on all ranks; every rank must call it, with the same (global) batch.

        Returns:
            What the step returns, the same on every rank: the loss, or tuples, lists, dicts and
            objects of tensors and numbers (an object as `Fields`), without gradients. If only a
            loss is returned, it is waited for when it is read, so that the next step can start.

        Raises:
            MismatchError: E505, E509 or E512, if the batch or what has changed cannot be followed;
                E518, if ranks get different batches; E519, if they see different changes.
            RankError: E6xx, naming the rank that failed first.
            StuckError: E7xx, naming the rank that hangs.
            UnsupportedError: E8xx, if what has changed cannot be captured; the graphs captured so
                far stay usable.
        """
        self._state.leave_on_signal(f"stopped after step {self._training.steps}")
        self._begin()
        try:
            variant = self._variants.step(batch)
        except BaseException:
            if self._state.is_limited:
                memory_limits.lift_limit()  # so that the failure can be reported
            raise
        self._training.steps += 1
        if self._recording is not None:
            self._recording.after_step()
        return variant.finished()

    def _begin(self) -> None:
        """Take back models that a step on this state has gathered."""
        try:
            self._followed(is_asked=False)
            for training in self._state.users:
                training.begin_step()
        except PardnnError as error:
            raise self._world.report_failure(error) from error.__cause__

    def evaluate(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(model, *args)` on all ranks, forward only, and return its result.

        Every rank must call it, between steps, with the same arguments. The models of the step come
        first, in the order of its arguments; they are in eval mode meanwhile, and no gradients are
        recorded. The function is captured and planned once per shape, with the parameters where
        they are.

        Args:
            function: Takes the models and `args`; returns a validation loss, predictions or
                metrics. Pass the same object at each call, or it is captured each time.
            *args: Its arguments after the models.

        Returns:
            What it returns, the same on every rank.

        Raises:
            PardnnError: As a call of the step.
        """
        self._begin()
        given = (*self._models, *args)
        batch = set(batch_indices(given))
        key = function, tuple(id(each) for i, each in enumerate(given) if i not in batch)
        if key not in self._evaluations:
            self._evaluations[key] = Evaluation(function, self._state, self._decide)
        return self._evaluations[key](given)

    def load(self, path: str | Path, step: int | None = None) -> Any:
        """Read a checkpoint, see `Checkpointed.load`."""
        self._variants.check_opened()
        self._state.reset_gradients.clear()
        return super().load(path, step)

    def load_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Take state dicts, see `Checkpointed.load_state_dict`."""
        self._variants.check_opened()
        super().load_state_dict(state)

    def _training_state(self) -> TrainingState:
        training = self._followed(is_asked=self._variants.settle())
        if training.moved:
            self._variants.enter_widest()
            training = self._followed()
        return training

    def _followed(self, *, is_asked: bool = True) -> TrainingState:
        self._variants.refresh()
        return self._follow(is_asked=is_asked)

    def _follow(self, *, is_asked: bool = True) -> TrainingState:
        executor, binding, stale = self._executor, self._binding, self._variants.not_carried()
        self._training.follow(
            executor.program, binding, executor.live_values, stale, is_asked=is_asked
        )
        return self._training

    def _located(self) -> tuple[Program, Mapping[str, Any]]:
        here = self._executor.program, self._executor.live_values
        return here if self._training.moved else (self._training.program, self._training.live)

    @property
    def _executor(self) -> Executor:
        return self._variants.current.executor

    @property
    def _binding(self) -> Binding:
        return self._variants.current.binding

    @property
    def plan(self) -> Plan:
        """The plan of the last step."""
        return self._executor.program.plan

    @property
    def graph(self) -> Graph:
        """The graph of the last step."""
        return self._executor.program.whole

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, buffers and optimizer states, for `whole`."""
        programs = self._follow().program, self._executor.program
        return tuple(dict.fromkeys(name for each in programs for name in resident_names(each)))

    @property
    def captures(self) -> int:
        """How often the step has been captured so far."""
        return self._variants.num_made

    @property
    def moved(self) -> int:
        """How many tensors of state have moved between ranks since they were first taken."""
        return self._variants.num_moved

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter, buffer or optimizer state as one device would hold it.

        Every rank must call it, with the same name, between steps, and gets the whole tensor.

        Args:
            name: One of `names`, such as "model.h.0.weight".

        Raises:
            UsageError: E215, if there is no such name.
        """
        self._training_state()
        return whole_source(self._world, *self._located(), name)

    def save(
        self,
        path: str | Path,
        extra: Any = None,
        keep: int | None = None,
        *,
        every: int | None = None,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint that any plan on any number of ranks can load.

        Every rank must call it, between the same two steps, with a directory that all ranks share.
        A kill at any moment leaves the last complete step, and `latest` names it. Under
        `parallelize(..., on_signal="save")` the first call after a signal writes one, whatever
        `every` says, and ends the rank with status 130.

        Args:
            path: Directory of the run; the step gets a directory of its own in it.
            extra: Anything else to keep: epoch, position in the data, a scheduler's
                `state_dict()`. Numbers, strings, small tensors, lists, tuples and dicts; or a
                function that returns them, called when something is written.
            keep: How many checkpoints to keep; older ones are deleted once this one is durable.
                None keeps all.
            every: Call `save` after every step, and write only every so many steps.
            wait: Return once the checkpoint is durable. False copies this rank's share and writes
                it during the next steps; the next `save`, `load` or `close` then raises any error.

        Raises:
            FileError: E433, on all ranks, if one of them could not write; training may go on.
            MismatchError: E521, E522, if the ranks save different things, or another run saves in
                this directory.
            UnsupportedError: E824, if something has a type that a checkpoint cannot hold.
        """
        stop = self._state.stop
        leaves = stop is not None and stop.tick() and stop.on_signal == "save"
        check_steps("every", every)
        if leaves or every is None or self.steps % every == 0:
            given = extra() if callable(extra) else extra
            self._training_state().save(path, given, keep, wait=wait or leaves)
        if stop is not None and leaves:
            self.close()
            stop.leave(f"saved step {self.steps} in {str(path)!r} and stopped")

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked to stop (`on_signal`): the same on all ranks after a step."""
        return self._state.stop is not None and self._state.stop.is_set

    @property
    def steps(self) -> int:
        """Steps trained so far, including those before the loaded checkpoint."""
        return self._training.steps

    @property
    def peak_bytes(self) -> int:
        """Measured peak bytes of tensors on this rank, in the first step of `graph`.

        Comparable with `plan`: both are of the graph that ran last.
        """
        return self._executor.peak_bytes

    @property
    def step_s(self) -> Sequence[float]:
        """Seconds of each step so far."""
        return tuple(self._history.step_s)

    def close(self) -> None:
        """Finish pending saves and close the connections to the other ranks.

        The user's process group stays open.
        """
        try:
            if self._state.users == [self._training]:
                settle_loss(self._world)
            self._training.close()
        finally:
            if self._training in self._state.users:
                self._state.users.remove(self._training)
            if not self._state.users:
                if self._state.stop is not None:
                    self._state.stop.close()
                self._world.close()
                if self._state.is_limited:
                    memory_limits.lift_limit()


def parallelize(
    step: Callable[..., Any],
    *args: Any,
    plan: Plan | None = None,
    decide: Decide | None = None,
    timeout: float = 60.0,
    device: str | None = None,
    shapes: Sequence[Sequence[Any]] = (),
    is_limited: bool = False,
    on_signal: OnSignal | None = None,
    on_cluster: Callable[[ThisCluster], None] | None = None,
    prove: Prove | None = None,
    record: str | Path | None = None,
) -> Parallel:
    """Return the step as a function that runs on all ranks.

    Rank 0 captures the step and plans it. Each rank keeps the parameters and states of its own ops,
    and the optimizers' and models' own objects hold them: between steps they may be read and
    changed. Where the plan places whole ops, the rest of the models reads as NaN. Where it cuts
    them (`tofu`), a parameter or state is this rank's shard from now on, with its shape. What is
    spread so refuses to be called and to give its state dict: `state_dict`, `save` gather it.

    Args:
        step: The user's step.
        *args: Its arguments, built in the same way on every rank, with an example batch.
        plan: Made for this step; None lets rank 0 decide.
        decide: Plans a graph for a number of devices, the state where it is; without it nothing
            that changes between calls is followed.
        timeout: Longest wait for one message, seconds.
        device: "cpu" or "cuda"; None takes what the models are on.
        shapes: Further example batches, to be captured and planned now instead of when they come.
        is_limited: Enforce the memory limits of the plan's cluster from here on.
        on_signal: What SIGTERM and SIGINT on any rank make all ranks do; see `StopSignal`.
        on_cluster: Called on every rank before planning, with measured links; None: not measured.
        record: Where rank 0 writes what the ranks measure of the first graph's ops.
        prove: Called on rank 0 with its graph and `plan`: raises unless what that cuts is right.

    Raises:
        MismatchError: E5xx, if ranks, plan and step do not belong together.
        RankError: E6xx, if a rank failed meanwhile.
    """
    tensors = [entry.value for entry in walk_objects(step, list(args)).tensors]
    state = live_state_of(tensors)
    if state is None:
        kind = device or this_device()
        world = join(rank_device(kind, int(os.environ.get("LOCAL_RANK", "0"))), timeout_s=timeout)
        world.detect_failures()
        state = LiveState(world)
    history = History([], [])
    try:
        state.tell_cluster(on_cluster)
        recording = recording_of(step, args)
        make = Maker(state, step, history, plan, decide, recording is not None, prove=prove)
        first = make(state.next_number(), args, ())
        read = {op.name for op in first.executor.program.whole.ops}
        recording = recording_for(read, recording, step, args)
        limits = is_limited and not state.is_limited
        if limits:
            pin_allocator()
            _limit(state, first.executor)  # so that it applies while the state is made
        elif state.world.device.type == "cpu":
            grow_heap()
        announce = functools.partial(guard_spread_objects, state.spread)
        variants = Variants(state, history, make, first, recording, announce)
        if limits:
            _limit(state, first.executor)  # by now, the memory of the user's own models is free
        for batch in shapes:
            variants.prepare(batch)
        if on_signal is not None and state.stop is None:
            state.stop = StopSignal(state.world, on_signal)
        recorded = None if record is None else Recording(record, variants.current.executor)
    except PardnnError as error:
        if state.users:  # other steps continue
            raise
        memory_limits.lift_limit()
        raise state.world.report_failure(error) from error.__cause__
    return Parallel(state, variants, history, decide, recorded)


def _limit(state: LiveState, executor: Executor) -> None:
    """Limit this rank to what its limit leaves beside the existing state."""
    held, device = live_bytes(executor.live_values), state.world.device
    state.is_limited = memory_limits.set_limit_beside(executor.limit_bytes, held, device)

"""Binding a graph's sources to live values: this rank's shards of the state, each step's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.deferred_init.initialise import Recording, replay
from pardnn.backends.torch.devices import one_element
from pardnn.backends.torch.ops.host_memory import new_state, on_host
from pardnn.backends.torch.ops.partition_ops import box_copy
from pardnn.backends.torch.rng.generator import generators_restored
from pardnn.backends.torch.runtime.failures import naming_what_is_made_whole
from pardnn.backends.torch.runtime.filled_containers import filled_names, rebind
from pardnn.backends.torch.runtime.granted_values import GrantedValues
from pardnn.backends.torch.runtime.host_numbers import HostNumbers
from pardnn.backends.torch.runtime.input_checks import (
    Batch,
    BatchTensors,
    check_sources,
    granted_settings,
    is_number,
    unlike_batch,
)
from pardnn.backends.torch.runtime.notices import changed_values
from pardnn.backends.torch.runtime.starting_numbers import StartingNumbers
from pardnn.backends.torch.user_step.absent import mark_absent
from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects, walk_value
from pardnn.backends.torch.user_step.root_names import argument_names
from pardnn.backends.torch.user_step.slots import Entry
from pardnn.backends.torch.user_step.sources import (
    Source,
    batch_indices,
    names_by_id,
    outside,
    setting_entries,
    sources,
)
from pardnn.errors import MismatchError, UnsupportedError, shown
from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import Box
from pardnn.plan.state_layout import shard_of


class Binding:
    """The sources of a graph, bound to the arguments of its step.

    Args:
        step: The user's step.
        args: Its arguments, with the example batch; fake tensors if they come from a recording.
        graph: The graph of that step.
        device: Where this rank's values are.

    Attributes:
        guards: The guards on the values on which the graph relies; None until `watch`.

    Raises:
        MismatchError: E505, if the graph has sources that the step's arguments do not have.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        graph: Graph,
        device: torch.device,
    ) -> None:
        self._step, self._args = step, list(args)
        self.guards: Guards | None = None
        self._notes, self._has_run, self._given = graph.step_notes, False, tuple[Any, ...]()
        self._device = device
        self._batch = batch_indices(args)
        self._names = argument_names(step, len(args))
        found = outside(filled_names(graph), sources(step, args, graph))
        self.sources = {source.name: source for source in found}
        self._whole = {op.outputs[0].name: op for op in graph.ops if op.is_source}
        self._initial = {
            op.name: (op.arguments or {}).get("initial") for op in graph.ops if op.is_source
        }
        self._passed = [name for name in self.sources if self._is_of_batch(name)]
        self._host = HostNumbers(step, args, graph, self.sources)
        check_sources(graph, self.sources)
        numbers = [op for op in graph.ops if op.kind == "input" and is_number(op)]
        self._tensors = [op for op in graph.ops if op.kind == "input" and not is_number(op)]
        self._of_batch = [op.name for op in self._tensors if self._is_of_batch(op.name)]
        objects = walk_objects(step, list(args))
        stateful = (entry.value for entry in objects.stateful)
        self._optimizers = [x for x in stateful if isinstance(x, torch.optim.Optimizer)]
        self._ints = {entry.name for entry in objects.numbers if type(entry.value) is int}
        # Watched now, since tensors that the step's objects also hold may lose their data later.
        self._of_tensors = BatchTensors(self._found_in(self.example())[0])
        self._starting = StartingNumbers(graph, self.sources, objects)
        granted = list(granted_settings(graph, setting_entries(objects, self._batch)))
        self._ints -= {name for name, *_ in granted}
        # Settings of the batch are guarded with it.
        settings = [each for each in granted if each[1].argument not in self._batch]
        self._granted = GrantedValues(numbers, self._host, settings)

    def stateful(self) -> list[Entry]:
        """Return the models, optimizers, schedulers and gradient scalers that the step reaches."""
        return self.objects().stateful

    def objects(self) -> ObjectGraph:
        """Return what the step reaches now, except the batch."""
        return walk_objects(self._step, self._args)

    def held_numbers(self) -> dict[str, Source]:
        """Return the numbers of the user's objects that the step reads at every call, by name."""
        return {
            name: source
            for name, source in self.sources.items()
            if source.kind == "input"
            and not self._is_of_batch(name)
            and isinstance(source.get(), bool | int | float | None)
        }

    # Residents: parameters, buffers and optimizer states.

    def replayed(self, ops: Iterable[Op], recording: Recording) -> dict[str, Any]:
        """Return the values of source ops by name, from a replay of the recorded construction.

        Called once per rank with everything that it needs: the generators end where the whole
        construction leaves them. Only the shard of a sharded tensor stays in memory.

        Args:
            ops: Sources of the planned graph.
            recording: The recording of the entry point that made the step's arguments.
        """
        shards = [(op, *shard_of(op, self._whole)) for op in ops]
        live = {of: self.first_tensor(of) for _, of, _ in shards}
        made = [shard for shard in shards if isinstance(live[shard[1]], torch.Tensor)]
        boxes = [self._own_box(of, box) for _, of, box in made]
        names, tensors = [of for _, of, _ in made], [live[of] for _, of, _ in made]
        parts = [
            None if box is None else (box, op.outputs[0].strides)
            for (op, _, _), box in zip(made, boxes, strict=True)
        ]
        with naming_what_is_made_whole(recording, names, tensors, parts):
            reals = replay(recording, tensors, parts)
        values = {
            op.name: self._placed(self._as_state(op, of, real), op)
            for (op, of, _), real in zip(made, reals, strict=True)
        }
        return {
            op.name: values[op.name] if op.name in values else self._initial_value(op, of)
            for op, of, _ in shards
        }

    def live_values(self, ops: Iterable[Op]) -> dict[str, Any]:
        """Return the live values of source ops by name; states that do not exist yet are created.

        A shard has its own storage; the whole tensor stays alive until `install`.
        """
        values = {}
        for op in ops:
            of, box = shard_of(op, self._whole)
            live, box = self.first_tensor(of), self._own_box(of, box)
            if not isinstance(live, torch.Tensor):
                values[op.name] = self._initial_value(op, of)
            elif box is None or isinstance(live, FakeTensor) or live.is_meta:
                values[op.name] = self._placed(live, op)
            else:
                copy = box_copy(live, box, op.outputs[0].strides)
                values[op.name] = self._placed(self._as_state(op, of, copy), op)
        return values

    def _is_copy(self, of: str) -> bool:
        """Whether a source does not exist yet and starts as a copy of another one."""
        return isinstance(self._initial[of], dict) and self.sources[of].get() is None

    def first_tensor(self, of: str) -> Any:
        """Return a source's live tensor, or the one that it starts as a copy of; else None."""
        return self.sources[self._initial[of]["copy_of"] if self._is_copy(of) else of].get()

    def _own_box(self, of: str, box: Box | None) -> Box | None:
        """Return the box of a source to copy; None if its live tensor is used directly."""
        whole = tuple((0, size) for size in self._whole[of].outputs[0].shape or ())
        return whole if box is None and self._is_copy(of) else box

    def _as_state(self, op: Op, of: str, value: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, op.outputs[0].dtype or "")
        return value.detach().to(dtype) if self._is_copy(of) else value

    def _placed(self, value: torch.Tensor, op: Op) -> torch.Tensor:
        if isinstance(value, FakeTensor) or value.is_meta or value.dim() == 0:
            return value  # the executor refuses values without data; a step count stays on the host
        if op.memory == "host":
            return on_host(value, op, self._device)
        return value if value.device == self._device else value.to(self._device)

    def _initial_value(self, op: Op, of: str) -> torch.Tensor | None:
        """Create a state that does not exist yet, as the first step would have."""
        initial = self._initial[of]
        return None if initial is None else new_state(op, self._device, initial)

    def install(self, values: Mapping[str, Any], names: Iterable[str]) -> None:
        """Put residents back into the user's objects, and drop those of other ranks.

        A dropped tensor keeps its shape and reads as NaN (0 for integers), stored in one element.
        The user's object of a sharded tensor holds the shard from now on: the same `Parameter`,
        with the shard's shape and storage.

        Args:
            values: The values of this rank's residents, by the names of their sources.
            names: The names of the sources to put back or to drop.
        """
        for name in names:
            source = self.sources[name]
            if name in values:
                source.set(values[name])
            elif isinstance(live := source.get(), torch.Tensor):
                source.set(one_element(live.shape, live.dtype, live.device))
                mark_absent(source.get(), name)

    def mark_stepped(self) -> None:
        """Mark the optimizers as stepped: learning rate schedules warn otherwise."""
        for optimizer in self._optimizers:
            optimizer._opt_called = True

    def first_values(self, ops: Sequence[Op], recording: Recording | None) -> dict[str, Any]:
        """Return the values of source ops of which no rank holds a shard yet, by name.

        Args:
            ops: The ops of this rank.
            recording: The recording of models without data; they are initialised here, by shard.
        """
        if recording is None:
            return self.live_values(ops)
        with generators_restored():
            return self.replayed(ops, recording)

    @property
    def must_open(self) -> bool:
        """Whether the graph is that of a first step, which has not run."""
        return bool(self._notes.get("opening")) and not self._has_run

    def watch(self) -> None:
        """Note the current Python values on which the graph relies.

        From here on, the example batch is no longer needed and is dropped.
        """
        known = self._host.places, self._host.left, self._ints, self._host.filled | self.sinks()
        read = self._notes.get("contents", ())
        self.guards = Guards(self._step, self._args, self._batch, *known, read)
        batch = self.read(self.example())
        of_batch = self.guards.of_batch
        held = names_by_id(self.sources, self._passed, is_asked=of_batch.compares_objects)
        parameters = [x.name for x in self.sources.values() if x.kind == "parameter"]
        self._of_tensors.watch(batch.tensors, held, of_batch.ignores, parameters)
        for index in self._batch:
            self._args[index] = None
        for name in self._passed:
            del self.sources[name]
        self._granted.expect(self.sources)

    # Inputs: the batch and hyperparameters.

    def example(self) -> tuple[Any, ...]:
        """Return the example batch: the arguments that are neither model nor optimizer."""
        return tuple(self._args[i] for i in self._batch)

    def example_values(self) -> dict[str, Any]:
        """Return the live tensors of the example batch by name."""
        return {op.name: self.sources[op.name].get() for op in self._tensors}

    def inputs(self, tensors: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every input op for one step.

        Args:
            tensors: The batch's tensors by source name.
            numbers: The batch's numbers by source name; hyperparameters are read from the
                optimizers.

        Raises:
            UnsupportedError: E807, if a tensor that an earlier step replaced is given again; E806,
                if the graph is that of a first step, which has run.
            MismatchError: E509, if a number is not one that the graph holds for, unless `changes`
                has run before.
        """
        if self._notes.get("opening") and self._has_run:
            raise UnsupportedError(
                "the first step does something different from later ones, but only its graph runs "
                "here.\nTrain with `parallelize`, which captures the later ones too, or run one "
                "step of your own where the model and the optimizer are made.",
                code="E806",
            )
        names = (op.name for op in self._tensors)  # some tensors are in param_groups
        values = {n: tensors[n] if n in tensors else self.sources[n].get() for n in names}
        read = self._granted.take()
        if read is None:  # `changes` has not run before
            if broken := list(self._granted.changes(numbers)):
                raise changed_values(broken)
            read = self._granted.take() or {}
        return values | read

    def read(self, batch: Sequence[Any]) -> Batch:
        """Return a batch with its tensors and numbers by name.

        Raises:
            MismatchError: E505, if its number of arguments differs; E528 of `StartingNumbers`.
        """
        if len(batch) != len(self._batch):
            raise unlike_batch([self._names[i] for i in self._batch], len(batch))
        if not self._has_run:
            self._starting.check()
            self._host.order_states()
        return Batch(tuple(batch), *self._found_in(batch))

    def _found_in(self, batch: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors and the numbers in a batch by name."""
        tensors: dict[str, Any] = {}
        numbers: dict[str, Any] = {}
        for i, arg in zip(self._batch, batch, strict=True):
            if type(arg) is torch.Tensor and not arg.__dict__:  # as the walk would name it
                tensors[self._names[i]] = arg
                continue
            objects = walk_value(arg, self._names[i])
            tensors |= {entry.name: entry.value for entry in objects.tensors}
            numbers |= {entry.name: entry.value for entry in objects.numbers}
        return tensors, numbers

    def arguments(self, batch: Sequence[Any]) -> tuple[Any, ...]:
        """Return all arguments of the step, with this batch."""
        given = dict(zip(self._batch, batch, strict=True))
        return tuple(given.get(i, arg) for i, arg in enumerate(self._args))

    def changes(self, batch: Batch, *, is_told: bool = False) -> Iterator[Change]:
        """Yield what differs from what the graph relies on: in the batch, then elsewhere.

        Args:
            batch: The batch from `read`; `watch` was called before.
            is_told: As for `ParameterGuards.changes`.
        """
        assert self.guards is not None
        if self._notes.get("opening") and self._has_run:
            yield Change("the call", "the first", "a later one")
            return
        yield from self._of_tensors.changes(batch.tensors)
        given = dict(zip(self._batch, batch.values, strict=True))
        yield from self.guards.changes(given, is_told=is_told)
        yield from islice(self._granted.changes(batch.numbers), 1)

    def batch_inputs(self, batch: Sequence[Any] | Batch) -> dict[str, Any]:
        """Return the value of every input op for a call; E505 if the batch lacks a tensor."""
        given = batch if isinstance(batch, Batch) else self.read(batch)
        self._given = given.values
        lacking = [name for name in self._of_batch if name not in given.tensors]
        if lacking:
            raise MismatchError(
                f"the batch lacks {shown(lacking[0])}, a tensor that the captured step reads.\n"
                "Every batch must have the structure of the captured example.",
                code="E505",
            )
        return self.inputs(given.tensors, given.numbers)

    def end_step(self, effects: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Write the step's results into the user's objects; return by name those it returns.

        Call it after each step. Containers of the batch and groups of
        optimizers get tensors that it put into them.

        Args:
            effects: `Executor.effects`.
        """
        held: dict[str, Any] = {}
        if effects or self._host.writes:
            given = zip(self._batch, self._given if self._host.puts(effects) else (), strict=False)
            objects = [walk_value(arg, self._names[index]) for index, arg in given]
            for name, tensor in rebind(effects, objects).items():
                if not self._is_of_batch(name):
                    self.sources[name].set(tensor)
            held = self._host.write(effects, objects)
        self._given, self._has_run = (), True
        return held

    def sinks(self) -> dict[str, Any]:
        """Return the files and writers to which the step writes, by name."""
        return self._host.sinks()

    def _is_of_batch(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{self._names[i]}.") for i in self._batch)

"""`parallelize`: a training step as a function on all ranks of torchrun, in the user's script."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.checkpoint.contents import root_modules
from pardnn.backends.torch.checkpoint.training_state import TrainingState
from pardnn.backends.torch.comm.handshake import check_world, wait_for
from pardnn.backends.torch.comm.world import World, join, rank_device
from pardnn.backends.torch.deferred_init.deferred import recording_of
from pardnn.backends.torch.devices import this_device
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.effects import tell
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.gather import resident_names, whole_value
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import random_ops
from pardnn.backends.torch.runtime.same_values import check_same_batch, check_same_state
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.backends.torch.user_step.access import SpreadObjects
from pardnn.errors import MismatchError, PardnnError
from pardnn.graph.file import graph_from_json, graph_to_json
from pardnn.graph.ir import Graph
from pardnn.plan.check import check_plan
from pardnn.plan.file import check_fingerprint, plan_from_json, plan_to_json
from pardnn.plan.plan import Plan

#: A store takes values of up to 8 MiB.
_CHUNK_BYTES = 4 << 20
#: How long the other ranks wait for rank 0 to capture and plan, seconds.
PLANNING_S = 3600.0


class Parallel:
    """The step on this rank; call it with the args that are neither model nor optimizer.

    Attributes:
        plan: The plan that runs.
        graph: The graph of the step.
        rank: This rank.
        names: Names of all parameters, buffers and optimizer states, for `whole`.
    """

    def __init__(self, executor: Executor, binding: Binding, spread: SpreadObjects) -> None:
        self._executor = executor
        self._binding = binding
        self.plan = executor.program.plan
        self.graph = executor.program.whole
        self.rank = executor.rank
        self.names = resident_names(executor.program)
        program, world, live = executor.program, executor.world, executor.live_values
        self._state = TrainingState(program, world, binding, live, spread)

    def __call__(self, *batch: Any) -> Any:
        """Run one step on all ranks; every rank must call it, with the same (global) batch.

        Returns:
            What the step returns, the same on every rank: the loss, or tuples, lists, dicts and
            objects of tensors and numbers (an object as `Fields`), without gradients.

        Raises:
            MismatchError: E505, E509 or E512, if the batch, a hyperparameter or another value that
                the step was captured with is not one that the graph holds for; E518, if ranks are
                given other batches.
            RankError: E6xx, naming the rank that failed first.
            StuckError: E7xx, naming the rank that hangs.
        """
        self._executor.step(lambda: self._inputs(batch))
        self._state.steps += 1
        self._binding.end_step(self._executor.effects)
        tell(self._executor.effects)
        return self._executor.result

    def _inputs(self, batch: Sequence[Any]) -> dict[str, Any]:
        self._state.begin_step()
        values = self._binding.batch_inputs(batch)
        check_same_batch(self._executor.world, values, len(self._executor.step_s))
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter, buffer or optimizer state as one device would hold it.

        Every rank must call it, with the same name, between steps, and gets the whole tensor.

        Args:
            name: One of `names`, such as "model.h.0.weight".

        Raises:
            UsageError: E215, if there is no such name.
        """
        executor = self._executor
        return whole_value(executor.program, executor.world, executor.live_values, name)

    def save(
        self, path: str | Path, extra: Any = None, keep: int | None = None, *, wait: bool = True
    ) -> None:
        """Write a checkpoint that any plan on any number of ranks can load.

        Every rank must call it, between the same two steps, with a directory that all ranks share.
        A kill at any moment leaves the last complete step, and `latest` names it.

        Args:
            path: Directory of the run; the step gets a directory of its own in it.
            extra: What else is to be kept: epoch, position in the data, a scheduler's
                `state_dict()`. Numbers, texts, small tensors, lists, tuples and dicts.
            keep: How many steps stay; older ones go once this one is durable. None keeps all.
            wait: Return when the step is durable. False copies this rank's share and writes beside
                the next steps; an error then comes from the next `save`, `load` or `close`.

        Raises:
            FileError: E433, on all ranks, if one of them could not write; training may go on.
            MismatchError: E521, E522, if the ranks save different things, or another run saves in
                this directory.
            UnsupportedError: E824, if something has a type that a checkpoint cannot hold.
        """
        self._state.save(path, extra, keep, wait=wait)

    def load(self, path: str | Path, step: int | None = None) -> Any:
        """Read a checkpoint: parameters, optimizers, step counts and random state.

        Every rank must call it, and reads what it holds. Where no op is cut, losses go on as
        those of the uninterrupted run, bit for bit.

        Args:
            path: As given to `save`.
            step: Number of trained steps; None takes the latest.

        Returns:
            The `extra` that was saved.

        Raises:
            FileError: E430 (no such step), E431 (torn), E432 (damaged, naming the tensor), E434.
            MismatchError: E520, if it is of another model or optimizer, naming the tensor.
        """
        return self._state.load(path, step)

    def export(self, path: str | Path, *, optimizer: bool = False) -> None:
        """Write the whole model into one safetensors file, for use elsewhere.

        Every rank must call it; rank 0 writes, and holds one whole tensor at a time. Names are
        the keys of `model.state_dict()`, with the model's own name before them where there are
        several; tied tensors are written once, so that `safetensors.torch.load_model` reads it.

        Args:
            path: Of the file.
            optimizer: Add optimizer states, as "optimizer.state.model.weight.exp_avg".

        Raises:
            FileError: E433, on all ranks, if it cannot be written; an old file stays.
        """
        self._state.export(path, optimizer=optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dicts of the step's objects, whole and on the host, on rank 0.

        Every rank must call it, and all but rank 0 get an empty dict. Rank 0 needs memory for the
        whole; `save` and `export` do not.

        Returns:
            By argument name: `{"model": model.state_dict(), "optimizer": ...}`, schedulers too.
        """
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Take torch's state dicts of the step's objects and give each rank its share.

        Every rank must call it; what rank 0 gives counts. Objects that are left out stay as they
        are, and so do step counts of the run and random state.

        Args:
            state: As `state_dict` returns it.

        Raises:
            MismatchError: E520, on all ranks, naming the key that is missing, superfluous, or of
                another shape or type. Nothing is changed then.
        """
        self._state.load_state_dict(state)

    def sync_model(self) -> None:
        """Fill the user's models on rank 0 with whole tensors until the next step.

        Every rank must call it. Then rank 0 may call the model (in `eval()` and `no_grad`) and
        read its state dict; changes are refused at the next step.
        """
        self._state.sync_model()

    @property
    def steps(self) -> int:
        """Steps trained so far, those before the checkpoint that was loaded among them."""
        return self._state.steps

    @property
    def peak_bytes(self) -> int:
        """Largest number of tensor storage bytes that this rank held in its first step."""
        return self._executor.peak_bytes

    @property
    def step_s(self) -> Sequence[float]:
        """Seconds of each step so far."""
        return tuple(self._executor.step_s)

    def close(self) -> None:
        """Finish what is being saved, and close the connections to the other ranks.

        The user's process group stays.
        """
        try:
            self._state.close()
        finally:
            self._executor.world.close()


def parallelize(
    step: Callable[..., Any],
    *args: Any,
    plan: Plan | None = None,
    decide: Callable[[Graph, int], Plan] | None = None,
    timeout: float = 60.0,
    device: str | None = None,
) -> Parallel:
    """Return the step as a function that runs on all ranks.

    Rank 0 captures the step and plans it; all ranks receive the graph and the plan. Each rank
    keeps the parameters and states of its own ops, and the optimizers' and models' own objects
    hold them: between steps they may be read and changed. Where the plan places whole ops, the
    rest of the models reads as NaN and takes no memory. Where it cuts them (`tofu`), a parameter
    or state is this rank's shard from now on, with the shard's shape. Models and optimizers that
    are spread so refuse to be called and to give their state dict: `Parallel.state_dict`, `save`,
    `export` and `sync_model` gather the shards.

    Args:
        step: The user's step.
        *args: Its arguments, built in the same way on every rank, with an example batch.
        plan: Made for this step; None lets rank 0 decide.
        decide: Plans a graph for a number of devices; needed where `plan` is None.
        timeout: Longest wait for one message, seconds.
        device: "cpu" or "cuda"; None takes what the models are on.

    Raises:
        MismatchError: E5xx, if ranks, plan and step do not belong together.
        RankError: E6xx, if a rank failed meanwhile.
    """
    kind = device or this_device()
    world = join(rank_device(kind, int(os.environ.get("LOCAL_RANK", "0"))), timeout_s=timeout)
    world.detect_failures()
    try:
        recording = recording_of(step, args)
        graph, chosen = _shared(world, step, args, plan, decide)
        program = Program(graph, chosen)
        binding = Binding(step, args, graph, world.device)
        state = ((s.name, s.get()) for s in binding.sources.values() if s.kind != "input")
        is_random = recording is not None or bool(random_ops(program.graph))
        check_same_state(world, state, is_random=is_random)
    except PardnnError as error:
        raise world.report_failure(error) from error.__cause__

    # Before the guards look at the models' hooks.
    spread = _spread_objects(program, binding)
    executor = start(program, world, lambda: binding.take(program.residents(world.rank), recording))
    return Parallel(executor, binding, spread)


def _spread_objects(program: Program, binding: Binding) -> SpreadObjects:
    """Let models and optimizers refuse to be read of which some rank does not hold all."""
    size = program.plan.num_devices
    whole = {
        name
        for name, shards in program.state.items()
        if len({shard.device for shard in shards if shard.box is None}) == size
    }
    spread = [
        s.get() for name, s in binding.sources.items() if name in program.state.keys() - whole
    ]
    stateful = binding.stateful()
    optimizers = {e.name: e.value for e in stateful if isinstance(e.value, torch.optim.Optimizer)}
    return SpreadObjects(root_modules(stateful), optimizers, frozenset(map(id, spread)))


def _shared(
    world: World,
    step: Callable[..., Any],
    args: Sequence[Any],
    plan: Plan | None,
    decide: Callable[[Graph, int], Plan] | None,
) -> tuple[Graph, Plan]:
    """Return graph and plan: rank 0 captures and plans, then broadcasts both."""
    content = None
    if world.rank == 0:
        graph = capture(step, *args)
        if plan is None and decide is not None:
            plan = decide(graph, world.size)
        if plan is None:
            raise MismatchError("there is no plan and nothing that could make one", code="E511")
        check_world(world.size, plan)
        check_fingerprint(plan, graph)
        check_plan(graph, plan)
        if world.store is None:
            return graph, plan
        content = graph_to_json(graph), plan_to_json(plan)
    elif plan is not None:
        check_world(world.size, plan)
    sent = [
        broadcast(world, name, None if content is None else content[i])
        for i, name in enumerate(("graph", "plan"))
    ]
    graph = graph_from_json(sent[0], "the graph of rank 0")
    # A plan of one's own is used as it is: the ranks compare what they hold before they start.
    return graph, plan or plan_from_json(sent[1], "the plan of rank 0")


def broadcast(world: World, name: str, content: bytes | None) -> bytes:
    """Return on every rank what rank 0 gives, compressed and in chunks through the store.

    The other ranks wait as long as rank 0 lives, at most `PLANNING_S`.

    Args:
        world: This rank's connections.
        name: Key in the store, used once.
        content: On rank 0 what all shall have, else None.

    Raises:
        RankError: E602, if a rank has failed meanwhile.
        StuckError: E702, if rank 0 writes nothing for `PLANNING_S`.
    """
    store = world.store
    assert store is not None
    if content is not None:
        packed = gzip.compress(content, compresslevel=1, mtime=0)
        chunks = [packed[i : i + _CHUNK_BYTES] for i in range(0, len(packed), _CHUNK_BYTES)]
        for i, chunk in enumerate(chunks):
            store.set(f"{name}/{i}", chunk)
        store.set(f"{name}/count", str(len(chunks)))
        return content
    wait_for(store, [f"{name}/count"], world.rank, [0], PLANNING_S, world.first_failure)
    count = int(store.get(f"{name}/count"))
    return gzip.decompress(b"".join(store.get(f"{name}/{i}") for i in range(count)))

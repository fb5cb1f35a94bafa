"""A new variant: captured and planned by rank 0, adopted by all ranks.

No object of the user changes before all ranks are ready: if capture or planning fails, all ranks
raise the same error and continue with the variants that they have.
"""

from __future__ import annotations

import functools
import gzip
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.capture import capture_step
from pardnn.backends.torch.capture.first_step.gradients import GradientNames
from pardnn.backends.torch.capture.refusals.first_step import kept_of_what_changed
from pardnn.backends.torch.capture.to_graph import Captured
from pardnn.backends.torch.comm.handshake import check_world
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.executor import Executor, History
from pardnn.backends.torch.runtime.filled_containers import assigned_names, filled_names
from pardnn.backends.torch.runtime.memory.fixed_places import choose_memory
from pardnn.backends.torch.runtime.notices import (
    Made,
    changed_values,
    gradients_not_left,
    not_left,
    told,
)
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import random_ops
from pardnn.backends.torch.runtime.same_values import check_same_state
from pardnn.backends.torch.runtime.start_rank import prepare
from pardnn.backends.torch.session.carried import check_left
from pardnn.backends.torch.session.constants import Constants
from pardnn.backends.torch.session.left_gradients import taken_gradients, used_tensors
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.backends.torch.session.new_tensors import check_shards
from pardnn.backends.torch.session.reset_gradients import GradientsOf, gradients_of
from pardnn.backends.torch.session.same_changes import check_same_changes, telling_changes
from pardnn.backends.torch.session.variants import Variant
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.held_numbers import NUMBERS, all_numbers, place
from pardnn.backends.torch.user_step.object_graph import walk_objects
from pardnn.backends.torch.user_step.sources import (
    batch_indices,
    sources,
    sources_of,
    tensor_names,
)
from pardnn.errors import MismatchError, PardnnError, RankError, error_from
from pardnn.graph.file import fingerprint, graph_from_json, graph_to_json
from pardnn.graph.ir import Graph
from pardnn.plan.check import check_plan
from pardnn.plan.file import check_fingerprint, plan_from_json, plan_to_json
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace

#: A store takes values up to 8 MiB.
_CHUNK_BYTES = 4 << 20
#: How long the other ranks wait for rank 0 to capture and plan, seconds.
PLANNING_S = 3600.0

Decide = Callable[[Graph, int, StateInPlace | None], Plan]
Prove = Callable[[Graph, Plan], None]


class Shared(NamedTuple):
    """What rank 0 sends to all others about a new variant.

    Attributes:
        graph: The graph of the step.
        plan: Its plan.
        uncarried: See `Captured`.
        gradients: See `Captured`.
        presumed: Parameters that were taken to have a gradient, by name.
        made: How long it took to make.
        constants: See `Captured`; only rank 0 has them.
    """

    graph: Graph
    plan: Plan
    uncarried: Sequence[str]
    gradients: GradientNames
    presumed: Sequence[str]
    made: Made
    constants: Sequence[tuple[torch.Tensor, Any]] = ()


class Maker:
    """Makes the variants of one step; see `variants.Make`.

    Args:
        state: What the ranks hold.
        step: The user's step.
        history: The history of the steps of this rank.
        plan: The user's own plan, for the first variant.
        decide: Plans a graph for a number of devices, with the state where it is; None: only the
            graph of `plan` can run.
        is_random: Whether the models have yet to be initialised.
        trains: Whether it is a training step; an evaluation may return anything.
        prove: Raises unless the cut ops of `plan` compute what the graph does, which `check_plan`
            cannot know.
    """

    def __init__(
        self,
        state: LiveState,
        step: Callable[..., Any],
        history: History,
        plan: Plan | None,
        decide: Decide | None,
        is_random: bool = False,
        trains: bool = True,
        prove: Prove | None = None,
    ) -> None:
        self._world, self._step, self._state, self._history = state.world, step, state, history
        self._plan, self._decide, self._is_random = plan, decide, is_random
        self._trains, self._is_first, self._prove = trains, True, prove
        self._filled: set[str] = set()  # containers that only some path fills
        self._live: set[str] = set()  # numbers that graphs read at every call
        self._fixed: set[str] = set()  # numbers that no graph could read
        self._flags: set[str] = set()  # buffers that graphs treat as constants
        # What the tensors kept by the step are made of, by name and geometry.
        self._kept: dict[Any, str] = {}
        self._executors: weakref.WeakValueDictionary[str, Executor] = weakref.WeakValueDictionary()

    def __call__(self, number: int, args: Sequence[Any], changes: Sequence[Change]) -> Variant:
        """Return a new variant, on all ranks; gradients that a call has reset are None to it.

        Args:
            number: The number of the variant; the same on all ranks.
            args: Arguments of the step.
            changes: What differs from the variant that ran last; nothing for the first.

        Raises:
            MismatchError: E509, if nothing can plan again; E519, if ranks see different changes.
            PardnnError: As capture and planning do, on all ranks.
        """
        if not self._is_first and self._decide is None:
            raise changed_values(changes)
        reset = self._state.reset_gradients
        with self._state.left_gradients.ours():
            undo = reset.arrange(GradientsOf())
            try:
                variant = self._made(number, args, changes)
            finally:
                if undo is not None:
                    undo()
            reset.arrange(gradients_of(variant.executor.program, variant.binding))
        return variant

    def _made(self, number: int, args: Sequence[Any], changes: Sequence[Change]) -> Variant:
        world, key = self._world, f" {number}" if number else ""
        with telling_changes(world, "capturing again", changes):
            if not self._is_first:
                check_same_changes(world, key, changes)
                together(world, f"own{key}", lambda: check_shards(self._state, self._step, args))
            shared = self._shared(number, args, changes)
            binding = together(
                world, f"bound{key}", lambda: Binding(self._step, args, shared.graph, world.device)
            )
            executor = self._executors.get(mark := fingerprint(shared.graph))
            program = None if executor is None else executor.program
            program = program or together(world, f"lowered{key}", lambda: Program(*shared[:2]))
            live = [(s.name, s.get()) for s in binding.sources.values() if s.kind != "input"]
            new = [each for each in live if self._state.held(each[1]) is None]
            is_random = self._is_random or bool(random_ops(program.graph))
            check_same_state(world, new, is_random=is_random, key=key)
            if executor is None:
                executor = self._executors[mark] = prepare(program, world, self._history, key)
                cluster = program.plan.cluster
                executor.limit_bytes = cluster.devices[world.rank].memory if cluster else None
                executor.layout = choose_memory(
                    program, world.rank, executor.limit_bytes, world.device
                )
        self._is_first = False
        text = told(changes) or "the values of the first call"
        return Variant(
            number, executor, binding, frozenset(shared.uncarried), shared.made, text,
            taken_gradients(
                shared.gradients, shared.presumed, binding, shared.graph,
                _reached(self._step, args),
            ),
            Constants(
                shared.constants, is_alone=world.size == 1, whole_of=self._state.whole_of
            ),
        )  # fmt: skip

    # Rank 0 captures and plans.

    def _shared(self, number: int, args: Sequence[Any], changes: Sequence[Change]) -> Shared:
        world = self._world
        if world.store is None:
            return self._captured(args, changes)
        shared, header = None, None
        if world.rank == 0:
            try:
                shared = self._captured(args, changes)
                header = {"uncarried": list(shared.uncarried), "made": list(shared.made),
                          "gradients": shared.gradients, "presumed": shared.presumed}  # fmt: skip
            except PardnnError as error:
                if not number:
                    raise
                header = {"error": record_of(error)}
            except Exception as error:
                raise RankError(
                    f"capturing or planning failed: {type(error).__name__}: {error}"
                ) from error
        elif self._is_first and self._plan is not None:
            check_world(world.size, self._plan)
        return self._received(number, header, shared)

    def _received(self, number: int, header: Any, shared: Shared | None) -> Shared:
        world = self._world
        text = None if header is None else json.dumps(header).encode()
        header = json.loads(broadcast(world, f"capture {number}", text))
        if "error" in header:
            raise error_from(**header["error"])
        text = None if shared is None else graph_to_json(shared.graph)
        graph = broadcast(world, f"graph {number}", text)
        plan = broadcast(
            world, f"plan {number}", None if shared is None else plan_to_json(shared.plan)
        )
        # A user's plan is used as it is: the ranks compare what they hold before they start.
        own = self._plan if self._is_first else None
        return Shared(
            graph_from_json(graph, "the graph of rank 0"),
            own or plan_from_json(plan, "the plan of rank 0"),
            header["uncarried"],
            GradientNames(*header["gradients"]),
            header["presumed"],
            Made(*header["made"]),
            () if shared is None else shared.constants,
        )

    def _check_kept(self, captured: Captured) -> None:
        """Raise E806 if a tensor that eager steps keep would be another one by a graph."""
        for name, (geometry, made_of) in captured.made_anew.items():
            if self._kept.setdefault((name, geometry), made_of) != made_of:
                raise kept_of_what_changed(name)
        # The graph would leave it now, and none before has.
        if again := {name for name, _ in self._kept} & assigned_names(captured.graph):
            raise kept_of_what_changed(min(again))

    def _presuming(
        self, args: Sequence[Any], capture: Callable[..., Captured]
    ) -> tuple[Captured, Sequence[str]]:
        """Capture a step, and again if it takes for None what an earlier call has left.

        Returns:
            What was captured, and the names of parameters that were taken to have a gradient.

        Raises:
            UnsupportedError: E808, if the step uses such gradients.
        """
        captured, left = capture(), self._state.left_gradients
        unknown = captured.gradients.unknown if left else ()
        found = _reached(self._step, args) if unknown else {}
        presumed = [name for name in unknown if found[name] in left]
        if presumed:
            other, mark = captured, fingerprint(captured.graph)
            captured = capture(presumed=presumed)
            check_left(used_tensors(captured.graph, [f"{name}.grad" for name in presumed]))
            if fingerprint(captured.graph) == mark:
                rest = tuple(name for name in unknown if name not in presumed)
                return other._replace(gradients=other.gradients._replace(unknown=rest)), ()
        return captured, presumed

    def _captured(self, args: Sequence[Any], changes: Sequence[Change]) -> Shared:
        begin = time.perf_counter()
        whole_of = self._state.whole_of
        must_train = self._trains and self._is_first
        wanted = (self._live | _changed_numbers(self._step, args, changes)) - self._fixed
        captured, presumed = self._presuming(args, functools.partial(
            capture_step, self._step, args, whole_of=whole_of, must_train=must_train,
            has_loss=self._trains, filled=self._filled, live=wanted, flags=self._flags,
        ))  # fmt: skip
        self._check_kept(captured)
        self._filled.update(filled_names(captured.graph))
        self._fixed |= wanted - captured.live
        self._live |= captured.live
        self._flags.update(captured.flags)
        graph, middle = captured.graph, time.perf_counter()
        if captured.made_anew and self._is_first:
            not_left(tuple(captured.made_anew))
        if captured.unleft:
            gradients_not_left(captured.unleft)
        known = self._executors.get(fingerprint(graph))
        if known is not None:
            of = known.program
            return _as_shared(of.whole, of.plan, captured, presumed, Made(middle - begin))
        plan = self._plan if self._is_first else None
        if plan is None and self._decide is not None:
            found, near = sources(self._step, args, graph), self._state.near
            state = None if near is None else self._state.in_place(found, near)
            plan = self._decide(graph, self._world.size, state)
        if plan is None:
            raise MismatchError("there is no plan and nothing to make one with", code="E511")
        check_world(self._world.size, plan)
        check_fingerprint(plan, graph)
        check_plan(graph, plan)
        if self._prove is not None and self._is_first and plan is self._plan:
            self._prove(graph, plan)
        made = Made(middle - begin, time.perf_counter() - middle)
        return _as_shared(graph, plan, captured, presumed, made)


def _as_shared(
    graph: Graph, plan: Plan, captured: Captured, presumed: Sequence[str], made: Made
) -> Shared:
    found = captured.uncarried, captured.gradients, presumed, made, captured.constants
    return Shared(graph, plan, *found)


def _reached(step: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the tensors that a step reaches now, by name."""
    found = sources_of(walk_objects(step, list(args)), batch_indices(args))
    return {source.name: source.get() for source in found}


def _changed_numbers(
    step: Callable[..., Any], args: Sequence[Any], changes: Sequence[Change]
) -> set[str]:
    """Return the names of changed numbers of objects among the changes between calls."""
    numbers = (each for each in changes if type(each.now) is type(each.then) in NUMBERS)
    places = {each.place for each in numbers if each.place is not None}
    if not places:
        return set()
    objects = walk_objects(step, list(args))
    names = tensor_names(sources_of(objects, batch_indices(args)))
    found = all_numbers(objects, names)
    return {name for name, (slot, _) in found.items() if place(slot) in places}


def together(world: World, key: str, work: Callable[[], Any]) -> Any:
    """Return what `work` returns; if it fails on one rank, it fails on all.

    Args:
        world: This rank's connections.
        key: Distinguishes this exchange from others of these ranks.
        work: Run on every rank.
    """
    result, failure = None, None
    try:
        result = work()
    except PardnnError as error:
        failure = error
    records = (
        []
        if world.store is None
        else world.all_gather(key, None if failure is None else record_of(failure))
    )
    if failure is not None:
        raise failure
    for record in records:
        if record is not None:
            raise error_from(**record)
    return result


def record_of(error: PardnnError) -> dict[str, Any]:
    """Return an error as JSON types."""
    return {"code": error.code, "message": error.message, "details": error.details}


def broadcast(world: World, name: str, content: bytes | None) -> bytes:
    """Return rank 0's content on every rank, sent compressed and in chunks through the store.

    The other ranks wait as long as rank 0 lives, at most `PLANNING_S`.

    Args:
        world: This rank's connections.
        name: Key in the store, used once.
        content: What all ranks get, on rank 0; otherwise None.

    Raises:
        RankError: E602, if a rank has failed in the meantime.
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
    world.wait_for([f"{name}/count"], [0], "before the next step", PLANNING_S)
    count = int(store.get(f"{name}/count"))
    return gzip.decompress(b"".join(store.get(f"{name}/{i}") for i in range(count)))

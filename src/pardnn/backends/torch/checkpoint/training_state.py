"""The state of a training step between two steps: saved, loaded, gathered.

All operations here are collective: every rank calls them, between the same two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.torch.checkpoint.contents import (
    contents,
    guard_spread_objects,
    root_modules,
    state_dict_keys,
)
from pardnn.backends.torch.checkpoint.held import HeldNumbers
from pardnn.backends.torch.checkpoint.left import LeftValues
from pardnn.backends.torch.checkpoint.left_unread import Bound, LeftUnread, moved
from pardnn.backends.torch.checkpoint.loading import agreed_manifest, check_tensors, fill
from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.checkpoint.python_values import (
    check_values,
    decode,
    encode,
    set_values,
    values_of,
)
from pardnn.backends.torch.checkpoint.random_state import random_state, set_random_state
from pardnn.backends.torch.checkpoint.saving import (
    Snapshot,
    Writing,
    copied,
    write_snapshot,
)
from pardnn.backends.torch.checkpoint.state_dicts import (
    export,
    gathered_settings,
    gathered_state_dicts,
    scatter_state_dicts,
)
from pardnn.backends.torch.checkpoint.unread import UnreadState
from pardnn.backends.torch.checkpoint.weights import (
    LoadedKeys,
    Models,
    agreed,
    model_keys,
    read_into,
)
from pardnn.backends.torch.checkpoint.whole import Exchange
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import random_ops
from pardnn.backends.torch.runtime.same_values import checksum
from pardnn.backends.torch.user_step.access import SpreadObjects
from pardnn.checkpoint.directory import Lock, check_steps
from pardnn.checkpoint.manifest import KEPT_BITS, Manifest
from pardnn.errors import FileError, MismatchError, shown
from pardnn.graph.file import fingerprint
from pardnn.graph.ir import Graph
from pardnn.plan.file import plan_to_json
from pardnn.plan.state_layout import shard_of
from pardnn.version import __version__


class TrainingState:
    """What a step keeps from one call to the next, on this rank.

    Args:
        program: What runs.
        world: This rank's connections.
        binding: The binding of the user's objects.
        live: This rank's live values, by the names of the planned graph.
        spread: The user's objects that refuse to be read.
        key: Distinguishes this step's exchanges from those of other steps on the same ranks.
        most_held: Returns the most bytes that this rank holds in a step of any graph that uses the
            state.
        unread: State of a checkpoint that no graph reads so far; None refuses such state.
        graphs: Returns all graphs of the step, each with its binding; None: there is one.

    Attributes:
        steps: Steps that were trained, including those before the loaded checkpoint.
        moved: Tensors that were moved or replaced, if the last graph reads not all of the state.
        program: What says where all of the state is.
        live: Its live values on this rank, by the names of the planned graph.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        binding: Binding,
        live: Mapping[str, Any],
        spread: SpreadObjects,
        key: str = "",
        most_held: Callable[[], int] = lambda: 0,
        unread: UnreadState | None = None,
        graphs: Callable[[], Iterable[tuple[Graph, Binding]]] | None = None,
    ) -> None:
        self.steps, self._kept_bits = 0, True
        self._most_held = most_held
        self._own_key = key
        self._spread = spread
        # Whole tensors in rank 0's models, and their versions when they were put there.
        self._synced: list[tuple[str, torch.Tensor, int]] = []
        self.program, self._world, self._binding, self.live = program, world, binding, live
        self._unread, self._of_graph = unread, (program, binding, live)
        graphs = graphs or (lambda: [(program.whole, binding)])
        self._held, self._left = HeldNumbers(graphs), LeftValues(graphs, is_silent=world.rank > 0)
        self._left_unread = LeftUnread(None if unread is None else unread.held)
        self._count = 0
        self._lock: Lock | None = None
        self._writing: Writing | None = None
        self._torn_by = ""
        self.moved: list[str] = []

    def begin_step(self) -> None:
        """Take back models that `sync_model` has filled.

        Raises:
            MismatchError: E524, if one was changed meanwhile; E525, as `check`.
        """
        if not self._torn_by and not self._synced:
            return
        self.check()
        changed = self._take_back()
        if changed:
            raise MismatchError(
                f"{shown(changed[0])} was changed in the whole model that sync_model() made "
                f"({len(changed)} such): the step would not see it.\n"
                "Call fast.load_state_dict(...) with the new values, and model.eval() before the "
                "model is called between steps.",
                code="E524",
                details={"changed": changed[:20]},
            )

    def _take_back(self) -> list[str]:
        """Put shards back where whole tensors still are; return the names of changed ones."""
        if not self._synced:
            return []
        changed = [name for name, tensor, version in self._synced if tensor._version != version]
        names = [n for n, tensor, _ in self._synced if self._binding.sources[n].get() is tensor]
        self._synced, self._spread.is_whole = [], False
        residents = self.program.residents(self._world.rank)
        whole, live = self.program.sources, self.live
        values = {shard_of(o, whole)[0]: live[o.outputs[0].name] for o in residents}
        self._binding.install(values, names)
        return changed

    def follow(
        self, program: Program, binding: Binding, live: Mapping[str, Any], gone: Set[str],
        *, is_asked: bool = True,
    ) -> None:  # fmt: skip
        """Continue with what runs now, see the class; no call carries `gone` state on.

        A graph that reads less, such as an evaluation's, leaves the rest where the previous one
        says, unless something has moved. `is_asked`: the state is about to be read.
        """
        of_graph = program, binding, live
        if self._unread is not None:
            program, live = self._unread.beside(*of_graph)
        now, before = Bound(program, binding), Bound(self.program, self._binding)
        is_left = self._left_unread.names(now, before, gone, is_asked=is_asked)
        self.moved = moved(now, before) + self._left_unread.replaced if is_left else []
        if not is_left:
            self.program, self._binding, self.live = program, binding, live
            self._of_graph = of_graph

    def _check_located(self) -> None:
        """Raise E526 if no graph says where all of the state is."""
        if self.moved:
            raise MismatchError(
                f"{shown(self.moved[0])} was moved by the graph of the last call, or replaced, and "
                "that graph does not read all of the state.\nCall this after a training step.",
                code="E526",
                details={"moved": self.moved[:20]},
            )

    def check(self) -> None:
        """Raise E525 if a failed load has left a mixture of two states."""
        if self._torn_by:
            raise MismatchError(
                f"the state is part of one step and part of another: {self._torn_by}.\n"
                "Load a complete step before going on.",
                code="E525",
            )

    def save(
        self, path: str | Path, extra: Any = None, keep: int | None = None, *, wait: bool = True
    ) -> None:
        """Write a checkpoint; see `Parallel.save`."""
        self._check_located()
        check_steps("keep", keep)
        self.check()
        self.finish()
        root = Path(path)
        snapshot = Snapshot(
            root=root,
            contents=contents(self.program, self._keys(), self.steps, self._binding.sources),
            values=self.live,
            manifest=self._manifest(extra),
            random=checksum(torch.get_rng_state()) if random_ops(self.program.whole) else None,
            keep=keep,
        )
        key = self._key("save")
        self._locked(root, key)
        copy = None if wait else self._copied(snapshot)
        if copy is not None:
            self._writing = Writing(copy, self._world, self._lock, key)
        else:
            write_snapshot(snapshot, self._world, self._lock, key)

    def _copied(self, snapshot: Snapshot) -> Snapshot | None:
        cluster, rank = self.program.plan.cluster, self._world.rank
        limit = None if cluster is None else cluster.devices[rank].memory
        held = max(self.program.peaks[rank], self._most_held())
        return copied(snapshot, held, limit, self._world)

    def _key(self, what: str) -> str:
        self._count += 1
        return f"{what}{self._own_key}/{self._count}"

    def _locked(self, root: Path, key: str) -> None:
        """Lock the directory on rank 0 while the context is open; all ranks learn if this fails."""

        def lock() -> None:
            if self._world.rank == 0 and (self._lock is None or self._lock.root != root):
                if self._lock is not None:
                    self._lock.release()
                    self._lock = None
                self._lock = Lock(root)

        Phases(self._world, f"{key}/lock", f"saving in {str(root)!r}").run(lock)

    def _keys(self) -> dict[str, list[tuple[str, str]]]:
        return state_dict_keys(root_modules(self._binding.stateful()), self._sources())

    def _sources(self) -> list[Any]:
        return list(self._binding.sources.values())

    def _manifest(self, extra: Any) -> Manifest:
        plan, settings = self.program.plan, gathered_settings(self._binding, self._exchange())
        return Manifest(
            step=self.steps,
            tensors=(),
            files=(),
            numbers={
                "objects": values_of(self._binding.stateful(), self._sources(), settings),
                "held": self._held.values(self._binding),
                "left": self._left.values(self._binding),
            },
            random=random_state(self._world.device),
            extra=encode(extra, "extra"),
            graph_fingerprint=fingerprint(self.program.whole),
            plan={
                "algorithm": plan.algorithm,
                "num_devices": plan.num_devices,
                KEPT_BITS: plan.keeps_bits and self._kept_bits,
                "fingerprint": hashlib.sha256(plan_to_json(plan)).hexdigest()[:32],
            },
            versions={"pardnn": __version__, "torch": torch.__version__},
        )

    def finish(self) -> None:
        """Wait until a save that runs beside the steps is durable.

        Raises:
            PardnnError: What it failed with, the same on all ranks.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()

    def close(self) -> None:
        """Finish, and release the directory for other runs."""
        try:
            self.finish()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def load(self, path: str | Path, step: int | None = None) -> Any:
        """Read a checkpoint into the state; see `Parallel.load`."""
        self._check_located()
        self.finish()
        self._take_back()
        root, world = Path(path), self._world
        phases = Phases(world, self._key("load"), f"loading {str(root)!r}")
        directory, manifest = agreed_manifest(root, step, world, phases, self._check_fits)
        extra = decode(manifest.extra)
        self._torn_by = f"loading {str(directory)!r} failed"
        phases.run(lambda: self._take(manifest))
        of_rank = self.program, self._binding, world.rank, self.live
        phases.run(lambda: fill(*of_rank, directory, manifest, phases.tick))
        self._set_numbers(manifest)
        set_random_state(manifest.random, world.device)
        self.steps, self._torn_by = manifest.step, ""
        self._kept_bits = manifest.kept_bits
        return extra

    def load_weights(
        self, path: str | Path, model: str | None = None, *, strict: bool = True
    ) -> LoadedKeys:
        """Read weights into models; see `Parallel.load_weights`."""
        self._check_located()
        self.check()
        self.finish()
        self._take_back()
        phases = Phases(self._world, self._key("weights"), f"loading weights {str(path)!r}")
        models = list(root_modules(self._binding.stateful()))
        into = Models(self.program, self._world.rank, self.live, self._binding.sources)
        tensors, keys = agreed(
            phases, path, into, lambda: model_keys(self._keys(), models, model), strict=strict
        )
        self._torn_by = f"loading weights {str(path)!r} failed"
        phases.run(lambda: read_into(into, tensors, phases.tick, is_new=self.steps == 0))
        self._torn_by = ""
        return keys

    def export(self, path: str | Path, *, optimizer: bool = False) -> None:
        """Write the whole model into one file; see `Parallel.export`."""
        self._check_located()
        self.check()
        self.finish()
        tensors = contents(self.program, self._keys(), self.steps, self._binding.sources).tensors
        wanted = [t for t in tensors if t.keys or (optimizer and t.kind == "state")]
        phases = Phases(self._world, self._key("export"), f"exporting to {str(path)!r}")
        export(Path(path), wanted, self._exchange(), phases, self._world.rank)

    def state_dict(self) -> dict[str, Any]:
        """Return whole state dicts on rank 0; see `Parallel.state_dict`."""
        self._check_located()
        self.check()
        return gathered_state_dicts(self._binding, self._exchange(), self._world.rank)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take the state dicts of rank 0; see `Parallel.load_state_dict`."""
        self._check_located()
        self.finish()
        self._take_back()
        sources = {op.name: op.outputs[0] for op in self.program.sources.values()}
        known = {name: sources[name] for name in self.program.state}
        phases = Phases(self._world, self._key("state"), "loading state dicts")
        values = scatter_state_dicts(
            state or {}, self._binding, self._exchange(), known, phases, self._world.rank
        )
        set_values(values, self._binding.stateful(), self._sources())

    def sync_model(self) -> None:
        """Fill the user's models on rank 0; see `Parallel.sync_model`."""
        self._check_located()
        self.check()
        exchange = self._exchange()
        found: list[tuple[str, torch.Tensor, int]] = []
        for name, source in self._binding.sources.items():
            if source.kind not in ("parameter", "buffer") or name not in self.program.state:
                continue
            whole = exchange.gather(name)
            if whole is not None:
                source.set(whole.to(self._world.device))
                found.append((name, source.get(), source.get()._version))
        self._synced, self._spread.is_whole = found, bool(found)

    def _exchange(self) -> Exchange:
        return Exchange(self.program, self._world, self.live)

    def _take(self, manifest: Manifest) -> None:
        """Make room for the state of a checkpoint that no graph reads."""
        if self._unread is not None:
            self._unread.take(manifest, *self._of_graph[:2])
            self.program, self.live = self._unread.beside(*self._of_graph)
            guard_spread_objects(self._spread, self.program, self._binding)

    def _set_numbers(self, manifest: Manifest) -> None:
        objects, held, left = _values_in(manifest)
        try:
            set_values(objects, self._binding.stateful(), self._sources())
            self._left.set(left, self._binding)
            self._held.set(held, self._binding)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"the numbers of the checkpoint are damaged: {error}"
            raise FileError(text, code="E435") from error

    def _check_fits(self, manifest: Manifest, what: str) -> None:
        """Raise E520 unless a checkpoint is of this step."""
        more = check_tensors(self.program, manifest, what, self._unread, self._binding)
        objects, held, left = _values_in(manifest)
        check_values(objects, self._binding.stateful(), what, more)
        self._held.check(held, objects, self._binding, what, left)


def _values_in(manifest: Manifest) -> list[Mapping[str, Any]]:
    """Return a checkpoint's values of optimizers and the like, held numbers, and left values."""
    return [manifest.numbers.get(key, {}) for key in ("objects", "held", "left")]

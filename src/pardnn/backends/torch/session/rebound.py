"""State tensors that get new data between two calls: `p.data = x`, `p.set_(x)`.

Problem: the executor works on the memory that a parameter had when the graph took it over, and an
assignment to `data` moves the parameter to other memory. Nothing else of the parameter shows this:
its object, its version and its hooks stay.
Idea: each rank compares addresses and layouts of its tensors at every call, by the words of memory
that hold them; `p.data = p.data.t()` changes only the layout. Data of the same shape, type and
strides replaces the old; for a cut parameter, so does a whole tensor, of which the rank copies its
shard. Otherwise the tensor is taken as at the start, and the step is captured again; a rank that
holds only a shard refuses. On ranks that do not hold the tensor, the new data goes: it would be out
of date after the next step.

Complexity: O(tensors of the state) per call, in C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import has_strides
from pardnn.backends.torch.devices import empty_tensor, strides_of
from pardnn.backends.torch.ops.host_memory import on_host
from pardnn.backends.torch.ops.partition_ops import box_copy
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.input_checks import kind_of
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.session.live_state import LiveState
from pardnn.backends.torch.user_step.absent import is_absent
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.reached import unreached
from pardnn.backends.torch.user_step.shards import shard_held
from pardnn.backends.torch.user_step.sources import sources_of
from pardnn.backends.torch.user_step.tensor_words import TensorWords
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Op
from pardnn.plan.state_layout import shard_of

_OTHER = "data of the shape of the shard that was not computed from the shard"
_NAN = "NaN, which is how state of other ranks reads"


class KeptData:
    """Where the data is that this rank keeps for one graph.

    Args:
        state: What the ranks hold.
        executor: The executor of the graph; it has its residents.
        binding: The binding of its sources.

    Attributes:
        are_parameters_told: Whether the last look showed that those of its guards on parameters
            hold, too.
    """

    def __init__(self, state: LiveState, executor: Executor, binding: Binding) -> None:
        self._state, self._executor, self._binding = state, executor, binding
        self.are_parameters_told = False
        self.renew()

    def renew(self) -> None:
        """Look at the tensors that the step's objects hold now from here on."""
        executor, binding = self._executor, self._binding
        program = executor.program
        kept: list[tuple[Op, str, torch.Tensor]] = []
        for op in program.residents(executor.rank):
            of, _ = shard_of(op, program.sources)
            tensor = binding.sources[of].get()
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                kept.append((op, of, tensor))
        others = program.state.keys() - {of for _, of, _ in kept}
        found = [(name, binding.sources[name].get()) for name in sorted(others)]
        self._kept, self._absent = kept, [each for each in found if is_absent(each[1])]
        self._tensors = [tensor for _, _, tensor in kept] + [tensor for _, tensor in self._absent]
        self._parts: tuple[TensorWords, ...] = ()
        self._both = TensorWords([])
        self._note()
        self._are_all_same()  # so that each tensor is held as often as at any other call

    def _note(self) -> None:
        self._words = TensorWords(self._tensors)
        self._places = [_place(tensor) for _, _, tensor in self._kept]

    def _are_all_same(self) -> bool:
        """Look at the kept tensors and, at once, at what guards of parameters look at."""
        assert self._binding.guards is not None
        parts = self._words, self._binding.guards.of_parameters.words
        if parts != self._parts:
            self._parts, self._both = parts, parts[0].beside(parts[1])
        return self._both.hold()

    def follow(self) -> list[Change]:
        """Take over new data; return tensors that need another graph and are no longer held.

        Raises:
            MismatchError: E527, if a rank that holds a shard was given data that it cannot take.
        """
        self.are_parameters_told = self._are_all_same()
        if self.are_parameters_told or self._words.hold():
            return []
        self._drop_again()
        # Noted before the getters run, so that no change goes unnoticed.
        words = TensorWords(self._tensors)
        if [_place(tensor) for _, _, tensor in self._kept] == self._places:
            self._words = words
            return []
        changes: list[Change] = []
        taken: dict[str, torch.Tensor] = {}
        for (op, of, tensor), then in zip(self._kept, self._places, strict=True):
            if _place(tensor) == then:
                continue
            value = self._taken(op, of, tensor)
            if value is None:
                changes.append(self._change(op, of, tensor))
                self._state.forget(tensor)
            else:
                taken[op.name] = value
        if taken and not changes:
            self.exchange(taken)
        self._note()
        return changes

    def _drop_again(self) -> None:
        """Drop what tensors got that other ranks hold."""
        sources = self._binding.sources
        given = [(name, tensor) for name, tensor in self._absent if not is_absent(tensor)]
        self._binding.install({}, [name for name, old in given if sources[name].get() is old])

    def exchange(self, taken: Mapping[str, torch.Tensor]) -> None:
        """Run with other tensors for some residents, by the names of their ops."""
        self._executor.attach(self._residents() | taken)

    def _residents(self) -> dict[str, Any]:
        live: Mapping[str, Any] = self._executor.live_values
        ops = self._executor.program.residents(self._executor.rank)
        return {op.name: live[op.outputs[0].name] for op in ops}

    def _taken(self, op: Op, of: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the data that this rank computes with from now on; None if no graph so far can."""
        held = self._state.held(tensor)
        old = self._executor.live_values[op.outputs[0].name]
        if self._is_shared_out(tensor) and bool((tensor != tensor).any()):
            raise self._error(of, _NAN)
        if held is None or self._state.shares_storage(tensor):
            return None
        if tensor.dtype != old.dtype or tensor.device != old.device:
            return None
        value, (_, box) = tensor, shard_of(op, self._executor.program.sources)
        if box is not None and held.tensor.shape != tuple(old.shape) == tuple(tensor.shape):
            if shard_held(tensor) is None:
                raise self._error(of, _OTHER)
        elif box is not None and tuple(tensor.shape) == held.tensor.shape != tuple(old.shape):
            value = box_copy(tensor, box, op.outputs[0].strides)
            self._binding.sources[of].set(value)
            self._state.mark(tensor)
        strides = strides_of(op.outputs[0])
        if value.shape != old.shape or not has_strides(value, strides):
            return None
        if op.memory == "host":
            value = on_host(value, op, self._state.world.device)
            self._binding.sources[of].set(value)
            self._state.mark(tensor)
        return value

    def _is_shared_out(self, tensor: torch.Tensor) -> bool:
        """Whether some rank holds less than the whole of a tensor."""
        held = self._state.held(tensor)
        shards = () if held is None else held.shards
        whole = {shard.device for shard in shards if shard.box is None}
        return held is not None and len(whole) < self._state.world.size

    def _change(self, op: Op, of: str, tensor: torch.Tensor) -> Change:
        old = self._executor.live_values[op.outputs[0].name]
        if self._is_shared_out(tensor):
            raise self._error(of, _layout_text(tensor))
        return Change(f"{of}.data", _layout_text(old), _layout_text(tensor))

    def _error(self, of: str, given: str) -> MismatchError:
        return MismatchError(
            f"the data of {shown(of)} was replaced, by {given}: this rank holds its share, and "
            "cannot adopt the new data.\nGive every rank the whole tensor in the captured type "
            "and strides, or call fast.load_state_dict(...), or parallelize again.",
            code="E527",
            details={"name": of},
        )


def has_replaced(
    state: LiveState, program: Program, binding: Binding, objects: ObjectGraph
) -> bool:
    """Whether tensors of the state are new objects since a graph took them: `m.best = x`.

    A call notices those that it reads; this is for what reads all of the state between two calls.

    Args:
        state: What the ranks hold.
        program: What runs.
        binding: The binding of its sources.
        objects: What the step reaches now.

    Raises:
        MismatchError: E527, if the graph cannot take one over.
    """
    found, outputs = False, {op.name: op.outputs[0] for op in program.sources.values()}
    now = {source.name: source for source in sources_of(objects, ())}
    # What holds a plain tensor may be new, too: `ema.backup = {...}`.
    plain = [each for each in program.state if each in now and now[each].kind == "buffer"]
    binding.sources.update({name: now[name] for name in plain})
    if lost := sorted(unreached(program.state, binding.sources, objects)):
        raise MismatchError(
            f"{shown(lost[0])} was deleted, or what held it was replaced, since the last call "
            f"({len(lost)} such).\nCall the step first, which captures what it reads anew, or put "
            "it back if training is over.",
            code="E527",
            details={"name": lost[0]},
        )
    for name, shards in program.state.items():
        tensor = binding.sources[name].get()
        if not isinstance(tensor, torch.Tensor) or state.held(tensor) is not None:
            continue
        found, wanted = True, empty_tensor(outputs[name], torch.device("meta"))
        is_alike = tensor.shape == wanted.shape and tensor.dtype == wanted.dtype
        whole = {shard.device for shard in shards if shard.box is None}
        is_nan = len(whole) < state.world.size and bool((tensor != tensor).any())
        if is_nan or not is_alike:
            given = _NAN if is_nan else _layout_text(tensor)
            raise MismatchError(
                f"{shown(name)} was replaced, by {given}: the graph that ran last cannot take it "
                "over.\nCall the step first, which captures what it reads anew, or give every rank "
                "the whole tensor in the captured type and shape.",
                code="E527",
                details={"name": name},
            )
    return found


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # an absent tensor's data has no address
        address = 0
    return address, tensor.dtype, tensor.shape, tensor.stride()


def _layout_text(tensor: torch.Tensor) -> str:
    return f"{kind_of(tensor)._replace(strides=None)!r}, strides {list(tensor.stride())}"

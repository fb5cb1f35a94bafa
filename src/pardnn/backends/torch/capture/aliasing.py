"""Alias analysis: which value of the trace a tensor is, over storages, versions and views.

Idea: tensors alias if they share a storage, whether the op's schema says so or not. A consumer of a
stale value gets the newest content: the last written value if it has the same geometry, otherwise a
new view of that value, so that the consumer depends on the write. A write that overlaps no element
of a view leaves the view valid, as for the gates of a recurrent cell, slices of one tensor.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.random_states import RandomState, state_as_data
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.trace_ir import (
    Call,
    Storage,
    Value,
    flags_of,
    geometry_of,
    with_flags,
)
from pardnn.backends.torch.capture.view_overlap import last_write, slices
from pardnn.backends.torch.ops.codec import encode_constant

_MARK = "_pardnn_value"
_MAX_CONSTANT_BYTES = 1 << 20
_PLAIN = (False, False)  # neither a lazy conjugate nor a lazy negative


class AliasTracker:
    """The storages of one trace.

    Args:
        calls: The trace, to which new views and constants are added.
        locator: Finds the user's line of each op.
    """

    def __init__(self, calls: list[Call], locator: Locator) -> None:
        self.calls = calls
        self.locator = locator
        self.caches: Sequence[Any] = ()  # of `functools`, which keep tensors of the trace
        self._storages: dict[int, Storage] = {}

    def mark(self, tensor: torch.Tensor, value: Value) -> None:
        """Mark a tensor with its value, for as long as the tensor lives."""
        setattr(tensor, _MARK, (self, value))

    def write(self, call: Call, tensor: torch.Tensor) -> Value:
        """Record that `call` writes a tensor in place; return the value of the new version."""
        old = self.current(self.value(tensor))
        storage = old.storage
        assert storage is not None
        if storage.owner.call.kind == "constant":
            self._copy_constant(storage)
        if call not in storage.writes:
            storage.writes.append(call)
            call.within = self._filling()
        value = Value(call, geometry_of(tensor), storage, len(storage.writes), old)
        value.device = old.device
        storage.newest = storage.values[geometry_of(tensor)] = value
        storage.written.append(value)
        self.mark(tensor, value)
        return value

    def _filling(self) -> Sequence[Any]:
        """Return those of `caches` whose functions are running, in their form of this trace."""
        if not self.caches:
            return ()
        running = {frame.f_code for frame, _ in traceback.walk_stack(None)}
        return [x for x in self.caches if getattr(x.__wrapped__, "__code__", None) in running]

    def new_value(self, call: Call, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor that `call` returned: a view or the owner of a storage."""
        held = tensor.untyped_storage()
        storage = self._storages.get(held._cdata)
        geometry = geometry_of(tensor)
        value = Value(call, geometry, storage, device=tensor.device.type)
        if storage is None:
            value.storage = storage = Storage(held, value, value)
            self._storages[held._cdata] = storage
        else:
            value.base = next((v for v in call.inputs if v.storage is storage), None)
            if value.base is None:  # a second output on the storage of the first
                value.base = next(v for v in call.outputs if v.storage is storage)
            value.version = value.base.version
        storage.values[geometry] = value
        call.outputs.append(value)
        self.mark(tensor, value)
        return value

    def note_read(self, call: Call, value: Value) -> None:
        """Record that a call reads a value's content."""
        if value.storage is not None:
            call.reads.append((value.storage, len(value.storage.writes)))

    # Which value a tensor is.

    def _marked(self, tensor: torch.Tensor) -> Value | None:
        """Return the value with which a tensor was last marked, if it is still valid."""
        tracker, value = getattr(tensor, _MARK, (None, None))
        if tracker is not self or value is None or value.storage is None:
            return None
        same = value.storage.held._cdata == tensor.untyped_storage()._cdata
        return value if same and value.geometry == geometry_of(tensor) else None

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to this trace."""
        return tensor.untyped_storage()._cdata in self._storages

    def fresh_value(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor with its newest content."""
        return self.fresh(self.value(tensor))

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor, which may be stale.

        Raises:
            UnsupportedError: E801, if its storage is unknown.
        """
        value = self._marked(tensor)
        if value is not None:
            return value
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            geometry = geometry_of(tensor)
            value = storage.values.get(geometry) or self._new_view(
                storage, geometry, storage.newest
            )
            self.mark(tensor, value)
            return value
        constant = getattr(tensor, "constant", None)
        if isinstance(tensor, RandomState):
            raise state_as_data(tensor.made)
        if constant is None:
            raise unsupported.unknown_tensor(tuple(tensor.shape), self.locator.line())
        return self.constant(constant, tensor)

    def current(self, value: Value) -> Value:
        """Return the value written last if it has the same geometry, else `value` itself."""
        newest = value.storage.newest if value.storage is not None else value
        return newest if newest.geometry == value.geometry else value

    def fresh(self, value: Value) -> Value:
        """Return a value of the same geometry with the storage's newest content."""
        write = last_write(value)
        if write is None:
            return value
        storage, geometry = value.storage, value.geometry
        assert storage is not None
        assert geometry is not None
        newest = storage.values[geometry]
        write = last_write(newest)
        return newest if write is None else self._new_view(storage, geometry, write)

    def _new_view(self, storage: Storage, geometry: Any, newest: Value) -> Value:
        """Record a view of a storage's newest content, which depends on the last write."""
        if any(flags := flags_of(geometry)):
            plain = with_flags(geometry, _PLAIN)
            known = storage.values.get(plain)
            base = self.fresh(known) if known else self._new_view(storage, plain, newest)
            return self._lazy_view(base, flags)
        newest = self._lazy_view(newest, flags_of(newest.geometry))
        shape, strides, offset, dtype = geometry
        base = newest
        cuts = slices(newest.geometry, geometry) if newest.geometry is not None else None
        if cuts:
            return self._sliced_view(storage, newest, cuts)
        call = Call("aten.as_strided.default", view=True)
        call.args = [base, list(shape), list(strides), offset]
        if newest.geometry is not None and newest.geometry[3] != dtype:
            base = next(
                v for g, v in storage.values.items() if g[3] == dtype and flags_of(g) == _PLAIN
            )
            call.args[0] = base
            call.after = storage.writes[-1:]
        call.inputs = [base]
        value = Value(call, geometry, storage, len(storage.writes), base, device=newest.device)
        return self._record_view(value)

    def _lazy_view(self, value: Value, flags: tuple[bool, bool]) -> Value:
        """Record views that read a value as its conjugate, its negative, or both."""
        for i, kind in enumerate(("aten._conj.default", "aten._neg_view.default")):
            if flags[i]:
                storage, geometry, now = value.storage, value.geometry, flags_of(value.geometry)
                assert storage is not None
                assert geometry is not None
                call = Call(kind, [value], inputs=[value], view=True)
                toggled = with_flags(geometry, (now[0] ^ (i == 0), now[1] ^ (i == 1)))
                version = len(storage.writes)
                value = Value(call, toggled, storage, version, value, device=value.device)
                self._record_view(value)
        return value

    def _sliced_view(
        self, storage: Storage, base: Value, cuts: list[tuple[int, int, int]]
    ) -> Value:
        """Record a view as slices of another one: unlike `as_strided`, slices can be sharded."""
        value = base
        for dim, begin, end in cuts:
            assert value.geometry is not None
            shape, strides, offset, dtype = value.geometry
            call = Call("aten.slice.Tensor", [value, dim, begin, end], inputs=[value], view=True)
            cut = torch.Size((*shape[:dim], end - begin, *shape[dim + 1 :]))
            geometry = cut, strides, offset + begin * strides[dim], dtype
            value = Value(call, geometry, storage, len(storage.writes), value, device=base.device)
            self._record_view(value)
        return value

    def _record_view(self, value: Value) -> Value:
        """Record a view's call, and the view as the newest value of its geometry."""
        call, storage, geometry = value.call, value.storage, value.geometry
        assert storage is not None
        assert geometry is not None
        call.outputs = call.returns = [value]
        self.locator.annotate(call)
        self.calls.append(call)
        storage.values[geometry] = value
        return value

    def _copy_constant(self, storage: Storage) -> None:
        """Turn a constant that is changed in place into a clone of one that never changes."""
        copy = storage.owner.call
        constant = Call("constant", arguments=copy.arguments, source=copy.source)
        constant.module = copy.module
        value = Value(constant, storage.owner.geometry, device=storage.owner.device)
        value.storage = Storage(storage.held, value, value)
        constant.outputs.append(value)
        copy.kind, copy.arguments = "aten.clone.default", None
        copy.args, copy.inputs, copy.returns = [value], [value], [storage.owner]
        copy.reads = [(value.storage, 0)]
        self.calls.insert(self.calls.index(copy), constant)

    def copy_back(self, old: Value, new: Value) -> Call:
        """Record `old.copy_(new)`: the step has replaced the source `old` by `new`."""
        current = self.current(old)
        storage = current.storage
        assert storage is not None
        call = Call("aten.copy_.default", args=[current, new], inputs=[current, new])
        call.mutated = [current]
        self.note_read(call, current)
        self.note_read(call, new)
        storage.writes.append(call)
        value = Value(call, current.geometry, storage, len(storage.writes), current)
        call.outputs = call.returns = [value]
        storage.newest = value
        storage.written.append(value)
        self.calls.append(call)
        return call

    def constant(self, tensor: torch.Tensor, fake: torch.Tensor) -> Value:
        """Record a constant, whose content is part of the graph.

        Args:
            tensor: The real tensor.
            fake: The fake tensor that stands for it in the trace.

        Raises:
            UnsupportedError: E801, if it is too large.
        """
        if tensor.nbytes > _MAX_CONSTANT_BYTES:
            raise unsupported.large_constant(
                tuple(tensor.shape), tensor.nbytes, self.locator.line()
            )
        with unset_fake_temporarily():
            arguments = encode_constant(tensor.cpu())
        call = Call("constant", arguments=arguments)
        self.locator.annotate(call)
        self.calls.append(call)
        return self.new_value(call, fake)

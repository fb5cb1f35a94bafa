"""Which value a tensor is: storages, their versions, and the views over them.

Storages are told apart by identity, so whatever shares one is an alias, declared or not. A reader
of a stale value gets the newest content: the last written value if it lies over the storage in
the same way, else a view that is made anew from it, so that the reader depends on the write. A
write that touches no element of a view leaves it as it is: gates cut from one tensor are apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value, geometry_of
from pardnn.backends.torch.capture.view_overlap import last_write, slices
from pardnn.backends.torch.ops.codec import encode_constant

_MARK = "_pardnn_value"
_MAX_CONSTANT_BYTES = 1 << 20


class Memory:
    """The storages of one trace.

    Args:
        calls: The trace, to which views that are made anew and constants are added.
        locator: Where ops come from.
    """

    def __init__(self, calls: list[Call], locator: Locator) -> None:
        self.calls = calls
        self.locator = locator
        self._storages: dict[int, Storage] = {}

    def mark(self, tensor: torch.Tensor, value: Value) -> None:
        """Remember which value a tensor is, for as long as the tensor lives."""
        setattr(tensor, _MARK, (self, value))

    def write(self, call: Call, tensor: torch.Tensor) -> Value:
        """Return the new content of a changed tensor."""
        old = self.current(self.value(tensor))
        storage = old.storage
        assert storage is not None
        if storage.owner.call.kind == "constant":
            self._copy_constant(storage)
        if call not in storage.writes:
            storage.writes.append(call)
        value = Value(call, geometry_of(tensor), storage, len(storage.writes), old)
        value.device = old.device
        storage.newest = storage.values[geometry_of(tensor)] = value
        storage.written.append(value)
        self.mark(tensor, value)
        return value

    def new_value(self, call: Call, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor that `call` made: a view or the owner of a storage."""
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
        """Note that a call depends on a value's content."""
        if value.storage is not None:
            call.reads.append((value.storage, len(value.storage.writes)))

    # Which value a tensor is.

    def known(self, tensor: torch.Tensor) -> Value | None:
        """Return the value that a tensor was last marked with, if it still is that."""
        memory, value = getattr(tensor, _MARK, (None, None))
        if memory is not self or value is None or value.storage is None:
            return None
        same = value.storage.held._cdata == tensor.untyped_storage()._cdata
        return value if same and value.geometry == geometry_of(tensor) else None

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor with its newest content."""
        return self.fresh(self.value(tensor))

    def value(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor, which may be stale.

        Raises:
            UnsupportedError: E801, if nothing is known of its storage.
        """
        value = self.known(tensor)
        if value is not None:
            return value
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            geometry = geometry_of(tensor)
            value = storage.values.get(geometry) or self._reviewed(
                storage, geometry, storage.newest
            )
            self.mark(tensor, value)
            return value
        constant = getattr(tensor, "constant", None)
        if constant is None:
            raise unsupported.unknown_tensor(tuple(tensor.shape), self.locator.line())
        return self.constant(constant, tensor)

    def current(self, value: Value) -> Value:
        """Return the newest value of the same geometry, or the stale one."""
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
        known = storage.values[geometry]
        write = last_write(known)
        return known if write is None else self._reviewed(storage, geometry, write)

    def _reviewed(self, storage: Storage, geometry: Any, newest: Value) -> Value:
        """Describe a storage's newest content anew, by a view that depends on the last write."""
        shape, strides, offset, dtype = geometry
        base = newest
        cuts = slices(newest.geometry, geometry) if newest.geometry is not None else None
        if cuts:
            return self._sliced(storage, newest, cuts)
        call = Call("aten.as_strided.default", view=True)
        call.args = [base, list(shape), list(strides), offset]
        if newest.geometry is not None and newest.geometry[3] != dtype:
            base = next(v for g, v in storage.values.items() if g[3] == dtype)
            call.args[0] = base
            call.after = storage.writes[-1:]
        call.inputs = [base]
        value = Value(call, geometry, storage, len(storage.writes), base, device=newest.device)
        return self._viewed(value)

    def _sliced(self, storage: Storage, base: Value, cuts: list[tuple[int, int, int]]) -> Value:
        """Cut a view out of another one: unlike `as_strided`, it can be spread over devices."""
        value = base
        for dim, begin, end in cuts:
            assert value.geometry is not None
            shape, strides, offset, dtype = value.geometry
            call = Call("aten.slice.Tensor", [value, dim, begin, end], inputs=[value], view=True)
            cut = torch.Size((*shape[:dim], end - begin, *shape[dim + 1 :]))
            geometry = cut, strides, offset + begin * strides[dim], dtype
            value = Value(call, geometry, storage, len(storage.writes), value, device=base.device)
            self._viewed(value)
        return value

    def _viewed(self, value: Value) -> Value:
        """Record the call that makes a view, and the view as its storage's value of that shape."""
        call, storage, geometry = value.call, value.storage, value.geometry
        assert storage is not None
        assert geometry is not None
        call.outputs = call.returns = [value]
        self.locator.place(call)
        self.calls.append(call)
        storage.values[geometry] = value
        return value

    def _copy_constant(self, storage: Storage) -> None:
        """Make a constant that is changed in place a copy of one that never is."""
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
        """Record `old.copy_(new)`: the step put `new` in the place of the source `old`."""
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
        """Make a source op of a tensor that is written down in the graph itself."""
        if tensor.nbytes > _MAX_CONSTANT_BYTES:
            raise unsupported.large_constant(
                tuple(tensor.shape), tensor.nbytes, self.locator.line()
            )
        with unset_fake_temporarily():
            arguments = encode_constant(tensor.cpu())
        call = Call("constant", arguments=arguments)
        self.locator.place(call)
        self.calls.append(call)
        return self.new_value(call, fake)

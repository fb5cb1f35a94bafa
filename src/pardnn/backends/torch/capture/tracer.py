"""The tracer: every ATen call of a step, recorded over fake tensors.

A dispatch mode above `FakeTensorMode`. It sees what autograd, autocast and composite ops have
become: the calls that allocate and compute. For each it notes the values among the arguments,
runs the fake kernel to learn what comes out, and names what came out: new storages, views of
known ones, new contents of changed ones.

Host scalars never reach the fake kernels: those get a number of the same type, which cannot
change the shape or dtype of a result.

The tracer holds storages, never tensors: autograd hands a gradient over without a copy only
where nobody else refers to it, and the trace must show what an eager step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from pardnn.backends.torch.capture import constant_folding, unsupported
from pardnn.backends.torch.capture.aliasing import Memory
from pardnn.backends.torch.capture.fake_cache import FakeResults, is_too_large_to_run
from pardnn.backends.torch.capture.rng_replays import Redraws
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.trace_ir import Call, Met, Value, geometry_of
from pardnn.backends.torch.ops.codec import flatten_result
from pardnn.backends.torch.ops.host_scalars import (
    HostNode,
    inputs_behind,
    node_of,
    symbol,
    tests_zero,
)
from pardnn.backends.torch.ops.schema import (
    Signature,
    leaves,
    parts,
    signature,
    written_names,
    written_tensors,
)

_SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)
_DEVICE = torch.ops.prim.device.default
_NONZERO, _UNBIND = torch.ops.aten.nonzero.default, torch.ops.aten.unbind.int
_SIZES = ("List[int]", "Optional[List[int]]")
_SMALLEST_FLOAT = 5e-324
_FIRST_DISGUISE = 0x5EED0000
_STAND_INS = {float: 1.0, int: 1, bool: True}


class Tracer(TorchDispatchMode):
    """Records the calls of one step.

    Args:
        fake_mode: Mode of the fake tensors that the step computes with.
        locator: Where ops come from.
        fakes: Fake results known from earlier steps under the same mode.

    Attributes:
        calls: In the order of execution, sources first.
        guards: Host scalar inputs that a decision depended on: "nonzero" or "exact".
        redraws: The random calls and the generators.
        before_write: Called with each tensor that the next call writes; None for nothing.
        may_read_numbers: Whether numbers may be read from activations now.
        free_numbers: The calls that read one while they might.
        answers: What the next decisions on data get, instead of being refused.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, locator: Locator, fakes: FakeResults | None = None
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.guards: dict[Value, str] = {}
        self.locator = locator
        self.memory = Memory(self.calls, locator)
        self._fake_mode = fake_mode
        self._fakes = fakes or FakeResults(fake_mode)
        self._constants: dict[tuple[Any, ...], tuple[torch.Tensor, FakeTensor]] = {}
        self.redraws = Redraws()
        self.before_write: Callable[[torch.Tensor], None] | None = None
        self.may_read_numbers = False
        self.free_numbers: set[Call] = set()
        self.answers: list[bool] = []
        self._disguised: dict[float, HostNode] = {}

    # What exists before the step.

    def add_source(self, kind: str, fake: FakeTensor, arguments: dict[str, Any] | None) -> Value:
        """Make `fake` the value of a new source op."""
        call = Call(kind=kind, arguments=arguments)
        self.calls.append(call)
        value = self.memory.new_value(call, fake)
        assert value.storage is not None
        value.storage.source = True
        return value

    def add_number(self, number: float, arguments: dict[str, Any]) -> Any:
        """Make a new source op of a host scalar; return the symbol that stands for it."""
        call = Call(kind="input", arguments=arguments)
        self.calls.append(call)
        value = Value(call, kind=type(number))
        call.outputs.append(value)
        return symbol(HostNode(self, value, type(number), number))

    # Host scalars.

    def scalar_call(self, function: str, operands: list[Any], kind: type) -> Value:
        """Record host arithmetic; see `ScalarRecorder`."""
        call = Call(kind=f"scalar.{function}", args=operands)
        call.inputs = list(dict.fromkeys(leaves(operands, Value)))
        return self._finish_scalar(call, kind)

    def _finish_scalar(self, call: Call, kind: type) -> Value:
        value = Value(call, kind=kind)
        call.outputs = call.returns = [value]
        self.locator.place(call)
        self.calls.append(call)
        return value

    def disguise(self, number: Any) -> Any:
        """Return a plain float that stands for a symbol, where an op's schema takes no other.

        It is a subnormal number that nobody computes with; `_argument` knows it again.
        """
        node = node_of(number)
        if node is None or node.kind is not float:
            return number
        mark = (_FIRST_DISGUISE + len(self._disguised)) * _SMALLEST_FLOAT
        self._disguised[mark] = node
        return mark

    def scalar_decides(self, node: HostNode) -> Any:
        """Note the inputs that a decision depends on, or refuse it; see `ScalarRecorder`."""
        if node.hint is None and self.answers:
            return self.answers.pop(0)
        if node.hint is None:
            raise unsupported.decision_by_value(self.locator.line())
        weak = tests_zero(node)
        for value in inputs_behind(node):
            if self.guards.get(value) != "exact":
                self.guards[value] = "nonzero" if weak else "exact"
        return node.hint

    def _item(self, tensor: torch.Tensor) -> Any:
        value = self.memory.value_of(tensor)
        constant = getattr(tensor, "constant", None)
        if constant is not None and value.call.kind == "constant":
            with unset_fake_temporarily():
                return constant.item()  # a literal of the user's own code
        same = constant_folding.data_of(value, self.calls)
        if same is not None:
            return same
        call = Call(kind="aten._local_scalar_dense.default", args=[value], inputs=[value])
        self.memory.note_read(call, value)
        if self.may_read_numbers:
            self.free_numbers.add(call)
        kind = bool if tensor.dtype == torch.bool else float
        if kind is float and not tensor.dtype.is_floating_point:
            kind = int
        return symbol(HostNode(self, self._finish_scalar(call, kind), kind))

    # Calls.

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record one call and return its fake result."""
        kwargs = kwargs or {}
        if func is _DEVICE:  # asked by autograd, as often as all else together
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(args[0])
        if not isinstance(func, torch._ops.OpOverload):
            raise unsupported.untraceable(str(func), self.locator.line())
        sig = signature(func)
        if sig.role is None:
            return self._call(func, sig, args, kwargs)
        if sig.role == "question":
            return func(*args, **kwargs)
        if sig.role == "no effect":
            return None
        if sig.role == "fused rnn" and not is_too_large_to_run(args):
            return self._call(func, sig, args, kwargs)
        if sig.role in ("hidden size", "fused rnn"):
            raise unsupported.hidden_size(func._schema.name, self.locator.line())
        if sig.role == "identity":
            return self._identity(func, args[0])
        return self._view_in_place(func, sig, args, kwargs)

    def _call(
        self, func: torch._ops.OpOverload, sig: Signature, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        writes = written_names(sig, args, kwargs)
        if writes and self.before_write is not None:
            for tensor in written_tensors(sig, writes, list(args), kwargs):
                self.before_write(tensor)
        if func in constant_folding.INDEXED:
            args = (args[0], self._unmasked(args[1]), *args[2:])
        met = Met(sig.kept, sig.view, sig.sized)
        fake_args, fake_kwargs = [], {}
        traced_args, traced_kwargs = [], {}
        for name, kind, arg in zip(sig.names, sig.types, args, strict=False):
            fake, traced = self._argument(arg, kind, name in writes, met)
            fake_args.append(fake)
            traced_args.append(traced)
        for name, arg in kwargs.items():
            met.key.append(name)
            kind = sig.types[sig.names.index(name)]
            fake, traced = self._argument(arg, kind, name in writes, met)
            fake_kwargs[name], traced_kwargs[name] = fake, traced
        key = tuple(met.key) if met.is_kept else None
        try:
            result = self._fakes.result(func, fake_args, fake_kwargs, met.tensors, key)
        except constant_folding.DEPENDS_ON_DATA:
            result = constant_folding.result_of(
                func, traced_args, met.values, self.calls, self._fake_mode
            )
            if result is None:
                raise
        results = [r if isinstance(r, torch.Tensor) else None for r in flatten_result(result)]
        if not writes and not sig.split and not any(r is not None for r in results):
            return result  # a question, such as is_same_size
        written = written_tensors(sig, writes, fake_args, fake_kwargs) if writes else []
        if sig.split:
            self._record_parts(sig, (traced_args, traced_kwargs), results, written)
        else:
            call = Call(sig.kind, traced_args, traced_kwargs, list(dict.fromkeys(met.values)))
            self._record(call, results, written, sig)
        return result

    def _unmasked(self, indices: Sequence[Any]) -> list[Any]:
        """Return indices with numbers in the place of masks that are the same in every step."""
        found: list[Any] = []
        for index in indices:
            is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
            if is_mask and constant_folding.values_of([self._value(index)], self.calls) is not None:
                found += self.recorded(_UNBIND, self.recorded(_NONZERO, index), 1)
            else:
                found.append(index)
        return found

    def _value(self, tensor: torch.Tensor) -> Value:
        fake = tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)
        return self.memory.value_of(fake)

    def _argument(self, arg: Any, kind: str, is_written: bool, met: Met) -> tuple[Any, Any]:
        """Return an argument as the fake kernel and as the trace see it."""
        if isinstance(arg, torch.Tensor):
            return self._tensor_argument(arg, is_written, met)
        if isinstance(arg, list | tuple):
            met.key.append(len(arg))
            if kind in _SIZES and all(type(item) is int for item in arg):
                met.key.extend(arg)
                return arg, list(arg)
            pairs = [self._argument(item, kind, is_written, met) for item in arg]
            return [fake for fake, _ in pairs], [traced for _, traced in pairs]
        fake = traced = arg
        if isinstance(arg, _SYMBOLS):
            node = node_of(arg)
            if node is None or "int" in kind or met.is_sized:
                raise unsupported.decides_shape(self.locator.line())
            fake = _STAND_INS[node.kind] if node.hint is None else node.hint
            traced = node.operand
        elif self._disguised and isinstance(arg, float) and arg in self._disguised:
            node = self._disguised[arg]
            fake = _STAND_INS[float] if node.hint is None else node.hint
            traced = node.operand
        elif isinstance(arg, torch.Generator):
            if arg is not torch.default_generator:
                raise unsupported.own_generator(self.locator.line())
            return arg, None
        if isinstance(traced, Value):
            met.values.append(traced)
        met.key += (fake.__class__, fake)  # True == 1 == 1.0
        return fake, traced

    def _tensor_argument(
        self, tensor: torch.Tensor, is_written: bool, met: Met
    ) -> tuple[FakeTensor, Value]:
        fake = tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)
        value = self.memory.value(fake)
        if met.is_view or is_written:
            value = self.memory.current(value)
        else:
            value = self.memory.fresh(value)
        met.tensors.append(fake)
        met.values.append(value)
        if met.is_kept:
            assert value.geometry is not None
            part = self._fakes.tensor_key(fake, value.geometry)
            met.is_kept = part is not None
            met.key.append(part)
        return fake, value

    def _identity(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return self._literal(func, tensor)
        value = self.memory.value(tensor)
        result = self._fakes.identity(func, tensor)
        self.memory.mark(result, value)
        return result

    def _view_in_place(
        self,
        func: torch._ops.OpOverload,
        sig: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record that a tensor describes its storage anew as a view of what it was."""
        old = self.memory.value(args[0])
        result = func(*args, **kwargs)
        call = Call(sig.twin_kind, [old, *args[1:]], kwargs, [old], view=True)
        self.locator.place(call)
        self.calls.append(call)
        call.returns = [self.memory.new_value(call, args[0])]
        return result

    def recorded(self, func: torch._ops.OpOverload, *args: Any) -> Any:
        """Record a call and return its fake result; also from inside of a call."""
        return self._call(func, signature(func), args, {})

    # Recording.

    def _record(
        self,
        call: Call,
        results: Sequence[torch.Tensor | None],
        written: Sequence[torch.Tensor],
        sig: Signature,
    ) -> None:
        call.random, call.view = sig.random, sig.view
        if sig.random:
            met = [t for t in (*results, *written) if t is not None]
            device = met[0].device.type if met else "cpu"
            self.redraws.note(call, device, self.locator.line())
        memory = self.memory
        if written:
            call.mutated = list(dict.fromkeys(memory.current(memory.value(t)) for t in written))
        if not sig.view:
            for value in call.inputs:
                memory.note_read(call, value)
        self.locator.place(call)
        self.calls.append(call)
        if not written:
            call.returns = [None if t is None else memory.new_value(call, t) for t in results]
            return
        changed = {id(tensor): memory.write(call, tensor) for tensor in written}
        for tensor in results:
            known = changed.get(id(tensor))
            if known is None and tensor is not None:
                known = memory.new_value(call, tensor)
            call.returns.append(known)
        returned = dict.fromkeys(value for value in call.returns if value is not None)
        call.outputs = list(returned | dict.fromkeys([*call.outputs, *changed.values()]))

    def _record_parts(
        self,
        sig: Signature,
        traced: tuple[list[Any], dict[str, Any]],
        results: list[torch.Tensor | None],
        written: list[FakeTensor],
    ) -> None:
        split = parts(sig, *traced)
        if split is None:
            raise unsupported.untraceable(sig.kind, self.locator.line())
        by_value = {self.memory.current(self.memory.value(tensor)): tensor for tensor in written}
        for i, (args, kwargs) in enumerate(split):
            # Fresh again: an earlier part may have changed what this one reads.
            values = list(dict.fromkeys(leaves([args, list(kwargs.values())], Value)))
            mine = [by_value[value] for value in values if value in by_value]
            outputs = results[i :: len(split)] if results else []
            self._record(Call(sig.kind, args, kwargs, values), outputs, mine, sig)

    # Tensors that are no sources.

    def _literal(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> FakeTensor:
        """Return the fake of a tensor that the user's code wrote down."""
        result = func(tensor)
        self.memory.constant(tensor, result)
        return result

    def _constant(self, tensor: torch.Tensor) -> FakeTensor:
        """Return the fake of a real tensor that the step met outside of all sources."""
        key = (tensor.untyped_storage()._cdata, *geometry_of(tensor))
        if key not in self._constants:
            if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
                raise unsupported.hidden_parameter(tuple(tensor.shape), self.locator.line())
            fake = self._fake_mode.from_tensor(tensor)
            self.memory.constant(tensor, fake)
            self._constants[key] = (tensor, fake)
        return self._constants[key][1]

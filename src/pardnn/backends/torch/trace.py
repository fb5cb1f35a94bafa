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

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from pardnn.backends.torch import refuse
from pardnn.backends.torch.alias import Memory
from pardnn.backends.torch.locate import Locator
from pardnn.backends.torch.ops import flatten_result, op_kind
from pardnn.backends.torch.scalars import HostNode, node_of, symbol
from pardnn.backends.torch.signature import (
    Signature,
    fake_result,
    parts,
    signature,
    view_twin,
    written_names,
)
from pardnn.backends.torch.values import Call, Value, geometry_of, leaves

_SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)
#: Their fake kernels do not know the size of the workspace that they hand to the backward pass.
_HIDDEN_SIZES = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})
_SMALLEST_FLOAT = 5e-324
_FIRST_DISGUISE = 0x5EED0000
_STAND_INS = {float: 1.0, int: 1, bool: True}
#: Questions about a tensor, and marks for profilers: no part of what is computed.
_NO_CALLS = frozenset({"prim", "profiler"})
_NO_EFFECT = frozenset({
    "aten::_assert_async", "aten::_assert_scalar", "aten::_assert_tensor_metadata",
})  # fmt: skip


class Tracer(TorchDispatchMode):
    """Records the calls of one step.

    Args:
        fake_mode: Mode of the fake tensors that the step computes with.
        locator: Where ops come from; None to leave it out.

    Attributes:
        calls: In the order of execution, sources first.
        guards: Host scalar inputs that a decision depended on: "nonzero" or "exact".
    """

    def __init__(self, fake_mode: FakeTensorMode, locator: Locator) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.guards: dict[Value, str] = {}
        self.locator = locator
        self.memory = Memory(self.calls, locator)
        self._fake_mode = fake_mode
        self._constants: dict[tuple[Any, ...], tuple[torch.Tensor, FakeTensor]] = {}
        self._seeded = False
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
        if node.hint is None:
            raise refuse.decision_by_value(self.locator.line())
        weak = _tests_zero(node)
        for value in _inputs_behind(node):
            if self.guards.get(value) != "exact":
                self.guards[value] = "nonzero" if weak else "exact"
        return node.hint

    def _item(self, tensor: torch.Tensor) -> Any:
        value = self.memory.value_of(tensor)
        constant = getattr(tensor, "constant", None)
        if constant is not None and value.call.kind == "constant":
            with unset_fake_temporarily():
                return constant.item()  # a literal of the user's own code
        call = Call(kind="aten._local_scalar_dense.default", args=[value], inputs=[value])
        self.memory.note_read(call, value)
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
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._item(args[0])
        if not isinstance(func, torch._ops.OpOverload):
            raise refuse.untraceable(str(func), self.locator.line())
        if func.namespace in _NO_CALLS:
            return func(*args, **kwargs)
        if func._schema.name in _NO_EFFECT:
            return None
        if func._schema.name in _HIDDEN_SIZES:
            raise refuse.hidden_size(func._schema.name, self.locator.line())
        sig = signature(func)
        if sig.identity:
            return self._identity(func, args[0])
        twin = view_twin(func)
        if twin is not None:
            return self._view_in_place(func, twin, args, kwargs)
        return self._call(func, sig, args, kwargs)

    def _call(
        self, func: torch._ops.OpOverload, sig: Signature, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        writes = written_names(func, args, kwargs)
        fake_args, fake_kwargs, tensors = [], {}, {}
        traced_args, traced_kwargs = [], {}
        for name, kind, arg in zip(sig.names, sig.types, args, strict=False):
            reads = not sig.view and name not in writes
            fake, traced = self._argument(arg, kind, reads, sized=sig.sized)
            fake_args.append(fake)
            traced_args.append(traced)
            tensors[name] = fake
        for name, arg in kwargs.items():
            reads = not sig.view and name not in writes
            kind = sig.types[sig.names.index(name)]
            fake, traced = self._argument(arg, kind, reads, sized=sig.sized)
            fake_kwargs[name], traced_kwargs[name] = fake, traced
            tensors[name] = fake
        written = [t for name in sig.names if name in writes for t in _tensors(tensors.get(name))]
        result = fake_result(func, fake_args, fake_kwargs)
        results = [r if isinstance(r, torch.Tensor) else None for r in flatten_result(result)]
        if not any(r is not None for r in results) and not written and not sig.split:
            return result  # a question, such as is_same_size
        if sig.split:
            self._record_parts(func, sig, (traced_args, traced_kwargs), results, written)
        else:
            self._record(op_kind(func), traced_args, traced_kwargs, results, written, sig)
        return result

    def _argument(self, arg: Any, kind: str, reads: bool, *, sized: bool) -> tuple[Any, Any]:
        """Return an argument as the fake kernel and as the trace see it."""
        if isinstance(arg, torch.Tensor):
            if not isinstance(arg, FakeTensor):
                arg = self._constant(arg)
            value = self.memory.value(arg)
            return arg, self.memory.fresh(value) if reads else self.memory.current(value)
        if isinstance(arg, _SYMBOLS):
            node = node_of(arg)
            if node is None or "int" in kind or sized:
                raise refuse.decides_shape(self.locator.line())
            stand_in = _STAND_INS[node.kind] if node.hint is None else node.hint
            return stand_in, node.operand
        if isinstance(arg, list | tuple):
            pairs = [self._argument(item, kind, reads, sized=sized) for item in arg]
            return [fake for fake, _ in pairs], [traced for _, traced in pairs]
        if self._disguised and isinstance(arg, float) and arg in self._disguised:
            node = self._disguised[arg]
            return _STAND_INS[float] if node.hint is None else node.hint, node.operand
        if isinstance(arg, torch.Generator):
            if arg is not torch.default_generator:
                raise refuse.own_generator(self.locator.line())
            return arg, None
        return arg, arg

    def _identity(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return self._literal(func, tensor)
        value = self.memory.value(tensor)
        result = func(tensor)
        self.memory.mark(result, value)
        return result

    def _view_in_place(
        self,
        func: torch._ops.OpOverload,
        twin: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record that a tensor describes its storage anew as a view of what it was."""
        old = self.memory.value(args[0])
        result = func(*args, **kwargs)
        call = Call(op_kind(twin), [old, *args[1:]], kwargs, inputs=[old], view=True)
        self.locator.place(call)
        self.calls.append(call)
        call.returns = [self.memory.new_value(call, args[0])]
        return result

    # Recording.

    def _record(
        self,
        kind: str,
        args: list[Any],
        kwargs: dict[str, Any],
        results: list[FakeTensor | None],
        written: list[FakeTensor],
        sig: Signature,
    ) -> None:
        call = Call(kind=kind, args=args, kwargs=kwargs, random=sig.random, view=sig.view)
        call.inputs = list(dict.fromkeys(leaves([args, list(kwargs.values())], Value)))
        if sig.random and self._seeded:
            raise refuse.reseeded(self.locator.line())
        call.mutated = list(
            dict.fromkeys(self.memory.current(self.memory.value(t)) for t in written)
        )
        if not sig.view:
            for value in call.inputs:
                self.memory.note_read(call, value)
        self.locator.place(call)
        self.calls.append(call)
        changed = {id(tensor): self.memory.write(call, tensor) for tensor in written}
        for tensor in results:
            known = changed.get(id(tensor))
            if known is None and tensor is not None:
                known = self.memory.new_value(call, tensor)
            call.returns.append(known)
        for value in changed.values():
            if value not in call.outputs:
                call.outputs.append(value)
        returned = [value for value in call.returns if value is not None]
        rest = [value for value in call.outputs if value not in returned]
        call.outputs = [*dict.fromkeys(returned), *rest]

    def _record_parts(
        self,
        func: torch._ops.OpOverload,
        sig: Signature,
        traced: tuple[list[Any], dict[str, Any]],
        results: list[FakeTensor | None],
        written: list[FakeTensor],
    ) -> None:
        split = parts(sig, *traced)
        if split is None:
            raise refuse.untraceable(str(func), self.locator.line())
        by_value = {self.memory.current(self.memory.value(tensor)): tensor for tensor in written}
        for i, (args, kwargs) in enumerate(split):
            # Fresh again: an earlier part may have changed what this one reads.
            values = leaves([args, list(kwargs.values())], Value)
            mine = [by_value[value] for value in dict.fromkeys(values) if value in by_value]
            outputs = results[i :: len(split)] if results else []
            self._record(op_kind(func), args, kwargs, outputs, mine, sig)

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
                raise refuse.hidden_parameter(tuple(tensor.shape), self.locator.line())
            fake = self._fake_mode.from_tensor(tensor)
            self.memory.constant(tensor, fake)
            self._constants[key] = (tensor, fake)
        return self._constants[key][1]

    def note_seed(self) -> None:
        """Remember that the step set the state of the generator."""
        self._seeded = True


def _tensors(data: Any) -> list[Any]:
    return leaves(data, torch.Tensor)


def _tests_zero(node: HostNode) -> bool:
    """Whether a decision asks only if one input is zero, and it is not."""
    if node.function is None:
        return bool(node.hint)
    literal = [p for p in node.parents if p.value is None]
    direct = [p for p in node.parents if p.value is not None and p.function is None]
    asks = node.function in ("eq", "ne") and len(literal) == 1 and literal[0].hint == 0
    return asks and len(direct) == 1 and bool(direct[0].hint)


def _inputs_behind(node: HostNode) -> Iterator[Value]:
    stack = [node]
    while stack:
        current = stack.pop()
        if current.function is None and current.value is not None:
            yield current.value
        stack.extend(current.parents)

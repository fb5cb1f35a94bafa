"""The tracer: every ATen call of a step, recorded over fake tensors.

A dispatch mode above `FakeTensorMode`. It sees the calls that allocate and compute, below
autograd, autocast and the decomposition of composite ops. For each it records the values among the
arguments, runs the fake kernel to learn the results, and makes values of them: owners of new
storages, views of known ones, new versions of changed ones.

Host scalars never reach the fake kernels: these get a placeholder of the same type, which cannot
change the shape or dtype of a result.

The tracer holds storages, never tensors: autograd moves a gradient without a copy only if nothing
else refers to it, and the trace must show what an eager step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pardnn.backends.torch.capture import constant_folding
from pardnn.backends.torch.capture.aliasing import AliasTracker
from pardnn.backends.torch.capture.fake_cache import FakeCache, is_too_large_to_run
from pardnn.backends.torch.capture.numbers.questions import NoCheck
from pardnn.backends.torch.capture.numbers.scalar_trace import ScalarTrace
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.collectives import collective
from pardnn.backends.torch.capture.refusals.kernel_settings import KernelSettings
from pardnn.backends.torch.capture.rewrites.tensor_checks import CHECKS, tensor_check
from pardnn.backends.torch.capture.rng_replays import RngReplays
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.trace_ir import ITEM, Call, CallArguments, Value, geometry_of
from pardnn.backends.torch.ops.codec import flatten_result, instances
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of, symbol
from pardnn.backends.torch.ops.schema import (
    Signature,
    signature,
    split_call,
    written_names,
    written_tensors,
)

_SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)
_DEVICE = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
_NONZERO, _UNBIND = torch.ops.aten.nonzero.default, torch.ops.aten.unbind.int
_SIZES = ("List[int]", "Optional[List[int]]")
_PLACEHOLDER_NUMBERS = {float: 1.0, int: 1, bool: True}


class Tracer(TorchDispatchMode):
    """Records the calls of one step.

    Args:
        fake_mode: Mode of the fake tensors that the step computes with.
        locator: Finds the user's line of each op.
        fake_cache: Fake results of earlier traces under the same mode.

    Attributes:
        fake_mode: Mode of the fake tensors that the step computes with.
        calls: The calls in the order of execution, sources first.
        scalars: Its host scalars.
        aliases: Which value each tensor is.
        rng_replays: Finds the random calls that replay the numbers of an earlier one.
        kernel_settings: The settings that decide how some of the calls compute.
        before_call: Called before each call; None for nothing.
        before_write: Called with each tensor before a call that writes it; None for nothing.
        undoing: The calls that keep and put back what others write: `rewrites.undoing`.
        flags: Names of flags in buffers that alone decided numbers which Python has asked for.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, locator: Locator, fake_cache: FakeCache | None = None
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.locator = locator
        self.scalars = ScalarTrace(self.calls, locator)
        self.aliases = AliasTracker(self.calls, locator)
        self.fake_mode = fake_mode
        self._fake_cache = fake_cache or FakeCache(fake_mode)
        self._constants: dict[tuple[Any, ...], tuple[torch.Tensor, FakeTensor]] = {}
        self.rng_replays = RngReplays()
        self.kernel_settings = KernelSettings(locator.line)
        self.before_call: Callable[[], None] | None = None
        self.before_write: Callable[[torch.Tensor], None] | None = None
        self.undoing: set[Call] = set()
        self.flags: set[str] = set()

    # Sources.

    def add_source(self, kind: str, fake: FakeTensor, arguments: dict[str, Any] | None) -> Value:
        """Make `fake` the value of a new source op."""
        call = Call(kind=kind, arguments=arguments)
        self.calls.append(call)
        value = self.aliases.new_value(call, fake)
        assert value.storage is not None
        value.storage.source = True
        return value

    # Host scalars.

    def number_of(self, tensor: torch.Tensor) -> Any:
        """Return the number in a tensor of one element: a symbol, unless it is constant."""
        if not isinstance(tensor, FakeTensor):
            tensor = self._constant(tensor)
        value = self.aliases.fresh_value(tensor)
        constant = getattr(tensor, "constant", None)
        is_literal = constant is not None and value.call.kind == "constant"
        same = [constant] if is_literal else constant_folding.folded_values([value], self.calls)
        if same is not None:
            with _disable_current_modes():
                return same[0].item()
        self.flags |= constant_folding.flags_behind(value)
        number = self.item_of(value)
        assert number.kind is not None
        node = HostNode(self.scalars, number, number.kind)
        node.tensor = tensor
        return symbol(node)

    def item_of(self, value: Value) -> Value:
        """Record the call of `.item()` of a tensor, a value of this trace; return its number."""
        call = Call(kind=ITEM, args=[value], inputs=[value])
        self.aliases.note_read(call, value)
        assert value.geometry is not None
        dtype = value.geometry[3]
        if dtype.is_complex:
            raise unsupported.data_dependent_branch(self.locator.line(), "complex")
        kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        return self.scalars.finish(call, kind)

    # Calls.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record one call and return its fake result."""
        kwargs = kwargs or {}
        if func is _DEVICE:  # autograd makes it as often as all others together
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if self.before_call is not None:
            self.before_call()
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.number_of(args[0])
        if self.scalars.questions.is_trying:
            raise NoCheck
        if not isinstance(func, torch._ops.OpOverload):
            raise unsupported.untraceable(str(func), self.locator.line())
        if func in CHECKS:
            op, given, outcome, error = tensor_check(func, args)
            flag = self.number_of(self.recorded(op, *given))
            return self.scalars.questions.must_be(flag, outcome, error, self.locator.line())
        sig = signature(func)
        if sig.role is None:
            return self._call(func, sig, args, kwargs)
        if sig.role in ("query", "new data"):
            return func(*args, **kwargs)
        if sig.role == "no effect":
            return None
        if sig.role == "collective":
            raise collective(func._schema.name, self.locator.line())
        if sig.role == "fused rnn" and not is_too_large_to_run(args):
            return self._call(func, sig, args, kwargs)
        if sig.role in ("unknown workspace", "fused rnn"):
            raise unsupported.unknown_workspace(func._schema.name, self.locator.line())
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
        arguments = CallArguments(sig.cacheable, sig.view, sig.sized)
        fake_args, fake_kwargs = [], {}
        traced_args, traced_kwargs = [], {}
        for name, kind, arg in zip(sig.names, sig.types, args, strict=False):
            fake, traced = self._argument(arg, kind, name in writes, arguments)
            fake_args.append(fake)
            traced_args.append(traced)
        for name, arg in kwargs.items():
            arguments.key.append(name)
            kind = sig.types[sig.names.index(name)]
            fake, traced = self._argument(arg, kind, name in writes, arguments)
            fake_kwargs[name], traced_kwargs[name] = fake, traced
        key = tuple(arguments.key) if arguments.is_cacheable else None
        try:
            result = self._fake_cache.result(func, fake_args, fake_kwargs, arguments.tensors, key)
        except constant_folding.DEPENDS_ON_DATA:
            result = constant_folding.folded_result(
                func, traced_args, arguments.values, self.calls, self.fake_mode
            )
            if result is None:
                raise
        results = [r if isinstance(r, torch.Tensor) else None for r in flatten_result(result)]
        if not writes and not sig.split and not any(r is not None for r in results):
            return result  # a query, such as is_same_size
        written = written_tensors(sig, writes, fake_args, fake_kwargs) if writes else []
        if sig.split:
            self._record_split(sig, (traced_args, traced_kwargs), results, written)
        else:
            call = Call(sig.kind, traced_args, traced_kwargs, list(dict.fromkeys(arguments.values)))
            self._record(call, results, written, sig)
        return result

    def _unmasked(self, indices: Sequence[Any]) -> list[Any]:
        """Return indices with numbers in place of masks that fold to constants."""
        found: list[Any] = []
        for index in indices:
            is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
            if (
                is_mask
                and constant_folding.folded_values([self._value(index)], self.calls) is not None
            ):
                found += self.recorded(_UNBIND, self.recorded(_NONZERO, index), 1)
            else:
                found.append(index)
        return found

    def _value(self, tensor: torch.Tensor) -> Value:
        fake = tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)
        return self.aliases.fresh_value(fake)

    def _argument(
        self, arg: Any, kind: str, is_written: bool, arguments: CallArguments
    ) -> tuple[Any, Any]:
        """Return an argument for the fake kernel and for the trace."""
        if isinstance(arg, torch.Tensor):
            return self._tensor_argument(arg, is_written, arguments)
        if isinstance(arg, list | tuple):
            arguments.key.append(len(arg))
            if kind in _SIZES and all(type(item) is int for item in arg):
                arguments.key.extend(arg)
                return arg, list(arg)
            pairs = [self._argument(item, kind, is_written, arguments) for item in arg]
            return [fake for fake, _ in pairs], [traced for _, traced in pairs]
        fake = traced = arg
        if isinstance(arg, _SYMBOLS):
            node = node_of(arg)
            is_size = "int" in kind or arguments.is_sized
            if node is None or (is_size and node.hint is None):
                raise unsupported.data_dependent_size(self.locator.line())
            if is_size:  # it decides a shape: the graph holds only for this number
                arg = self.scalars.guard_scalar(node)
                arguments.key += (arg.__class__, arg)
                return arg, arg
            fake = _PLACEHOLDER_NUMBERS[node.kind] if node.hint is None else node.hint
            traced = node.operand
        elif isinstance(arg, float) and (node := self.scalars.node_behind(arg)) is not None:
            fake = _PLACEHOLDER_NUMBERS[float] if node.hint is None else node.hint
            traced = node.operand
        elif isinstance(arg, torch.Generator):
            if arg is not torch.default_generator:
                raise unsupported.custom_generator(self.locator.line())
            return arg, None
        if isinstance(traced, Value):
            arguments.values.append(traced)
        arguments.key += (fake.__class__, fake)  # True == 1 == 1.0
        return fake, traced

    def _tensor_argument(
        self, tensor: torch.Tensor, is_written: bool, arguments: CallArguments
    ) -> tuple[FakeTensor, Value]:
        fake = tensor if isinstance(tensor, FakeTensor) else self._constant(tensor)
        value = self.aliases.value(fake)
        if arguments.is_view or is_written:
            value = self.aliases.current(value)
        else:
            value = self.aliases.fresh(value)
        arguments.tensors.append(fake)
        arguments.values.append(value)
        if arguments.is_cacheable:
            assert value.geometry is not None
            key = self._fake_cache.tensor_key(fake, value.geometry)
            arguments.is_cacheable = key is not None
            arguments.key.append(key)
        return fake, value

    def _identity(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            if func is _DETACH:  # from `numpy()`, which would go on to read its data
                raise unsupported.unknown_tensor(tuple(tensor.shape), self.locator.line())
            return self._literal(func, tensor)
        value = self.aliases.value(tensor)
        result = self._fake_cache.identity(func, tensor)
        self.aliases.mark(result, value)
        return result

    def _view_in_place(
        self, func: torch._ops.OpOverload, sig: Signature, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Record an in-place change of geometry, such as `t_`, as a view of the old value."""
        old = self.aliases.value(args[0])
        result = func(*args, **kwargs)
        call = Call(sig.view_kind, [old, *args[1:]], kwargs, [old], view=True)
        self.locator.annotate(call)
        self.calls.append(call)
        call.returns = [self.aliases.new_value(call, args[0])]
        return result

    def recorded(self, func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Record a call and return its fake result, also while another is being recorded."""
        return self._call(func, signature(func), args, kwargs)

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
            tensors = [t for t in (*results, *written) if t is not None]
            device = tensors[0].device.type if tensors else "cpu"
            self.rng_replays.note(call, device, self.locator.line())
        aliases = self.aliases
        if written:
            call.mutated = list(dict.fromkeys(aliases.current(aliases.value(t)) for t in written))
        if not sig.view:
            for value in call.inputs:
                aliases.note_read(call, value)
        self.locator.annotate(call)
        self.kernel_settings.note(call, results)
        self.calls.append(call)
        if not written:
            call.returns = [None if t is None else aliases.new_value(call, t) for t in results]
            return
        changed = {id(tensor): aliases.write(call, tensor) for tensor in written}
        for tensor in results:
            value = changed.get(id(tensor))
            if value is None and tensor is not None:
                value = aliases.new_value(call, tensor)
            call.returns.append(value)
        returned = dict.fromkeys(value for value in call.returns if value is not None)
        call.outputs = list(returned | dict.fromkeys([*call.outputs, *changed.values()]))

    def _record_split(
        self,
        sig: Signature,
        traced: tuple[list[Any], dict[str, Any]],
        results: list[torch.Tensor | None],
        written: list[FakeTensor],
    ) -> None:
        calls = split_call(sig, *traced)
        if calls is None:
            raise unsupported.untraceable(sig.kind, self.locator.line())
        by_value = {self.aliases.current(self.aliases.value(tensor)): tensor for tensor in written}
        for i, (args, kwargs) in enumerate(calls):
            values = list(dict.fromkeys(instances([args, list(kwargs.values())], Value)))
            mine = [by_value[value] for value in values if value in by_value]
            outputs = results[i :: len(calls)] if results else []
            self._record(Call(sig.kind, args, kwargs, values), outputs, mine, sig)

    # Constants.

    def _literal(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> FakeTensor:
        """Return the fake of a literal in the user's code, as in `torch.tensor(1.0)`."""
        result = func(tensor)
        self.aliases.constant(tensor, result)
        return result

    def constants(self) -> list[tuple[torch.Tensor, Value]]:
        """Return the real tensors that the step uses and that are not sources."""
        return [(tensor, self.aliases.value(fake)) for tensor, fake in self._constants.values()]

    def _constant(self, tensor: torch.Tensor) -> FakeTensor:
        """Return the fake of a real tensor that the step uses and that is not a source."""
        key = tensor.untyped_storage()._cdata, geometry_of(tensor)
        if key not in self._constants:
            if tensor._is_zerotensor():
                raise unsupported.zero_tangent(self.locator.line())
            if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
                raise unsupported.unreachable_parameter(tuple(tensor.shape), self.locator.line())
            fake = self.fake_mode.from_tensor(tensor)
            with _disable_current_modes():
                self.aliases.constant(_as_held(tensor), _as_held(fake))
            self._constants[key] = (tensor, fake)
        return self._constants[key][1]


def _as_held(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as its memory holds it, without a lazy conjugate or negative."""
    tensor = tensor._conj() if tensor.is_conj() else tensor
    return tensor._neg_view() if tensor.is_neg() else tensor

"""A cache of fake results: the fake kernel of each distinct call runs once.

Problem: a call through `FakeTensorMode` takes 95 us and more (torch 2.13), and a step may make a
hundred thousand.

Idea: the result depends on the op, the geometries of its tensors and its plain arguments, and few
hundred such keys are distinct. The first result under a key is kept as a recipe per output: a new
tensor of that geometry (7 us), a view of an argument (10 us), or the argument itself.

A recipe is kept only if the tensor it makes equals what the fake kernel returned. Calls whose
result depends on more than geometries are never cached: custom ops, tensors that carry their
value, lazily conjugated or negated ones, ops that resize or depend on a whole storage. A result
whose shape depends on data has no geometry of plain numbers, and the tracer rejects it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)

from pardnn.backends.torch.capture.trace_ir import Geometry, geometry_of
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.ops.schema import fake_result

_META = torch.device("meta")
FUSED_RNN = torch.ops.aten.mkldnn_rnn_layer.default
#: Above this, running a layer to measure its workspace takes too long for a capture.
_MAX_RNN_BYTES = 1 << 30
#: Above this, a failing call is not run on zeros for its error message.
_MAX_ERROR_BYTES = 64 << 20
#: Fake kernels raise these where they lack data; real kernels would not.
_OF_FAKES = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
)  # fmt: skip
#: Workspace and outputs over the bytes of the gates of all time steps; 4 was measured.
_RNN_BYTES_PER_GATE = 5
#: Outputs of these types are part of the recipe itself.
_PLAIN = (type(None), bool, int, float)


class Recipe(NamedTuple):
    """How to make one output.

    Attributes:
        argument: Index, among the call's tensors, of the one that it views or is; -1 for none.
        geometry: The geometry of the new tensor or view; None if it is the argument itself, or
            plain.
        device: The device of the new tensor or view.
        attributes: The attributes of the fake tensor, such as its mode and device.
        plain: The output itself, if it is not a tensor.
    """

    argument: int
    geometry: Geometry | None = None
    device: torch.device = _META
    attributes: dict[str, Any] | None = None
    plain: Any = None


class Recipes(NamedTuple):
    """How to make the result of a call: a list, a tuple or, with `kind` None, one output."""

    kind: type | None
    outputs: tuple[Recipe, ...]


class FakeCache:
    """Runs fake kernels and caches their results.

    Args:
        mode: Mode of the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._recipes_by_key: dict[Hashable, Recipes | None] = {}
        guard = "warn_deprecated" if mode._allow_unsafe_data_ptr_access else "throw"
        self._guard_data = getattr(torch._C, f"_set_{guard}_on_mutable_data_ptr")

    def result(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[FakeTensor],
        key: Hashable,
    ) -> Any:
        """Return the fake result of `func(*args, **kwargs)`.

        Args:
            func: The op.
            args: Its arguments, fake tensors inside.
            kwargs: Its keyword arguments.
            tensors: All tensors among them, in order.
            key: Everything else that the result depends on; None if it cannot be cached.
        """
        if key is None:
            return self._run_fake_kernel(func, args, kwargs)
        key = (func, key, torch.get_default_dtype(), torch.is_grad_enabled())
        recipes = self._recipes_by_key.get(key)
        if recipes is not None:
            if recipes.kind is None:
                return self._make(recipes.outputs[0], tensors)
            return recipes.kind(self._make(recipe, tensors) for recipe in recipes.outputs)
        result = self._run_fake_kernel(func, args, kwargs)
        if key not in self._recipes_by_key:
            self._recipes_by_key[key] = self._recipes(result, tensors)
        return result

    def _run_fake_kernel(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            result = fake_result(func, args, kwargs)
        except _OF_FAKES:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise _eager_error(func, args, kwargs) or error from None
        if func is not FUSED_RNN:
            return result
        *others, workspace = result
        num_bytes = _fused_rnn_workspace(args)
        if num_bytes is None:
            return *others, None
        # Created under the fake mode, which is the one that is active here.
        return *others, torch.empty(num_bytes, dtype=workspace.dtype, device=workspace.device)

    def identity(self, func: torch._ops.OpOverload, tensor: FakeTensor) -> Any:
        """Return `func(tensor)` of an op that returns its input as a new tensor."""
        key = self.tensor_key(tensor, geometry_of(tensor))
        return self.result(func, (tensor,), {}, (tensor,), key and (key,))

    def tensor_key(self, tensor: Any, geometry: Geometry) -> Hashable:
        """Return a tensor's part of a cache key; None if results may depend on more than that."""
        if (
            type(tensor) is not FakeTensor
            or tensor.constant is not None
            or tensor.fake_mode is not self._mode
            or geometry[3].is_complex
            or tensor.is_neg()
        ):
            return None
        return geometry, tensor.fake_device

    def _make(self, recipe: Recipe, tensors: Sequence[FakeTensor]) -> Any:
        if recipe.geometry is None:
            return recipe.plain if recipe.argument < 0 else tensors[recipe.argument]
        shape, strides, offset, dtype = recipe.geometry
        # The same as FakeTensor's constructor, which takes three times as long.
        with torch._C._DisableTorchDispatch():
            if recipe.argument < 0:
                inner = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
            else:
                inner = torch.empty_strided((0,), (1,), dtype=dtype, device=_META)
                storage = tensors[recipe.argument].untyped_storage()
                inner.set_(storage, offset, shape, strides)  # pyright: ignore[reportArgumentType]
            fake = torch.Tensor._make_subclass(
                FakeTensor,
                inner,
                False,
                dispatch_device=True,
                device_for_backend_keys=recipe.device,
            )
        self._guard_data(fake)
        fake.__dict__.update(recipe.attributes or {})
        return fake

    # Learning recipes.

    def _recipes(self, result: Any, tensors: Sequence[FakeTensor]) -> Recipes | None:
        kind = type(result) if isinstance(result, list | tuple) else None
        if kind not in (None, list, tuple):
            return None
        outputs = [result] if kind is None else list(result)
        made = [out for out in outputs if isinstance(out, torch.Tensor)]
        storages = [out.untyped_storage()._cdata for out in made]
        recipes = [self._recipe(output, tensors) for output in outputs]
        existing = {tensor.untyped_storage()._cdata for tensor in tensors}
        new = [storage for storage in storages if storage not in existing]
        if len(set(new)) < len(new) or any(recipe is None for recipe in recipes):
            return None
        return Recipes(kind, tuple(recipe for recipe in recipes if recipe is not None))

    def _recipe(self, output: Any, tensors: Sequence[FakeTensor]) -> Recipe | None:
        if isinstance(output, _PLAIN):
            return Recipe(-1, plain=output)
        if type(output) is not FakeTensor:
            return None
        storage = output.untyped_storage()._cdata
        owners = [i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == storage]
        if len(owners) > 1:
            return None
        argument = owners[0] if owners else -1
        if owners and output is tensors[argument]:
            return Recipe(argument)
        attributes = dict(output.__dict__)
        recipe = Recipe(argument, geometry_of(output), output.fake_device, attributes)
        return recipe if _are_equal_fakes(output, self._make(recipe, tensors)) else None


def is_too_large_to_run(args: Sequence[Any]) -> bool:
    """Whether a fused recurrent layer takes too much memory to be run once at capture."""
    x, gates = args[0], args[1].shape[0]
    given = sum(t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor))
    made = _RNN_BYTES_PER_GATE * x.shape[0] * x.shape[1] * gates * x.element_size()
    return given + made > _MAX_RNN_BYTES


def _eager_error(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Exception | None:
    """Return the error of the real kernel, whose text differs from the fake one's.

    It is run on zeros; None if it raises nothing, or its arguments are large or unknown.
    """
    leaves, spec = pytree.tree_flatten((list(args), kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    others = (x for x in leaves if not isinstance(x, torch.Tensor))
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    if num_bytes > _MAX_ERROR_BYTES or any(node_of(x) is not None for x in others):
        return None
    with unset_fake_temporarily(), torch.no_grad():
        real = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_()
            if isinstance(x, torch.Tensor) else x for x in leaves
        ]  # fmt: skip
        try:
            args, kwargs = pytree.tree_unflatten(real, spec)
            func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            return error
    return None


def _fused_rnn_workspace(args: Sequence[Any]) -> int | None:
    """Return the bytes that a fused recurrent layer keeps for its backward pass; None for none.

    Only oneDNN knows, and the fake kernel returns 0, so the layer is run once on zeros.
    """
    with unset_fake_temporarily():
        real = [
            torch.zeros(arg.shape, dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        ]
        workspace = FUSED_RNN(*real)[3]
        return None if workspace is None else workspace.nbytes


def _are_equal_fakes(one: FakeTensor, other: FakeTensor) -> bool:
    """Whether two fake tensors differ in nothing but their identity."""
    return (
        one.constant is None
        and not one.requires_grad
        and not one.is_conj()
        and not one.is_neg()
        and geometry_of(one) == geometry_of(other)
        and one.layout == other.layout == torch.strided
        and one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        and torch._C._dispatch_keys(one) == torch._C._dispatch_keys(other)
        and one.is_inference() == other.is_inference()
        and one.__dict__ == other.__dict__
    )

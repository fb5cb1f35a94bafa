"""Input checks: residents and batch have the shapes and types that the step was captured with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.user_step.absent import absent_as, is_absent
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.slots import Entry
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Graph, Op, span_bytes


def shape_and_dtype(op: Op) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Return the shape and dtype of a source's value; None for what the graph does not state."""
    (output,) = op.outputs
    dtype = getattr(torch, output.dtype or "", None)
    return output.shape, dtype if isinstance(dtype, torch.dtype) else None


def check_sources(graph: Graph, known: Collection[str]) -> None:
    """Check that a step has the sources of its graph, by name.

    Raises:
        MismatchError: E505, naming the first that it lacks.
    """
    wanted = [op for op in graph.ops if op.is_source and op.kind != "constant"]
    missing = [op for op in wanted if op.name not in known]
    if missing:
        raise MismatchError(
            f"the graph was captured from another step: {missing[0].kind} "
            f"{shown(missing[0].name)} is not in this step's arguments ({len(missing)} "
            "such).\nCapture and plan this step again.",
            code="E505",
            details={"missing": [op.name for op in missing[:20]]},
        )


def check_resident(op: Op, value: Any) -> None:
    """Check that a resident value exists, and has data and the shape and type of its op.

    Raises:
        MismatchError: E514, naming the op.
    """
    shape, dtype = shape_and_dtype(op)
    if isinstance(value, torch.Tensor):
        held = value.untyped_storage().nbytes()
        is_real = not value.is_meta and held >= span_bytes(op.outputs[0])
        if dtype is None or (is_real and value.shape == shape and value.dtype == dtype):
            return
        found = (
            f"{_name(value.dtype)} {list(value.shape)}" if is_real else "uninitialised (no data)"
        )
    elif value is not None and dtype is None:
        return
    else:
        found = "missing" if value is None else f"a {type(value).__name__}"
    raise MismatchError(
        f"{op.kind} {shown(op.name)} is {found}; the graph needs {op.outputs[0].dtype} "
        f"{list(shape or ())}.\nInitialise the model before it runs, or capture it again as it is.",
        code="E514",
        details={"source": op.name},
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def other_batch(op: Op, value: torch.Tensor, rank: int) -> MismatchError:
    """Return the error E512 for an input with another shape or type than at capture.

    Args:
        op: The input op.
        value: What was given.
        rank: This rank.
    """
    shape, _ = shape_and_dtype(op)
    return MismatchError(
        f"input {shown(op.name)} is {_name(value.dtype)} {list(value.shape)} on rank {rank}; "
        f"captured: {op.outputs[0].dtype} {list(shape or ())}.\nGive every rank the whole "
        "(global) batch, in the captured size: pad or drop a short last batch, or plan for its "
        "size too.",
        code="E512",
        details={"input": op.name, "given": list(value.shape), "captured": list(shape or ())},
    )


#: Numbers of dims for which torch derives a memory format from all strides, of size 1, too.
_IMAGES = (4, 5)


class TensorKind(NamedTuple):
    """The properties of a batch tensor on which a graph relies.

    Attributes:
        dtype: The tensor's dtype.
        shape: The tensor's shape.
        requires_grad: Whether it requires a gradient.
        strides: None if they are those of a new tensor; those of dims of size 1 are 0 if no result
            depends on them.
        layout: Its layout, such as "sparse_coo"; empty for a dense tensor.
        of: Other properties that the step may read or change, see `_others`.
        kind: `Tensor`, `Parameter` or a user's class.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    layout: str = ""
    of: str = ""
    kind: str = "Tensor"

    def __repr__(self) -> str:
        """Return `float32 [4, 16]`."""
        grad = ", requires grad" * self.requires_grad
        strides = "" if self.strides is None else f", strides {list(self.strides)}"
        kind = "" if self.kind == "Tensor" else f", a {self.kind}"
        layout = f", {self.layout}" * bool(self.layout)
        return f"{_name(self.dtype)} {list(self.shape)}{grad}{strides}{layout}{kind}{self.of}"


class Batch(NamedTuple):
    """The arguments of one call that are neither model nor optimizer.

    Attributes:
        values: As they were given.
        tensors: All tensors in them, by the name of their source.
        numbers: All plain values in them, by name.
    """

    values: tuple[Any, ...]
    tensors: dict[str, Any]
    numbers: dict[str, Any]


def _glance_at(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what determines a tensor's kind, in 1 us: equal for tensors of one kind."""
    is_leaf = tensor.is_leaf
    return (
        tensor.__class__, tensor.dtype, tensor.shape, tensor.requires_grad, is_leaf,
        tensor.layout is torch.strided and tensor.stride(),
        is_leaf and tensor.grad is not None,  # torch warns for others
        tensor._backward_hooks and list(tensor._backward_hooks.values()),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """Return the properties of a tensor on which a graph relies."""
    is_dense = tensor.layout is torch.strided
    return TensorKind(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.requires_grad,
        _strides(tensor) if is_dense else None,
        "" if is_dense else str(tensor.layout).removeprefix("torch."),
        _others(tensor),
        class_of(tensor).__name__,
    )


def class_of(tensor: torch.Tensor) -> type:
    """Return the class of a tensor; for a fake one, that of the tensor that it replaces."""
    if isinstance(tensor, FakeTensor):
        return torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    return type(tensor)


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    is_image = tensor.dim() in _IMAGES
    new = torch.empty(tensor.shape, device="meta")
    own, contiguous = (
        tuple(s * (n > 1 or is_image) for n, s in zip(each.shape, each.stride(), strict=True))
        for each in (tensor, new)
    )
    return None if own == contiguous else own


def _others(tensor: torch.Tensor) -> str:
    """Describe what else is set on a tensor; hooks by their code, not their identity."""
    if not tensor.is_leaf:
        return ", computed from others"
    if tensor.is_conj() or tensor.is_neg():
        return ", lazily conjugated or negated"
    hooks = [getattr(each, "__qualname__", "") for each in (tensor._backward_hooks or {}).values()]
    told = f", with the hooks {hooks}" if hooks else ""
    return told + ", with a gradient" * (tensor.grad is not None)


class BatchTensors:
    """The batch tensors of a capture: their kinds, and which are the same object.

    Args:
        tensors: The tensors by the name of their source.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._kinds = {name: kind_of(value) for name, value in tensors.items()}
        self._glance: dict[str, tuple[Any, ...]] = {}
        self._same: dict[str, str] = {}
        self._find: Callable[[], dict[int, str]] = dict
        self._held: dict[int, str] = {}
        self._own: set[str] = set()
        self._ignores: Callable[[str], bool] = self._kinds.__contains__

    def watch(
        self,
        tensors: Mapping[str, torch.Tensor],
        held: Callable[[], dict[int, str]],
        ignores: Callable[[str], bool],
        parameters: Collection[str] = (),
    ) -> None:
        """Note which tensors are the same object.

        Args:
            tensors: The tensors, as for the class.
            held: Returns the names of the tensors that the step's objects hold now, by id.
            ignores: Whether the step never reads the tensor of a name.
            parameters: Names of held tensors that the graph reads as its state, wherever they are.
        """
        self._find, self._held, self._ignores = held, held(), ignores
        self._same = _same_places(tensors, self._held)
        # A rank may hold a shard of them or no data; their properties are guarded with the state.
        self._own = {n for n, x in tensors.items() if self._held.get(id(x)) in parameters}
        self._kinds = {name: x for name, x in self._kinds.items() if name not in self._own}

    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Change]:
        """Yield what differs in the tensors of another batch.

        Raises:
            MismatchError: E529, if one is state that other ranks hold.
        """
        read = {n: x for n, x in tensors.items() if n not in self._own} if self._own else tensors
        given = {name: _glance_at(value) for name, value in read.items()}
        if given != self._glance:
            for name, value in read.items():
                if is_absent(value) and not self._ignores(name):
                    raise absent_as(name, value)
            kinds = {name: kind_of(value) for name, value in read.items()}
            if kinds == self._kinds:
                self._glance = given
            yield from self._differing(self._kinds, kinds)
        same = _same_places(tensors, self._held)
        if same != self._same:  # the id may belong to a deleted tensor
            self._held = self._find()
            same = _same_places(tensors, self._held)
        if same != self._same:
            yield from self._differing(self._same, same, "a tensor of its own")

    def _differing(
        self, then: Mapping[str, Any], now: Mapping[str, Any], other: str | None = None
    ) -> Iterator[Change]:
        for name in dict.fromkeys([*then, *now]):
            pair = then.get(name, other), now.get(name, other)
            if pair[0] != pair[1] and not self._ignores(name):
                yield Change(name, *pair)


def _same_places(tensors: Mapping[str, Any], held: Mapping[int, str]) -> dict[str, str]:
    """Return which tensors of a batch are an earlier one, or one that is held.

    Args:
        tensors: The tensors of the batch, by name.
        held: Names of tensors by id.
    """
    ids = list(map(id, tensors.values()))
    if len(set(ids)) == len(ids) and held.keys().isdisjoint(ids):
        return {}
    found, known = {}, dict(held)
    for name, key in zip(tensors, ids, strict=True):
        if known.setdefault(key, name) != name:
            found[name] = f"the same tensor as {known[key]}"
    return found


def is_number(op: Op) -> bool:
    """Whether an input is a number, not a tensor."""
    return (op.outputs[0].dtype or "").startswith("host.")


def granted_settings(graph: Graph, found: Mapping[str, Entry]) -> Iterator[tuple[str, Entry, Any]]:
    """Yield name, place and captured value of each setting on which the graph relies."""
    for name, value in graph.step_notes.get("settings", {}).items():
        if name in found:
            yield name, found[name], value


def unlike_batch(names: Sequence[str], given: int) -> MismatchError:
    """Return the error for a call whose number of arguments differs from the batch's.

    Args:
        names: The names of the batch's arguments.
        given: How many the call has.
    """
    count = len(names)
    return MismatchError(
        f"the step takes {count} argument{'s' * (count != 1)} besides models and optimizers "
        f"({', '.join(names) or 'none'}); {given} were given.\n"
        "Pass those that `parallelize` was given, in this order, without the models and "
        "optimizers.",
        code="E505",
    )

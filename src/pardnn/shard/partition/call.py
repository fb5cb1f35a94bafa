"""One call of an operator with its shapes, in the forms needed to cut it.

A `Call` is data, as in the graph. `Bound` matches its tensors with the parameters of a description,
which name them by *slot*. A `Skeleton` is what equal calls on different tensors share, the key
under which results are cached. `DimSlices` puts the dims of all tensors side by side.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from pardnn.errors import shown
from pardnn.graph.ir import Op
from pardnn.graph.ir import Tensor as GraphTensor
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import Shape, Sizes, Tensor
from pardnn.shard.tdl.registry import Description


@dataclass(frozen=True, slots=True)
class Call:
    """A call as data.

    Attributes:
        kind: Such as "aten.mm.default".
        args: Positional arguments, `{"tensor": name}` for tensors, as in `Op.arguments`.
        kwargs: The others.
        shapes: Shape of each tensor among the arguments.
        outputs: Shape of each result in order, None for a result that is no tensor or not needed.
        dtypes: Dtype of each tensor among the arguments, where known.
    """

    kind: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    outputs: tuple[Shape | None, ...]
    dtypes: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """A call whose arguments are matched with the parameters of its description.

    Attributes:
        call: The call, its tensors named by slot.
        names: Slot to the name that the call gave the tensor.
        tensors: Slot to what the description sees.
        arguments: What the description is called with.
    """

    call: Call
    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    arguments: inspect.BoundArguments


def call_of(op: Op, tensors: Mapping[str, GraphTensor]) -> Call:
    """Return the call that an op of a graph makes.

    Args:
        op: A call, no source.
        tensors: All that it reads and writes, by name; host scalars count as rank 0.
    """
    arguments = op.arguments or {}
    returned = arguments.get("returns") or [tensor.name for tensor in op.outputs]
    return Call(
        op.kind,
        tuple(arguments.get("args", ())),
        dict(arguments.get("kwargs", {})),
        {name: tensors[name].shape or () for name in op.inputs},
        tuple(None if name is None else tensors[name].shape for name in returned),
        {name: tensors[name].dtype for name in op.inputs},
    )


class Skeleton(NamedTuple):
    """The arguments of a call without its tensors, which repeated layers have in common.

    Attributes:
        structure: Kind and arguments; equal for calls that differ only in their tensors.
        names: Of the tensors, in the order of the arguments, repeated as they are.
    """

    structure: Any
    names: tuple[str, ...]

    def key(
        self,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, str | None],
        outputs: tuple[Shape | None, ...],
    ) -> Any:
        """Return a key that is equal for calls that differ only in the names of their tensors.

        Args:
            shapes: By tensor name.
            dtypes: By tensor name.
            outputs: Shapes of the results; None for one that is no tensor.
        """
        return (self.structure, tuple([(shapes[n], dtypes.get(n)) for n in self.names]), outputs)


def skeleton_of(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Skeleton:
    """Return the arguments of a call without its tensors. O(size of the arguments).

    Args:
        kind: The operator.
        args: As in `Op.arguments`.
        kwargs: Likewise.
    """
    names: list[str] = []
    structure = tuple([_plain(value, names) for value in args])
    named = tuple([(key, _plain(value, names)) for key, value in kwargs.items()]) if kwargs else ()
    return Skeleton((kind, description_of(kind), structure, named), tuple(names))


def _plain(value: Any, names: list[str]) -> Any:
    """Return an argument without the names of its tensors, which are noted."""
    of = type(value)
    if of is dict:
        if len(value) == 1 and "tensor" in value:
            names.append(value["tensor"])
            return None
        return (of, tuple([(key, _plain(item, names)) for key, item in value.items()]))
    if of is list or of is tuple:
        return (list, tuple([_plain(item, names) for item in value]))
    return (of, value)  # 1, 1.0 and True are different attributes


def fingerprint(call: Call) -> Any:
    """Return a key that is equal for calls that differ only in the names of their tensors."""
    skeleton = skeleton_of(call.kind, call.args, call.kwargs)
    return skeleton.key(call.shapes, call.dtypes, call.outputs)


def walk(value: Any, slot: str, visit: Callable[[str, str], Any]) -> Any:
    """Replace the tensors of an argument.

    Args:
        value: The argument, `{"tensor": name}` for tensors.
        slot: Its parameter; items of a list are "slot.0", "slot.1" and so on.
        visit: Takes the name and slot of a tensor, and returns what replaces the tensor.
    """
    if isinstance(value, list | tuple):
        return [walk(item, f"{slot}.{n}", visit) for n, item in enumerate(value)]
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return visit(value["tensor"], slot)
    return value


@lru_cache(maxsize=4096)
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)  # 40 us each time


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, call: Call
) -> inspect.BoundArguments:
    defaults = _plain_defaults(function)
    if defaults is None or len(call.args) > len(defaults) or call.kwargs.keys() - defaults:
        bound = signature.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        return bound
    given = dict(zip(defaults, call.args, strict=False))
    if given.keys() & call.kwargs.keys():
        raise TypeError("an argument is given twice")
    given |= call.kwargs
    found = {name: given.get(name, default) for name, default in defaults.items()}
    if inspect.Parameter.empty in found.values():
        raise TypeError("an argument is missing")
    return inspect.BoundArguments(signature, found)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _plain_defaults(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return parameters with defaults, None unless all may be given by position and by name."""
    found = _signature_of(function).parameters
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in found.values()):
        return None
    return {name: parameter.default for name, parameter in found.items()}


def bind_call(description: Description, call: Call) -> Bound:
    """Match the arguments of a call with the parameters of its description.

    Raises:
        DescriptionError: E220, if the description does not take what the op takes.
    """
    signature = _signature_of(description.function)
    try:
        bound = _bound(description.function, signature, call)
    except TypeError as error:
        raise DescriptionError(
            f"the description of {shown(description.name)} ({description.source}) does not take "
            f"the arguments of {shown(call.kind)}: {error}\nGive it the parameters of the operator."
        ) from None
    names: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}

    def visit(name: str, slot: str) -> Tensor:
        names[slot] = name
        tensors[slot] = Tensor(slot, Sizes(call.shapes[name]), call.dtypes.get(name))
        return tensors[slot]

    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: walk(item, key, visit) for key, item in value.items()}
        else:
            bound.arguments[name] = walk(value, name, visit)
    return Bound(_by_slot(description, call), names, tensors, bound)


def _by_slot(description: Description, call: Call) -> Call:
    def visit(_: str, slot: str) -> Any:
        return {"tensor": slot}

    slots = _positional_slots(description.function, len(call.args))
    args = tuple(walk(v, slot, visit) for v, slot in zip(call.args, slots, strict=True))
    kwargs = {key: walk(value, key, visit) for key, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs)


@lru_cache(maxsize=4096)
def _positional_slots(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    slots: list[str] = []
    for name, parameter in _signature_of(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            slots += [f"{name}.{n}" for n in range(count - len(slots))]
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            slots.append(name)
    return tuple(slots[:count])


def replaced(description: Description, call: Call, attributes: Mapping[str, Any]) -> Call:
    """Return a call with some arguments changed.

    Args:
        description: Of the operator.
        call: The call.
        attributes: New values, by parameter of the description.
    """
    slots = _positional_slots(description.function, len(call.args))
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in attributes.items():
        if name in slots:
            args[slots.index(name)] = value
        else:
            kwargs[name] = value
    return replace(call, args=tuple(args), kwargs=kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class DimSlices:
    """Which dims belong to which tensor if those of all tensors of a call are put side by side.

    So the boxes of a call are one array with one row per dim, whatever its tensors.

    Attributes:
        inputs: Dims of each input, by slot.
        outputs: Dims of each output, None for one that is not computed.
        num_dims: Of all tensors together.
    """

    inputs: Mapping[str, slice]
    outputs: tuple[slice | None, ...]
    num_dims: int

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """Number of dims of each output, 0 for one that is not computed."""
        return tuple([0 if dims is None else dims.stop - dims.start for dims in self.outputs])


@lru_cache(maxsize=4096)
def _dim_slices(slots: tuple[tuple[str, int], ...], outputs: tuple[int | None, ...]) -> DimSlices:
    ends = list(itertools.accumulate((rank or 0 for _, rank in slots), initial=0))
    inputs = {slot: slice(a, a + rank) for (slot, rank), a in zip(slots, ends, strict=False)}
    at, found = ends[-1], list[slice | None]()
    for rank in outputs:
        found.append(None if rank is None else slice(at, at + rank))
        at += rank or 0
    return DimSlices(inputs, tuple(found), at)


def dim_slices_of(shapes: Mapping[str, Shape], outputs: Sequence[Shape | None]) -> DimSlices:
    """Return the slices for tensors of these ranks: the same object for the same ranks."""
    return _dim_slices(
        tuple((slot, len(shape)) for slot, shape in shapes.items()),
        tuple(None if shape is None else len(shape) for shape in outputs),
    )

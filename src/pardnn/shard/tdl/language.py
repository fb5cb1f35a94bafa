"""TDL, the tensor description language: what an operator computes, index by index (Tofu, 4.1).

A description is a Python function. It takes what the operator takes, and returns a lambda from
the indices of the output to the value there; several outputs are a tuple of lambdas:

    @describe("aten.mm")
    def mm(a, b):
        return lambda i, j: Sum(lambda k: a[i, k] * b[k, j])

Tensors are indexed with affine expressions of the variables; attributes are ordinary Python values
and ranks ordinary numbers. `lambda *i` stands for all remaining variables (i0, i1, ...). Variables
of the same name in several outputs are one variable: a loop of the operator. How it is cut along
each variable follows from the description, see `partition.strategy`.

- `Sum`, `Max`, `Min`, `Prod`, `Mean`, or a `Reducer` of one's own, over further variables.
- `Opaque` functions take elements and slices, `f(x[i, :])`; the indices at which their result is
  taken, `f(x[i, :])[j]`, cannot be cut.
- `At((2 * i + j,), value)`: the value's position in the output, if it is not just a variable. Under
  a `Sum`, values at the same position are added up.
- `Once(value)`: an addend that is added once, however the sum beside it is cut.
- `Local(lambdas, padding=...)`: the value of an attribute in the call of a worker.

Reference: Tofu (EuroSys 2019), section 4.1 and Fig. 3. Deviations: names join the loops of several
outputs; `At`, `Once`, `Local`, `clipped` and `padded` say how to call the real op on shards; custom
reducers, which the paper leaves open, exist; `Mean` is built in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pardnn.shard.tdl.interval import Affine, DescriptionError, affine, variable

Shape = tuple[int, ...]

#: What a function in `Local` returns for an attribute that stays as it is.
KEEP: Any = object()


class Node:
    """A value of a description: an element, a number, or a function of them."""

    __slots__ = ()

    def __add__(self, other: Any) -> Node:
        return Apply("add", (self, _node(other)))

    def __radd__(self, other: Any) -> Node:
        return Apply("add", (_node(other), self))

    def __sub__(self, other: Any) -> Node:
        return Apply("sub", (self, _node(other)))

    def __rsub__(self, other: Any) -> Node:
        return Apply("sub", (_node(other), self))

    def __mul__(self, other: Any) -> Node:
        return Apply("mul", (self, _node(other)))

    def __rmul__(self, other: Any) -> Node:
        return Apply("mul", (_node(other), self))

    def __truediv__(self, other: Any) -> Node:
        return Apply("truediv", (self, _node(other)))

    def __rtruediv__(self, other: Any) -> Node:
        return Apply("truediv", (_node(other), self))

    def __pow__(self, other: Any) -> Node:
        return Apply("pow", (self, _node(other)))

    def __rpow__(self, other: Any) -> Node:
        return Apply("pow", (_node(other), self))

    def __neg__(self) -> Node:
        return Apply("neg", (self,))


@dataclass(frozen=True, slots=True, eq=False)
class Number(Node):
    """A value that reads no tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Node):
    """A function of the elements `operands`.

    Attributes:
        name: "add", "mul" and so on, or the name of an opaque function.
        operands: What it is computed from.
        at: Indices at which the result of an opaque function is taken: these cannot be cut.
    """

    name: str
    operands: tuple[Node, ...]
    at: tuple[Affine, ...] = ()

    def __getitem__(self, index: Any) -> Apply:
        listed = index if isinstance(index, tuple) else (index,)
        return replace(self, at=tuple(affine(i) for i in listed if not isinstance(i, slice)))


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """All indices of a dim from `start` on, to `stop`, exclusive; None means its ends."""

    start: Affine | None = None
    stop: Affine | None = None


Outside = Literal["refuse", "clip", "fill"]


@dataclass(frozen=True, slots=True, eq=False)
class Read(Node):
    """Elements of an input.

    Attributes:
        slot: Which input: the parameter's name, with a position inside lists ("tensors.0").
        index: One entry for each dim of the input.
        outside: What indices outside the tensor mean.
        fill: The value there, if they mean one.
        content: Whether values are read; if not, an uninitialised tensor of that shape will do.
    """

    slot: str
    index: tuple[Affine | Range, ...]
    outside: Outside = "refuse"
    fill: float = 0.0
    content: bool = True


@dataclass(frozen=True, slots=True)
class Reducer:
    """A commutative, associative function that combines partial results.

    Attributes:
        name: "sum", "max", "min", "prod", "mean" (weighted by the number of indices) or
            "quotient" (sums of this output over sums of output `by`); any other needs `combine`.
        combine: Takes the list of the partial results and returns the whole one. With `together`,
            each partial result is the tuple of those outputs.
        by: For "quotient": which output divides.
        together: Outputs that `combine` needs to see.
    """

    name: str
    combine: Callable[[list[Any]], Any] | None = None
    by: int | None = None
    together: tuple[int, ...] = ()

    def __call__(self, body: Callable[..., Any], ndim: int = 0) -> Reduction:
        """Reduce `body` over its parameters; `*r` stands for `ndim` of them."""
        names, extents = parameters(body, ndim)
        return Reduction(self, names, extents, result(body, names))


Sum = Reducer("sum")
Max = Reducer("max")
Min = Reducer("min")
Prod = Reducer("prod")
Mean = Reducer("mean")


@dataclass(frozen=True, slots=True, eq=False)
class Reduction(Node):
    """`body`, reduced over `names`."""

    reducer: Reducer
    names: tuple[str, ...]
    extents: Mapping[str, int]
    body: Node


@dataclass(frozen=True, slots=True, eq=False)
class Once(Node):
    """An addend beside a reduction; all workers but the first call with `without` instead.

    Attributes:
        value: What is added.
        without: Attributes that leave the addend out, such as `{"bias": None}`.
    """

    value: Node
    without: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class At(Node):
    """A value and its place in the output, one affine index or slice for each dim."""

    place: tuple[Affine | int | slice, ...]
    value: Any


class Opaque:
    """A function that TDL does not look into; it may be called on elements and on slices."""

    def __init__(self, name: str = "opaque") -> None:
        self.name = name

    def __call__(self, *values: Any) -> Apply:
        """Return the function's value, which may be indexed."""
        return Apply(self.name, tuple(_node(value) for value in values))


@dataclass(slots=True)
class Sizes:
    """Sizes of an input, and whether a description has read them."""

    shape: Shape
    were_read: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input as a description sees it.

    Attributes:
        slot: Which input it is.
        sizes: Its sizes, and whether they were read.
        dtype: Such as "float32"; None where unknown.
        outside: What indices outside the tensor mean.
        fill: The value there.
        content: Whether values are read.
    """

    slot: str
    sizes: Sizes
    dtype: str | None = None
    outside: Outside = "refuse"
    fill: float = 0.0
    content: bool = True

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes.shape)

    @property
    def shape(self) -> Shape:
        """Sizes of the dims; a description that reads no sizes is analysed once for all of them."""
        self.sizes.were_read = True
        return self.sizes.shape

    @property
    def clipped(self) -> Tensor:
        """The tensor, clipped where an index is out of bounds."""
        return replace(self, outside="clip")

    @property
    def form(self) -> Tensor:
        """The tensor's shape alone: no value is read, so nothing needs to be sent."""
        return replace(self, content=False)

    def padded(self, fill: float = 0.0) -> Tensor:
        """Return the tensor with `fill` at all indices outside."""
        return replace(self, outside="fill", fill=fill)

    def __iter__(self) -> Iterator[Any]:
        raise DescriptionError(f"input {self.slot!r} is iterated over; index it instead")

    def __getitem__(self, index: Any) -> Read:
        """Return the element at `index`; slices stand for all elements of a dim."""
        listed = index if isinstance(index, tuple) else (index,)
        if len(listed) != self.ndim:
            raise DescriptionError(
                f"input {self.slot!r} has {self.ndim} dims and is indexed with {len(listed)}"
            )
        return Read(
            self.slot, tuple(map(index_entry, listed)), self.outside, self.fill, self.content
        )

    def broadcast(self, index: tuple[Any, ...]) -> Read:
        """Return the element at `index` of a result that this tensor is broadcast to.

        Raises:
            DescriptionError: E220, if the result has fewer dims than the tensor.
        """
        if len(index) < self.ndim:
            raise DescriptionError(
                f"input {self.slot!r} has {self.ndim} dims, the result only {len(index)}"
            )
        last = index[len(index) - self.ndim :]
        sizes = zip(last, self.sizes.shape, strict=True)
        return self[tuple(slice(None) if size == 1 else i for i, size in sizes)]


def index_entry(index: Any) -> Affine | Range:
    """Return one entry of an index: affine, or a range for a slice.

    Raises:
        DescriptionError: E220, if a slice has a step.
    """
    if not isinstance(index, slice):
        return affine(index)
    if index.step is not None:
        raise DescriptionError("a slice has a step; write it as an index, `x[2 * i + 1]`")
    start, stop = index.start, index.stop
    return Range(*(None if end is None else affine(end) for end in (start, stop)))


def _node(value: Any) -> Node:
    if isinstance(value, Node):
        return value
    if isinstance(value, Tensor):
        return value[(slice(None),) * value.ndim]
    return Number()


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """Outputs, and the values of attributes in the call of a worker.

    Attributes:
        outputs: A lambda, or a tuple of lambdas.
        attributes: By parameter: a value, or a function of the worker's `WorkerShapes`.
    """

    outputs: Any
    attributes: Mapping[str, Any]

    def __init__(self, outputs: Any, **attributes: Any) -> None:
        object.__setattr__(self, "outputs", outputs)
        object.__setattr__(self, "attributes", attributes)


@dataclass(frozen=True, slots=True, eq=False)
class Loops:
    """A lambda whose variables are named, and sized, by the description.

    Attributes:
        names: Of the variables, in the order that `body` takes them.
        body: Takes the variables.
        sizes: Extents of variables that do not run over a whole dim.
    """

    names: tuple[str, ...]
    body: Callable[..., Any]
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, *values: Any) -> Any:
        """Return the value at these indices."""
        return self.body(*values)


def parameters(function: Callable[..., Any], ndim: int) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the variables of a lambda, and the extents that its defaults state.

    Args:
        function: `*i` stands for the remaining of `ndim` variables.
        ndim: Number of variables, of use only if some are starred.
    """
    if isinstance(function, Loops):
        return function.names, dict(function.sizes)
    listed = list(inspect.signature(function).parameters.values())
    single = [p for p in listed if p.kind is not p.VAR_POSITIONAL]
    names: list[str] = []
    for parameter in listed:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{n}" for n in range(ndim - len(single))]
        else:
            names.append(parameter.name)
    return tuple(names), {p.name: p.default for p in single if p.default is not p.empty}


def result(function: Callable[..., Any], names: tuple[str, ...]) -> Node:
    """Return the value of a lambda at the variables of these names."""
    return _node(function(*(variable(name) for name in names)))

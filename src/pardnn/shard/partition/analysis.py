"""From a description to the loops of an operator, and what each of their indices reads and writes.

Problem: find every variable along which an operator can be cut, whatever its sizes.
Idea: run the lambdas on symbolic indices. A variable may be cut if it stands for a position of an
output (case 1) or belongs to a reduction surrounded by nothing but sums and factors (case 2).
Variables inside an opaque result, or of a reduction whose result is passed to another function, may
not.
Complexity: O(size of the description); results are cached by ranks and attributes, so that equal
layers of different width are analysed once.
Reference: Tofu (EuroSys 2019), section 4.2, cases 1 and 2.
Deviations: bounds are affine in the first and last value of each loop, so one run serves any number
of workers, while the paper makes two runs per loop; several outputs share loops by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pardnn.errors import shown
from pardnn.shard.cache import cached
from pardnn.shard.partition.call import Bound, Call, bind_call
from pardnn.shard.tdl.check_value import check_value
from pardnn.shard.tdl.interval import (
    Affine,
    DescriptionError,
    Floor,
    Interval,
    bare_variable,
    divisors,
    interval,
    variable,
    variables,
)
from pardnn.shard.tdl.language import (
    Apply,
    At,
    Local,
    Node,
    Once,
    Outside,
    Range,
    Read,
    Reducer,
    Reduction,
    index_entry,
    parameters,
    result,
)
from pardnn.shard.tdl.registry import Description

#: A size that a variable runs over: stated, or that of a dim: ("input", slot, dim) and the like.
Extent = int | tuple[str, str | int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """Elements that are read or written: an interval for each dim, None for all of it."""

    slot: str
    dims: tuple[Interval | None, ...]
    outside: Outside
    fill: float
    content: bool


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """How one output is computed.

    Attributes:
        place: An interval for each dim, None for all of it.
        names: Variables that it depends on.
        reducers: Variables whose cut gives partial results, with what combines these.
        overlap: What combines values at the same position; None: there must be none.
        without: Arguments of all workers but the first, if the results are partial.
    """

    place: tuple[Interval | None, ...]
    names: frozenset[str]
    reducers: Mapping[str, Reducer]
    overlap: Reducer | None
    without: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Analysis:
    """The loops of an operator with what each reads and writes, affine in the ends of the loops.

    Attributes:
        loops: Variables that can be cut, in order of appearance.
        extents: Where the size of each variable is found, the most binding first.
        multiples: Numbers whose multiples the cuts of a variable must be, where not 1.
        reads: Accesses of inputs.
        writes: One per output, None for what is not computed.
        attributes: See `Local`.
        contents: Slots of which values are read.
        reads_sizes: Whether the description looked at sizes: the analysis then holds only for them.
    """

    loops: tuple[str, ...]
    extents: Mapping[str, tuple[Extent, ...]]
    multiples: Mapping[str, frozenset[int]]
    reads: tuple[Access, ...]
    writes: tuple[Write | None, ...]
    attributes: Mapping[str, Any]
    contents: frozenset[str] = frozenset()
    reads_sizes: bool = False


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Apply):
        children: tuple[Any, ...] = node.operands
    elif isinstance(node, Reduction):
        children = (node.body,)
    else:
        children = (node.value,) if isinstance(node, Once | At) else ()
    for child in children:
        if isinstance(child, Node):
            yield from _nodes(child)


def _reduces(node: Node) -> bool:
    return any(isinstance(inner, Reduction) for inner in _nodes(node))


class _Roles:
    """What each variable of one output is: a position, part of a reduction, or not cuttable."""

    def __init__(self, value: Node) -> None:
        self.reducers: dict[str, Reducer] = {}
        self.uncuttable: set[str] = set()
        self.without: dict[str, Any] = {}
        self._top(value, None)
        for node in _nodes(value):
            if isinstance(node, Apply):
                for index in node.at:
                    self.uncuttable |= variables(index)

    def _top(self, node: Node, outer: Reducer | None) -> None:
        if isinstance(node, Reduction) and outer in (None, node.reducer):
            self.reducers |= dict.fromkeys(node.names, node.reducer)
            self._top(node.body, node.reducer)
        elif isinstance(node, At):
            self._top(node.value, outer)
        elif isinstance(node, Once):
            self.without |= node.without
            self._forbid(node.value)
        elif isinstance(node, Apply):
            self._apply(node, outer)

    def _apply(self, node: Apply, outer: Reducer | None) -> None:
        partial = [operand for operand in node.operands if _reduces(operand)]
        others = [operand for operand in node.operands if not _reduces(operand)]
        is_scaled = node.name in ("mul", "neg") or (
            node.name == "truediv" and node.operands[0] in partial
        )
        is_added = node.name in ("add", "sub") and all(isinstance(o, Once) for o in others)
        if len(partial) == 1 and (is_added or (is_scaled and _is_linear(partial[0]))):
            for operand in node.operands:
                self._top(operand, outer)
        else:
            for operand in node.operands:
                self._forbid(operand)

    def _forbid(self, node: Node) -> None:
        for inner in _nodes(node):
            if isinstance(inner, Reduction):
                self.uncuttable |= set(inner.names)


def _is_linear(node: Node) -> bool:
    reducers = {inner.reducer.name for inner in _nodes(node) if isinstance(inner, Reduction)}
    return reducers <= {"sum", "mean"}


def _span(entry: Affine | Range) -> Interval | None:
    if isinstance(entry, Affine):
        name = bare_variable(entry)
        return interval(entry) if name is None else _interval_of(name)
    if entry.start is None and entry.stop is None:
        return None
    if entry.start is None or entry.stop is None:
        raise DescriptionError("a slice has one end; give it both, or none")
    return Interval(interval(entry.start).lower, interval(entry.stop).upper - 1)


@lru_cache(maxsize=1024)
def _interval_of(name: str) -> Interval:
    return interval(variable(name))


def _traced(function: Any, shape: tuple[int, ...] | None) -> Output | None:
    return None if function is None or shape is None else trace(function, len(shape))


def _write(output: Output, roles: _Roles) -> Write:
    names = set(output.names) | set(roles.reducers)
    reducers = {name: r for name, r in roles.reducers.items() if name not in roles.uncuttable}
    around = output.value.reducer if isinstance(output.value, Reduction) else None
    overlap = None if output.bare else around
    place = tuple(map(_span, output.place))
    return Write(place, frozenset(names), reducers, overlap, roles.without)


def _reads(output: Output) -> list[Read]:
    return [node for node in _nodes(output.value) if isinstance(node, Read)]


def _extents(outputs: list[Output | None]) -> dict[str, tuple[Extent, ...]]:
    stated: dict[str, list[Extent]] = {}
    read: dict[str, list[Extent]] = {}
    for number, output in enumerate(outputs):
        if output is None:
            continue
        for node in _nodes(output.value):
            if isinstance(node, Reduction):
                for name, size in node.extents.items():
                    stated.setdefault(name, []).append(size)
        for name, size in output.extents.items():
            stated.setdefault(name, []).append(size)
        for dim, entry in enumerate(output.place):
            if isinstance(entry, Affine) and (name := bare_variable(entry)):
                stated.setdefault(name, []).append(("output", number, dim))
        for access in _reads(output):
            for dim, entry in enumerate(access.index):
                if isinstance(entry, Affine) and (name := bare_variable(entry)):
                    read.setdefault(name, []).append(("input", access.slot, dim))
    # An index of an output may read less than the whole of an input; a reduction reads all.
    return {name: tuple(stated.get(name) or read[name]) for name in {**stated, **read}}


def _divided(outputs: list[Output | None], reads: Sequence[Read]) -> list[Affine]:
    """Return the indices that are divided and rounded somewhere."""
    entries = [e for output in outputs if output is not None for e in output.place]
    entries += [e for read in reads for e in read.index]
    return [
        entry
        for entry in entries
        if isinstance(entry, Affine) and any(isinstance(atom, Floor) for atom, _ in entry.terms)
    ]


def _multiples(divided: Sequence[Affine], name: str) -> frozenset[int]:
    return frozenset(n for entry in divided for n in divisors(entry, name))


def _joined(outputs: list[Output | None], attributes: Mapping[str, Any]) -> Analysis:
    known = [None if output is None else (output, _Roles(output.value)) for output in outputs]
    pairs = [pair for pair in known if pair is not None]
    uncuttable = {name for _, role in pairs for name in role.uncuttable}
    ordered = [name for output, role in pairs for name in (*output.names, *role.reducers)]
    extents = _extents(outputs)
    unknown = [name for name in ordered if name not in extents and name not in uncuttable]
    if unknown:
        raise DescriptionError(
            f"the range of variable {unknown[0]!r} is not known.\nIndex a tensor with it alone, or "
            f"state it: lambda {unknown[0]}=8: ..."
        )
    reads = [read for output, _ in pairs for read in _reads(output)]
    divided = _divided(outputs, reads)
    return Analysis(
        tuple(name for name in dict.fromkeys(ordered) if name not in uncuttable),
        extents,
        {name: _multiples(divided, name) for name in extents},
        tuple(
            Access(r.slot, tuple(map(_span, r.index)), r.outside, r.fill, r.content) for r in reads
        ),
        tuple(None if pair is None else _write(*pair) for pair in known),
        attributes,
        frozenset(read.slot for read in reads if read.content),
    )


#: By description, arguments and ranks, or sizes where the description reads them.
_ANALYSES: dict[Any, Analysis] = cached({})


#: What plain Python raises in a description whose call has a text for a number, or the like, as the
#: arguments of a file may.
_WRONG_ARGUMENTS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def _signature(description: Description, bound: Bound, with_sizes: bool) -> Any:
    call = bound.call
    shapes = {slot: tensor.sizes.shape for slot, tensor in bound.tensors.items()}
    seen = shapes if with_sizes else {s: tuple(n == 1 for n in v) for s, v in shapes.items()}
    dtypes = [tensor.dtype for tensor in bound.tensors.values()]
    ranks = tuple(None if shape is None else len(shape) for shape in call.outputs)
    return (
        description.name,
        description.function,
        repr((call.args, call.kwargs, seen, dtypes)),
        ranks,
    )


def analyse(description: Description, call: Call) -> tuple[Analysis, Bound]:
    """Analyse the description of the operator that `call` calls.

    Raises:
        DescriptionError: E220, naming the operator, if the description cannot be analysed.
    """
    bound = bind_call(description, call)
    for with_sizes in (False, True):
        kept = _ANALYSES.get(_signature(description, bound, with_sizes))
        if kept is not None:
            return kept, bound
    found = analysis_of(description, bound)
    _ANALYSES[_signature(description, bound, found.reads_sizes)] = found
    return found, bound


def analysis_of(description: Description, bound: Bound) -> Analysis:
    """Analyse the description of a newly bound call, in which reads of sizes are noted.

    Raises:
        DescriptionError: E220, naming the operator, if the description cannot be analysed.
    """
    outputs = bound.call.outputs
    if not any(tensor.ndim for tensor in bound.tensors.values()) and not any(outputs):
        return Analysis((), {}, {}, (), (None,) * len(outputs), {})
    try:
        result = description.function(*bound.arguments.args, **bound.arguments.kwargs)
        local = result if isinstance(result, Local) else Local(result)
        listed = local.outputs if isinstance(local.outputs, tuple | list) else (local.outputs,)
        if len(listed) != len(outputs):
            raise DescriptionError(
                f"it has {len(listed)} outputs, the call {len(outputs)}; None stands for one "
                "that is not computed"
            )
        traced = [_traced(f, s) for f, s in zip(listed, outputs, strict=True)]
        analysis = _joined(traced, local.attributes)
    except DescriptionError as error:
        raise DescriptionError(
            f"the description of {shown(description.name)} ({description.source}) is wrong: "
            f"{error.message}"
        ) from error
    except _WRONG_ARGUMENTS as error:
        raise DescriptionError(
            f"the description of {shown(description.name)} ({description.source}) does not take "
            f"these arguments: {type(error).__name__}: {shown(str(error))}"
        ) from error
    if any(tensor.sizes.were_read for tensor in bound.tensors.values()):
        analysis = replace(analysis, reads_sizes=True)
    return analysis


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One output, traced.

    Attributes:
        names: Variables that stand for positions, in the order of the lambda.
        extents: Sizes of the variables that state them.
        place: Positions of the values: one entry per dim.
        value: What is computed there.
        bare: Whether `place` consists of the variables themselves.
    """

    names: tuple[str, ...]
    extents: Mapping[str, int]
    place: tuple[Affine | Range, ...]
    value: Node
    bare: bool


def _place_of(value: Node) -> At | None:
    """Return the `At` that a value is, below any reductions."""
    while isinstance(value, Reduction):
        value = value.body
    return value if isinstance(value, At) else None


def trace(function: Callable[..., Any], ndim: int) -> Output:
    """Run the lambda of one output on symbolic indices.

    Raises:
        DescriptionError: E220, if it is not affine, its rank is not `ndim`, or by `check_value`.
    """
    names, extents = parameters(function, ndim)
    value = result(function, names)
    at = _place_of(value)
    if at is None:
        listed: tuple[Affine | Range, ...] = tuple(variable(name) for name in names)
    else:
        listed = tuple(map(index_entry, at.place))
    if len(listed) != ndim:
        raise DescriptionError(
            f"an output has {ndim} dims and is described with {len(listed)} indices"
        )
    check_value(value, frozenset(names))
    return Output(names, extents, listed, value, at is None)

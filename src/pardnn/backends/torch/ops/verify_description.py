"""Numeric verification of a description: the local ops of a call are run and combined.

Problem: a wrong TDL description gives wrong numbers on several devices, and no type or shape gives
    this away.

Idea: run the operator on whole inputs and, for every strategy of the call, each worker's local op
on its region of the inputs. The local results, placed and reduced as the description says, must
equal the whole result, in float64 up to rounding. Elements that a local op must not read are NaN.

Complexity: the operator's work, twice for each cut.

`call_with_values` turns a sample call into data, which `pardnn.shard` partitions; `run_call` and
`verify_worker_ops` run the whole and the local ops.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from pardnn.backends.torch.ops.codec import (
    Reference,
    decode,
    encode,
    find_call,
    flatten_result,
    op_kind,
)
from pardnn.backends.torch.ops.schema import signature, written_names, written_tensors
from pardnn.errors import UnsupportedError

Box = tuple[tuple[int, int], ...]

#: Largest difference that counts as rounding, relative to the largest magnitude in the result.
TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 2e-5}
COARSE_TOLERANCE = 2e-2

_HOST_VALUES: Mapping[str, Any] = {"host.int": 1, "host.float": 0.5, "host.bool": True}


#: Classes of `pardnn.shard.partition`, which a back end does not import: `call.Call`,
#: `regions.Region`, `regions.WorkerResult` and `worker_ops.WorkerOp`.
CallData = Any
Region = Any
WorkerResult = Any
WorkerOp = Any


def call_with_values(
    op: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, list[Any], dict[str, Any], dict[str, Any]]:
    """Return a call as data, and its tensors.

    Args:
        op: Name or overload of the operator.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Its kind, arguments and keyword arguments as in `Op.arguments`, and its tensors by name.

    Raises:
        UnsupportedError: E801, if the op is not registered, or an argument cannot be data.
    """
    kind = full_kind(op)
    find_call(kind)
    values: dict[str, Any] = {}

    def name_of(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            raise KeyError
        name = f"t{len(values)}"
        values[name] = value.detach()
        return name

    encoded = [encode(value, name_of) for value in args]
    return kind, encoded, {k: encode(v, name_of) for k, v in kwargs.items()}, values


def full_kind(op: str | Callable[..., Any]) -> str:
    """Return the kind of an op: "mylib::op.default" for "mylib::op" and for its overload."""
    if not isinstance(op, str):
        overload = getattr(op, "default", op)
        return op_kind(overload)
    return op if op.replace("::", ".").count(".") == 2 else f"{op}.default"


def in_double(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with floating-point tensors in float64."""

    def promote(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    return _pytree.tree_map(promote, dict(values))


def sample_values(
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, str | None],
    seed: int,
    *,
    double: bool = True,
) -> dict[str, Any]:
    """Return random values for the tensors and host scalars of a call.

    Args:
        shapes: The shapes by name.
        dtypes: Dtypes by name; "host.int" and the like for host scalars.
        seed: The seed of the draw.
        double: Whether floats are in double precision, whatever their dtype.

    Returns:
        By name. Integers are 0 or 1, which most operators take for indices.

    Raises:
        UnsupportedError: E801, if a dtype is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {}
    for name, shape in shapes.items():
        dtype = getattr(torch, dtypes.get(name) or "", None)
        if dtypes.get(name) in _HOST_VALUES:
            values[name] = _HOST_VALUES[str(dtypes[name])]
        elif not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"tensor {name!r:.80} has no known dtype")
        elif dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            drawn = torch.randn(tuple(shape), dtype=wide, generator=generator)
            values[name] = drawn if double else drawn.to(dtype)
        else:
            values[name] = torch.randint(2, tuple(shape), generator=generator).to(dtype)
    return values


def run_call(call: CallData, values: Mapping[str, Any]) -> list[Any]:
    """Run a call for real, on copies of its tensors.

    Args:
        call: The call, whose tensors are named in `values`.
        values: Tensors and host scalars by name.

    Returns:
        Its results, lists flattened; for a call that returns nothing, the tensors that it changes
        in place.
    """

    def fill(data: Any) -> Any:
        if isinstance(data, Reference):
            value = values[data]
            return value.clone() if isinstance(value, torch.Tensor) else value
        return [fill(item) for item in data] if isinstance(data, list) else data

    device = torch.device("cpu")
    args = [fill(decode(_lists(item), device)) for item in call.args]
    kwargs = {key: fill(decode(_lists(item), device)) for key, item in call.kwargs.items()}
    function = find_call(call.kind)
    with torch.no_grad():
        results = flatten_result(function(*args, **kwargs))
    if results or not isinstance(function, torch._ops.OpOverload):
        return results
    sig = signature(function)
    return written_tensors(sig, written_names(sig, tuple(args), kwargs), args, kwargs)


def _lists(data: Any) -> Any:
    return [_lists(item) for item in data] if isinstance(data, list | tuple) else data


def verify_worker_ops(
    whole: Sequence[Any],
    ops: Sequence[WorkerOp],
    values: Mapping[str, Any],
    is_random: bool = False,
) -> str | None:
    """Run the local ops of a call and compare their combined results with the whole results.

    Args:
        whole: Results of the call on whole inputs.
        ops: The local ops, one per worker.
        values: Whole inputs, by slot.
        is_random: Compare only shapes.

    Returns:
        What is wrong; None if nothing.
    """
    local_results: list[list[Any]] = []
    for worker, op in enumerate(ops):
        try:
            local = {slot: take(values[slot], region) for slot, region in op.regions.items()}
            local_results.append(run_call(op.call, local))
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            return f"worker {worker} fails: {str(error).splitlines()[0]}"
        problem = _local_problem(op, local_results[-1])
        if problem:
            return f"worker {worker}: {problem}"
    if is_random:
        return None
    for number, expected in enumerate(whole):
        problem = _output_problem(number, expected, ops, local_results)
        if problem:
            return f"output {number}: {problem}"
    return None


def take(value: Any, region: Region) -> Any:
    """Return a region of a tensor, contiguous, with the region's fill outside the tensor.

    Raises:
        ValueError: If it is out of bounds and has no fill.
    """
    if not isinstance(value, torch.Tensor):
        return value
    inside = value
    for dim, (begin, end) in enumerate(region.box):
        size = value.shape[dim]
        if region.fill is None and not 0 <= begin <= end <= size:
            raise ValueError(f"dim {dim} of size {size} is read from {begin} to {end}")
        first, last = max(begin, 0), min(end, size)
        inside = inside.narrow(dim, min(first, size), max(last - first, 0))
    if not region.content:  # these values must not be read: NaN spoils every result that does
        fill = float("nan") if value.is_floating_point() else 0
        return value.new_full([end - begin for begin, end in region.box], fill)
    if region.fill is None:
        return inside.clone(memory_format=torch.contiguous_format)
    made = value.new_full([end - begin for begin, end in region.box], region.fill)
    place = made
    for dim, (begin, _) in enumerate(region.box):
        place = place.narrow(dim, max(-begin, 0) if inside.shape[dim] else 0, inside.shape[dim])
    place.copy_(inside)
    return made


def _local_problem(op: WorkerOp, results: Sequence[Any]) -> str | None:
    for number, placement in enumerate(op.results):
        if placement is None:
            continue
        shape = [end - begin for begin, end in placement.box]
        if isinstance(results[number], torch.Tensor) and list(results[number].shape) != shape:
            got = list(results[number].shape)
            return f"output {number} of a local op has shape {got}, described as {shape}"
    return None


def _output_problem(
    number: int, expected: Any, ops: Sequence[WorkerOp], local_results: Sequence[Sequence[Any]]
) -> str | None:
    placements = [op.results[number] for op in ops]
    if placements[0] is None:
        return None
    shape = getattr(expected, "shape", None)
    combined = _combine(number, local_results, placements, shape)
    if combined is not None:
        return difference(combined, expected)
    problems = (difference(results[number], expected) for results in local_results)
    return next((problem for problem in problems if problem), None)


_REDUCE: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "sum": lambda partials: functools.reduce(operator.add, partials),
    "prod": lambda partials: functools.reduce(operator.mul, partials),
    "max": lambda partials: functools.reduce(torch.maximum, partials),
    "min": lambda partials: functools.reduce(torch.minimum, partials),
}


def _combine(
    number: int,
    local_results: Sequence[Sequence[Any]],
    placements: Sequence[WorkerResult],
    shape: Any,
) -> Any:
    """Combine output `number` of all workers; None if each has the whole."""
    reducer = placements[0].reducer
    partials = [results[number] for results in local_results]
    if reducer is None:
        if all(placement.box == placements[0].box for placement in placements):
            return None
        placed = [_placed(p, s.box, shape) for p, s in zip(partials, placements, strict=True)]
        if partials[0].dtype == torch.bool:
            return _REDUCE["max"](placed)
        return _REDUCE["sum"](placed)
    if reducer.combine is not None:
        together = reducer.together
        seen = [tuple(r[n] for n in together) for r in local_results] if together else partials
        return reducer.combine(list(seen))
    if reducer.name == "mean":
        return _REDUCE["sum"]([p * s.weight for p, s in zip(partials, placements, strict=True)])
    if reducer.name == "quotient":
        divisors = [results[reducer.by or 0] for results in local_results]
        return _REDUCE["sum"](partials) / _REDUCE["sum"](divisors)
    if reducer.name not in _REDUCE:
        raise UnsupportedError(f"reducer {reducer.name!r} needs a `combine` to be computed")
    if reducer.name == "sum":
        partials = [_placed(p, s.box, shape) for p, s in zip(partials, placements, strict=True)]
    return _REDUCE[reducer.name](partials)


def _placed(result: torch.Tensor, box: Box, shape: torch.Size) -> torch.Tensor:
    """Return a tensor of zeros with `result` in its box; what is out of bounds is dropped."""
    whole = result.new_zeros(shape)
    target, source = whole, result
    for dim, (begin, end) in enumerate(box):
        first, last = max(begin, 0), min(end, shape[dim])
        length = max(last - first, 0)
        target = target.narrow(dim, first if length else 0, length)
        source = source.narrow(dim, first - begin if length else 0, length)
    target.copy_(source)
    return whole


def difference(found: Any, expected: Any) -> str | None:
    """Return how a result differs from the expected one; None if only by rounding."""
    if not isinstance(expected, torch.Tensor):
        return None if found == expected else f"it is {found!r:.40} and not {expected!r:.40}"
    if found.shape != expected.shape:
        return f"its shape is {list(found.shape)} and not {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"its dtype is {found.dtype} and not {expected.dtype}"
    if not expected.numel():
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((found != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else None
    regular = torch.isfinite(expected)
    if not torch.equal(
        torch.where(regular, 0.0, found).nan_to_num(7.0),
        torch.where(regular, 0.0, expected).nan_to_num(7.0),
    ):
        return "infinities or NaNs are in other places"
    error = torch.where(regular, found - expected, 0.0).abs().max()
    scale = torch.where(regular, expected, 0.0).abs().max().clamp(min=1.0)
    limit = TOLERANCE.get(expected.dtype, COARSE_TOLERANCE)
    return None if error <= limit * scale else f"it is off by {float(error / scale):.2g}"

"""Check a description of an operator against the operator itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn import backends
from pardnn.errors import UsageError
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.call import Call, bind_call
from pardnn.shard.partition.worker_ops import partition
from pardnn.shard.tdl.interval import DescriptionError


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying one call.

    Attributes:
        kind: The operator.
        verified: Loops and numbers of workers whose ops make up the whole.
        skipped: Those that cannot be cut so.
        problems: Loop, number of workers and what is wrong.
    """

    kind: str
    verified: tuple[tuple[str, int], ...]
    skipped: tuple[tuple[str, int], ...]
    problems: tuple[tuple[str, int, str], ...]


def verify(
    op: str | Callable[..., Any],
    *args: Any,
    workers: Sequence[int] = (2, 3, 4, 5),
    double: bool = True,
    **kwargs: Any,
) -> Verification:
    """Cut a call by every strategy of its description, run the local ops, compare with the whole.

    Args:
        op: Such as "mylib::op" or "aten.mm.default", or the overload itself.
        args: What to call it with: a sample, small but with dims of at least 5.
        workers: Numbers of workers to cut among.
        double: Compute in float64, so that differences are not rounding.
        kwargs: Further arguments of the call.

    Raises:
        UsageError: E201, if the operator has no description.
        DescriptionError: E220, if its description cannot be analysed.
    """
    kind, encoded, keywords, values = backends.call_with_values(op, args, kwargs)
    if double and not kind.startswith("aten._fused_"):  # these count steps in float32 alone
        values = backends.in_double(values)
    return verify_call(kind, encoded, keywords, values, workers)


def verify_call(
    kind: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Mapping[str, Any],
    workers: Sequence[int] = (2, 3, 4, 5),
) -> Verification:
    """Verify a call that is data already, see `verify`.

    Args:
        kind: Such as "aten.mm.default".
        args: As in `Op.arguments`.
        kwargs: Likewise.
        values: Tensors and host scalars by name.
        workers: Numbers of workers to cut among.

    Raises:
        UsageError: E201, if the operator has no description.
        DescriptionError: E220, if its description cannot be analysed.
    """
    description = description_of(kind)
    if description is None:
        raise UsageError(f"{kind!r:.80} has no description; write one with @pardnn.describe")
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in values.items()}
    dtypes = {
        name: str(getattr(value, "dtype", "")).removeprefix("torch.") or None
        for name, value in values.items()
    }
    bare = Call(kind, tuple(args), dict(kwargs), shapes, (), dtypes)
    whole = backends.run_call(bare, values)
    outputs = tuple(tuple(r.shape) if hasattr(r, "shape") else None for r in whole)
    call = Call(kind, bare.args, bare.kwargs, shapes, outputs, dtypes)
    by_slot = {slot: values[name] for slot, name in bind_call(description, call).names.items()}
    analysis, _ = analyse(description, call)
    verified: list[tuple[str, int]] = []
    skipped: list[tuple[str, int]] = []
    problems: list[tuple[str, int, str]] = []
    for loop in analysis.loops:
        for count in workers:
            try:
                ops = partition(call, loop, count)
            except DescriptionError as error:
                problems.append((loop, count, error.message))
                continue
            if ops is None:
                skipped.append((loop, count))
                continue
            problem = backends.verify_worker_ops(whole, ops, by_slot, description.is_random)
            if problem:
                problems.append((loop, count, problem))
            else:
                verified.append((loop, count))
    return Verification(kind, tuple(verified), tuple(skipped), tuple(problems))

"""The result of a step: which of its tensors is the loss, and what else its caller gets.

The loss is marked in the graph; if the step does not return it, it is the tensor on which the last
`backward` was called. Every other tensor that the step returns becomes a copy that outlives the
step, because eager code holds the last result while the next step runs. The structure around them
(tuples, lists, dicts, fields) is data on the loss op.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from pardnn.backends.torch.capture.numbers.containers import recorded_name
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.rewrites.undoing import record
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value, storages_read
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.ops.host_scalars import node_of

#: Containers within containers deeper than this are not followed.
_MAX_DEPTH = 8


@contextlib.contextmanager
def roots_noted() -> Iterator[list[torch.Tensor]]:
    """Note the tensors on which `backward` is called, except by checkpoints within it."""
    roots, run = list[torch.Tensor](), torch.autograd._engine_run_backward

    def noted(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        is_within = torch._C._current_graph_task_id() >= 0
        if kwargs.get("accumulate_grad") and not is_within:  # else it is `torch.autograd.grad`
            roots.extend(each for each in tensors if isinstance(each, torch.Tensor))
        return run(tensors, *args, **kwargs)

    torch.autograd._engine_run_backward = noted
    try:
        yield roots
    finally:
        torch.autograd._engine_run_backward = run


def loss_of(result: Any, roots: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the first scalar floating-point tensor in what a step returned, `loss` first.

    A step may return `loss.item()`, or nothing: then it is the last scalar of `roots`.

    Args:
        result: What the step returned.
        roots: The tensors of `roots_noted`.

    Raises:
        UnsupportedError: E805, if there is none.
    """
    found = next(_scalars(result, 0), None)
    if found is None:
        scalars = (root for each in reversed(roots) for root in _scalars(each, 0))
        found = next(scalars, None)
    if found is None:
        raise unsupported.no_loss(_described(result))
    return found


def recorded_result(
    tracer: Tracer, result: Any, loss: torch.Tensor | None, held: Mapping[int, str]
) -> tuple[Value | None, Any, list[Call]]:
    """Record a copy of each tensor that a step returns besides its loss.

    Call it before `source_updates`: the step may return what a source held until it was replaced.

    Args:
        tracer: The tracer of the step, which has run.
        result: What it returned.
        loss: The loss, part of it or not; None for an evaluation.
        held: Names of the step's own objects by id, see `objects_by_name`.

    Returns:
        The value of the loss, of a copy if it is what a source held before the step; the structure
        of the result, with trace values for tensors and numbers, or None if it is the
        loss alone; and the calls that copy them.
    """
    marked = None if loss is None else tracer.aliases.fresh_value(loss)
    if loss is not None and marked and marked.storage is not None and marked.storage.source:
        marked = kept_copy(tracer, loss).outputs[0]
    if result is loss and loss is not None:
        return marked, None, []
    calls: dict[int, Call] = {}

    def kept(item: Any) -> Value:
        if id(item) not in calls:
            keep = kept_copy if isinstance(item, torch.Tensor) else _passed_on
            calls[id(item)] = keep(tracer, item)
        return calls[id(item)].outputs[0]

    return marked, structured(result, loss, kept, held), list(calls.values())


def storages_read_or_returned(tracer: Tracer, result: Any) -> set[Storage | None]:
    """Return the storages that a step reads, and those of the tensors that it returns."""
    returned: list[Any] = []
    structured(result, None, returned.append, {})
    values = (tracer.aliases.fresh_value(each) for each in returned
              if isinstance(each, torch.Tensor) and tracer.aliases.knows(each))  # fmt: skip
    return storages_read(tracer.calls) | {value.storage for value in values}


def structured(
    result: Any,
    loss: torch.Tensor | None,
    kept: Callable[[Any], Any],
    held: Mapping[int, str],
    depth: int = 0,
) -> Any:
    """Return the structure of a result, with what `kept` makes of tensors and numbers.

    Args:
        result: What a step returned.
        loss: The tensor in it that is the loss; None if none is marked.
        kept: Called with each other tensor, and each number that only a run knows.
        held: Names of the step's own objects by id.
        depth: How many containers are around it.
    """
    if result is loss and loss is not None:
        return {"loss": True}
    if isinstance(result, torch.Tensor) or node_of(result) is not None:
        return {"kept": kept(result)}
    if result is None or isinstance(result, bool | int | float | str):
        return {"value": encode(result, _no_name)}
    own = held.get(id(result)) or recorded_name(result)
    if own is not None:
        return {"held": own}
    named = _named_items(result)
    if depth >= _MAX_DEPTH or (named is None and not isinstance(result, list | tuple)):
        return {"opaque": type(result).__name__}
    if named is None:
        kind = "tuple" if isinstance(result, tuple) else "list"
        kind = "size" if isinstance(result, torch.Size) else kind
        return {kind: [structured(each, loss, kept, held, depth + 1) for each in result]}
    kind = "dict" if type(result) is dict else "named" if isinstance(result, tuple) else "fields"
    return {kind: [[key, structured(each, loss, kept, held, depth + 1)] for key, each in named]}


def named_result(structure: Any) -> Any:
    """Return the structure of a result with the names of tensors for values of the trace."""
    if isinstance(structure, Value):
        return structure.name
    if isinstance(structure, list):
        return [named_result(item) for item in structure]
    if isinstance(structure, dict):
        return {key: named_result(item) for key, item in structure.items()}
    return structure


def kept_copy(tracer: Tracer, tensor: torch.Tensor) -> Call:
    """Record a copy of a tensor that outlives the step, for its caller."""
    copy = record(tracer, "clone", tensor)
    call = tracer.aliases.value(copy).call
    call.kept = True
    call.source = None  # the step has returned, so the user's innermost line is the caller's
    return call


def _passed_on(tracer: Tracer, number: Any) -> Call:
    node = node_of(number)
    assert node is not None
    function = "bool" if node.kind is bool else "pos"  # +True is 1
    value = tracer.scalars.scalar_call(function, [node.operand], node.kind)
    if node.hint is not None:
        tracer.scalars.hints[value] = node.hint
    value.call.kept = True
    return value.call


def _no_name(_value: Any) -> str:
    raise KeyError


def _named_items(item: Any) -> list[tuple[str | int, Any]] | None:
    """Return the items of a dict or the fields of an object with named parts, else None."""
    if isinstance(item, dict):
        is_plain = all(isinstance(key, str | int) for key in item)
        return list(item.items()) if is_plain else None
    if is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in fields(item)]
    if isinstance(item, types.SimpleNamespace):
        return list(vars(item).items())
    if isinstance(item, tuple) and type(item) is not tuple:
        # The names in torch's own, as of `x.max(0)`, are only for `match`.
        names = getattr(item, "_fields", getattr(type(item), "__match_args__", ()))
        return [*zip(names, item, strict=True)] if len(names) == len(item) > 0 else None
    return None


def _scalars(result: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        if result.numel() == 1 and result.dtype.is_floating_point:
            yield result
        return
    leaf = str | bytes | int | float | torch.SymInt | torch.SymFloat | torch.SymBool | None
    if depth > 4 or isinstance(result, leaf):
        return
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if named is not None:
        yield from _scalars(named, depth + 1)
    for item in _items(result):
        yield from _scalars(item, depth + 1)


def _items(result: Any) -> list[Any]:
    if recorded_name(result) is not None:
        return []  # its content is not searched
    if isinstance(result, list | tuple):
        return list(result)
    named = _named_items(result)
    if named is None:
        return list(getattr(result, "__dict__", {}).values())
    return [item for _, item in named]


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a {str(result.dtype).removeprefix('torch.')} tensor of shape {list(result.shape)}"
    if isinstance(result, list | tuple):
        return f"a {type(result).__name__} of " + (
            ", ".join(_described(item) for item in result[:4]) or "nothing"
        )
    if isinstance(result, torch.SymInt | torch.SymFloat):
        return "a number, as .item() makes it"
    return "nothing" if result is None else f"a {type(result).__name__}"

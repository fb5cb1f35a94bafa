"""Python values beside the tensors: hyperparameters, counts, schedules, and the caller's `extra`.

They are JSON in the manifest. Values that JSON lacks are written as an object with the key `$`:
tuples, floats that are not finite, dicts whose keys are not texts, small tensors such as a learning
rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.user_step.slots import Entry
from pardnn.backends.torch.user_step.sources import Source
from pardnn.errors import FileError, MismatchError, UnsupportedError, shown

#: Key that marks values which JSON lacks; a user's dict is never encoded as one with it.
TAG = "$"
_MAX_ELEMENTS = 64
SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def encode(value: Any, path: str) -> Any:
    """Return a value as JSON types.

    Args:
        value: Numbers, texts, None, small tensors, and lists, tuples and dicts of these.
        path: Names it in errors.

    Raises:
        UnsupportedError: E824, naming a value that is none of these.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if isinstance(value, list):
        return [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": encode(list(value), path)}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, path)
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_ELEMENTS:
        dtype = str(value.dtype).removeprefix("torch.")
        return {TAG: "tensor", "dtype": dtype, "items": encode(value.tolist(), path)}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of NumPy
        return encode(value.item(), path)
    raise UnsupportedError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: it holds numbers, "
        f"texts, small tensors (up to {_MAX_ELEMENTS} elements), lists, tuples and dicts.",
        code="E824",
        details={"path": path},
    )


def _encoded_mapping(value: Mapping[Any, Any], path: str) -> Any:
    plain = all(isinstance(key, str) for key in value) and TAG not in value
    if plain and not isinstance(value, Counter):
        return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
    items = [[encode(key, path), encode(item, f"{path}.{key}")] for key, item in value.items()]
    return {TAG: "counter" if isinstance(value, Counter) else "dict", "items": items}


def decode(value: Any) -> Any:
    """Return the value that `encode` was given.

    Raises:
        FileError: E435, if `encode` cannot have made it.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item) for key, item in value.items()}
    try:
        return _DECODERS[value[TAG]](value)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise FileError(f"a value of the checkpoint is damaged: {error}", code="E435") from error


def _tensor(value: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(value['dtype'])} is not a type")
    return torch.tensor(decode(value["items"]), dtype=dtype)


def _pairs(value: Mapping[str, Any]) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in value["items"]}


_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda value: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["value"]],
    "tuple": lambda value: tuple(decode(value["items"])),
    "dict": _pairs,
    "counter": lambda value: Counter(_pairs(value)),
    "tensor": _tensor,
}


# The values of a step's objects.


def values_of(
    stateful: Iterable[Entry], sources: Iterable[Source], settings: Mapping[int, torch.Tensor]
) -> dict[str, Any]:
    """Return the Python values of optimizers, schedulers and scalers by name, as JSON types.

    Args:
        stateful: The step's models, optimizers, schedulers and scalers.
        sources: The sources of the step: they name the parameters.
        settings: The whole tensors among settings, as for `with_whole`.

    Raises:
        UnsupportedError: E824, if one has a value that a checkpoint cannot hold.
    """
    names = _parameter_names(sources)
    found: dict[str, Any] = {}
    for entry in stateful:
        value = entry.value
        if isinstance(value, torch.optim.Optimizer):
            found[entry.name] = _optimizer_values(entry.name, value, names, settings)
        elif isinstance(value, SCHEDULERS):
            found[entry.name] = encode(value.state_dict(), entry.name)
        elif isinstance(value, torch.amp.GradScaler):
            found[entry.name] = {key: getattr(value, key) for key in _SCALER_KEYS}
    return found


def with_whole(value: Any, whole: Mapping[int, torch.Tensor | None]) -> Any:
    """Return a value with whole tensors for those that stand for a share, or for nothing.

    Args:
        value: A tensor, a dict, list or tuple of such values, or anything else.
        whole: The whole tensors by the ids of the user's own.
    """
    if isinstance(value, torch.Tensor):
        found = whole.get(id(value))
        return value.detach() if found is None else found
    if isinstance(value, dict):
        return {key: with_whole(item, whole) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_whole(item, whole) for item in value)
    return value


#: What schedules put into parameter groups.
_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
#: What a scaler holds; its scale and growth tracker are tensors of the graph.
_SCALER_KEYS = ("_growth_factor", "_backoff_factor", "_growth_interval")


def _parameter_names(sources: Iterable[Source]) -> dict[int, str]:
    return {id(source.get()): source.name for source in sources if source.kind == "parameter"}


def _optimizer_values(
    path: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    settings: Mapping[int, torch.Tensor],
) -> dict[str, Any]:
    groups = [
        {key: with_whole(item, settings) for key, item in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    numbers = {
        names[id(parameter)]: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
    return {
        "param_groups": encode(groups, f"{path}.param_groups"),
        "state": encode({name: each for name, each in numbers.items() if each}, f"{path}.state"),
        "sizes": group_sizes(optimizer.param_groups),
    }


def group_sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the number of parameters of each group of an optimizer, or of its state dict."""
    return [len(group["params"]) for group in groups]


def set_values(
    values: Mapping[str, Any], stateful: Iterable[Entry], sources: Iterable[Source]
) -> None:
    """Give optimizers, schedulers and scalers the values of a checkpoint, in their own objects.

    Args:
        values: The result of `values_of`.
        stateful: As for `values_of`.
        sources: As for `values_of`.
    """
    names = _parameter_names(sources)
    # Schedulers last: they only read what optimizers hold.
    for entry in sorted(stateful, key=lambda each: isinstance(each.value, SCHEDULERS)):
        if entry.name not in values:
            continue
        value, saved = entry.value, decode(values[entry.name])
        if isinstance(value, torch.optim.Optimizer):
            for group, new in zip(value.param_groups, saved["param_groups"], strict=True):
                _update(group, new)
            for parameter, state in value.state.items():
                if id(parameter) in names:
                    _update(state, saved["state"].get(names[id(parameter)], {}))
        elif isinstance(value, SCHEDULERS):
            value.load_state_dict(saved)
        elif isinstance(value, torch.amp.GradScaler):
            value.__dict__.update({key: saved[key] for key in _SCALER_KEYS})


def _update(items: Any, new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        old = items.get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
            old.detach().copy_(value)  # the graph reads this tensor object
        else:
            items[key] = value


def check_values(
    values: Mapping[str, Any], stateful: Iterable[Entry], what: str, unread: Iterable[str] = ()
) -> None:
    """Check that a checkpoint is of the same optimizers before any of it is loaded.

    Args:
        values: The values of the checkpoint.
        stateful: The step's own objects.
        what: Names the checkpoint.
        unread: Names of its states that no graph of the step reads so far.

    Raises:
        MismatchError: E520, naming the optimizer.
    """
    for entry in stateful:
        if not isinstance(entry.value, torch.optim.Optimizer):
            continue
        saved = values.get(entry.name)
        groups = saved.get("param_groups") if isinstance(saved, dict) else None
        groups = groups if isinstance(groups, list) else []
        own, differs = entry.value.param_groups, ""
        if len(groups) != len(own):
            number = f"{len(groups)} parameter groups of {shown(entry.name)}"
            differs = f"has {number}; the step has {len(own)}"
        elif (sizes := saved.get("sizes")) not in (None, now := group_sizes(own)):
            differs = f"has {sizes} parameters in groups of {shown(entry.name)}; the step has {now}"
        elif (key := _setting_of_another(groups, own, entry.name, unread)) is not None:
            kind = type(entry.value).__name__
            differs = (
                f"is of another optimizer than {shown(entry.name)}, {kind}: {shown(key)} is a "
            )
            differs += "setting of only one of them"
        if differs:
            raise MismatchError(
                f"{what} {differs}.\nBuild the optimizer as it was when it was saved, or load "
                "another checkpoint.",
                code="E520",
                details={"name": entry.name},
            )


def _setting_of_another(
    saved: list[Any], own: list[dict[str, Any]], name: str, unread: Iterable[str]
) -> str | None:
    """Return a setting that shows that a checkpoint is of another kind of optimizer.

    A torch version may add settings, and the user's code may set others later, so one side may lack
    some. States that no graph has read could belong to anything: then none may differ.
    """
    has_unread = any(each.startswith(f"{name}.state.") for each in unread)
    for there, here in zip(map(decode, saved), own, strict=True):
        unknown = [key for key in there if key not in here and key not in _OF_SCHEDULES]
        lacking = [k for k in here if k not in there and k not in ("params", *_OF_SCHEDULES)]
        if (unknown and lacking) or (has_unread and (unknown or lacking)):
            return (unknown or lacking)[0]
    return None

"""Weights read from files into this rank's shards, with only a few extra rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.checkpoint.contents import Keys
from pardnn.backends.torch.checkpoint.loading import copy_rows
from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.sources import Source
from pardnn.checkpoint.manifest import whole_box
from pardnn.checkpoint.weights import StoredTensor, Weights, open_weights, stored_rows
from pardnn.errors import MismatchError, UsageError, shown
from pardnn.plan.mesh import Box
from pardnn.plan.state_layout import shard_of


class LoadedKeys(NamedTuple):
    """Keys that only weight files or only models have, as torch's `load_state_dict` returns them.

    Attributes:
        missing_keys: Keys of the models' state dicts that the files lack.
        unexpected_keys: Keys of the files that the models lack.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class Models(NamedTuple):
    """The models that weights are read into.

    Attributes:
        program: What runs.
        rank: This rank.
        live: Its live values, by the names of the planned graph.
        sources: The sources of the step, by name.
    """

    program: Program
    rank: int
    live: Mapping[str, Any]
    sources: Mapping[str, Source]


def model_keys(keys: Keys, models: Sequence[str], model: str | None) -> dict[str, list[str]]:
    """Return by source the names that it may have in a file.

    Args:
        keys: Entries of state dicts by source.
        models: Names of the step's models.
        model: The one that the file holds; None: all of them.

    Raises:
        UsageError: E234, if there is no such model.
    """
    if model is not None and model not in models:
        known = ", ".join(models)
        raise UsageError(f"the step has no model {shown(model)}; it has {known}", code="E234")
    is_plain = model is not None or len(models) == 1
    found = {
        source: [key if is_plain else f"{of}.{key}" for of, key in each if model in (None, of)]
        for source, each in keys.items()
    }
    return {source: names for source, names in found.items() if names}


def agreed(
    phases: Phases, path: str | Path, into: Models, keys: Callable[[], dict[str, list[str]]],
    *, strict: bool,
) -> tuple[dict[str, StoredTensor], LoadedKeys]:  # fmt: skip
    """Return what all ranks have to read, after each has inspected the files.

    Args:
        phases: The phases of this load.
        path: The path of the files.
        into: The models.
        keys: Returns the keys of `model_keys`.
        strict: Refuse missing and unexpected keys.

    Raises:
        PardnnError: As `Parallel.load_weights` does, on all ranks.
    """
    found: list[Any] = []

    def look() -> str:
        weights = open_weights(path)
        found.extend(matched(weights, keys(), into, strict=strict))
        return weights.fingerprint

    phases.agree(
        look,
        f"the ranks find different weights in {shown(str(path))}.\nGive each node the same files.",
    )
    return found[0], found[1]


def matched(
    weights: Weights, keys: Mapping[str, Sequence[str]], into: Models, *, strict: bool
) -> tuple[dict[str, StoredTensor], LoadedKeys]:
    """Return what to read into each source.

    Args:
        weights: The content of the files.
        keys: The result of `model_keys`.
        into: The models.
        strict: Refuse missing and unexpected keys.

    Raises:
        MismatchError: E520, naming missing and unexpected keys, or a tensor of another shape or
            type, or tied tensors that the files give different values.
    """
    whole = {op.name: op.outputs[0] for op in into.program.sources.values()}
    present = {name: [k for k in names if k in weights.tensors] for name, names in keys.items()}
    expected = {key for names in keys.values() for key in names}
    missing = [names[0] for name, names in keys.items() if not present[name]]
    unexpected = [key for key in weights.tensors if key not in expected]
    found = {name: weights.tensors[each[0]] for name, each in present.items() if each}
    if not found or (strict and (missing or unexpected)):
        raise _unlike(weights, missing, unexpected)
    for name, each in present.items():
        for key in each:
            _check(weights, key, weights.tensors[key], whole.get(name) or into.sources[name].get())
        for other in each[1:]:
            if not _are_equal(weights.tensors[each[0]], weights.tensors[other]):
                raise MismatchError(
                    f"{shown(each[0])} and {shown(other)} differ in {shown(str(weights.path))}; "
                    "in the model they are one tensor.\nUntie them, or remove one from the file.",
                    code="E520",
                    details={"tensors": [each[0], other]},
                )
    return found, LoadedKeys(missing, unexpected)


def _unlike(weights: Weights, missing: list[str], unexpected: list[str]) -> MismatchError:
    told = [
        f"{verb} {', '.join(map(shown, keys[:5]))}"
        + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        for verb, keys in (("lack", missing), ("have, unlike the model,", unexpected))
        if keys
    ]
    return MismatchError(
        f"the weights {shown(str(weights.path))} are of another model: they "
        f"{'; they '.join(told) or 'hold nothing'}.\n"
        "Names are the keys of model.state_dict(). strict=False loads what both have.",
        code="E520",
        details={"missing": missing[:20], "unexpected": unexpected[:20]},
    )


def _check(weights: Weights, key: str, tensor: StoredTensor, own: Any) -> None:
    shape, dtype = tuple(own.shape), str(own.dtype).removeprefix("torch.")
    if (tensor.shape, tensor.dtype) != (shape, dtype):
        raise MismatchError(
            f"{shown(key)} is {tensor.dtype} {list(tensor.shape)} in {shown(str(weights.path))}; "
            f"the model has {dtype} {list(shape)}.\nTypes are not converted: build the model in "
            f"the type of the file, as in model.to(torch.{tensor.dtype}).",
            code="E520",
            details={"tensor": key},
        )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    pairs = zip(stored_rows(one), stored_rows(other), strict=True)
    return one == other or all(a.data == b.data for a, b in pairs)


def read_into(
    into: Models, tensors: Mapping[str, StoredTensor], tick: Callable[[], None], *, is_new: bool
) -> None:
    """Read this rank's shares.

    Args:
        into: The models.
        tensors: The result of `agreed`.
        tick: Called now and then.
        is_new: Whether no step has run: states that start as copies of parameters then copy these.

    Raises:
        FileError: E434, if a file cannot be read.
    """
    program = into.program
    starts = {op.name: (op.arguments or {}).get("initial") for op in program.sources.values()}
    with torch.no_grad():
        for op in program.residents(into.rank):
            of, box = shard_of(op, program.sources)
            start = starts.get(of)
            if is_new and isinstance(start, dict):
                of = start["copy_of"]
            if of in tensors:
                _fill(into.live[op.outputs[0].name], box, tensors[of], tick)
        for name in tensors.keys() - program.state.keys():
            _fill(into.sources[name].get(), None, tensors[name], tick)  # no step reads it


def _fill(
    value: torch.Tensor, box: Box | None, tensor: StoredTensor, tick: Callable[[], None]
) -> None:
    box = whole_box(tensor.shape) if box is None else box
    low, high = box[0] if box else (0, 1)
    for rows in stored_rows(tensor, low, high):
        tick()
        copy_rows(value, box, rows, getattr(torch, tensor.dtype))

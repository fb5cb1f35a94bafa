"""torch's state dicts of a step's objects, whole on rank 0, and files of the whole model."""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pardnn import files
from pardnn.backends.torch.checkpoint.contents import chunks, root_modules
from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.checkpoint.python_values import (
    SCHEDULERS,
    encode,
    group_sizes,
    with_whole,
)
from pardnn.backends.torch.checkpoint.whole import Exchange
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.user_step.access import access_allowed
from pardnn.checkpoint.directory import io_error
from pardnn.checkpoint.manifest import SavedTensor
from pardnn.checkpoint.pieces import header, write_tensors
from pardnn.checkpoint.verify import exported_names
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Tensor


def export(
    path: Path, tensors: Sequence[SavedTensor], exchange: Exchange, phases: Phases, rank: int
) -> None:
    """Write whole tensors into one file, some rows at a time; all ranks take part.

    Args:
        path: The path of the file; an old one is replaced once the new one is complete.
        tensors: The tensors to write.
        exchange: Gathers them.
        phases: The phases of this export.
        rank: This rank; rank 0 writes.

    Raises:
        FileError: E433, on all ranks.
    """
    found, tied = exported_names([t for t in tensors if t.keys] or tensors, optimizer=True)
    found += [(t.name, t) for t in tensors if not t.keys and t.name not in dict(found)]
    # One buffer for all rows: glibc does not reuse freed aligned memory for the next request.
    rooms = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
    moved = ((t.name, rows) for _, t in found for rows in exchange.gather_rows(t.name, rooms))

    def contents() -> Iterator[Iterator[memoryview]]:
        for _, group in itertools.groupby(moved, key=operator.itemgetter(0)):
            yield (chunk for _, rows in group for chunk in chunks(rows))

    def write() -> None:
        first = header([(name, t.dtype, t.shape) for name, t in found], {"format": "pt", **tied})
        temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
        try:
            if rank == 0:
                write_tensors(temporary, first, contents(), phases.tick)
                files.rename(temporary, path)
        except OSError as error:
            raise io_error("cannot write", path, error) from error
        finally:
            if rank == 0:
                temporary.unlink(missing_ok=True)
            for _ in moved:  # after a failure the other ranks still send
                phases.tick()

    phases.run(write)


def gathered_settings(binding: Binding, exchange: Exchange) -> dict[int, torch.Tensor]:
    """Return tensors that are settings of optimizers, such as learning rates, whole on rank 0.

    Args:
        binding: The binding of the user's objects.
        exchange: Gathers their tensors.

    Returns:
        The whole tensors by the ids of the user's own; nothing on the other ranks.
    """
    optimizers = [e.value for e in binding.stateful() if isinstance(e.value, torch.optim.Optimizer)]
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    sources = [binding.sources[name] for name in exchange.names]
    settings = [each for each in sources if groups & {id(slot.holder) for slot in each.slots}]
    gathered = [(id(each.get()), exchange.gather(each.name)) for each in settings]
    return {key: whole for key, whole in gathered if whole is not None}


def gathered_state_dicts(binding: Binding, exchange: Exchange, rank: int) -> dict[str, Any]:
    """Return the state dict of each model, optimizer, scheduler and scaler by name, on rank 0.

    Args:
        binding: The binding of the user's objects.
        exchange: Gathers their tensors.
        rank: This rank.

    Returns:
        Tensors are whole and on the host; nothing on the other ranks.
    """
    names = exchange.names
    whole = {name: exchange.gather(name) for name in names}
    if rank != 0:
        return {}
    by_id = {id(source.get()): whole.get(name) for name, source in binding.sources.items()}
    found: dict[str, Any] = {}
    with access_allowed():
        for name, module in root_modules(binding.stateful()).items():
            state = module.state_dict(keep_vars=True)
            for key in list(state):
                state[key] = with_whole(state[key], by_id)
            found[name] = state  # the same object, since it carries the versions of modules
        for entry in binding.stateful():
            if isinstance(entry.value, torch.optim.Optimizer):
                state = with_whole(entry.value.state_dict(), by_id)
                # A rank's own optimizer has no entries for parameters that are elsewhere.
                for index, keys in _optimizer_sources(entry.value, binding, names).items():
                    tensors = {key: whole[name] for key, name in keys.items()}
                    state["state"][index] = state["state"].get(index, {}) | tensors
                found[entry.name] = state
            elif isinstance(entry.value, SCHEDULERS):
                found[entry.name] = entry.value.state_dict()
    return found


def _optimizer_sources(
    optimizer: torch.optim.Optimizer, binding: Binding, names: Iterable[str]
) -> dict[int, dict[str, str]]:
    """Return the source of each tensor of optimizer state by parameter number and key.

    Args:
        optimizer: The user's optimizer.
        binding: The binding of the user's objects.
        names: The names of all parameters, buffers and states.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    indices = {id(optimizer.state[p]): i for i, p in enumerate(held) if p in optimizer.state}
    found: dict[int, dict[str, str]] = {}
    for name in names:
        slots = binding.sources[name].slots
        index = indices.get(id(slots[0].holder)) if slots else None
        if index is not None:
            found.setdefault(index, {})[slots[0].key] = name
    return dict(sorted(found.items()))


def scatter_state_dicts(
    state: Mapping[str, Any],
    binding: Binding,
    exchange: Exchange,
    known: Mapping[str, Tensor],
    phases: Phases,
    rank: int,
) -> Any:
    """Give each rank its share of the tensors of state dicts; return their Python values.

    Args:
        state: As for `given_tensors`; that of rank 0 counts.
        binding: The binding of the user's objects.
        exchange: Scatters their tensors.
        known: Parameters, buffers and states of the step.
        phases: The phases of this load.
        rank: This rank.

    Raises:
        MismatchError: As `given_tensors` does, on all ranks.
    """
    kinds = {name: (tuple(each.shape or ()), each.dtype or "") for name, each in known.items()}
    tensors: dict[str, torch.Tensor] = {}

    def checked() -> Any:
        if rank != 0:
            return None
        tensors.update(given_tensors(state, binding, kinds))
        return [list(tensors), encode(given_values(state, binding), "state")]

    names, values = phases.run(checked)[0]
    with torch.no_grad():
        for name in names:
            exchange.scatter(name, tensors.get(name))
    return values


def given_tensors(
    state: Mapping[str, Any], binding: Binding, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, torch.Tensor]:
    """Return the checked tensors of state dicts by source.

    Args:
        state: As `gathered_state_dicts` returns it; objects that it leaves out stay as they are.
        binding: The binding of the user's objects.
        tensors: Shape and dtype of every parameter, buffer and state.

    Raises:
        MismatchError: E520, naming the key that is missing, superfluous, or of another shape or
            type.
    """
    names = {id(source.get()): name for name, source in binding.sources.items()}
    objects: dict[str, Any] = dict(root_modules(binding.stateful()))
    for entry in binding.stateful():
        if isinstance(entry.value, (torch.optim.Optimizer, *SCHEDULERS)):
            objects[entry.name] = entry.value
    unknown = [name for name in state if name not in objects]
    if unknown:
        raise MismatchError(
            f"the step has no model or optimizer {shown(str(unknown[0]))}; it has "
            f"{', '.join(objects)}.\nGive a dict of state dicts by these names, as "
            "`fast.state_dict()` returns it.",
            code="E520",
        )
    found: dict[str, torch.Tensor] = {}
    for name, given in state.items():
        owner = objects[name]
        pairs: dict[str, tuple[str | None, Any]] = {}
        if isinstance(owner, torch.nn.Module):
            with access_allowed():
                own = owner.state_dict(keep_vars=True)
            _check_keys(name, own, given)
            pairs = {key: (names.get(id(own[key])), given[key]) for key in own}
        elif isinstance(owner, torch.optim.Optimizer):
            pairs = _optimizer_pairs(name, _optimizer_sources(owner, binding, tensors), given)
            _check_groups(name, owner, given)
        for key, (source, new) in pairs.items():
            if source in tensors and isinstance(new, torch.Tensor):
                _check_tensor(f"{name}.{key}", new, *tensors[source])
                found[source] = new
    return found


def _check_keys(name: str, own: Mapping[Any, Any], given: Any) -> None:
    given = given if isinstance(given, Mapping) else {}
    missing = [key for key in own if key not in given]
    more = [key for key in given if key not in own]
    if missing or more:
        verb, key = ("lacks", missing[0]) if missing else ("has the unknown key", more[0])
        raise MismatchError(
            f"the state dict of {shown(name)} {verb} {shown(str(key))}.\n"
            "Build the model as it was when its state was taken.",
            code="E520",
            details={
                "missing": list(map(str, missing[:20])),
                "unexpected": list(map(str, more[:20])),
            },
        )


def _check_groups(name: str, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    found, own = group_sizes(given.get("param_groups", ())), group_sizes(optimizer.param_groups)
    if found != own:
        raise MismatchError(
            f"the state dict of {shown(name)} has groups of {found} parameters; the step has "
            f"{own}.\nBuild the optimizer as it was when its state was taken.",
            code="E520",
            details={"name": name},
        )


def _optimizer_pairs(
    name: str, own: Mapping[int, Mapping[str, str]], given: Any
) -> dict[str, tuple[str | None, Any]]:
    """Return each state's source and its given value by path."""
    given = given.get("state", {}) if isinstance(given, Mapping) else {}
    _check_keys(f"{name}.state", own, given)
    pairs: dict[str, tuple[str | None, Any]] = {}
    for index, sources in own.items():
        _check_keys(f"{name}.state.{index}", sources, given[index])
        pairs |= {f"state.{index}.{k}": (source, given[index][k]) for k, source in sources.items()}
    return pairs


def _check_tensor(name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    found = str(value.dtype).removeprefix("torch.")
    if (tuple(value.shape), found) != (shape, dtype):
        raise MismatchError(
            f"{shown(name)} is {found} {list(value.shape)}; the step has {dtype} {list(shape)}.\n"
            "Types are not converted: convert the state dict first.",
            code="E520",
            details={"tensor": name},
        )


def given_values(state: Mapping[str, Any], binding: Binding) -> dict[str, Any]:
    """Return the Python values of given state dicts, as `python_values.set_values` takes them.

    Args:
        state: As for `given_tensors`.
        binding: The binding of the user's objects.
    """
    found: dict[str, Any] = {}
    for entry in binding.stateful():
        given = state.get(entry.name)
        if isinstance(entry.value, torch.optim.Optimizer) and given is not None:
            groups = [
                {key: value for key, value in group.items() if key != "params"}
                for group in given["param_groups"]
            ]
            found[entry.name] = {"param_groups": groups, "state": {}}
        elif isinstance(entry.value, SCHEDULERS) and given is not None:
            found[entry.name] = given
    return found

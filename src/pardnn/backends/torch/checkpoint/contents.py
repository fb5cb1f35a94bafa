"""What a checkpoint of a running plan contains, and which rank writes each part.

Every rank derives the same list from graph and plan. If several ranks hold a box, the one with
least to write so far takes it. Pieces, like source ops, are named by the user's own paths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from pardnn.backends.torch.devices import bytes_of
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.access import SpreadObjects, access_allowed
from pardnn.backends.torch.user_step.slots import Entry
from pardnn.backends.torch.user_step.sources import Source
from pardnn.checkpoint.checksum import Sums
from pardnn.checkpoint.manifest import DTYPES, Piece, SavedTensor, pieces_by_file, whole_box
from pardnn.checkpoint.pieces import CHUNK_BYTES, piece_header
from pardnn.errors import UnsupportedError, shown
from pardnn.graph.ir import Op

Keys = Mapping[str, Sequence[tuple[str, str]]]
"""Per source the entries of state dicts that hold it: (model, key)."""


class Contents(NamedTuple):
    """The tensors of a checkpoint before it is written.

    Attributes:
        tensors: The tensors, without checksums.
        files: Bytes of each rank's file.
        values: The live values that each rank writes, in the order of its file.
    """

    tensors: tuple[SavedTensor, ...]
    files: tuple[int, ...]
    values: tuple[tuple[str, ...], ...]


def contents(program: Program, keys: Keys, step: int, bound: Mapping[str, Source]) -> Contents:
    """Return what every rank of a program writes: all but gradients that are None now.

    Args:
        program: What runs.
        keys: The result of `state_dict_keys`.
        step: Steps that were trained.
        bound: The sources of the program, by name.

    Raises:
        UnsupportedError: E824, if safetensors has no name for the type of a tensor.
    """
    sources = {op.name: op for op in program.sources.values()}
    load = [0] * program.plan.num_devices
    values: list[list[str]] = [[] for _ in load]
    tensors: list[SavedTensor] = []
    for name, shards in program.state.items():
        if name in bound and bound[name].parameter is not None and bound[name].get() is None:
            continue
        tensor = _tensor(sources[name], keys)
        holders: dict[tuple[tuple[int, int], ...], list[tuple[int, str]]] = {}
        for rank, op, box, _ in shards:
            holders.setdefault(box or whole_box(tensor.shape), []).append((rank, op))
        pieces: list[Piece] = []
        for box, found in holders.items():
            rank, op = min(found, key=lambda each: (load[each[0]], each[0]))
            piece = Piece(file=rank, box=box, start=load[rank], crc32=0, sha256="")
            load[rank] += math.prod(piece.shape) * tensor.itemsize
            values[rank].append(program.ops[op].outputs[0].name)
            pieces.append(piece)
        tensors.append(dataclasses.replace(tensor, pieces=tuple(pieces)))
    # The start of the data is known only once all names are.
    headers = [len(piece_header(each, step)) for each in pieces_by_file(tensors, len(load))]
    moved = tuple(
        dataclasses.replace(
            tensor,
            pieces=tuple(
                dataclasses.replace(piece, start=piece.start + headers[piece.file])
                for piece in tensor.pieces
            ),
        )
        for tensor in tensors
    )
    files = tuple(size + start for size, start in zip(load, headers, strict=True))
    return Contents(moved, files, tuple(map(tuple, values)))


def _tensor(op: Op, keys: Keys) -> SavedTensor:
    (output,) = op.outputs
    if output.dtype not in DTYPES:
        raise UnsupportedError(
            f"{op.kind} {shown(op.name)} is {output.dtype}, a type that a checkpoint cannot hold.\n"
            f"It holds {', '.join(DTYPES)}.",
            code="E824",
            details={"tensor": op.name},
        )
    return SavedTensor(
        name=op.name,
        kind=op.kind,  # pyright: ignore[reportArgumentType]
        dtype=output.dtype,
        shape=tuple(output.shape or ()),
        pieces=(),
        keys=tuple(keys.get(op.name, ())),
    )


def with_sums(
    tensors: Iterable[SavedTensor], sums: Sequence[Sequence[Sums]]
) -> Iterator[SavedTensor]:
    """Yield tensors with the checksums of their pieces.

    Args:
        tensors: The tensors in `Contents`.
        sums: The checksums of each rank's file, in the file's order.
    """
    left = [iter(each) for each in sums]
    for tensor in tensors:
        # Files hold their pieces in the order of the tensors.
        pieces = tuple(
            dataclasses.replace(p, **next(left[p.file])._asdict()) for p in tensor.pieces
        )
        yield dataclasses.replace(tensor, pieces=pieces)


def root_modules(stateful: Iterable[Entry]) -> dict[str, torch.nn.Module]:
    """Return the models of a step by name: modules that were not found inside another one."""
    found: dict[str, torch.nn.Module] = {}
    inside: set[int] = set()
    for entry in stateful:
        if isinstance(entry.value, torch.nn.Module) and id(entry.value) not in inside:
            found[entry.name] = entry.value
            inside |= {id(module) for module in entry.value.modules()}
    return found


def guard_spread_objects(spread: SpreadObjects, program: Program, binding: Binding) -> None:
    """Make models and optimizers refuse to be read if some rank does not hold all of them.

    Args:
        spread: Keeps them.
        program: What runs.
        binding: The binding of the user's objects.
    """
    size = program.plan.num_devices
    whole = {
        name
        for name, shards in program.state.items()
        if len({shard.device for shard in shards if shard.box is None}) == size
    }
    shards = [
        s.get() for name, s in binding.sources.items() if name in program.state.keys() - whole
    ]
    stateful = binding.stateful()
    optimizers = {e.name: e.value for e in stateful if isinstance(e.value, torch.optim.Optimizer)}
    spread.add(root_modules(stateful), optimizers, frozenset(map(id, shards)))


def state_dict_keys(
    models: Mapping[str, torch.nn.Module], sources: Iterable[Source]
) -> dict[str, list[tuple[str, str]]]:
    """Return by source the entries of the models' state dicts that hold it.

    Args:
        models: The models by name.
        sources: The sources of the step.
    """
    names = {id(source.get()): source.name for source in sources}
    found: dict[str, list[tuple[str, str]]] = {}
    with access_allowed():
        for model, module in models.items():
            for key, value in module.state_dict(keep_vars=True).items():
                if id(value) in names:
                    found.setdefault(names[id(value)], []).append((model, key))
    return found


def chunks(value: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in C order: its own memory, or copies of some rows at a time."""
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    value = value.reshape(1) if value.dim() == 0 else value
    if value.numel() == 0:
        return
    if value.device.type == "cpu" and value.is_contiguous():
        yield memory(value)
        return
    step = max(1, CHUNK_BYTES // max(1, value[0].numel() * value.element_size()))
    for low in range(0, len(value), step):
        yield memory(value[low : low + step].contiguous().cpu())


def memory(value: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return memoryview(bytes_of(value).numpy())

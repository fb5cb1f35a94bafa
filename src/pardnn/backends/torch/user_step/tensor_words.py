"""Whether any of many tensors has new data, layout or gradient, told from their memory.

Problem: torch's getters read one property of one tensor, and a call has 300 tensors to check,
    almost none of which ever changes.
Idea: compare the words of memory that hold these properties with those of the last look; the
getters are called only if any differs.

These places are internal to torch's C++ code, and no version guarantees them. So nothing is
assumed: the places are searched at import, each by a value that torch reports (`_cdata` of a
tensor, of its storage and its gradient, odd sizes and strides, the key set), read through
`/proc/self/mem`, which fails where a pointer would crash. A tensor is read only if its C++ class is
that of the test tensors. If any of this fails, the getters are always called.

A word is read only from memory of a live object: first those of the Python objects, which
the caller keeps; then those of their tensors, if they are still the same tensors; then those of
storages and autograd's data, if the tensors still point there.

Complexity: O(tensors) per look, at most five lines of memory each.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.memory_words import TYPE_OFFSET, WORD_BYTES, Words

#: With more dimensions, sizes and strides are elsewhere.
_MOST_DIMS = 5
#: Words of an object that are searched for a value, and first words of a storage. A tensor has 23:
#: those after its end are another object's, and change.
_NUM_WORDS, _NUM_DATA_WORDS = 23, 8
_SHAPE, _STRIDES, _OFFSET = (3, 5, 7, 11, 13), (20011, 3001, 401, 31, 2), 17


@dataclass(frozen=True)
class Places:
    """Where the words of a tensor are, in words from the start of the object that has them.

    Attributes:
        impl: Pointer of a Python tensor to its C++ tensor.
        classes: The classes of C++ tensor, storage and autograd's data: the first word of each.
        storage: Pointer of a tensor to its storage.
        autograd: Pointer of a tensor to autograd's data; 0 if there is none.
        ndim: The number of dimensions of a tensor.
        sizes: The first size of a tensor.
        strides: The first stride of a tensor.
        kinds: Offset, type, device and key set of a tensor.
        data: Pointer of a storage to its data.
        gradients: Words of autograd's data that hold `grad` and decide `requires_grad`.
    """

    impl: int
    classes: tuple[int, int, int]
    storage: int
    autograd: int
    ndim: int
    sizes: int
    strides: int
    kinds: tuple[int, ...]
    data: int
    gradients: tuple[int, ...]


class TensorWords:
    """The current properties of some tensors, to be compared later.

    Args:
        tensors: The tensors, which are kept alive.
        gradients: Compare `grad` and `requires_grad` instead of data and layouts.

    Attributes:
        is_known: Whether all have the C++ classes that were tried.
        levels: Their words, and what is expected; one is read only if all before are as expected.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, gradients: bool = False) -> None:
        self._tensors, self._gradients = list(tensors), gradients
        self.levels: list[tuple[Words, bytearray]] = []
        self.is_known = PLACES is not None and self._note(PLACES)

    def hold(self) -> bool:
        """Whether all tensors are unchanged; False also if that is unknown."""
        if not self.is_known:
            return False
        for words, known in self.levels:  # noqa: SIM110  a generator takes two more microseconds
            if words.read() != known:
                return False
        return True

    def beside(self, other: TensorWords) -> TensorWords:
        """Return a look at these tensors and others, which expects what each of both does."""
        both = TensorWords([])
        both._tensors = self._tensors + other._tensors
        both.is_known = self.is_known and other.is_known
        nothing = Words(np.array([], dtype=np.int64)), bytearray()
        for mine, theirs in itertools.zip_longest(self.levels, other.levels, fillvalue=nothing):
            words = Words(np.concatenate([mine[0].addresses, theirs[0].addresses]))
            both.levels.append((words, mine[1] + theirs[1]))
        return both

    def _note(self, places: Places) -> bool:
        """Note the words of all tensors; return whether all are of the tested kind."""
        if not self._tensors:
            return True
        python = np.array(list(map(id, self._tensors)), dtype=np.int64)
        first = np.concatenate([python + TYPE_OFFSET, python + WORD_BYTES * places.impl])
        impl = self._level(first)[len(python) :]
        if (_at(impl, 0) != places.classes[0]).any():
            return False
        if not self._gradients:
            dims = _at(impl, places.ndim)
            if (dims > _MOST_DIMS).any():
                return False
            is_used = np.arange(_MOST_DIMS) < dims[:, None]
            shapes = [
                (impl[:, None] + WORD_BYTES * (start + np.arange(_MOST_DIMS)))[is_used]
                for start in (places.sizes, places.strides)
            ]
            rest = [impl + WORD_BYTES * word for word in (places.ndim, *places.kinds)]
            storages = self._level(impl + WORD_BYTES * places.storage, *shapes, *rest)[: len(impl)]
            if (storages == 0).any() or (_at(storages, 0) != places.classes[1]).any():
                return False
            self._level(storages + WORD_BYTES * places.data)
            return True
        kept = self._level(impl + WORD_BYTES * places.autograd)
        kept = kept[kept != 0]
        if (_at(kept, 0) != places.classes[2]).any():
            return False
        self._level(*(kept + WORD_BYTES * word for word in places.gradients))
        return True

    def _level(self, *addresses: np.ndarray) -> np.ndarray:
        words = Words(np.concatenate(addresses))
        self.levels.append((words, bytearray(words.read())))
        return words.found.astype(np.int64)


def _at(addresses: np.ndarray, word: int) -> np.ndarray:
    words = Words(addresses + WORD_BYTES * word)
    words.read()
    return words.found.astype(np.int64)


def _memory(address: int) -> np.ndarray:
    """Return the words from an address on; ValueError or OSError if they cannot be read."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        return np.frombuffer(os.pread(memory.fileno(), _NUM_WORDS * WORD_BYTES, address), np.int64)


def _only(found: Sequence[bool] | np.ndarray) -> int:
    """Return the only index at which something was found; ValueError unless there is just one."""
    (index,) = np.flatnonzero(found).tolist()
    return index


def _run_of(words: np.ndarray, values: Sequence[int]) -> int:
    """Return where the only run of given values begins."""
    windows = np.lib.stride_tricks.sliding_window_view(words, len(values))
    return _only((windows == np.array(values)).all(axis=1))


def _flags(leaf: torch.Tensor, address: int) -> int:
    """Return which word changes whenever a leaf's `requires_grad` does, which ends as False."""
    is_changed = np.ones(_NUM_WORDS, dtype=bool)
    for requires in (False, True, False):
        before = _memory(address)
        leaf.requires_grad_(requires)
        is_changed &= before != _memory(address)
    return _only(is_changed)


def _odd(dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    storage = torch.empty(_OFFSET + 1 + 80_000, dtype=dtype, device=device)
    return storage.as_strided(_SHAPE, _STRIDES, _OFFSET).detach()


def _found() -> Places:
    """Return the places of this torch; ValueError or OSError if one is uncertain."""
    tensor = _odd()
    python = _memory(id(tensor))[: torch.Tensor.__basicsize__ // WORD_BYTES]
    words, storage = _memory(tensor._cdata), tensor.untyped_storage()
    keys = np.uint64(torch._C._dispatch_keys(tensor).raw_repr()).astype(np.int64)
    strides, kept = _run_of(words, _STRIDES), _only(words == keys)
    offset = _only(words == _OFFSET)
    others = [_odd(torch.int64), _odd(device="meta"), torch._neg_view(_odd())]
    told = {i for other in others for i in np.flatnonzero(_memory(other._cdata) != words).tolist()}
    kinds = sorted({offset, kept} | {i for i in told if offset < i < kept})
    if python[TYPE_OFFSET // WORD_BYTES] != id(type(tensor)) or len(kinds) < len(
        ("offset", "type and device", "keys")
    ):
        raise ValueError

    autograd, kind, gradients = _autograd()
    return Places(
        impl=_only(python == tensor._cdata),
        classes=(int(words[0]), int(_memory(storage._cdata)[0]), kind),
        storage=_only(words == storage._cdata),
        autograd=autograd,
        ndim=_run_of(words, (len(_SHAPE), *_SHAPE)),
        sizes=_run_of(words, _SHAPE),
        strides=strides,
        kinds=tuple(kinds),
        data=_data(storage),
        gradients=gradients,
    )


def _data(storage: torch.UntypedStorage) -> int:
    """Return which word of a storage points to its data; the next one points to what frees it."""
    # NumPy's memory is freed through something other than a pointer to it.
    others = torch.from_numpy(np.zeros(2)).untyped_storage()
    found = [
        _memory(each._cdata)[:_NUM_DATA_WORDS] == each.data_ptr() for each in (storage, others)
    ]
    return _only(found[0] & found[1])


def _autograd() -> tuple[int, int, tuple[int, ...]]:
    """Return `Places.autograd`, the class of what it points to, and `Places.gradients`."""
    leaf, gradient = torch.zeros(2, device="cpu"), torch.zeros(2, device="cpu")
    before = _memory(leaf._cdata)
    autograd = _only((before == 0) & (_memory(leaf.requires_grad_()._cdata) != 0))
    address = int(_memory(leaf._cdata)[autograd])
    empty = _memory(address)
    leaf.grad = gradient
    held = _only((empty != gradient._cdata) & (_memory(address) == gradient._cdata))
    flags = _flags(leaf, address)
    before = _memory(address)
    leaf.mul_(torch.ones(2, device="cpu", requires_grad=True))
    made = np.flatnonzero((before == 0) & (_memory(address) != 0))
    made = made[(held < made) & (made < flags)]
    if not len(made):
        raise ValueError
    return autograd, int(empty[0]), (held, *made.tolist(), flags)


def _find() -> Places | None:
    if not sys.platform.startswith("linux"):
        return None
    # By chance, one search in 200 finds a number twice.
    for _ in range(5):
        with (
            contextlib.suppress(ValueError, IndexError, OSError, RuntimeError),
            _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(),
        ):  # fmt: skip
            return _found()
    return None


#: Where this torch has the words of its tensors; None if not all were found.
PLACES = _find()

"""The recorder: every call of a factory that affects its tensors, as data.

The factory runs under fake tensors, so nothing is allocated and nothing is drawn. To detect when
the user reseeds, each generator is set to a unique state ("mark") after every random call: a state
other than the last mark was set by the user; if it is an earlier mark, the user has restored the
state after that call (`fork_rng`, `set_rng_state` of a saved state).

Values that Python needs on the host (`.item()` of a computed schedule, a boolean mask) are computed
for real from the recording so far, as long as that is cheap; from then on they are constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pardnn.backends.torch.deferred_init import recording as rec
from pardnn.backends.torch.deferred_init import replay
from pardnn.backends.torch.ops.schema import signature, written_tensors
from pardnn.backends.torch.rng import generator as rng
from pardnn.errors import UnsupportedError

# Elements that may be computed or drawn for one value on the host: a fifth of a second.
MAX_VALUE_ELEMENTS = 1 << 25
# Samples of a constant that are compared to detect that the host has overwritten it.
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20

# Functions that loop on data: they run as one call, for real, at replay.
OPAQUE = ((torch.nn.init, "_no_grad_trunc_normal_"),)

_PRIVATE_STATE = slice(24, 56)


def fingerprint(storage: torch.UntypedStorage) -> bytes:
    """Return a digest of samples of a storage's bytes (all of them up to 64 MiB)."""
    digest = hashlib.blake2b(digest_size=16)
    with _disable_current_modes():
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return b""
        raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    step = max(raw.size // _SAMPLES, _SAMPLE_BYTES)
    for start in range(0, raw.size, step):
        digest.update(raw[start : start + _SAMPLE_BYTES].data)
    return digest.digest()


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    sig = signature(function)
    return written_tensors(sig, sig.writes.union(sig.unmarked), list(args), kwargs)


def _changes_geometry_alone(function: Any) -> bool:
    """Whether a call only changes its argument's geometry in place, as `t_` does."""
    is_view = torch.Tag.inplace_view in function.tags
    return is_view and function is not torch.ops.aten.resize_.default


class Recorder(TorchDispatchMode):
    """Dispatch mode that writes a `Recording`.

    Args:
        recording: An empty one. The factory runs inside `patched`; `close` completes the
            recording, and `restore` the generators.
    """

    def __init__(self, recording: rec.Recording) -> None:
        super().__init__()
        self.recording = recording
        self._marks: dict[bytes, tuple[int, int]] = {}
        self._shared: set[int] = set()
        self._last_states: list[bytes] = []
        self._fingerprints: dict[int, bytes] = {}
        self._values: dict[int, tuple[int, torch.Tensor]] = {}
        self._versions: dict[int, int] = {}
        self._folded_fakes: list[FakeTensor] = []
        self._generator_number(torch.default_generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a call under fake tensors and record it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._record_literal(func, args[0])
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._run_real(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            real = self._run_real(func, args, kwargs)
            return pytree.tree_map_only(torch.Tensor, self._fake, real)
        if isinstance(func, torch._ops.OpOverload) and not _changes_geometry_alone(func):
            self._record(func, args, kwargs, result)
        return result

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Record functions that cannot run on fake tensors as single calls, while open."""
        replaced = [(module, name, getattr(module, name)) for module, name in OPAQUE]
        replaced.append((torch.utils, "swap_tensors", torch.utils.swap_tensors))
        try:
            for module, name, function in replaced[:-1]:
                setattr(module, name, self._opaque(function))
            torch.utils.swap_tensors = _without_swap(torch.utils.swap_tensors)
            yield
        finally:
            for module, name, function in replaced:
                setattr(module, name, function)

    def close(self) -> None:
        """Record a last reseed and check that constants have not changed.

        Raises:
            UnsupportedError: E818, the host has overwritten a constant.
        """
        for generator in range(len(self.recording.generators)):
            self._note_reseed(generator)
        for number, known in self._fingerprints.items():
            if fingerprint(self.recording.constants[number]) != known:
                raise UnsupportedError(
                    "an array of the host was given to torch and overwritten afterwards: the "
                    "recorded values would be stale.\nFill arrays before torch.from_numpy.",
                    code="E818",
                )
        for tensor in self._folded_fakes:
            # Capture must not take an input tensor's value for a constant of the step.
            tensor.constant = None

    def restore(self) -> None:
        """Restore the generators to their states before the recording."""
        for generator, state in zip(self.recording.generators, self.recording.starts, strict=True):
            rng.write_state(generator, state)

    # Generators.

    def _generator_number(self, generator: torch.Generator) -> int:
        for number, known in enumerate(self.recording.generators):
            # Two Python objects can stand for the same generator.
            if known is generator or known._cdata == generator._cdata:
                return number
        state = rng.read_state(generator)
        self.recording.generators.append(generator)
        self.recording.starts.append(state)
        number = len(self._last_states)
        self._last_states.append(state)
        if state in self._marks:
            # A copy of a generator that calls have drawn from.
            self.recording.events.append(rec.Reseed(number, self._marks[state]))
        return number

    def _note_reseed(self, number: int) -> None:
        state = rng.read_state(self.recording.generators[number])
        if state != self._last_states[number]:
            self._last_states[number] = state
            place = self._marks.get(state, state)
            self.recording.events.append(rec.Reseed(number, place))

    def _mark(self, number: int) -> None:
        place = len(self.recording.events) - 1
        generator = self.recording.generators[number]
        raw = bytearray(rng.read_state(generator))
        if len(raw) > 16:
            tag = hashlib.blake2b(place.to_bytes(8, "little"), digest_size=4).digest()
            words = b"".join(part + bytes(4) for part in (tag, place.to_bytes(4, "little")))
            raw[_PRIVATE_STATE] = words + bytes(16)
        else:
            # A philox state is a seed and an offset; no program draws 2**60 numbers.
            raw[8:] = ((1 << 60) + 4 * place).to_bytes(8, "little")
        rng.write_state(generator, bytes(raw))
        self._last_states[number] = rng.read_state(generator)
        self._marks[self._last_states[number]] = (number, place)

    # Tensors.

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with _disable_current_modes():
            number = rec.add_constant(self.recording, tensor.untyped_storage())
            if number not in self._fingerprints:
                self._fingerprints[number] = fingerprint(tensor.untyped_storage())
            fake = self.recording.fake_mode.from_tensor(tensor, static_shapes=True)
        if fake.untyped_storage()._cdata not in self.recording.storages:
            rec.add_storage(self.recording, fake.untyped_storage(), number)
        return fake

    def _record_literal(self, function: Any, real: torch.Tensor) -> torch.Tensor:
        # torch's own memory can be resized; an array's cannot.
        is_shared = not real.untyped_storage().resizable()
        fake = function(real)
        if fake.constant is not None:
            self._folded_fakes.append(fake)
            with _disable_current_modes():
                # Fake mode computes on with the one-element tensor it keeps, in place.
                real = real.clone()
        number = rec.add_constant(self.recording, real.untyped_storage())
        self._fingerprints[number] = fingerprint(real.untyped_storage())
        rec.add_storage(self.recording, fake.untyped_storage(), number)
        if is_shared:
            self._shared.add(number)
        return fake

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return rec.tensor_ref(self.recording, leaf)
        if isinstance(leaf, torch.UntypedStorage):
            return rec.StorageRef(self.recording.storages[leaf._cdata])
        if isinstance(leaf, torch.Generator):
            return rec.GeneratorRef(self._generator_number(leaf))
        return leaf

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for output in outputs:
            if isinstance(output, FakeTensor) and output.constant is not None:
                self._folded_fakes.append(output)
        known = self.recording.storages
        created = [out for out in outputs if out.untyped_storage()._cdata not in known]
        written = _written(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if created or written or is_random:
            self._append(func, (args, kwargs), written, result, is_random=is_random)

    def _append(
        self, func: Any, call: tuple[Any, Any], written: list[Any], result: Any, *, is_random: bool
    ) -> None:
        recording = self.recording
        args, kwargs = pytree.tree_map(self._reference, call)
        reads = frozenset(ref.storage for ref in replay.tensor_refs((args, kwargs)))
        number = self._generator_of(call, result) if is_random else None
        if number is not None:
            self._note_reseed(number)
        writes = {rec.tensor_ref(recording, tensor).storage for tensor in written}
        if writes & self._shared:
            raise UnsupportedError(
                "a tensor that shares memory with an array of the host is written in place: the "
                "host would not see it.\nCopy it first, as in torch.from_numpy(array).clone().",
                code="E818",
            )
        leaves = pytree.tree_leaves(result)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in recording.storages:
                    writes.add(rec.add_storage(recording, storage))
        outputs = tuple(
            rec.tensor_ref(recording, leaf) if isinstance(leaf, torch.Tensor) else None
            for leaf in leaves
        )
        for storage in writes:
            self._versions[storage] = self._versions.get(storage, 0) + 1
        dtype = torch.get_default_dtype()
        recording.events.append(
            rec.Call(func, args, kwargs, reads, frozenset(writes), outputs, number, dtype)
        )
        if number is not None:
            self._mark(number)

    def _generator_of(self, call: tuple[Any, Any], result: Any) -> int | None:
        leaves = pytree.tree_leaves((call, result))
        for leaf in leaves:
            if isinstance(leaf, torch.Generator):
                return self._generator_number(leaf)
        device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        if device.type == "meta":
            return None
        return self._generator_number(rng.default_generator(device))

    # Values that the host needs.

    def _opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_at_replay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            with _disable_current_modes():
                call = ((self._fake(tensor), *args), kwargs)
                self._append(function, call, [tensor], tensor, is_random=True)
            return tensor

        return run_at_replay

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on real values; an error if they cost too much to compute."""
        with _disable_current_modes():
            real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
            return func(*real_args, **real_kwargs)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        ref = rec.tensor_ref(self.recording, tensor)
        version = self._versions.get(ref.storage, 0)
        cached = self._values.get(ref.storage)
        if cached is None or cached[0] != version:
            elements = replay.cost_elements(self.recording, [ref])
            if elements > MAX_VALUE_ELEMENTS:
                raise UnsupportedError(
                    f"a value of a tensor of shape {ref.size} is asked for on the host while the "
                    f"model is built; computing it now takes {elements:,} elements of work, more "
                    f"than {MAX_VALUE_ELEMENTS:,}.\nMove it before the model is built, or compute "
                    "it with Python numbers.",
                    code="E819",
                )
            (real,) = replay.execute(self.recording, [ref], keep_generators=True)
            cached = self._values[ref.storage] = (version, real)
        return replay.view(cached[1].untyped_storage(), ref)


def _without_swap(swap: Callable[..., None]) -> Callable[..., None]:
    """Return a `swap_tensors` that sets `.data` of fake parameters, as eager `Module.to` does."""

    def exchange(old: torch.Tensor, new: torch.Tensor) -> None:
        if not isinstance(old, FakeTensor):
            swap(old, new)
            return
        if old.is_meta != new.is_meta:
            # Only one is meta, as in `to_empty`: the inner tensors are swapped.
            old.__dict__, new.__dict__ = new.__dict__, old.__dict__
            torch._C._swap_tensor_impl(old, new)
            return
        with torch.no_grad():
            old.data = new.data
        old.fake_device = new.fake_device

    return exchange

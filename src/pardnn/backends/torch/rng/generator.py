"""Advancing a generator past random calls that are not run, and measuring how far a call moves it.

How far a call moves a generator depends on the op, on the number of elements and on how the library
was built (with MKL, `bernoulli_` draws one seed for the whole tensor), so it is measured by running
the call once, and never derived.

Two things make up the state of PyTorch's CPU generator: the position of its Mersenne twister
(`mt19937.py`) and, because Box-Muller makes normal samples in pairs, at times a spare one, which
the next scalar draw of a normal uses up. A call that uses the spare moves the generator differently
with and without one; `Draws` keeps both cases. A spare is the second of the pair made from the last
four draws, so it is restored by drawing that pair. A CUDA generator has an offset and no spare.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.rng import mt19937
from pardnn.errors import UnsupportedError

# Most draws of a call per element before it counts as a reseed: 0.5 us an element. Samplers with
# a fixed number of draws take at most 4.
MAX_DRAWS_PER_ELEMENT = 64
# 32-bit draws behind one pair of normal samples in double precision.
_PAIR_DRAWS = 4
# Up to here drawing into a scratch tensor (5 ns a draw) beats converting the state (0.1 ms).
_SCRATCH_DRAWS = 1 << 15
# Offset of the words, of the spare samples, and size in a CPU generator's state, in bytes.
_WORDS, _SPARE, _SIZE = 24, 24 + 8 * mt19937.BLOCK, 5056
_SENTINEL = 0.123456789

# Overload packets whose number of draws depends on tensor values: they cannot be skipped.
DATA_DEPENDENT = frozenset(
    {"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "_dirichlet", "gamma"}
)


class Effect(NamedTuple):
    """What one call does to a generator.

    Attributes:
        count: 32-bit draws (CPU) or units of the philox offset (CUDA).
        spare: What becomes of the spare normal sample: kept, none left, or a new one.
    """

    count: int
    spare: Literal["kept", "none", "new"] = "kept"


@dataclass(frozen=True)
class Draws:
    """What a call does to a generator, by whether it finds a spare normal sample.

    Attributes:
        without_spare: Effect on a generator that holds no spare sample.
        with_spare: Effect on a generator that holds one.
    """

    without_spare: Effect
    with_spare: Effect

    @property
    def uses_spare(self) -> bool:
        """Whether the call uses the spare sample or leaves one."""
        return (self.without_spare.spare, self.with_spare.spare) != ("kept", "kept")


def fixed(count: int) -> Draws:
    """Return the draws of a call that always makes `count` of them and never uses the spare."""
    return Draws(Effect(count), Effect(count))


class _State(NamedTuple):
    engine: mt19937.Twister
    normal: float | None
    single: float | None


def _without_modes() -> AbstractContextManager[Any]:
    # Tracing modes of the caller must not see the tensors that carry a state. Leaving them costs
    # 15 us, too much for every random op of a step.
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    return _disable_current_modes() if has_modes else nullcontext()


def read_state(generator: torch.Generator) -> bytes:
    """Return a generator's state as bytes (5,056 on CPU, 16 on CUDA)."""
    with _without_modes():
        return generator.get_state().numpy().tobytes()


def write_state(generator: torch.Generator, state: bytes) -> None:
    """Set a generator to a state that `read_state` returned."""
    with _without_modes():
        generator.set_state(torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy()))


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that a device's random ops use when they are given none.

    Raises:
        UnsupportedError: E815, the device has a generator of a kind not handled here.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    raise UnsupportedError(
        f"random ops on {device} are not supported: only the generators of cpu and cuda are "
        "understood.\nMove the random op to one of these.",
        code="E815",
        details={"device": str(device)},
    )


def _decode(state: bytes) -> _State:
    if len(state) != _SIZE:
        raise UnsupportedError(
            f"the CPU generator's state has {len(state)} bytes, this version understands {_SIZE}.\n"
            f"PyTorch {torch.__version__} keeps it in another way; use a version from the docs.",
            code="E815",
        )
    (left,) = struct.unpack_from("<i", state, 8)
    words = np.frombuffer(state, np.uint64, mt19937.BLOCK, _WORDS).astype(np.uint32)
    _, normal, _, has_normal = struct.unpack_from("<dddi", state, _SPARE)
    single, has_single = struct.unpack_from("<f?", state, _SPARE + 32)
    return _State(
        mt19937.Twister(words, mt19937.BLOCK + 1 - left),
        normal if has_normal else None,
        single if has_single else None,
    )


def _with_spare(raw: bytes, normal: float | None, single: float | None = None) -> bytes:
    changed = bytearray(raw)
    struct.pack_into("<dddi", changed, _SPARE, 0.0, normal or 0.0, 0.0, int(normal is not None))
    struct.pack_into("<f?", changed, _SPARE + 32, single or 0.0, single is not None)
    return bytes(changed)


def _with_engine(raw: bytes, engine: mt19937.Twister) -> bytes:
    changed = bytearray(raw)
    struct.pack_into("<i", changed, 8, mt19937.BLOCK + 1 - engine.position)
    struct.pack_into("<Q", changed, 16, engine.position)
    changed[_WORDS:_SPARE] = engine.key.astype(np.uint64).tobytes()
    return bytes(changed)


def advance(generator: torch.Generator, count: int, *, is_repeated: bool = False) -> None:
    """Move a generator past `count` draws; its spare normal sample stays.

    On CPUs it takes about 3 ns per draw up to 16 million draws, then 50 to 100 ms for any number;
    on CUDA the offset is set. Memory is constant (below 1 MB).

    Args:
        generator: The generator to move.
        count: 32-bit draws (CPU), or units of the philox offset (CUDA).
        is_repeated: Whether the same count comes again, as in every step: then from 2 million
            draws on it takes about 5 ms from the second time.
    """
    if count == 0:
        return
    if generator.device.type == "cuda":
        with _without_modes():
            generator.set_offset(generator.get_offset() + count)
    elif count <= _SCRATCH_DRAWS:
        with _without_modes():
            torch.empty(count, dtype=torch.int32).random_(generator=generator)
    else:
        raw = read_state(generator)
        engine = mt19937.skip(_decode(raw).engine, count, is_repeated=is_repeated)
        write_state(generator, _with_engine(raw, engine))


def _draw_spare(generator: torch.Generator) -> None:
    """Draw one pair of normal samples; the second stays as the spare."""
    write_state(generator, _with_spare(read_state(generator), None))
    with _without_modes():
        torch.empty(1, dtype=torch.float64).normal_(generator=generator)


def skip_calls(
    generator: torch.Generator, calls: Sequence[Draws], *, is_repeated: bool = False
) -> None:
    """Move a generator past calls that it does not run, as if it had run them in this order.

    O(calls) plus one `advance`, or two if a call leaves a spare normal sample.

    Args:
        generator: The generator to move.
        calls: What the calls do to it, in order.
        is_repeated: As in `advance`.
    """
    if not any(call.uses_spare for call in calls):
        count = sum(call.without_spare.count for call in calls)
        advance(generator, count, is_repeated=is_repeated)
        return
    state = _decode(read_state(generator))
    spare = found = state.normal is not None
    last_effect, passed, at_last_effect = "kept", 0, 0
    for call in calls:
        effect = call.with_spare if spare else call.without_spare
        passed += effect.count
        if effect.spare != "kept":
            last_effect, spare = effect.spare, effect.spare == "new"
            at_last_effect = passed
    if last_effect == "new":
        advance(generator, at_last_effect - _PAIR_DRAWS, is_repeated=is_repeated)
        _draw_spare(generator)
        advance(generator, passed - at_last_effect, is_repeated=is_repeated)
        return
    advance(generator, passed, is_repeated=is_repeated)
    if last_effect == "none" and found:
        write_state(generator, _with_spare(read_state(generator), None))


def _effect(
    generator: torch.Generator, before: bytes, call: Callable[[], Any], max_draws: int
) -> Effect:
    write_state(generator, before)
    call()
    after = read_state(generator)
    start, end = _decode(before), _decode(after)
    count = mt19937.distance(start.engine, end.engine, max_draws)
    if count is None or end.single != start.single:
        raise UnsupportedError(
            f"a random call moved the generator in a way that cannot be repeated: after {max_draws}"
            " draws its new state had not come up.\nIt reseeds, or its library keeps samples in "
            "the generator; run it on one device only.",
            code="E816",
        )
    if end.normal == start.normal:
        return Effect(count)
    if end.normal is None:
        return Effect(count, "none")
    write_state(generator, before)
    skip_calls(generator, [fixed(0), Draws(Effect(count, "new"), Effect(count, "new"))])
    if count < _PAIR_DRAWS or read_state(generator) != after:
        raise UnsupportedError(
            f"a random call of {count} draws left a normal sample that its last {_PAIR_DRAWS} draws"
            " do not give.\nRun it on one device only.",
            code="E816",
        )
    return Effect(count, "new")


def measure(
    call: Callable[[], Any],
    device: torch.device,
    generator: torch.Generator | None = None,
    *,
    num_elements: int = 1 << 16,
) -> Draws:
    """Return how far a call moves a generator, by running it once or twice.

    Args:
        call: Runs the random op on the real device, with the sizes and strides of the real
            tensors; called again if it uses the generator's spare normal sample.
        device: Where it runs.
        generator: The generator it draws from; the device's default one if None. Its state is
            restored.
        num_elements: How many the call draws at most; bounds the search for the number of draws.

    Raises:
        UnsupportedError: E815 for unknown generators; E816 if the call reseeds.
    """
    generator = default_generator(device) if generator is None else generator
    saved, limit = read_state(generator), MAX_DRAWS_PER_ELEMENT * num_elements
    try:
        with _without_modes():  # under a recorder or fake tensors, nothing would be drawn
            if generator.device.type == "cuda":
                start = generator.get_offset()
                call()
                return fixed(generator.get_offset() - start)
            seeded = read_state(torch.Generator().manual_seed(0))
            with_spare = _effect(generator, _with_spare(seeded, _SENTINEL), call, limit)
            if with_spare.spare == "kept":
                return Draws(with_spare, with_spare)
            return Draws(_effect(generator, seeded, call, limit), with_spare)
    finally:
        write_state(generator, saved)


def has_fixed_draws(function: Any) -> bool:
    """Return whether the draws of an ATen overload depend only on sizes, not on values."""
    packet = getattr(function, "overloadpacket", function)
    return getattr(packet, "__name__", str(packet)).rstrip("_") not in {
        name.rstrip("_") for name in DATA_DEPENDENT
    }


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the state of every random generator that the user's code may have moved."""
    host, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    state = torch.get_rng_state()
    devices = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state_all() if devices else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(host)
        np.random.set_state(numbers)  # noqa: NPY002
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

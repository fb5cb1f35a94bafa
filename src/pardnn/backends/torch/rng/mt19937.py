"""Advancing a Mersenne twister (MT19937) without drawing, and measuring how far it has moved.

PyTorch's CPU generator is an MT19937: 624 words of 32 bits, renewed as a block ("twist"), and a
position in the block. Every draw is a linear function over GF(2) of the state, so the state n
draws ahead is `x**n mod p` applied to it, where p is the characteristic polynomial: a jump costs
the same for a million draws as for a trillion.

Complexity: a walk of n draws is O(n), about 3 ns a draw; a jump is O(log n), about 50 ms.
Source: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998; Haramoto, Matsumoto,
Nishimura, Panneton, L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators",
INFORMS J. Computing 20(3), 2008. Deviation: plain polynomial reduction instead of a sliding
window, because p has only 135 terms.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt32
from numpy.lib.stride_tricks import sliding_window_view

BLOCK = 624
DEGREE = 19937
# From the first number of draws on, a jump (about 50 ms) beats a walk (about 3 ns a draw); from the
# second on, a jump with a polynomial known from an earlier one does (about 5 ms).
JUMP_FROM = 1 << 24
REPEATED_JUMP_FROM = 1 << 21
# Windows gathered at a time: 300 KB, which stay in the cache.
_GATHER = 128
# Words compared after the first match; a false match of 128 bits is out of the question.
_WITNESSES = 4

# Exponents below DEGREE of the characteristic polynomial; a test derives them from 40,000 output
# bits by Berlekamp-Massey.
# fmt: off
EXPONENTS = (
    19314, 19087, 18860, 18691, 18633, 18406, 18237, 18179, 18068, 17952, 17841, 17783, 17725,
    17498, 17445, 17329, 17271, 17160, 17044, 16933, 16875, 16822, 16817, 16595, 16590, 16537,
    16421, 16368, 16363, 16252, 16141, 16136, 16025, 15967, 15909, 15682, 15629, 15576, 15513,
    15455, 15349, 15344, 15228, 15117, 15059, 15006, 15001, 14953, 14779, 14774, 14721, 14605,
    14552, 14547, 14436, 14325, 14320, 14209, 14151, 14093, 13866, 13813, 13760, 13697, 13639,
    13533, 13528, 13412, 13301, 13243, 13190, 13185, 13137, 12963, 12958, 12905, 12789, 12736,
    12731, 12673, 12620, 12509, 12504, 12393, 12335, 12277, 11997, 11944, 11881, 11838, 11717,
    11712, 11611, 11485, 11384, 11374, 11321, 11215, 11157, 11147, 11089, 10920, 10761, 10693,
    10128, 9969, 9901, 9505, 8206, 7979, 7752, 7583, 7525, 7477, 7129, 6569, 6337, 5661, 4753,
    4362, 4135, 3908, 3681, 3454, 3227, 3000, 2773, 2493, 1870, 1643, 1585, 1416, 1189, 0,
)
# fmt: on


class Twister(NamedTuple):
    """State of an MT19937.

    Attributes:
        key: Current block of words, untempered.
        position: Words of the block that have been drawn, 0 to 624.
    """

    key: UInt32[np.ndarray, " 624"]
    position: int


def _generator(state: Twister, generator: np.random.MT19937 | None = None) -> np.random.MT19937:
    generator = np.random.MT19937(0) if generator is None else generator
    generator.state = {
        "bit_generator": "MT19937",
        "state": {"key": state.key, "pos": state.position},
    }
    return generator


def _state(generator: np.random.MT19937) -> Twister:
    inner = generator.state["state"]
    return Twister(np.asarray(inner["key"], dtype=np.uint32), int(inner["pos"]))


@cache
def _engine() -> np.random.MT19937:
    # Making one takes 0.3 ms, setting its state only a tenth of that.
    return np.random.MT19937(0)


def _walk(state: Twister, count: int) -> Twister:
    generator = _generator(state, _engine())
    generator.random_raw(count, output=False)
    return _state(generator)


def _reduce(polynomial: int) -> int:
    """Return a polynomial over GF(2) (bit i: coefficient of x**i) modulo the characteristic."""
    while (high := polynomial >> DEGREE) != 0:
        polynomial ^= high << DEGREE
        for exponent in EXPONENTS:
            polynomial ^= high << exponent
    return polynomial


def _square(polynomial: int) -> int:
    size = (polynomial.bit_length() + 7) // 8
    raw = np.frombuffer(polynomial.to_bytes(size, "little"), dtype=np.uint8)
    bits = np.unpackbits(raw, bitorder="little")
    spaced = np.zeros(2 * bits.size, dtype=np.uint8)
    spaced[::2] = bits
    return int.from_bytes(np.packbits(spaced, bitorder="little").tobytes(), "little")


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    result = 1
    for digit in bin(exponent)[2:]:
        result = _reduce(_square(result) << (digit == "1"))
    return result


def _jump(state: Twister, count: int) -> Twister:
    # The low 31 bits of a block's first word do not obey the recurrence in a seeded block, but
    # do in a twisted one: so one block is walked before the jump.
    generator = _generator(Twister(state.key, BLOCK), _engine())
    words = np.empty((DEGREE // BLOCK + 2) * BLOCK, dtype=np.uint32)
    for start in range(0, words.size, BLOCK):
        generator.random_raw(BLOCK, output=False)
        words[start : start + BLOCK] = _state(generator).key
    # The polynomial must depend only on the count to be found again, so the rest is walked.
    blocks = count // BLOCK - 1
    power = _power_of_x(BLOCK * blocks)
    raw = np.frombuffer(power.to_bytes(DEGREE // 8 + 1, "little"), dtype=np.uint8)
    chosen = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    windows = sliding_window_view(words, BLOCK)
    key = np.zeros(BLOCK, dtype=np.uint32)
    for start in range(0, chosen.size, _GATHER):
        key ^= np.bitwise_xor.reduce(windows[chosen[start : start + _GATHER]], axis=0)
    # The words stand for the block after that of `state`, its first `position` drawn.
    return _walk(Twister(key, state.position), count - BLOCK * (blocks + 1))


def skip(state: Twister, count: int, *, is_repeated: bool = False) -> Twister:
    """Return the state after `count` draws of 32 bits.

    Args:
        state: Where to start.
        count: Draws to skip, at least 0.
        is_repeated: Whether the same count will be skipped again, so that preparing a jump pays.

    Returns:
        The state, bit for bit the one that drawing would leave. O(count) below `JUMP_FROM`,
        O(log count) from there; constant memory (about 500 KB).
    """
    if count == 0:
        return state
    jumps_from = REPEATED_JUMP_FROM if is_repeated else JUMP_FROM
    return _jump(state, count) if count >= jumps_from else _walk(state, count)


def _same_stream(left: Twister, right: Twister) -> bool:
    here = _generator(left).random_raw(BLOCK)
    return bool(np.array_equal(here, _generator(right).random_raw(BLOCK)))


def distance(start: Twister, end: Twister, limit: int) -> int | None:
    """Return how many draws lie between two states; None if more than `limit`.

    The next words of `end` are searched for in the stream that `start` produces, in blocks that
    grow from 64 to a million draws: O(draws), about 8 ns each, 24 MB at most.

    Args:
        start: The earlier state.
        end: The later state.
        limit: Most draws to search.
    """
    witnesses = _generator(end).random_raw(_WITNESSES)
    generator = _generator(start)
    carried = np.empty(0, dtype=np.uint64)
    passed, num_words = 0, 64
    while passed <= limit:
        stream = np.concatenate([carried, generator.random_raw(num_words)])
        room = stream.size - _WITNESSES + 1
        for index in np.flatnonzero(stream[:room] == witnesses[0]).tolist():
            if np.array_equal(stream[index : index + _WITNESSES], witnesses):
                found = passed + index
                return found if found <= limit and _same_stream(skip(start, found), end) else None
        carried = stream[room:]
        passed += room
        num_words = min(num_words * 16, 1 << 20)
    return None

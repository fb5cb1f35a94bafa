"""A scan of large JSON for keys that appear twice, without making an object of anything in it.

The parser of Python tells of such keys at seven microseconds per op of a graph, more than reading
the ops themselves takes; numpy needs a fifth of that.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64
from numpy import ndarray

#: Longer keys are left to the parser.
MAX_KEY = 256
#: Looked at in one go, and on to the end of the line: what fits the caches of a processor.
PART_BYTES = 1 << 20
_QUOTE, _COLON = ord('"'), ord(":")
_STEP = np.zeros(256, dtype=np.int8)  #: How a byte changes the depth, outside strings.
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
_MARKS = _STEP != 0
_MARKS[_QUOTE] = True
#: Keys are found by the colon right behind them, so none may stand apart; without a backslash a key
#: is spelt in one way alone, and each quote begins or ends a string.
_UNPLAIN = (b"\\", b" :", b"\n:", b"\r:", b"\t:")
#: What is no number of JSON, but of parsers.
_NO_NUMBERS = (b"NaN", b"Infinity")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def has_plain_keys(content: bytes, max_depth: int) -> bool:
    """Whether it is certain that no key appears twice in one object.

    It is never said of valid JSON where it does not hold, but may be denied where it does: of
    escapes, spaces before colons, and keys with equal hashes. O(bytes).

    Args:
        content: JSON, or any bytes: of what is no JSON the answer means nothing.
        max_depth: What is nested deeper is denied; at most 255.
    """
    if any(part in content for part in _UNPLAIN):
        return False
    open_at = np.zeros(max_depth + 2, dtype=np.uint64)  # by depth, the object that is open there
    values: list[ndarray] = []
    begin = depth = 0
    while begin < len(content):
        # No string goes over a line's end, so each part begins outside strings.
        end = content.find(b"\n", begin + PART_BYTES) + 1 or len(content)
        found = _part(content, begin, end, depth, open_at)
        if found is None:
            return False
        keys, depth = found
        values.append(keys)
        begin = end
    return not _any_twice(np.concatenate(values)) if values else True


def _part(
    content: bytes, begin: int, end: int, depth: int, open_at: UInt64[ndarray, " d"]
) -> tuple[UInt64[ndarray, " k"], int] | None:
    """Return a number for each key, equal for equal keys of one object, and the depth at the end.

    Args:
        content: JSON.
        begin: Of the part.
        end: Of the part.
        depth: At its begin.
        open_at: By depth, the number of the object that is open at the begin; then, at the end.

    Returns:
        None if a key is long, or something is deeper than `open_at`.
    """
    text = np.frombuffer(content, dtype=np.uint8, count=end - begin, offset=begin)
    at = np.flatnonzero(_MARKS[text])
    marks = text[at]
    is_quote = marks == _QUOTE
    step = _STEP[marks]
    step[np.cumsum(is_quote, dtype=np.uint8) % 2 == 1] = 0  # within strings
    depths = depth + np.cumsum(step, dtype=np.int32)
    if not 0 <= int(depths.min(initial=0)) <= int(depths.max(initial=0)) <= len(open_at) - 2:
        return None
    quotes = np.flatnonzero(is_quote)
    if len(quotes) % 2 or (len(quotes) and at[quotes[-1]] + 1 == len(text)):
        return None
    is_key = text[at[quotes[1::2]] + 1] == _COLON
    first, last = quotes[0::2][is_key], quotes[1::2][is_key]
    hashes = _hashes(content, begin + at[first] + 1, at[last] - at[first] - 1)
    if hashes is None:
        return None
    hashes += _objects(begin + at, depths, step > 0, first, open_at) * _FACTOR
    return hashes, int(depths[-1]) if len(depths) else depth


def _objects(
    at: Int64[ndarray, " m"],
    depth: Int32[ndarray, " m"],
    is_open: Bool[ndarray, " m"],
    keys: Int64[ndarray, " k"],
    open_at: UInt64[ndarray, " d"],
) -> UInt64[ndarray, " k"]:
    """Return where the object of each key was opened; and set `open_at` to what is open now.

    Args:
        at: Where in the content each mark stands.
        depth: Behind each mark.
        is_open: Whether a mark opens an object or a list.
        keys: The marks at which keys begin.
        open_at: As for `_part`.
    """
    found = np.empty(len(keys), dtype=np.uint64)
    opened, of_key = np.flatnonzero(is_open), depth[keys]
    for level in range(1, 1 + int(depth.max(initial=0))):
        mine = opened[depth[opened] == level]
        here = np.flatnonzero(of_key == level)
        # A key belongs to what was opened last at its depth.
        which = np.searchsorted(mine, keys[here])
        known = np.concatenate([open_at[level : level + 1], at[mine].astype(np.uint64)])
        found[here] = known[which]
        open_at[level] = known[-1]
    return found


def _hashes(
    content: bytes, begin: Int64[ndarray, " k"], length: Int64[ndarray, " k"]
) -> UInt64[ndarray, " k"] | None:
    """Return a hash of each key; None if one is too long or too close to the end of the content."""
    longest = int(length.max(initial=0))
    if longest > MAX_KEY or int(begin.max(initial=0)) + longest + 8 > len(content):
        return None
    words = np.ndarray((len(content) - 7,), dtype="<u8", buffer=content, strides=(1,))
    found = length.astype(np.uint64)
    which = np.arange(len(begin))
    for offset in range(0, longest, 8):
        which = which[length[which] > offset]
        unread = np.maximum(8 - (length[which] - offset), 0).astype(np.uint64)
        word = words[begin[which] + offset] << (unread * np.uint64(8))
        mixed = (found[which] ^ word) * _FACTOR
        found[which] = mixed ^ (mixed >> np.uint64(29))
    return found


def _any_twice(values: UInt64[ndarray, " k"]) -> bool:
    values.sort()
    return bool((values[1:] == values[:-1]).any())


_REST = bytes(set(range(256)) - set(b'"[]{}'))  #: Bytes that tell nothing of nesting: 4 of 5.


def nested_depth(content: bytes) -> int:
    """Return how deep brackets are nested; in array operations, as files may be large."""
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    text = np.frombuffer(unescaped.translate(None, _REST), dtype=np.uint8)
    # The number of quotes before a byte, modulo 256, is odd within strings.
    text = text[np.cumsum(text == ord('"'), dtype=np.uint8) % 2 == 0]
    step = np.isin(text, list(b"[{")).astype(np.int8) - np.isin(text, list(b"]}"))
    return int(np.cumsum(step, dtype=np.int32).max(initial=0))


#: Each digit as 0, both letters of an exponent as e: what `may_be_large` looks for.
_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")


def may_be_large(content: bytes, max_digits: int) -> bool:
    """Whether a number may have more than some digits, or an exponent of three, or be NaN.

    Where none has, none is refused and none is infinite. A text in the file may have them, too.
    """
    if any(word in content for word in _NO_NUMBERS):
        return True
    shape = content.translate(_SHAPE)
    return any(part in shape for part in (b"0" * (max_digits + 1), b"0e000", b"0e+000"))

"""Sizes, rates and times as people write them.

Everything inside is bytes, bytes per second and seconds; only this module and `report` convert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from pardnn.errors import UsageError

_BYTES = {
    "B": 1,
    **{f"{p}iB": 1 << 10 * i for i, p in enumerate("KMGT", start=1)},
    **{f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", start=1)},
}
#: Units per second: dividing by them is exact where multiplying by 1e-6 is not.
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")
_SIZE_HELP = 'write B, KiB, MiB, GiB, TiB (binary) or KB, MB, GB, TB (decimal), such as "16GiB"'

#: Waits and time limits stay below it, which clocks of all libraries take: three years.
MAX_WAIT_SECONDS = 1e8

_USUAL = {"bandwidth": "GB/s", "time": "us", "size": "GiB", "memory": "GiB"}
_SINGLE = {"bandwidth": "B/s", "size": "B", "memory": "B"}

MemoryLimits = int | str | Mapping[int | str, int | str] | Sequence[int | str] | None


def bytes_text(num_bytes: float | None) -> str:
    """Return a size such as "1.50 GiB"; None is unlimited."""
    if num_bytes is None:
        return "unlimited"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def size_texts(size: int, usable: int | None) -> tuple[str, str]:
    """Return both as `bytes_text` does, or in bytes where that would hide that they differ."""
    texts = bytes_text(size), bytes_text(usable)
    if usable is None or size == usable or texts[0] != texts[1]:
        return texts
    return f"{size:,} B", f"{usable:,} B"


def _split(text: str, units: Mapping[str, float], help_text: str, what: str) -> tuple[float, float]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"{what} {text!r:.60} is not a number with a unit: {help_text}")
    number, unit = match.groups()
    if unit in units:
        return float(number), units[unit]
    meant = _spelling(unit)
    close = next((u for u in units if _spelling(u) == meant), None)
    if re.fullmatch("[kmgt](bit/s|bps)", meant) and what == "bandwidth":  # eight to a byte
        number, close = f"{float(number) / 8:g}", f"{unit[0].upper()}B/s"
    suggestion = f'; did you mean "{number}{close}"?' if close else ""
    if not unit:  # of a number above a million, units themselves: bytes, or bytes a second
        usual = _USUAL.get(what, "") if float(number) < 1e6 else _SINGLE.get(what, "")
        suggestion = f'; did you mean "{number}{usual}"?' if usual else ""
    if not float(number):
        suggestion = ""  # where nothing is too little, any unit would be refused again
    raise UsageError(f"{what} {text!r:.60} has no known unit: {help_text}{suggestion}")


def _spelling(unit: str) -> str:
    """Return what spellings of one unit have in common: "16g", "16Gib" and "16GiB" are binary."""
    unit = unit.lower()
    return f"{unit}ib" if unit in {"k", "m", "g", "t"} else unit


def parse_bytes(size: int | str, what: str = "size") -> int:
    """Return `size` in bytes: a positive int, or text such as "16GiB" or "1.5GB".

    Raises:
        UsageError: E202, listing the accepted forms.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise UsageError(f"{what} {size!r:.60} is not a size: {_SIZE_HELP}", code="E202")
    if isinstance(size, int):
        value = size
    else:
        try:
            # Exact for whole numbers: float products round above 2**53.
            match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]+)\s*", size)
            if match and match[2] in _BYTES:
                value = int(match[1]) * _BYTES[match[2]]
            else:
                number, scale = _split(size, _BYTES, _SIZE_HELP, what)
                value = int(number * scale)
        except UsageError as error:
            raise UsageError(error.message, code="E202") from None
        except OverflowError:
            raise UsageError(
                f"{what} {size!r:.60} is too large: {_SIZE_HELP}", code="E202"
            ) from None
    if value <= 0:
        raise UsageError(f"{what} {size!r} is not positive: {_SIZE_HELP}", code="E202")
    return value


def parse_bandwidth(rate: float | str) -> float:
    """Return bytes per second from a number or text such as "300GB/s".

    Raises:
        UsageError: E201, listing the accepted forms.
    """
    if isinstance(rate, str):
        units = {f"{unit}/s": float(scale) for unit, scale in _BYTES.items()}
        number, scale = _split(rate, units, 'write "300GB/s" or "12GiB/s"', "bandwidth")
        rate = number * scale
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"bandwidth is {rate} bytes per second; it must be above 0")
    return float(rate)


def parse_seconds(time: float | str) -> float:
    """Return seconds from a number or text such as "25us".

    Raises:
        UsageError: E201, listing the accepted forms.
    """
    if isinstance(time, str):
        number, per_second = _split(time, _PER_SECOND, 'write "25us", "1ms" or "2s"', "time")
        time = number / per_second
    if not (math.isfinite(time) and time >= 0):
        raise UsageError(f"time is {time} seconds; it must be finite and at least 0")
    return float(time)


def parse_limits(memory: MemoryLimits, num_devices: int) -> dict[int | str, int | None]:
    """Return the limit in bytes of each device id, in accelerate's forms.

    Args:
        memory: One size for all, a list of sizes, or sizes by device id; the id "cpu" adds the
            host as a device. None: no limit. Ids are kept exactly, gaps included.
        num_devices: Number of accelerators.

    Raises:
        UsageError: E202 (form) or E203 (count).
    """
    limits: dict[int | str, int | None]
    if isinstance(memory, Mapping):
        bad = [key for key in memory if key != "cpu" and not _is_index(key)]
        if bad or not memory:
            raise UsageError(
                f"memory limits {memory!r:.80}: keys are device numbers or 'cpu', "
                'such as {0: "10GiB", 1: "24GiB", "cpu": "64GiB"}',
                code="E202",
            )
        limits = {key: parse_bytes(memory[key], f"memory of {key}") for key in memory}
    elif memory is None or isinstance(memory, int | str):
        size = None if memory is None else parse_bytes(memory, "memory")
        return {i: size for i in range(num_devices)}  # noqa: C420  keys of two types
    elif isinstance(memory, Sequence):
        limits = {i: parse_bytes(size, f"memory of device {i}") for i, size in enumerate(memory)}
    else:
        raise UsageError(f"memory {memory!r:.60} is not a size, list or mapping", code="E202")
    count = sum(key != "cpu" for key in limits)
    if count != num_devices:
        raise UsageError(
            f"memory limits name {count} devices, but there are {num_devices}.\n"
            f"Give one size for all, or one for each device.",
            code="E203",
        )
    return limits


def _is_index(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool) and key >= 0


def sharing_text(slowdown: Sequence[float], num_devices: int) -> str:
    """Say how much longer ops take when all devices compute (`cluster.Sharing`)."""
    return f"ops take {slowdown[:num_devices][-1]:.3g} times as long when all compute"


def rate_text(bandwidth: float, latency: float) -> str:
    """Return a link such as "118 MB/s + 1.2 ms".

    Args:
        bandwidth: Bytes per second.
        latency: Seconds.
    """
    per_second = next((u for u in _RATES if bandwidth >= u[1]), _RATES[-1])
    time = next((u for u in _TIMES if latency >= u[1]), _TIMES[-1])
    return f"{bandwidth / per_second[1]:.3g} {per_second[0]} + {latency / time[1]:.3g} {time[0]}"


_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))

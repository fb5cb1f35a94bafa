"""The cluster: devices with hard memory limits, and directed links between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn import files
from pardnn.errors import FileError, UsageError
from pardnn.units import MemoryLimits, parse_bandwidth, parse_limits, parse_seconds

LinkModel = Literal["independent", "serial"]
#: Of links between ranks that were measured: two ranks have one connection, which sends one message
#: after the other (docs/decisions/039).
MEASURED_LINKS: LinkModel = "serial"
DeviceNames = Literal["gpu", "cpu"]

#: Defaults of the command line: NVSwitch of a DGX-2, and the latency the thesis measured.
DEFAULT_BANDWIDTH = 300e9
DEFAULT_LATENCY = 25e-6
#: Every pair of devices has a link of its own: a thousand devices are a million links.
MAX_DEVICES = 1024
#: Of a message; sums of any number of them are finite, in nanoseconds too.
MAX_LATENCY_S = 1e9
#: Bytes per second; the seconds of any message are finite.
MIN_BANDWIDTH = 1e-6
#: Sums of a few of these still fit the 64 bits of the kernels.
MAX_MEMORY_BYTES = 1 << 60


def _file_key(name: str) -> str:
    # "from" is a keyword of Python.
    return {"source": "from", "target": "to"}.get(name, name)


STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False, "alias_generator": _file_key}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: Unique in the cluster.
        type: Selects an op's `seconds`: "accelerator" or "cpu".
        memory: Hard limit in bytes; None is unlimited.
        speed: Divides an op's `seconds`.
    """

    __pydantic_config__ = STRICT

    name: str
    type: str = "accelerator"
    memory: int | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Cost of a message: `latency` seconds + bytes / `bandwidth` (bytes per second)."""

    __pydantic_config__ = STRICT

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed link from device `source` to device `target`, by name."""

    __pydantic_config__ = STRICT

    source: str
    target: str
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What devices take from each other: ranks that share cores, caches and memory.

    Attributes:
        slowdown: How many times as long an op takes while one device computes, two, and so on;
            from 1, and never falling. The last number also holds for more devices.
        overhead: Seconds that a message takes of each of its ends, which computes nothing then;
            None: none.
    """

    __pydantic_config__ = STRICT

    slowdown: tuple[float, ...]
    overhead: Rate | None = None


class ClusterArrays(NamedTuple):
    """The cluster as arrays for kernels: a message takes latency + bytes / bandwidth seconds."""

    latency: Float64[ndarray, "k k"]  # seconds; 0 on the diagonal, infinite without a link
    bandwidth: Float64[ndarray, "k k"]  # bytes per second; infinite on the diagonal
    speed: Float64[ndarray, " k"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and links.

    Attributes:
        devices: In rank order.
        links: A missing direction uses the other one; a missing pair uses `default_link`.
        default_link: Of pairs without a link; None if they cannot communicate.
        link_model: "independent" gives every transfer its link's full bandwidth (the papers'
            model); "serial" allows one transfer at a time per directed link.
        sharing: What devices take from each other; None: each has all it needs.

    Raises:
        FileError: E421, if a name, a number or a link is not valid.
    """

    __pydantic_config__ = STRICT

    format: Literal["pardnn.cluster/1"] = "pardnn.cluster/1"
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    default_link: Rate | None = None
    link_model: LinkModel = "independent"
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        problems = list(itertools.islice(_problems(self), 10))
        if problems:
            raise FileError(f"cluster: {problems[0]}", code="E421", details={"problems": problems})

    @cached_property
    def arrays(self) -> ClusterArrays:
        """The same as arrays for kernels."""
        return _arrays(self)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        memory: MemoryLimits = None,
        bandwidth: float | str = DEFAULT_BANDWIDTH,
        latency: float | str = DEFAULT_LATENCY,
        links: LinkModel = "independent",
        named: DeviceNames = "gpu",
    ) -> Cluster:
        """Return equal devices, with the same link between every pair.

        Args:
            num_devices: At least 1.
            memory: Limit per device in accelerate's forms, see `units.parse_limits`.
            bandwidth: Bytes per second, or text such as "300GB/s".
            latency: Seconds, or text such as "25us".
            links: The link model.
            named: "gpu" names them `gpu:0`, `gpu:1` and so on, "cpu" `cpu:0`, `cpu:1`; nothing
                else differs.

        Raises:
            UsageError: E201 to E203.
        """
        if num_devices < 1:
            raise UsageError(f"a cluster needs at least 1 device, not {num_devices}")
        if num_devices > MAX_DEVICES:
            raise UsageError(f"a cluster has at most {MAX_DEVICES} devices, not {num_devices}")
        if links not in ("independent", "serial"):
            raise UsageError(f"links is {links!r:.40}; it can be independent or serial")
        if named not in ("gpu", "cpu"):
            raise UsageError(f"named is {named!r:.40}; it can be gpu or cpu")
        limits = parse_limits(memory, num_devices)
        if any(size is not None and size > MAX_MEMORY_BYTES for size in limits.values()):
            raise UsageError(f"memory {memory!r:.60} is too large: at most 1 EiB", code="E202")
        devices = tuple(
            Device(name="cpu", type="cpu", memory=size)
            if key == "cpu"
            else Device(name=f"{named}:{key}", memory=size)
            for key, size in limits.items()
        )
        rate = Rate(bandwidth=parse_bandwidth(bandwidth), latency=parse_seconds(latency))
        return cls(devices=devices, default_link=rate, link_model=links)

    def limited(self, memory: int | str | Sequence[int | str]) -> Cluster:
        """Return the same devices and links with other memory limits.

        Args:
            memory: One size for all devices, or one for each.

        Raises:
            UsageError: E202, E203.
        """
        limits = Cluster.uniform(self.num_devices, memory=memory).devices
        devices = (
            replace(device, memory=limit.memory)
            for device, limit in zip(self.devices, limits, strict=True)
        )
        return replace(self, devices=tuple(devices))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a `pardnn.cluster/1` file.

        Raises:
            FileError: E403 to E407, E421.
            MismatchError: E502.
        """
        return cluster_from_json(files.read_bytes(path), f"cluster file {str(path)!r}")

    @classmethod
    def preset(cls, name: str, num_devices: int | None = None) -> Cluster:
        """Return a known machine; `PRESETS` lists them.

        Raises:
            UsageError: E204, listing the names.
        """
        if name not in PRESETS:
            raise UsageError(
                f"no cluster preset {name!r:.40}; there are {', '.join(PRESETS)}", code="E204"
            )
        most, memory, bandwidth, latency = PRESETS[name]
        count = most if num_devices is None else num_devices
        named = "cpu" if name == "cpu" else "gpu"
        return cls.uniform(count, memory=memory, bandwidth=bandwidth, latency=latency, named=named)

    def seconds(self, source: int, target: int, num_bytes: int) -> float:
        """Seconds of one message between two devices; 0 within a device.

        Args:
            source: Index of the sending device.
            target: Index of the receiving device.
            num_bytes: Of the message.
        """
        a = self.arrays
        return float(a.latency[source, target] + num_bytes / a.bandwidth[source, target])


#: name: (devices, memory, link bytes per second, link latency in seconds)
PRESETS: dict[str, tuple[int, str, float, float]] = {
    # The thesis's machine: 16 V100 SXM3 32 GB, NVSwitch; "300 GB/sec" (chapter 6).
    "dgx-v100": (16, "32GiB", 300e9, 25e-6),
    # Tofu's testbed: 8 K80 chips of 12 GB, 21 GB/s peer to peer (section 7.1).
    "p2-k80": (8, "12GiB", 21e9, 25e-6),
    # DGX A100 80 GB and DGX H100/H200 user guides: NVLink 600 and 900 GB/s both ways together.
    "dgx-a100": (8, "80GiB", 300e9, 10e-6),
    "dgx-h100": (8, "80GiB", 450e9, 10e-6),
    "dgx-h200": (8, "141GB", 450e9, 10e-6),
    # Two local processes over gloo: 140 us for a small message, 2 GB/s.
    "cpu": (4, "16GiB", 2e9, 140e-6),
}


def _problems(cluster: Cluster) -> Iterator[str]:
    names = [device.name for device in cluster.devices]
    if not names:
        yield "it has no devices"
    if len(names) > MAX_DEVICES:
        yield f"it has {len(names)} devices; at most {MAX_DEVICES} are possible"
        return
    for name in {name for name in names if names.count(name) > 1}:
        yield f"two devices are named {name!r:.60}"
    for device in cluster.devices:
        if not (math.isfinite(device.speed) and device.speed > 0):
            yield f"device {device.name!r:.60}: speed is {device.speed}"
        if device.memory is not None and device.memory <= 0:
            yield f"device {device.name!r:.60}: memory is {device.memory} bytes"
        if device.memory is not None and device.memory > MAX_MEMORY_BYTES:
            yield f"device {device.name!r:.60}: memory of {device.memory} bytes is too large"
    if cluster.link_model not in ("independent", "serial"):
        yield f"link_model is {cluster.link_model!r:.40}, not independent or serial"
    yield from _link_problems(cluster, set(names))
    if cluster.default_link is not None:
        yield from _rate_problems("default_link", cluster.default_link)
    if cluster.sharing is not None:
        yield from _sharing_problems(cluster.sharing)


def _link_problems(cluster: Cluster, known: Collection[str]) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for link in cluster.links:
        where = f"link {link.source!r:.60} -> {link.target!r:.60}"
        if link.source not in known or link.target not in known:
            yield f"{where}: no such device"
        if link.source == link.target:
            yield f"{where}: joins a device to itself"
        if (link.source, link.target) in seen:
            yield f"{where}: given twice"
        seen.add((link.source, link.target))
        yield from _rate_problems(where, link)


def _rate_problems(where: str, rate: Link | Rate) -> Iterator[str]:
    if not (math.isfinite(rate.bandwidth) and rate.bandwidth >= MIN_BANDWIDTH):
        yield (
            f"{where}: bandwidth is {rate.bandwidth} bytes per second; it must be at least "
            f"{MIN_BANDWIDTH:g}"
        )
    if not 0 <= rate.latency <= MAX_LATENCY_S:
        yield f"{where}: latency is {rate.latency} seconds; it is from 0 to {MAX_LATENCY_S:g}"


def _sharing_problems(sharing: Sharing) -> Iterator[str]:
    told = list(sharing.slowdown)
    if not all(math.isfinite(each) for each in told) or told[:1] != [1] or told != sorted(told):
        yield f"sharing: slowdown is {told!s:.80}; it begins with 1, and never falls"
    if sharing.overhead is not None:
        yield from _rate_problems("sharing: overhead", sharing.overhead)


def _arrays(cluster: Cluster) -> ClusterArrays:
    k = cluster.num_devices
    index = {device.name: i for i, device in enumerate(cluster.devices)}
    default = cluster.default_link
    latency = np.full((k, k), np.inf if default is None else default.latency)
    bandwidth = np.full((k, k), 1.0 if default is None else default.bandwidth)
    given = {(index[link.source], index[link.target]): link for link in cluster.links}
    for (i, j), link in given.items():
        both = [(i, j)] if (j, i) in given else [(i, j), (j, i)]
        for pair in both:
            latency[pair], bandwidth[pair] = link.latency, link.bandwidth
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    speed = np.array([device.speed for device in cluster.devices], dtype=np.float64)
    for array in (latency, bandwidth, speed):
        array.setflags(write=False)
    return ClusterArrays(latency, bandwidth, speed)


def more_like(device: Device, count: int, taken: Iterable[str] = ()) -> list[Device]:
    """Return so many devices like this one, by names of its kind that are not taken yet."""
    stem, known = device.name.rpartition(":")[0] or "gpu", set(taken)
    names = (f"{stem}:{i}" for i in range(count + len(known)))
    free = [name for name in names if name not in known][:count]
    return [replace(device, name=name) for name in free]


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as JSON types."""
    rate, sharing = cluster.default_link, cluster.sharing
    told: dict[str, Any] = {
        "format": cluster.format,
        "devices": [
            {"name": d.name, "type": d.type, "memory": d.memory, "speed": d.speed}
            for d in cluster.devices
        ],
        "links": [
            {"from": i.source, "to": i.target, "bandwidth": i.bandwidth, "latency": i.latency}
            for i in cluster.links
        ],
        "default_link": _rate_to_dict(rate),
        "link_model": cluster.link_model,
    }
    if sharing is not None:
        overhead = _rate_to_dict(sharing.overhead)
        told["sharing"] = {"slowdown": list(sharing.slowdown), "overhead": overhead}
    return told


def _rate_to_dict(rate: Rate | None) -> dict[str, float] | None:
    return None if rate is None else {"bandwidth": rate.bandwidth, "latency": rate.latency}


def cluster_from_json(content: bytes, what: str = "cluster") -> Cluster:
    """Parse and check the content of a cluster file."""
    return files.parse_summed(Cluster, content, what)


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file."""
    files.write_bytes(path, files.with_checksum(files.dump_json(cluster_to_dict(cluster))))

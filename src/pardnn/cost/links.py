"""How long messages take: the alpha-beta model, and a fit to measurements.

A message of m bytes takes alpha + m / bandwidth seconds (Hockney, "The communication challenge
for MPP", Parallel Computing 20, 1994); alpha is the latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from pardnn.errors import UsageError


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link as measured.

    Attributes:
        latency: Seconds of an empty message.
        bandwidth: Bytes/s of a long one.
        error: Median of |predicted - measured| / measured over the measurements.
    """

    latency: float
    bandwidth: float
    error: float


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What a message between two ranks costs that compute between messages.

    The model is LogGP with each end's overhead explicit (Culler et al., "LogP: towards a
    realistic model of parallel computation", PPoPP 1993; Alexandrov et al., "LogGP", SPAA 1995):
    sender and receiver each give their own time, an overhead and a share per byte, and a receiver
    that sleeps takes some time to wake up. Between ranks of one machine there is no other latency.

    Attributes:
        idle: Of ranks that do nothing else: seconds from one to the other.
        sending: Own time of the sender; its `latency` is the overhead o.
        taking: Own time of the receiver once the message is there.
        posting: Seconds of the receiver's own for the buffer and the post.
        waking: Seconds from the end of a send until a receiver that slept goes on, without
            `taking`.
    """

    idle: LinkFit
    sending: LinkFit
    taking: LinkFit
    posting: float
    waking: float


def message_seconds(num_bytes: float | int, *, bandwidth: float, latency: float) -> float:
    """Seconds of one message of `num_bytes`.

    Args:
        num_bytes: Of the message.
        bandwidth: Of the link, bytes/s.
        latency: Of the link, seconds.
    """
    return latency + num_bytes / bandwidth


def fit_link(num_bytes: Sequence[float | int], seconds: Sequence[float]) -> LinkFit:
    """Fit latency and bandwidth to measured messages, robust against stray measurements.

    Minimises the sum of |relative error| by iteratively reweighted least squares: relative,
    because sizes span orders of magnitude; absolute value, because a busy machine delays single
    messages and delays are one-sided. A negative latency is set to 0 and the slope fitted again.

    Args:
        num_bytes: Of each message; at least two different sizes.
        seconds: Of each message, positive.

    Raises:
        UsageError: E232, if the measurements determine no link.
    """
    sizes = np.asarray(num_bytes, dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    _check_measurements(sizes, times)
    latency, slope = _least_absolute(np.stack([np.ones_like(sizes), sizes], axis=1), times)
    if latency < 0:
        latency, slope = 0.0, float(_least_absolute(sizes[:, None], times)[0])
    if slope <= 0:
        raise UsageError(
            "the measured times do not grow with the size of the messages "
            f"({sizes.min():.0f} to {sizes.max():.0f} bytes); measure longer messages.",
            code="E232",
        )
    error = float(np.median(np.abs(latency + slope * sizes - times) / times))
    return LinkFit(latency=float(latency), bandwidth=float(1 / slope), error=error)


def _check_measurements(sizes: ndarray, times: ndarray) -> None:
    well_formed = sizes.ndim == 1 and sizes.shape == times.shape
    if not well_formed or not (np.isfinite(sizes).all() and np.isfinite(times).all()):
        raise UsageError("sizes and times must be two equally long finite lists", code="E232")
    if len(np.unique(sizes)) < 2 or sizes.min() < 0 or times.min() <= 0:
        raise UsageError(
            "a link's fit needs messages of at least two different sizes and positive times; "
            f"there are {len(np.unique(sizes))} sizes.",
            code="E232",
        )


def _least_absolute(
    design: Float64[ndarray, "m p"], times: Float64[ndarray, " m"]
) -> Float64[ndarray, " p"]:
    """Coefficients that minimise sum |design @ x - times| / times. 60 rounds of O(m p**2)."""
    relative = design / times[:, None]
    scale = np.abs(relative).max(axis=0)  # columns differ by 1e9 in size
    relative = relative / scale
    weights = np.ones(len(times))
    x = np.zeros(design.shape[1])
    for _ in range(60):
        root = np.sqrt(weights)
        solution = cast("tuple[Any, ...]", np.linalg.lstsq(relative * root[:, None], root))
        x = np.array(solution[0], dtype=np.float64)
        weights = 1 / np.maximum(np.abs(relative @ x - 1), 1e-6)
    return x / scale

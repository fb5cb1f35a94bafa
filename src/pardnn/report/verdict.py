"""How a run compares with one device, in words."""

from __future__ import annotations

from pardnn.report.export.result import CodeResult
from pardnn.report.results import RunResult, StateDifference


def verdict(result: RunResult | CodeResult) -> list[str]:
    """Return how the losses compare with those of one device, if they were compared."""
    if result.verified is None:
        return []
    if result.tolerance == 0:
        same = "bitwise equal to" if result.largest_difference == 0 else "DIFFER from"
        return [f"losses {same} one device", *_state(result.state, is_cut=False)]
    within = (
        "equal to one device within" if result.verified else "DIFFER from one device by more than"
    )
    largest = result.largest_difference
    found = "no number" if largest is None else f"{largest:.2g}"
    how = f"{within} {result.tolerance:g} relative; the largest difference is {found}"
    how = f"losses {how} (sums are added in another order)"
    return [how, *_state(result.state, is_cut=True)]


def _state(state: StateDifference | None, *, is_cut: bool) -> list[str]:
    """Return how parameters, buffers and optimizer states compare with those of one device."""
    if state is None:
        return []
    what = f"parameters, buffers and optimizer states ({state.tensors} tensors)"
    if state.differing == 0:
        return [f"{what} bitwise equal to one device"]
    largest = state.largest_difference
    found = "no number" if largest is None else f"{largest:.2g} relative"
    verb = "differ" if is_cut else "DIFFER"
    return [
        (f"{what} {verb} in {state.differing}: the largest difference is {found}, in {state.worst}")
    ]

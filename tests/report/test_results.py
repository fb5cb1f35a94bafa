"""What the commands report, as JSON."""

import json
from typing import Any

from pydantic import TypeAdapter

from pardnn.report.results import RunResult, result_to_dict


def test_losses_that_are_no_numbers_are_null() -> None:
    """A step whose loss overflows is a result like any other; JSON has no NaN."""
    losses = (0.5, float("nan"), float("inf"))
    lists: dict[str, Any] = dict.fromkeys(
        ("step_s", "peak_bytes_predicted", "peak_bytes_measured", "limit_bytes"), ()
    )
    result = RunResult(
        losses=losses,
        reference_losses=losses,
        makespan_s=None,
        allowance_bytes=0,
        algorithm=None,
        **lists,
    )
    text = json.dumps(result_to_dict(result), allow_nan=False)
    found = TypeAdapter(RunResult).validate_json(text)
    assert found.losses == found.reference_losses == (0.5, None, None)

"""What the commands report, as JSON."""

import io
import json
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from pardnn.report.export.result import CodeResult
from pardnn.report.results import RunResult, result_to_dict
from pardnn.report.text import result_text, table


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


def test_a_result_with_lists_of_seconds_is_shown() -> None:
    """`pardnn code -o FOLDER` without `--run` ended as an internal error."""
    console = Console(file=io.StringIO(), width=80)
    console.print(result_text(CodeResult(files=("rank0.py",), step_s=(0.25, 1.5))))
    console.print(result_text(CodeResult(files=("rank0.py",))))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "rank0.py" in shown
    assert "250 ms" in shown
    assert "1.5 s" in shown


def test_names_keep_their_ends_on_a_narrow_terminal() -> None:
    """`explain --layers` showed three layers as `model.bloc…` on 80 columns."""
    console = Console(file=io.StringIO(), width=60)
    names = [f"model.blocks.{i}" for i in range(3)]
    console.print(
        table("", ("layer", *"abcdef"), [(name, *("1.50 MiB of it",) * 6) for name in names])
    )
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(name in shown for name in names)
    assert "…" not in shown

"""What the commands report, as JSON."""

import io
import json
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from pardnn.report.explained import LayerRow, LayersExplained
from pardnn.report.explained_text import explained_text
from pardnn.report.export.result import CodeResult, ExportResult
from pardnn.report.results import RunResult, StateDifference, result_to_dict
from pardnn.report.text import code_text, result_text, table


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
    assert "\\n" not in shown


def test_code_that_ran_is_shown_as_a_run_is() -> None:
    """`code --run --verify` said "verified True" of losses that were equal to rounding alone."""
    state = StateDifference(tensors=3, differing=2, largest_difference=1e-7, worst="w")
    result = CodeResult(
        losses=(0.5,), step_s=(0.25,), reference_losses=(0.5000001,), verified=True,
        tolerance=1e-4, largest_difference=2e-7, state=state,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    console.print(code_text(result))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "time (measured)" in shown
    assert "within 0.0001 relative; the largest difference is 2e-07" in shown
    assert "(3 tensors) differ in 2" in shown


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


def test_fields_of_text_begin_at_one_column() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(result_text(ExportResult(output="plan.dot", format="dot", bytes=2048)))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert [line[:12].rstrip() for line in shown.splitlines()] == [
        "output  plan", "format  dot", "bytes   2.00"
    ]  # fmt: skip


def shown_layers(*changes: tuple[str, float, int]) -> str:
    rows = tuple(
        LayerRow(
            name=name, ops=1, seconds=(1.0,), held_bytes=(8,), state_bytes=0, sent_bytes=0,
            half_makespan_s=4.0 + seconds, half_change_s=seconds, half_peak_bytes=(64 + num_bytes,),
        )
        for name, seconds, num_bytes in changes
    )  # fmt: skip
    found = LayersExplained(
        subject="layers", devices=("gpu:0",), makespan_s=4.0, peak_bytes=(64,),
        usable_bytes=(None,), rows=rows, notes=(),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    console.print(explained_text(found))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_layers_to_make_smaller_are_named_if_that_brings_something() -> None:
    text = shown_layers(("encoder", -0.5, 0), ("decoder", -0.25, -8))
    assert "for time, make encoder smaller" in text
    assert "for memory, decoder" in text
    text = shown_layers(("encoder", 0.0, 0), ("decoder", 0.25, 8))
    assert "smaller" not in text
    assert "for memory" not in text

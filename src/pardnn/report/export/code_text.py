"""The text about what `code` wrote, and how its steps went."""

from __future__ import annotations

from rich.console import Group, RenderableType

from pardnn.report.export.result import CodeResult
from pardnn.report.text import losses_table
from pardnn.report.verdict import verdict


def code_text(result: CodeResult) -> RenderableType:
    """Return the losses of code that ran, and how they compare with those of one device."""
    return Group(losses_table(result), *verdict(result))

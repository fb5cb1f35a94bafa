"""What `export` and `draw` report."""

from __future__ import annotations

from dataclasses import dataclass

from pardnn.report.results import STRICT


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What `export` and `draw` wrote."""

    __pydantic_config__ = STRICT

    output: str
    format: str
    bytes: int

"""JSON Schemas of every file and of every `--json` object, generated from the values themselves."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from pardnn.checkpoint.manifest import Manifest
from pardnn.cluster import Cluster
from pardnn.graph.file import GraphFile
from pardnn.plan.constraints import Constraints
from pardnn.plan.plan import Plan
from pardnn.plan.run_record import RunRecord
from pardnn.report import results
from pardnn.report.differences import DiffResult
from pardnn.report.explained import Explained
from pardnn.report.export.result import CodeResult, ExportResult
from pardnn.report.layout import LayoutResult
from pardnn.report.page.contents import Report, ReportResult

_VALUES: dict[str, Any] = {
    "pardnn.graph/1": GraphFile,
    "pardnn.cluster/1": Cluster,
    "pardnn.constraints/1": Constraints,
    "pardnn.plan/1": Plan,
    "pardnn.checkpoint/2": Manifest,
    "pardnn.run/1": RunRecord,
    "pardnn.report/1": Report,
    "capture": results.CaptureResult,
    "plan": results.PlanResult,
    "check": results.CheckResult,
    "simulate": results.SimulateResult,
    "compare": results.CompareResult,
    "estimate": results.EstimateResult,
    "run": results.RunResult,
    "max-batch": results.MaxBatchResult,
    "layout": LayoutResult,
    "report": ReportResult,
    "export": ExportResult,
    "draw": ExportResult,
    "code": CodeResult,
    "profile": results.ProfileResult,
    "profile --links": results.LinksResult,
    "profile --links, torchrun": results.RankLinksResult,
    "convert": results.ConvertResult,
    "checkpoint show": results.CheckpointResult,
    "checkpoint verify": results.CheckpointVerifyResult,
    "checkpoint export": results.CheckpointExportResult,
    "explain": Explained,
    "diff": DiffResult,
    "doctor": results.DoctorResult,
    "error": results.ErrorResult,
}


def json_schemas() -> dict[str, Any]:
    """Return the schemas by format name or command."""
    found = {name: TypeAdapter(kind).json_schema() for name, kind in _VALUES.items()}
    for kind in (GraphFile, Cluster):  # of the content, so no value holds it
        checksum = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
        found[kind.format]["properties"]["checksum"] = checksum
    return found

"""The table of what is described is computed from the descriptions."""

import json

from pardnn.shard.aten.coverage import coverage
from pardnn.shard.aten.lookup import described
from testbed import DATA

LISTS = json.loads((DATA / "aten_ops.json").read_text())


def test_all_ops_of_training_steps_are_described() -> None:
    assert [row.kind for row in coverage(LISTS["training"]) if row.description is None] == []


def test_ops_left_out_of_core_have_reasons() -> None:
    out = [row for row in coverage(LISTS["core"]) if row.description is None]
    assert len(out) == 9
    assert all(row.reason for row in out)
    assert all(row.source for row in coverage(LISTS["core"]) if row.description)


def test_coverage_says_why_an_operator_runs_whole() -> None:
    kinds = ["aten.nonzero.default", "aten.unique.default", "mylib::op.default"]
    reasons = {row.kind: row.reason for row in coverage(kinds)}
    assert "depends on the data" in (reasons[kinds[0]] or "")
    assert "depends on the data" in (reasons[kinds[1]] or "")
    assert reasons[kinds[2]] is None


def test_overloads_share_a_description_unless_they_have_their_own() -> None:
    rows = {r.kind: r.description for r in coverage(["aten.max.dim", "aten.add_.Tensor"])}
    assert rows == {"aten.max.dim": "aten.max.dim", "aten.add_.Tensor": "aten.add"}
    assert len(described()) > 300

"""Schedules of plans by pipeline recipes, loaded by torch.distributed.pipelining itself."""

import dataclasses
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pardnn.api.report import export
from pardnn.errors import UsageError
from pardnn.place.recipes.schedules import SCHEDULES
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import Plan
from tests.place.recipes.torch.test_pipeline import planned
from tests.place.recipes.torch.test_stages import captured

PIECES = 4


def loaded(path: Path, name: str) -> dict[int, list[str]]:
    """The actions of each rank, as torch's loader reads and checks them."""
    schedule = object.__new__(torch_schedules.PipelineScheduleMulti)
    schedule.__dict__ |= {
        "pp_group_size": 2,
        "_num_stages": 2 * SCHEDULES[name].chunks,
        "_n_microbatches": PIECES,
        "_stages": [],
        "pipeline_order": {},
    }
    schedule._load_csv(str(path))
    of_stage = {s: SCHEDULES[name].device_of(s, 2) for s in range(2 * SCHEDULES[name].chunks)}
    assert schedule.stage_index_to_group_rank == of_stage
    return {rank: [str(a) for a in row] for rank, row in schedule.pipeline_order.items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_loads_the_schedule_of_a_plan(name: str, tmp_path: Path) -> None:
    graph = captured("unet")
    plan, _ = planned(graph, name, pieces=PIECES)
    path = tmp_path / "schedule.csv"
    path.write_bytes(export(graph, plan, "pp-csv", costs="v100"))
    expected = SCHEDULES[name].rows(2, PIECES)
    assert loaded(path, name) == {
        rank: [f"{unit.stage}{unit.what}{unit.piece}" for unit in row]
        for rank, row in enumerate(expected)
    }


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_pipeline_of_submeshes_has_a_row_for_each(name: str, tmp_path: Path) -> None:
    """In torch each rank of a stage is in a pipeline of its own, all with the same rows."""
    graph = captured("unet")
    plan, _ = planned(graph, f"zero-1*{name}", pieces=PIECES, devices=4)
    path = tmp_path / "schedule.csv"
    path.write_bytes(export(graph, plan, "pp-csv", costs="v100"))
    assert {rank: len(row) for rank, row in loaded(path, name).items()} == {
        rank: len(row) for rank, row in enumerate(SCHEDULES[name].rows(2, PIECES))
    }
    assert "by zero-1*gpipe was changed" in refusal(
        dataclasses.replace(plan, algorithm="zero-1*gpipe")
    )
    assert "by zero-1*heft is not" in refusal(dataclasses.replace(plan, algorithm="zero-1*heft"))


def test_where_devices_are_stages_costs_need_not_be_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = captured("unet")
    one, two = (planned(graph, name, pieces=PIECES)[0] for name in ("zero-bubble-h1", "zb-v"))
    monkeypatch.setattr("pardnn.place.recipes.pipeline.staged", lambda *_: iter(()))
    assert export(graph, one, "pp-csv", costs="k80").startswith(b"0F0,")
    assert "by zb-v was changed, or made with other --costs" in refusal(two)


def refusal(plan: Plan) -> str:
    with pytest.raises(UsageError) as caught:
        export(captured("unet"), plan, "pp-csv", costs="v100")
    assert caught.value.code == "E244"
    return str(caught.value)


def test_plans_that_are_no_pipeline_are_refused_by_name() -> None:
    plan, _ = planned(captured("unet"), "heft", pieces=PIECES)
    assert "by heft is not a pipeline" in refusal(plan)
    assert "--algorithm gpipe|1f1b" in refusal(plan)
    assert "by gpipe was changed" in refusal(dataclasses.replace(plan, algorithm="gpipe"))


def test_a_plan_in_another_order_than_its_schedules_is_refused() -> None:
    graph = captured("unet")
    plan, _ = planned(graph, "1f1b", pieces=PIECES)
    other = dataclasses.replace(plan, algorithm="gpipe")
    assert plan_problems(graph, other) == []
    assert "was changed" in refusal(other)

"""Unit orders beside those of torch.distributed.pipelining, which are made without any process."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pardnn.errors import UsageError
from pardnn.place.recipes.schedules import SCHEDULES, Unit

NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zero-bubble-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
SIZES = [(1, 2), (2, 4), (2, 5), (3, 7), (4, 8), (4, 10), (4, 16), (5, 11), (8, 16), (8, 32)]


def of_torch(name: str, devices: int, pieces: int) -> list[list[Unit]]:
    """The rows of torch's own schedule, as its class computes them before anything runs."""
    kind = getattr(torch_schedules, NAMES[name])
    schedule = object.__new__(kind)
    schedule.__dict__ |= {
        "_n_microbatches": pieces,
        "_num_stages": devices * SCHEDULES[name].chunks,
        "num_stages": devices * SCHEDULES[name].chunks,
        "pp_group_size": devices,
        "n_local_stages": SCHEDULES[name].chunks,
        "microbatches_per_round": pieces // max(1, pieces // devices),
    }
    if name in ("gpipe", "1f1b"):
        order = schedule._get_pipeline_order()
    else:
        order = {d: schedule._calculate_single_rank_operations(d) for d in range(devices)}
    return [[unit for action in order[d] for unit in units(action)] for d in range(devices)]


def units(action: Any) -> list[Unit]:
    if action is None or str(action.computation_type.value) == "REDUCE_GRAD":
        return []
    if action.sub_actions:
        return [unit for one in action.sub_actions for unit in units(one)]
    return [Unit(action.computation_type.value, action.stage_index, action.microbatch_index)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "pieces"), SIZES)
def test_units_come_in_the_order_of_torchs_schedules(name: str, devices: int, pieces: int) -> None:
    is_divided = pieces % max(1, pieces // devices) == 0
    if (name == "interleaved-1f1b" and not is_divided) or (
        name == "dualpipe-v" and pieces < 2 * devices
    ):
        pytest.skip("torch refuses this number of microbatches")
    expected = of_torch(name, devices, pieces)
    if name == "1f1b":  # torch's table counts the last device's forward passes from 1 on
        expected[-1] = [u._replace(piece=u.piece - (u.what == "F")) for u in expected[-1]]
    assert SCHEDULES[name].rows(devices, pieces) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("devices", "pieces"), [*SIZES, (3, 1), (4, 3), (4, 9), (6, 13)])
def test_each_pass_runs_once_and_nobody_waits_for_ever(
    name: str, devices: int, pieces: int
) -> None:
    schedule = SCHEDULES[name]
    if name == "dualpipe-v" and pieces < 2 * devices:
        with pytest.raises(UsageError, match="--microbatches"):
            schedule.rows(devices, pieces)
        return
    rows = schedule.rows(devices, pieces)
    last = devices * schedule.chunks - 1
    left, done = [list(row) for row in rows], set[tuple[str, int, int]]()

    def may_run(unit: Unit) -> bool:
        what, s, i = unit
        if what == "F":
            return s == 0 or ("F", s - 1, i) in done
        if what == "W":
            return ("I", s, i) in done
        return ("F", s, i) in done and (s == last or ("I", s + 1, i) in done)

    moved = True
    while moved:
        moved = False
        for d, row in enumerate(left):
            while row and may_run(row[0]):
                unit = row.pop(0)
                parts = ("I", "W") if unit.what == "B" else (unit.what,)
                assert schedule.device_of(unit.stage, devices) == d
                for part in parts:
                    assert (part, unit.stage, unit.piece) not in done
                    done.add((part, unit.stage, unit.piece))
                moved = True
    assert not any(left)
    assert len(done) == 3 * (last + 1) * pieces

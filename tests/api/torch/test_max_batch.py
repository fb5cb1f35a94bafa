"""max-batch on captured steps: its answer fits, the next size does not."""

import json
from pathlib import Path
from typing import Any

import pytest

from pardnn.api.batch_scaling import family_of, graph_at
from pardnn.backends.torch.capture.capture import capture
from pardnn.cli import main
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from tests.backends.torch import entry_points, models

ENTRY = str(Path(entry_points.__file__).resolve())


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as end:
        main.main([*arguments, "--json"])
    return int(str(end.value.code)), json.loads(capsys.readouterr().out)


def _fits(batch_size: int, memory: str) -> bool:
    step, args = entry_points.training(batch_size=batch_size)
    graph = capture(step, *args)
    cluster = Cluster.uniform(2, memory=memory)
    costs = costs_for(graph, cluster, "v100")
    try:
        make_plan(Problem(graph, cluster, costs, PlanOptions(algorithm="pardnn", reserve=0.0)))
    except InfeasibleError:
        return False
    return True


def test_the_answer_fits_and_the_next_size_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _run(
        capsys, "max-batch", f"{ENTRY}:training", "--devices", "2", "--max-memory", "40KiB",
        "--algorithm", "pardnn", "--reserve", "0", "--costs", "v100",
    )  # fmt: skip
    assert status == 0
    assert found["batch_size"] > 4
    assert max(found["peak_bytes"]) <= 40 * 1024
    assert found["makespan_s"] > 0
    assert _fits(found["batch_size"], "40KiB")
    assert not _fits(found["batch_size"] + found["step"], "40KiB")
    assert sum(tried["captured"] for tried in found["tried"]) <= 6


def test_the_answer_meets_constraints(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = _run(
        capsys, "max-batch", f"{ENTRY}:training", "--devices", "2", "--max-memory", "40KiB",
        "--algorithm", "heft", "--costs", "v100", "--forbid", "0",
    )  # fmt: skip
    assert status == 0
    assert found["peak_bytes"][0] == 0 < found["peak_bytes"][1]


def test_the_answer_of_a_cut_inside_submeshes_is_of_captures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = _run(
        capsys, "max-batch", f"{ENTRY}:training", "--devices", "4", "--max-memory", "20KiB",
        "--algorithm", "tofu*heft", "--costs", "v100",
    )  # fmt: skip
    assert (status, found["algorithm"]) == (0, "tofu*heft")
    assert all(tried["captured"] for tried in found["tried"])


def test_an_entry_point_without_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    entry = f"{ENTRY}:leaving_while_building"
    status, found = _run(capsys, "max-batch", entry, "--devices", "2", "--max-memory", "1MiB")
    assert status == 2
    assert found["error"]["code"] == "E223"


def _resnet(batch_size: int) -> Any:
    import torch

    step, (model, optimizer, _, _) = models.resnet()
    x, y = torch.randn(batch_size, 3, 8, 8), torch.randint(10, (batch_size,))
    return capture(step, model, optimizer, x, y)


@pytest.mark.long
def test_predicted_sizes_are_captured_sizes() -> None:
    low, high, real = map(_resnet, (2, 4, 7))
    family = family_of(low, 2, high, 4)
    assert family is not None
    found = graph_at(family, 7)
    assert found.ops == real.ops
    assert found.arrays.tensor_bytes.tolist() == real.arrays.tensor_bytes.tolist()


@pytest.mark.parametrize(("algorithm", "size"), [("heft", 4096), ("tofu*heft", 64)])
def test_where_nothing_fits_a_smaller_batch_is_named(
    algorithm: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--devices", "4", "--max-memory", "40KiB", "--algorithm", algorithm, "--reserve",
               "0", "--costs", "v100"]  # fmt: skip
    entry = f"{ENTRY}:training"
    status, found = _run(capsys, "plan", entry, *options, "--batch-size", str(size))
    assert status == 3
    advised = [line for line in found["error"]["details"]["try"] if "--batch-size" in line]
    assert len(advised) == 1
    assert advised[0] in found["error"]["message"]
    assert 4 < int(advised[0].split()[1]) < size
    status, found = _run(capsys, "plan", entry, *options, *advised[0].split())
    assert status == 0


@pytest.mark.long
def test_of_a_graph_file_the_command_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "g.json")
    assert _run(capsys, "capture", f"{ENTRY}:training", "-o", file)[0] == 0
    status, found = _run(
        capsys, "plan", file, "--devices", "2", "--max-memory", "1KiB", "--costs", "v100"
    )
    assert status == 3
    assert "pardnn max-batch FILE.py:FUNCTION" in found["error"]["message"]

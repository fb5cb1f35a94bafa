"""`exact` with a solver that crashes or hangs: a plan all the same, and no process left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pardnn import solvers
from pardnn.cost.costs import graph_costs
from pardnn.errors import StuckError
from pardnn.place.baselines.exact import place_exact, proof
from pardnn.place.baselines.single import place_single
from pardnn.place.decision import Decision
from pardnn.planner.algorithms import AUTO_SMALL
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio
from pardnn.planner.search.portfolio import decide_best
from testbed.hand_graphs import pipeline, pipeline_cluster
from tests.long_cases import long_but

pytestmark = pytest.mark.jit  # whole runs of planning

HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)\n"


def problem(time_limit: float) -> Problem:
    graph, options = pipeline(2, 2), PlanOptions(algorithm="exact", time_limit=time_limit)
    return Problem(graph, pipeline_cluster(2, 3), graph_costs(graph), options)


@pytest.mark.parametrize(
    ("solver", "told"),
    [
        *long_but(
            (),
            [
                (
                    "import os; os._exit(139)\n",
                    "exact: the solver 'cp' failed with exit status 139",
                ),
            ],
        ),
        ("import os; os.kill(os.getpid(), 11)\n", "exact: the solver 'cp' failed"),
        (HANGS, "exact: the solver 'cp' did not answer within 0."),
    ],
)
def test_a_solver_that_fails_leaves_the_best_of_the_others(
    solver: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("pardnn.place.baselines.exact.GRACE_S", 0.1)
    (tmp_path / "ortools.py").write_text(solver)
    limit = 0.1 if solver == HANGS else 60.0
    _, result = make_plan(problem(limit))
    assert result.algorithm == "exact"
    assert result.makespan_s <= 8.0
    assert told in result.notes[0]
    assert "; this is the best plan of the other algorithms" in result.notes[0]


def test_auto_names_a_solver_that_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "highspy.py").write_text("import os; os._exit(139)\n")
    found = decide_best(problem(60.0), ["single"], solvers=["m-sct"])
    assert found.algorithm == "single"
    assert "m-sct was not considered: the solver 'lp' failed with exit status 139" in found.notes[0]


def test_no_solver_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    (tmp_path / "ortools.py").write_text(
        f"import os, pathlib\npathlib.Path({str(said)!r}).write_text(str(os.getpid()))\n{HANGS}"
    )
    root = str(Path(solvers.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    code = "from pardnn import solvers; solvers.ask('cp', {}, seconds=60, extra='exact')"
    with subprocess.Popen([sys.executable, "-c", code], env=env) as parent:
        solver = int(waited_for(lambda: said.exists() and said.read_text()))
        parent.kill()
    waited_for(lambda: not is_running(solver))


def waited_for(what):
    for _ in range(600):
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("waited for nothing")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_time_limit_holds_for_model_and_solver_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def ask(_, problem, *, seconds, **__):
        asked.append((problem["until"] - time.monotonic(), seconds))
        return {"status": "UNKNOWN"}

    monkeypatch.setattr("pardnn.place.baselines.exact.ask", ask)
    small = problem(3.0)
    with pytest.raises(StuckError, match="nothing in 3 s"):
        place_exact(small.graph, small.machine, small.capacities, time_limit=3.0)
    [(left, seconds)] = asked
    assert 2.0 < left <= 3.0 < seconds < 6.0


@pytest.mark.parametrize(("limit", "best"), [(1, 15.0), (2, 10.0), (3, 10.0)])
def test_it_is_optimal_under_limits(limit: int, best: float, monkeypatch) -> None:
    cp = pytest.importorskip("pardnn.solvers.cp", exc_type=ImportError)
    monkeypatch.setattr(
        "pardnn.place.baselines.exact.ask", lambda _, problem, **__: cp.solve(problem)
    )
    # Residual bytes alone were bounded: with 2 it found 11 and called it best.
    graph, cluster = pipeline(2, 3), pipeline_cluster(2, limit)
    options = PlanOptions(algorithm="exact", reserve=0.0)
    _, result = make_plan(Problem(graph, cluster, graph_costs(graph), options))
    assert result.makespan_s == best
    assert result.lower_bound_s == pytest.approx(best)
    assert "exact: proven optimal" in result.notes


def test_what_is_not_proven_states_its_gap() -> None:
    assert proof(1.1, 1.0) == (
        "exact: at most 10 % above the optimum, which takes 1 s or more; not proven optimal"
    )
    assert proof(1.0 + 1e-12, 1.0) == "exact: proven optimal"
    assert proof(1.0, 0.0) == "exact: not proven optimal"


def test_a_solver_that_proves_nothing_is_no_slower_than_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def slow(graph, machine, capacities, *, seed: int, time_limit: float) -> Decision:
        asked.append(time_limit)
        return place_single(graph, machine, capacities, seed=seed)._replace(lower_bound_s=6.5)

    monkeypatch.setattr(portfolio, "place_exact", slow)
    _, result = make_plan(problem(60.0))
    others = decide_best(problem(60.0), AUTO_SMALL, polish=True)
    alone = decide_best(problem(60.0), ["single"]).makespan_s
    assert asked == [45.0]
    assert result.makespan_s == others.makespan_s < alone
    assert "the solver's best plan is slower" in result.notes[0]
    assert result.notes[1] == proof(result.makespan_s, 6.5)
    assert result.lower_bound_s == 6.5

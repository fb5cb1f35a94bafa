"""Interrupts at any moment, and threads that outlive a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pardnn
from pardnn.backends import entry_point
from pardnn.backends.entry_point import load_factory
from pardnn.cli import main as command_line
from pardnn.cost.costs import graph_costs
from pardnn.graph.file import read_graph
from pardnn.plan.file import read_plan
from pardnn.planner.make_plan import make_plan
from pardnn.planner.microbatches import decide as microbatched
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio

#: Two modules that the command line loads send the interrupt, and one later turns it into an error.
WHILE_LOADING = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["pardnn", "plan", {graph!r}, "--devices", "2", *{more!r}]
runpy.run_module("pardnn", run_name="__main__")
"""
THREAD = """
import sys, threading, time
from pardnn import __main__
from pardnn.cli import main
__main__.THREADS_S = 0.1
main.main = lambda: (threading.Thread(target=time.sleep, args=(60,)).start(), sys.exit(3))
__main__.main()
"""
FROZEN = """
import atexit, gc, sys
from pardnn import __main__
from pardnn.cli import main
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
main.main = lambda: sys.exit({status})
__main__.main()
"""


def run_python(text: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(pardnn.__file__).resolve().parents[1])}

    def heeding() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=60,
        preexec_fn=heeding, check=False,
    )  # fmt: skip


def test_an_interrupt_while_a_dataclass_is_made_ends_with_130(tmp_path: Path) -> None:
    """`python -m` ended by SIGINT itself, which callers see as -2."""
    text = "from pardnn import __main__\nfrom pardnn.cli import main\n"
    text += "main.main = lambda: exec('raise KeyboardInterrupt')\n__main__.main()\n"
    (tmp_path / "interrupted.py").write_text(text)
    source = str(Path(pardnn.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], env=os.environ | {"PYTHONPATH": source},
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("status", [0, 7])
def test_the_end_of_a_command_collects_no_garbage(status: int) -> None:
    done = run_python(FROZEN.format(status=status))
    assert (done.returncode, done.stdout) == (status, "True\n")


@pytest.mark.parametrize("error", ["MemoryError", "SystemError"])
def test_no_room_to_tell_of_an_error_is_said(error: str) -> None:
    text = "from pardnn import __main__\nfrom pardnn.cli import main\n"
    text += f"def main_(): raise {error}\nmain.main = main_\n__main__.main()\n"
    done = run_python(text)
    assert (done.returncode, done.stderr.split()[0], done.stderr.count("\n")) == (4, "E413", 1)


@pytest.mark.parametrize(
    ("module", "more"),
    [("typer", []), ("typer", ["--json"]), ("pardnn.place.polish.polish", []),
     pytest.param("pardnn.place.polish.polish", ["--json"], marks=pytest.mark.long)],
)  # fmt: skip
def test_an_interrupted_start_leaves_no_traceback(module: str, more: list[str], tiny: Path) -> None:
    graph = str(tiny / "graph.json")
    done = run_python(WHILE_LOADING.format(module=module, graph=graph, more=more))
    assert done.returncode == 130
    assert done.stderr == ""
    if not more:
        assert done.stdout == ""
        return
    error = json.loads(done.stdout)["error"]
    assert error == {"code": "E130", "exit": 130, "message": "interrupted", "details": {}}


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_interrupt_with_json_prints_one_object(
    wrapped: bool, run_json: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what was interrupted raises something else, as imports of extensions do."""

    def interrupted(*_: Any, **__: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            if wrapped:
                raise ImportError("numpy could not be loaded") from None
            raise

    monkeypatch.setattr(command_line, "app", interrupted)
    status, found = run_json("plan", tiny / "graph.json")
    assert status == 130
    assert found["error"]["code"] == "E130"
    assert found["error"]["exit"] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_search_and_keeps_the_best_plan(
    number: int, run: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, calls = portfolio.decide, iter(range(100))

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 6:
            os.kill(os.getpid(), number)
            time.sleep(5)
        return decide(*arguments, **options)

    monkeypatch.setattr(portfolio, "decide", interrupted)
    plan_file, graph_file = tmp_path / "p.json", tiny / "graph.json"
    found = run("plan", graph_file, "--devices", 2, "--bandwidth", "1GB/s", "-o", plan_file)
    if number == signal.SIGTERM:
        assert found[0] == 130
        assert not plan_file.exists()
        return
    assert found[0] == 0, found
    assert "interrupted after" in found[1]
    assert run("check", plan_file, "--graph", graph_file)[0] == 0
    tried = {each.algorithm: each.makespan_s for each in read_plan(plan_file).tried}
    assert len(tried) == 6
    assert json.loads(plan_file.read_text())["predicted"]["makespan_s"] == min(
        filter(None, tried.values())
    )


def test_an_interrupt_keeps_the_best_of_all_parts_of_a_search(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What local search improved, and what was better than the part in hand."""
    cluster = pardnn.Cluster.uniform(2, memory=None, bandwidth=1e9)
    graph = read_graph(tiny / "graph.json")
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions())
    best, worse = portfolio.decide(problem, "heft"), portfolio.decide(problem, "single")
    assert best.makespan_s < worse.makespan_s
    for part in (best, worse):
        microbatched._fastest(problem, [lambda part=part: part])
    assert problem.log.best is best

    monkeypatch.setattr(portfolio, "polished", lambda *_: best)
    monkeypatch.setattr(portfolio, "lower_bound_seconds", lambda *_: 0.0)
    fresh = Problem(graph, cluster, graph_costs(graph), PlanOptions())
    portfolio.decide_best(fresh, ["single"], polish=True)
    assert fresh.log.best is best


def test_who_watches_sees_the_search(tiny: Path) -> None:
    lines: list[tuple[str, int, float | None]] = []
    cluster = pardnn.Cluster.uniform(2, memory=None, bandwidth=1e9)
    graph = read_graph(tiny / "graph.json")
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions())
    plan, _ = make_plan(problem, lambda *line: lines.append(line))
    assert [line[0] for line in lines][:2] == [each.algorithm for each in plan.tried][:2]
    assert [line[1] for line in lines] == sorted(line[1] for line in lines)
    assert lines[0][2] is None
    assert lines[-1][2] == min(each.makespan_s for each in plan.tried if each.makespan_s)


def test_a_thread_of_the_users_does_not_keep_the_command_alive() -> None:
    start = time.monotonic()
    done = run_python(THREAD)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - start < 30


def test_a_function_that_does_not_return_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry_point, "NOTICE_S", 0.05)
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef build():\n    time.sleep(0.3)\n    return 1\n")
    assert load_factory(f"{path}:build")() == 1
    assert f"your function that builds the model runs for 0 s, at {path}:3" in caplog.messages

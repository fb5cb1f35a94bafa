"""The command line: JSON objects, exit codes, files, errors that teach."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pardnn
from pardnn.api.schemas import json_schemas
from pardnn.cli.main import _heed_interrupts
from pardnn.graph.file import read_graph, write_graph
from pardnn.plan.file import read_plan
from pardnn.plan.state_layout import state_layout
from pardnn.sim.peak import one_device_peak
from tests.strategies import random_graph

Run = Any
# With kernels as plain Python, the search for a limit that fits takes half a minute.
pytestmark = pytest.mark.jit


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--devices", "100000"], "E201", "at most 1024 devices"),
        (["--devices", "2", "--max-memory", "1e30GiB"], "E202", "too large"),
        (["--devices", "2", "--time-limit", "nan"], "E201", "it must be from 0"),
        (["--devices", "2", "--time-limit", "-1"], "E201", "it must be from 0"),
        (["--cluster", "dgx-w100:4"], "E403", "no preset of that name"),
        (["--devices", "2", "--pin", "x"], "E201", "--pin 'x': write NAME=DEVICE[,DEVICE]."),
        (["--devices", "2", "--pin", "x="], "E201", "--pin 'x=': write NAME=DEVICE[,DEVICE]."),
        (["--devices", "2", "--prefer", "x@1ms"], "E201", "write NAME=DEVICE[,DEVICE]@TIME."),
        (["--devices", "2", "--forbid", ""], "E201", "--forbid '': write [NAME=]DEVICE"),
        (["--devices", "2", "-o", "nowhere/p.json"], "E405", "nowhere/p.json"),
        (["--devices", "2", "-o", "."], "E405", "Is a directory"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(run, arguments, code, said):
    _, out, _ = run("plan", "no-such-graph.json", *arguments, "--json")
    error = json.loads(out)["error"]
    assert error["code"] == code
    assert said in error["message"]


def test_plan_check_simulate_agree(run_json: Run, tiny: Path, tmp_path: Path) -> None:
    graph, plan = tiny / "graph.json", tmp_path / "plan.json"
    cluster = tiny / "cluster.json"
    status, made = run_json("plan", graph, "--cluster", cluster, "--reserve", 0, "-o", plan)
    assert status == 0
    assert made["makespan_s"] >= made["lower_bound_s"] > 0
    assert made["gap"] == pytest.approx(made["makespan_s"] / made["lower_bound_s"] - 1)
    assert made["serial_s"] == pytest.approx(0.008)
    assert made["capacity_bytes"] == [3000, 3000]
    assert all(p <= 3000 for p in made["peak_bytes"])
    assert run_json("check", plan, "--graph", graph) == (0, {"valid": True, "problems": []})
    status, judged = run_json("simulate", plan, "--graph", graph)
    assert status == 0
    assert judged["policy"] == "order"
    for key in ("makespan_s", "peak_bytes", "busy_s", "transfer_bytes"):
        assert judged[key] == made[key]
    for policy in ("fifo", "priority"):
        assert run_json("simulate", plan, "--graph", graph, "--policy", policy)[0] == 0


def test_the_worked_plan_is_valid_and_judged(run_json: Run, tiny: Path) -> None:
    arguments = (tiny / "plan.json", "--graph", tiny / "graph.json")
    assert run_json("check", *arguments)[0] == 0
    status, judged = run_json("simulate", *arguments, "--cluster", tiny / "cluster.json")
    assert status == 0
    assert judged["makespan_s"] == pytest.approx(0.0084, abs=1e-15)
    assert judged["peak_bytes"] == [2800, 1250]
    status, failed = run_json("simulate", *arguments)
    assert status == 2
    assert failed["error"]["code"] == "E212"


def test_same_input_same_bytes(run: Run, tiny: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run("plan", tiny / "graph.json", "--devices", 2, "-o", tmp_path / name)[0] == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    text = (tmp_path / "a").read_text()
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text


def test_plans_have_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Whatever the seed of hashes and the number of threads."""
    graph = random_graph(3, 60, "transformer")
    write_graph(graph, tmp_path / "g.json")
    limit = f"{int(one_device_peak(graph.arrays) * 0.8)}B"
    options = ("--devices", "3", "--max-memory", limit, "--bandwidth", "1GB/s", "-o")
    for number in ("1", "2"):
        words = ("plan", tmp_path / "g.json", *options, tmp_path / number)
        settings = dict.fromkeys(("PYTHONHASHSEED", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), number)
        subprocess.run(
            [sys.executable, "-m", "pardnn", *words], env=os.environ | settings, check=True
        )
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_plan_keeps_the_state_of_another(run_json: Run, tiny: Path, tmp_path: Path) -> None:
    graph, old, new = tiny / "graph.json", tmp_path / "old.json", tmp_path / "new.json"
    options = (graph, "--devices", 2, "--algorithm", "auto-whole")
    assert run_json("plan", *options, "--algorithm", "round-robin", "-o", old)[0] == 0
    keep = ("--keep-state", graph, old)
    assert run_json("plan", *options, *keep, "-o", new)[0] == 0
    there, here = (state_layout(read_graph(graph), read_plan(plan)) for plan in (old, new))
    assert here == there
    assert there
    status, found = run_json("plan", *options, *keep, "--max-memory", "100B")
    assert (status, found["error"]["code"]) == (3, "E301")
    data = json.loads(graph.read_text())
    data["ops"][5]["workspace"] = 7
    (tmp_path / "g.json").write_text(json.dumps(data))
    status, found = run_json("plan", *options, "--keep-state", tmp_path / "g.json", old)
    assert (status, found["error"]["code"]) == (5, "E503")


def test_an_invalid_plan_exits_4(run_json: Run, tiny: Path, tmp_path: Path) -> None:
    data = json.loads((tiny / "plan.json").read_text())
    data["messages"] = data["messages"][:1]
    (tmp_path / "p.json").write_text(json.dumps(data))
    status, found = run_json("check", tmp_path / "p.json", "--graph", tiny / "graph.json")
    assert status == 4
    assert not found["valid"]
    assert "not sent" in found["problems"][0]


def test_a_plan_of_another_graph_exits_5(run_json: Run, tiny: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run_json("plan", tiny / "graph.json", "--devices", 2, "-o", plan)[0] == 0
    data = json.loads((tiny / "graph.json").read_text())
    data["ops"][5]["workspace"] = 7
    (tmp_path / "g.json").write_text(json.dumps(data))
    status, found = run_json("check", plan, "--graph", tmp_path / "g.json")
    assert status == 5
    assert found["error"]["details"]["changed"] == ["b"]


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["plan", "{g}"], 2, "E205"),
        (["plan", "{g}", "--devices", "0"], 2, "E201"),
        (["plan", "{g}", "--devices", "two"], 2, "E200"),
        (["plan", "{g}", "--devices", "2", "--max-memory", "10Gb"], 2, "E202"),
        (["plan", "{g}", "--devices", "2", "--max-memory", "0B"], 2, "E202"),
        (["plan", "{g}", "--devices", "2", "--max-memory", "1GiB,1GiB,1GiB"], 2, "E203"),
        (["plan", "{g}", "--devices", "2", "--bandwidth", "3"], 2, "E201"),
        (["plan", "{g}", "--devices", "2", "--links", "fast"], 2, "E201"),
        (["plan", "{g}", "--devices", "2", "--cluster", "cpu"], 2, "E205"),
        (["plan", "{g}", "--cluster", "dgx-v100:x"], 2, "E205"),
        (["plan", "{g}", "--cluster", "dgx-v100:2", "--max-memory", "1KiB"], 3, "E301"),
        (["plan", "{g}", "--cluster", "dgx-v100:2", "--max-memory", "1GiB,1GiB,1GiB"], 2, "E203"),
        (["plan", "{g}", "--devices", "2", "--algorithm", "magic"], 2, "E210"),
        (["plan", "{g}", "--devices", "2", "--reserve", "1"], 2, "E211"),
        (["plan", "{g}", "--devices", "2", "--objective", "fun"], 2, "E201"),
        (
            ["plan", "{g}", "--devices", "2", "--objective", "bytes", "--algorithm", "heft"],
            2,
            "E201",
        ),
        (["plan", "none.py:f", "--devices", "2"], 2, "E221"),
        (["plan", "none.json", "--devices", "2"], 4, "E403"),
        (["plan", "{g}", "--cluster", "none.json"], 4, "E403"),
        (["plan", "{g}", "--devices", "2", "-o", "/no/such/folder/p.json"], 4, "E405"),
        (["plan", "{g}", "--devices", "2", "--max-memory", "1KiB"], 3, "E301"),
        (["plan"], 2, "E200"),
        (["nothing"], 2, "E200"),
        (["profile"], 2, "E201"),
        (["simulate", "{p}", "--graph", "{g}", "--policy", "x"], 2, "E201"),
        (["simulate", "{p}", "--graph", "{g}", "--bandwidth", "1GB/s"], 2, "E206"),
        (["plan", "{g}", "--devices", "2", "--batch-size", "8"], 2, "E206"),
        (["run", "m.py:f", "--plan", "{p}", "--algorithm", "auto-whole"], 2, "E206"),
        (["run", "m.py:f", "--plan", "{p}", "--max-memory", "1MiB"], 2, "E206"),
        (["convert", "{p}", "x.txt", "--graph", "{g}", "--links", "serial"], 2, "E206"),
        (["code", "{p}", "--graph", "{g}", "--rank", "0", "--verify"], 2, "E206"),
        (["profile", "--links", "--batch-size", "3"], 2, "E206"),
        (["explain", "{p}", "--graph", "{g}", "a", "--algorithm", "heft"], 2, "E206"),
        (["draw", "{p}", "--graph", "{g}", "-o", "p.png"], 2, "E201"),
        (["layout", "{p}", "--graph", "{g}", "-o", "p.PDF"], 2, "E201"),
    ],
)
def test_failures(
    run: Run, tiny: Path, arguments: list[str], status: int, code: str, monkeypatch
) -> None:
    monkeypatch.setattr("pardnn.api.advice.CHEAP_OPS", 0)  # pieces would be tried for seconds
    filled = [a.format(g=tiny / "graph.json", p=tiny / "plan.json") for a in arguments]
    found, out, err = run(*filled)
    assert found == status
    assert err.startswith(code)
    assert "Traceback" not in out + err
    found, out, err = run(*filled, "--json")
    assert found == status
    error = json.loads(out)["error"]
    assert (error["code"], error["exit"]) == (code, status)
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["{g}", "--algorithm", "pardn"], "Did you mean 'pardnn'"),
        (["{g}", "--algorithm", "ParDNN"], "Did you mean 'pardnn'"),
        (["{g}", "--algorithm", "tofu*heft2"], r"no algorithm 'tofu\*heft2'"),
        (["{g}", "--algoritm", "auto"], "--algorithm"),
        (["{m}"], "FILE.py:FUNCTION.*\n.*Functions of this file: training"),
        (["{m}:"], "Functions of this file: training"),
        (["{m}:trainin"], "Did you mean 'training'"),
    ],
)
def test_a_slip_is_told_what_it_is_close_to(
    run: Run, tiny: Path, tmp_path: Path, arguments: list[str], hint: str
) -> None:
    module = tmp_path / "m.py"
    module.write_text("def training():\n    pass\n")
    filled = [a.format(g=tiny / "graph.json", m=module) for a in arguments]
    status, _, err = run("plan", *filled, "--devices", "2")
    assert status == 2
    assert re.search(hint, err)


def test_a_file_that_is_no_python_shows_its_line_and_none_of_ours(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(:\n")
    status, _, err = run("plan", f"{tmp_path / 'm.py'}:f", "--devices", "2")
    assert status == 1
    assert "def f(:" in err
    assert "Traceback" not in err


def test_what_does_not_fit_says_what_was_tried(run_json: Run, tiny: Path) -> None:
    arguments = ("plan", tiny / "graph.json", "--devices", 2, "--reserve", 0, "--max-memory")
    status, found = run_json(*arguments, "1500B")
    assert status == 3
    tried = found["error"]["details"]["try"]
    limit = next(option for option in tried if option.startswith("--max-memory")).split()[1]
    assert run_json(*arguments, limit)[0] == 0


def test_compare_and_estimate(run_json: Run, tiny: Path) -> None:
    graph = tiny / "graph.json"
    status, found = run_json(
        "compare", graph, "--devices", 2, "--max-memory", "3KB", "--reserve", 0
    )
    assert status == 0
    for row in found["rows"]:
        assert row["fits"] == (row["error"] is None) == (row["makespan_s"] is not None)
    status, found = run_json("compare", graph, "--devices", 2, "--max-memory", "1KB", "--baselines")
    assert status == 3
    assert not any(row["fits"] for row in found["rows"] if not row["estimated"])
    pinned = ("--forbid", 0, "--algorithms", "single,round-robin")
    status, found = run_json("compare", graph, "--devices", 2, *pinned)
    assert status == 0
    assert all(row["peak_bytes"][0] == 0 < row["peak_bytes"][1] for row in found["rows"])
    estimated = ("--algorithms", "single", "--baselines")
    status, found = run_json("compare", graph, "--devices", 2, *estimated)
    assert [row["algorithm"] for row in found["rows"]] == [
        "single", "ideal", "small-batch", "swapping",
    ]  # fmt: skip
    assert [row["estimated"] for row in found["rows"]] == [False, True, True, True]
    assert found["rows"][1]["makespan_s"] == pytest.approx(found["rows"][0]["makespan_s"] / 2)
    status, found = run_json("estimate", graph, "--devices", 1, "--max-memory", "2KB")
    assert status == 3
    assert not found["fits"]
    # w and c are added in place: their bytes, and x and h are gone by then.
    assert found["largest_op"] == {"name": "b", "bytes": 1250, "source": None} or (
        found["largest_op"]["bytes"] >= 1250
    )
    least = found["minimum_bytes"]
    assert run_json("plan", graph, "--devices", 1, "--max-memory", f"{least}B")[0] == 0
    assert sum(found["by_kind"].values()) == max(found["peak_bytes"])


def test_convert_there_and_back(run_json: Run, tiny: Path, tmp_path: Path) -> None:
    graph, lines, plan = tiny / "graph.json", tmp_path / "p.txt", tmp_path / "p.json"
    assert run_json("convert", tiny / "plan.json", "--graph", graph, "-o", lines)[0] == 0
    assert dict(line.rsplit(" ", 1) for line in lines.read_text().splitlines())["b"] == "1"
    done = run_json("convert", lines, "--graph", graph, "-o", plan, "--devices", 2)
    assert done[0] == 0
    assert read_plan(plan).placement == read_plan(tiny / "plan.json").placement
    lines.write_text("x 0\n")
    failed = run_json("convert", lines, "--graph", graph, "-o", plan, "--devices", 2)
    assert failed[1]["error"]["code"] == "E503"


def test_idle_devices_and_one_op(run_json: Run, tiny: Path, tmp_path: Path) -> None:
    graph = read_graph(tiny / "graph.json")
    from pardnn.graph.build import build_graph

    write_graph(build_graph("one", graph.ops[:1]), tmp_path / "one.json")
    status, found = run_json("plan", tmp_path / "one.json", "--devices", 4)
    assert status == 0
    assert found["makespan_s"] == found["lower_bound_s"] == found["gap"] == 0.0
    assert any("without ops" in note for note in found["notes"])


def test_schemas_are_published(run: Run) -> None:
    status, out, _ = run("schema")
    assert status == 0
    assert json.loads(out) == json_schemas()
    assert json.loads(run("schema", "pardnn.plan/1")[1])["additionalProperties"] is False
    assert run("schema", "nothing")[0] == 2


def test_names_are_shown_as_they_are(run: Run, tmp_path: Path) -> None:
    name = "[bold]x[/bold]</script>"
    data = {"format": "pardnn.graph/1", "name": name, "ops": [
        {"name": name, "kind": "input", "outputs": [{"name": name, "bytes": 1}]}]}  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(data))
    status, out, _ = run("plan", tmp_path / "g.json", "--devices", 1)
    assert status == 0
    assert name in out


def test_terminated_while_planning(tmp_path: Path) -> None:
    ops = [
        {"name": f"o{i}", "kind": "op", "seconds": {"accelerator": 1e-3 * (i % 7)},
         "inputs": [f"t{(i * 7) // 8 - j}" for j in range(1, 3) if i > 8 * j],
         "outputs": [{"name": f"t{i}", "bytes": 1000 * (i % 11)}]}
        for i in range(12_000)  # planned in ten seconds, most of them spent on polishing
    ]  # fmt: skip
    data = {"format": "pardnn.graph/1", "name": "large", "ops": ops}
    (tmp_path / "g.json").write_text(json.dumps(data))
    arguments = ["plan", "g.json", "--devices", "8", "--bandwidth", "1GB/s", "-o", "p.json"]
    command = [sys.executable, "-m", "pardnn", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, env=dict(os.environ))
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.json"]


def test_an_interrupt_in_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints what is raised there, and goes on: once in many runs planning went on."""

    class Large:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)  # where the handler raises

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    seen = _heed_interrupts()
    try:
        Large()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
        assert seen.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_version_is_told(run: Run) -> None:
    status, out, _ = run("--version")
    assert (status, out) == (0, f"pardnn {pardnn.__version__}\n")


def test_a_command_that_is_none_gets_the_one_that_was_meant(run_json: Run) -> None:
    status, found = run_json("simulte", "p.json")
    error = found["error"]
    assert status == 2
    assert error["code"] == "E200"
    assert "Did you mean 'simulate'" in error["message"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("pardnn pl", "plan"),
        ("pardnn plan g.json --algorithm m-", "m-topo\nm-etf\nm-sct"),
        ("pardnn plan g.json --costs h", "h100\nh200"),
    ],
)
def test_a_shell_completes_commands_and_values(typed: str, expected: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    asked = os.environ | words | {"_PARDNN_COMPLETE": "complete_bash"}
    command = [str(Path(sys.executable).parent / "pardnn")]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected

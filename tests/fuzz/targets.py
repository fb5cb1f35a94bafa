"""The files that commands read, small and valid, and the commands that read each."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import re
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import typer

from pardnn.api import code as api_code
from pardnn.api import run
from pardnn.backends.entry_point import EntryPoint
from pardnn.backends.torch.codegen.load import load_step
from pardnn.checkpoint.weights import open_weights
from pardnn.cli import main
from pardnn.cost.table import CostTable, Entry, Machine, load_table, save_table
from pardnn.errors import PardnnError, UsageError, UserCodeError
from pardnn.graph.file import read_graph
from pardnn.plan.constraints import apart, constraint_to_dict, forbid, pin, together
from pardnn.plan.file import read_plan
from pardnn.plan.plan import Plan
from pardnn.plan.run_record import RunRecord, run_record, write_run
from pardnn.report.export.result import CodeResult
from tests.checkpoint.steps import write_step

DATA = Path(__file__).parents[1] / "data"
#: What the contract knows of; 1 would be an internal error.
STATUSES = {0, 2, 3, 4, 5, 8}
SECONDS = 60
#: A case that waits and does not compute; a busy machine takes ten times as long as an idle one.
WALL_SECONDS = 600
#: What a terminal acts on, or what changes the order of the text around it.
UNSAFE = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
PLANS = ("plan", "cut", "pieces", "mixed", "recompute")
ALGORITHMS = (
    "pardnn", "heft", "single", "round-robin", "m-etf", "contiguous", "acyclic",
    "linear-clustering", "m-topo", "modulo", "tofu", "data-parallel", "allrow-greedy",
)  # fmt: skip
FORMATS = ("perfetto", "chrome", "dot", "mermaid", "pp-csv")
#: A folder of what `code` wrote.
CODE = "code"
MACHINE = Machine(device="a", library="b", threads=1)

Reader = Callable[[Path, random.Random], None]


class Target(NamedTuple):
    """A file to mutate.

    Attributes:
        path: Below the folder of a case.
        reads: From the folder and a generator of choices: calls what reads the file.
    """

    path: str
    reads: Reader


class Fault(Exception):
    """What a command did that it must not do."""


def command(*arguments: object) -> int:
    """Run a command of `pardnn` and check how it ends; return its status.

    Raises:
        Fault: It ended as no command may, or printed what a terminal would act on.
    """
    words = [str(argument) for argument in arguments]
    out, err, status = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main.main(words)
    except SystemExit as end:
        status = int(str(end.code))
    finally:
        signal.signal(signal.SIGTERM, handler)
    said = out.getvalue() + err.getvalue()
    if status not in STATUSES:
        raise Fault(f"exit {status}: {' '.join(words)}\n{said}")
    if UNSAFE.search(said):
        raise Fault(f"unsafe text: {' '.join(words)}\n{said!a}")
    if "--json" in words:
        json.loads(out.getvalue(), parse_constant=_no_constant)
    return status


def _no_constant(text: str) -> NoReturn:
    raise Fault(f"{text} is not a number of JSON")


@contextlib.contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """Raise a fault where a case computes longer, or waits much longer."""

    def late(number: int, frame: Any) -> NoReturn:
        most = f"{seconds} CPU s" if number == signal.SIGPROF else f"{WALL_SECONDS} s"
        raise Fault(f"took more than {most}\n{''.join(traceback.format_stack(frame))}")

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, seconds),
              (signal.ITIMER_REAL, signal.SIGALRM, WALL_SECONDS))  # fmt: skip
    before = [signal.signal(number, late) for _, number, _ in clocks]
    for clock, _, most in clocks:
        signal.setitimer(clock, most)
    try:
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Parse the commands' signatures once: that takes ten times as long as reading a file."""
    app = main.app
    main.app = typer.main.get_command(app)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        main.app = app


def fill(folder: Path) -> None:
    """Write all valid files."""
    folder.mkdir(exist_ok=True)
    for path in (DATA / "fuzz").glob("*.json"):
        shutil.copy(path, folder)
    for name in PLANS:  # as one writes them by hand: a changed graph does not differ from theirs
        plan = json.loads((folder / f"{name}.json").read_text())
        for key in ("checksum", "graph_fingerprint", "op_digests"):
            plan.pop(key)
        (folder / f"{name}.json").write_text(json.dumps(plan))
    for name in ("graph", "plan", "cluster"):
        shutil.copy(DATA / "tiny" / f"{name}.json", folder / f"tiny-{name}.json")
    graph, plan = folder / "tiny-graph.json", folder / "tiny-plan.json"
    split = ("--to", "msr-fiddle-split")
    assert (
        command("convert", plan, folder / "tiny.txt", "--graph", graph)
        | command("convert", plan, folder / "split.json", "--graph", graph, *split)
        | command("convert", graph, folder / "msr.json", "--devices", 2, "--max-memory", "1GiB")
    ) == 0
    (folder / "packed.json.gz").write_bytes(gzip.compress((folder / "graph.json").read_bytes()))
    of = (folder / "plan.json", "--graph", folder / "graph.json")
    assert command("code", *of, "-o", folder / CODE) == 0
    write_step(folder / "run", 3)
    told = [pin("m", 0), forbid(1, what="x"), together("op:t", "op:addmm")]
    demands = [constraint_to_dict(each) for each in (*told, apart("tensor:relu", "m.bias"))]
    text = json.dumps({"format": "pardnn.constraints/1", "constraints": demands})
    (folder / "constraints.json").write_text(text)
    write_run(_record(read_plan(folder / "plan.json")), folder / "record.json")
    save_table(CostTable(MACHINE, {"a": Entry(seconds=1.0), "b": Entry(seconds=2.0)}), folder)


def _record(plan: Plan) -> RunRecord:
    """Return what ranks might have measured of a plan."""
    ranks = [
        {
            "step_s": [1.0, 1.5], "peak_bytes": 100, "op": list(row),
            "start_s": [0.1 * i for i in range(len(row))], "seconds": [0.1] * len(row),
            "tensor": ["x"], "wait_start_s": [0.0], "wait_s": [0.01],
        }
        for row in plan.order
    ]  # fmt: skip
    return run_record(plan.graph_fingerprint, ranks)


def _json(rng: random.Random) -> list[str]:
    return rng.choice(([], ["--json"]))


def _graph(path: str, plans: tuple[str, ...]) -> Target:
    def reads(folder: Path, rng: random.Random) -> None:
        graph, out = folder / path, folder / "out.json"
        plan = folder / f"{rng.choice(plans)}.json"
        command("check", plan, "--graph", graph)
        devices = ("--devices", rng.choice((1, 2, 3)))
        by = ("--algorithm", rng.choice(ALGORITHMS))
        limit = ("--max-memory", rng.choice(("1KiB", "1MiB")))
        words = rng.choice((
            ("simulate", plan, "--graph", graph),
            ("estimate", graph, *devices, *limit),
            ("convert", graph, out, *devices, *limit),
            ("layout", folder / "cut.json", "--graph", graph, "-o", out),
            ("report", plan, "--graph", graph, "-o", out),
            ("draw", plan, "--graph", graph, "-o", folder / "out.svg"),
            ("export", plan, "--graph", graph, "--to", rng.choice(FORMATS), "-o", out),
            ("explain", plan, "--graph", graph, rng.choice(("--time", "--layers", "1"))),
            ("diff", folder / f"{plans[0]}.json", plan, "--graph", graph),
            ("compare", graph, *devices, *limit, "--algorithms", "heft,m-etf,single,contiguous"),
            ("plan", graph, *devices, *by, "--keep-state", graph, plan, "-o", out),
            ("plan", graph, *devices, "--algorithm", "pardnn", "--microbatches", 2),
            ("plan", graph, *devices, *by, "-o", out),
        ))  # fmt: skip
        command(*words, *_json(rng))

    return Target(path, reads)


def _run(plan: Path, graph: Path) -> None:
    """Give a plan to `run`, up to where ranks would start: none does of what `check` refuses."""
    started: list[int] = []

    def run_checked(*_: object, **__: object) -> NoReturn:
        started.append(1)
        raise UsageError("ranks would start")

    entry = EntryPoint("s.py:make", lambda: None)
    with (
        mock.patch.object(run, "load_entry_point", return_value=entry),
        mock.patch.object(run, "captured", return_value=(read_graph(graph), None)),
        mock.patch.object(run, "run_checked", run_checked),
    ):
        command("run", "s.py:make", "--plan", plan)
    if started and command("check", plan, "--graph", graph) != 0:
        raise Fault("ranks would start with a plan that `check` refuses")


def _plan(name: str, graph_name: str) -> Target:
    def reads(folder: Path, rng: random.Random) -> None:
        plan, graph, out = folder / f"{name}.json", folder / graph_name, folder / "out"
        if rng.random() < 0.2:
            _run(plan, graph)
            return
        command("check", plan, "--graph", graph, *_json(rng))
        by = ("--algorithm", rng.choice(("heft", "tofu")))
        words = rng.choice((
            ("simulate", plan, "--graph", graph),
            ("simulate", plan, "--graph", graph, "--devices", 2),
            ("convert", plan, out, "--graph", graph),
            ("convert", plan, out, "--graph", graph, "--to", "msr-fiddle-split"),
            ("layout", plan, "--graph", graph, "-o", out),
            ("report", plan, "--graph", graph, "-o", out),
            ("explain", plan, "--graph", graph, rng.choice(("0", "t", "a", "m.weight"))),
            ("explain", plan, "--graph", graph, rng.choice(("--memory", "--time", "--layers"))),
            ("draw", plan, "--graph", graph, "-o", folder / "out.svg"),
            ("export", plan, "--graph", graph, "--to", rng.choice(FORMATS), "-o", out),
            ("diff", plan, folder / f"{rng.choice(PLANS)}.json", "--graph", graph),
            ("diff", folder / f"{rng.choice(PLANS)}.json", plan, "--graph", graph),
            ("plan", graph, "--devices", 2, *by, "--keep-state", graph, plan),
            ("plan", graph, "--devices", rng.choice((1, 2, 3)), "--start", plan, "-o", out),
            ("code", plan, "--graph", graph, "--rank", rng.choice((0, 1, 9))),
            ("code", plan, "--graph", graph, "-o", out),
        ))  # fmt: skip
        command(*words, *_json(rng))

    return Target(f"{name}.json", reads)


def _code(folder: Path, rng: random.Random) -> None:
    """Give an edited file to `code --run`, up to where ranks would start: they load it."""
    of = (folder / "plan.json", "--graph", folder / "graph.json")
    edited = ("--edited", folder / CODE)

    def run_code(_target: str, _plan: Path, paths: Sequence[Path], **_: object) -> CodeResult:
        with contextlib.suppress(UserCodeError, SystemExit):  # whoever edits it is told of it
            load_step(paths[0])
        return CodeResult(files=tuple(map(str, paths)))

    with mock.patch.object(api_code, "run_code", run_code):
        command("code", *of, *edited, "--run", "s.py:make", *_json(rng))


def _cluster(folder: Path, rng: random.Random) -> None:
    cluster, tiny = ("--cluster", folder / "tiny-cluster.json"), folder / "tiny-graph.json"
    by = ("--algorithm", rng.choice(ALGORITHMS))
    words = rng.choice((
        ("plan", tiny, *cluster, *by),
        ("plan", folder / "graph.json", *cluster, *by),
        ("simulate", folder / "tiny-plan.json", "--graph", tiny, *cluster),
        ("estimate", tiny, *cluster),
    ))  # fmt: skip
    command(*words, *_json(rng))


def _constraints(folder: Path, rng: random.Random) -> None:
    graph, demands = folder / "graph.json", ("--constraints", folder / "constraints.json")
    by = ("--algorithm", rng.choice(("heft", "single", "pardnn", "m-etf")))
    words = rng.choice((
        ("plan", graph, "--devices", rng.choice((2, 3)), *by, *demands),
        ("plan", graph, "--devices", 2, *by, *demands, "--microbatches", 2),
        ("check", folder / f"{rng.choice(PLANS)}.json", "--graph", graph, *demands),
    ))  # fmt: skip
    command(*words, *_json(rng))


def _of_record(folder: Path, rng: random.Random) -> None:
    of, out = (folder / "plan.json", "--graph", folder / "graph.json"), folder / "out.html"
    run_of = ("--run", folder / "record.json", *_json(rng))
    command("report", *of, "-o", out, *run_of)
    command("export", *of, "--to", "perfetto", "-o", out, *run_of)


def _convert(path: str) -> Target:
    def reads(folder: Path, rng: random.Random) -> None:
        graph = ("--graph", folder / "tiny-graph.json")
        other = rng.choice((
            (), graph, (*graph, "--devices", 2),
            (*graph, "--devices", 2, "--to", "msr-fiddle-split"),
            ("--write-cluster", folder / "c.json"),
        ))  # fmt: skip
        command("convert", folder / path, folder / "out", *other, *_json(rng))

    return Target(path, reads)


def _checkpoint(folder: Path, rng: random.Random) -> None:
    with contextlib.suppress(PardnnError):
        open_weights(folder / "run/step-00000003/rank-00000.safetensors")
    for what in ("show", "verify"):
        command("checkpoint", what, folder / "run", *_json(rng))
    command("checkpoint", "export", folder / "run", "-o", folder / "out", "--optimizer")


def _costs(folder: Path, rng: random.Random) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_table(MACHINE, folder)


TARGETS = (
    _graph("graph.json", PLANS), _graph("tiny-graph.json", ("tiny-plan",)),
    _graph("packed.json.gz", PLANS),
    *(_plan(name, "graph.json") for name in PLANS), _plan("tiny-plan", "tiny-graph.json"),
    Target("tiny-cluster.json", _cluster), Target("constraints.json", _constraints),
    Target("record.json", _of_record), Target(f"{CODE}/rank0.py", _code),
    _convert("tiny.txt"), _convert("msr.json"), _convert("split.json"),
    Target("run/step-00000003/manifest.json", _checkpoint),
    Target("run/latest", _checkpoint),
    Target("run/step-00000003/rank-00000.safetensors", _checkpoint),
    Target(MACHINE.file_name, _costs),
)  # fmt: skip

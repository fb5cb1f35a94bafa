"""Plans in the formats of other tools: each is read by the rules of its format."""

import collections
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pardnn.api.report import FORMATS, export
from pardnn.api.simulate import simulate
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op
from pardnn.plan.plan import Plan
from pardnn.plan.run_record import RankTimes, RunRecord, write_run
from pardnn.report.export.drawing import Box, Drawing, dot_text, mermaid_text
from pardnn.sim.machine import MAX_SECONDS
from tests.report.steps import HOSTILE, hostile_step, planned

Step = tuple[Graph, Plan]


@pytest.fixture(scope="module")
def step() -> Step:
    graph = hostile_step()
    return graph, planned(graph, memory="4KiB")


class Trace:
    """A trace, read strictly by the rules of the Trace Event Format."""

    def __init__(self, content: bytes) -> None:
        data = json.loads(content)
        self.names: dict[int, str] = {}
        self.threads: dict[int, tuple[int, str]] = {}
        self.bars: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
        self.flows: dict[int, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
        self.held: dict[int, list[int]] = collections.defaultdict(list)
        for event in data["traceEvents"]:
            getattr(self, f"_{event['ph']}")(event)
        for tid, bars in self.bars.items():
            assert {bar["pid"] for bar in bars} == {self.threads[tid][0]}
            ends = [(ns(bar["ts"]), ns(bar["ts"]) + ns(bar["dur"])) for bar in bars]
            assert all(one[1] <= other[0] for one, other in pairwise(ends)), self.threads[tid]
        for ends in self.flows.values():
            assert sorted(ends) == ["f", "s"]
            assert ends["s"]["ts"] <= ends["f"]["ts"]
            for end in ends.values():  # an arrow binds to the bar around its end
                assert any(
                    bar["ts"] <= end["ts"] < bar["ts"] + bar["dur"] for bar in self.bars[end["tid"]]
                )

    def _M(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            assert event["pid"] > 0
            self.names[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert event["tid"] > 0
            assert event["tid"] not in self.threads
            self.threads[event["tid"]] = event["pid"], event["args"]["name"]

    def _X(self, event: dict[str, Any]) -> None:
        assert event["dur"] >= 0 <= event["ts"]
        assert event["name"].isprintable()
        self.bars[event["tid"]].append(event)

    def _C(self, event: dict[str, Any]) -> None:
        self.held[event["pid"]].append(event["args"]["bytes"])

    def _s(self, event: dict[str, Any]) -> None:
        assert event["ph"] not in self.flows[event["id"]]
        self.flows[event["id"]][event["ph"]] = event

    def _f(self, event: dict[str, Any]) -> None:
        assert event["bp"] == "e"
        self._s(event)

    def of(self, thread: str, side: str = "predicted") -> list[list[dict[str, Any]]]:
        """Return the bars of threads such as "send" and "send 2", per device."""
        pids = [pid for pid, name in sorted(self.names.items()) if name.endswith(f": {side}")]
        return [
            [
                bar
                for tid, (process, name) in self.threads.items()
                if process == pid and name.partition(" ")[0] == thread
                for bar in self.bars[tid]
            ]
            for pid in pids
        ]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def seconds(bars: list[dict[str, Any]]) -> float:
    return sum(bar["dur"] for bar in bars) / 1e6


@pytest.mark.parametrize("to", ["chrome", "perfetto"])
def test_a_trace_keeps_the_rules_and_adds_up_to_the_plan(step: Step, to: str) -> None:
    graph, plan = step
    trace, judged = Trace(export(graph, plan, to)), simulate(graph, plan)
    computed, sent, received = trace.of("compute"), trace.of("send"), trace.of("receive")
    assert [seconds(bars) for bars in computed] == pytest.approx(judged.busy_s, abs=1e-7)
    last = max(bar["ts"] + bar["dur"] for bars in computed for bar in bars)
    assert last == pytest.approx(judged.makespan_s * 1e6, abs=1e-3)
    assert [max(held) for _, held in sorted(trace.held.items())] == list(judged.peak_bytes)
    for sides in (sent, received):
        sizes = [bar["args"]["bytes"] for bars in sides for bar in bars]
        assert sum(sizes) == judged.transfer_bytes > 0
    assert len(trace.flows) == len(plan.messages)
    for flow in trace.flows.values():
        assert trace.threads[flow["s"]["tid"]][1].startswith("send")
        assert trace.threads[flow["f"]["tid"]][1].startswith("receive")
    calls = [op.name for op in graph.ops if not op.is_source]
    assert sum(map(len, computed)) == len(calls)


def test_a_step_of_the_most_seconds_is_a_trace() -> None:
    """Nanoseconds of 4e299 s were infinite."""
    op = Op(name="long", kind="aten.mm.default", seconds={"accelerator": 0.9 * MAX_SECONDS})
    graph = build_graph("one", [op])
    trace = Trace(export(graph, planned(graph), "perfetto"))
    assert max(bar["dur"] for bars in trace.bars.values() for bar in bars) > MAX_SECONDS


def test_messages_under_way_at_once_have_threads_of_their_own() -> None:
    graph = hostile_step()
    plan = planned(graph, 4)
    trace = Trace(export(graph, plan, "chrome"))
    assert sum(map(len, trace.of("send"))) == len(plan.messages)


def test_a_run_is_a_second_process_on_the_same_axis(step: Step, tmp_path: Path) -> None:
    graph, plan = step
    took = 2e-3  # a millisecond beyond each op's turn, as medians may be
    ranks = tuple(
        RankTimes(
            step_s=(0.1,), peak_bytes=2048, op=row,
            start_s=tuple(i * 1e-3 for i in range(len(row))), seconds=(took,) * len(row),
            tensor=("x",), wait_start_s=(0.5e-3,), wait_s=(1e-4,),
        )
        for row in plan.order
    )  # fmt: skip
    record = RunRecord(graph_fingerprint=plan.graph_fingerprint, ranks=ranks)
    path = tmp_path / "run.json"
    write_run(record, path)
    trace = Trace(export(graph, plan, "perfetto", run=path))
    assert len(trace.names) == 2 * plan.num_devices
    measured = [name for pid, name in trace.threads.values() if pid % 2 == 0]
    assert measured == ["compute", "wait"] * plan.num_devices
    calls = {op.name for op in graph.ops if not op.is_source}
    for bars, waits, row in zip(
        trace.of("compute", "measured"), trace.of("wait", "measured"), plan.order, strict=True
    ):
        assert [bar["args"]["measured_s"] for bar in bars] == [took] * len(calls & set(row))
        assert seconds(waits) == pytest.approx(1e-4)
        assert bars[0]["ts"] == pytest.approx(1e3 * next(
            i for i, name in enumerate(row) if name in calls
        ))  # fmt: skip
    with pytest.raises(UsageError, match="by round-robin is not a pipeline"):
        export(graph, plan, "pp-csv")
    with pytest.raises(UsageError, match=r"dot shows no times.*\n.*perfetto"):
        export(graph, plan, "dot", run=path)


def dot_tokens(text: str) -> Iterator[str]:
    """The tokens of dot, strictly: nothing between them is skipped but white space."""
    token = re.compile(r'\s*("(?:[^"\\\n]|\\["\\n])*"|->|[A-Za-z_]\w*|[{}\[\]=,;])')
    at = 0
    while text[at:].strip():
        found = token.match(text, at)
        assert found is not None, text[at : at + 80]
        yield found[1]
        at = found.end()


def read_dot(text: str) -> tuple[dict[str, str], dict[str, str], list[tuple[str, str]]]:
    """Nodes with their subgraph and labels, and edges."""
    tokens = list(dot_tokens(text))
    assert tokens[:3] == ["digraph", "plan", "{"]
    assert tokens[-1] == "}"
    assert tokens.count("{") == tokens.count("}")
    within, labels, edges, current = {}, {}, [], ""
    for i, each in enumerate(tokens):
        if each == "subgraph":
            current = tokens[i + 1]
        elif each == "[" and tokens[i - 2] == "->":
            edges.append((tokens[i - 3], tokens[i - 1]))
        elif each == "[" and tokens[i - 1] != "node":
            within[tokens[i - 1]] = current
            labels[tokens[i - 1]] = tokens[i + 3]
    return within, labels, edges


def read_mermaid(text: str) -> tuple[dict[str, str], dict[str, str], list[tuple[str, str]]]:
    """The same of a Mermaid flowchart; every line must be one that is known."""
    label = r'"((?:[A-Za-z0-9 .,:()/_-]|#\d+;|<br/>)*)"'
    kinds = {
        "subgraph": re.compile(rf"  subgraph (d\d+)\[{label}\]"),
        "node": re.compile(rf"    (n\d+)\[{label}\]"),
        "end": re.compile(r"  end"),
        "edge": re.compile(rf"  (n\d+) (?:-->|==>)\|{label}\| (n\d+)"),
    }
    first, *lines = text.splitlines()
    assert first == "flowchart LR"
    within, labels, edges, current = {}, {}, [], ""
    for line in lines:
        kind, found = next(
            (kind, found) for kind, each in kinds.items() if (found := each.fullmatch(line))
        )
        if kind == "subgraph":
            current = found[1]
        elif kind == "node":
            within[found[1]], labels[found[1]] = current, found[2]
        elif kind == "edge":
            edges.append((found[1], found[3]))
    return within, labels, edges


@pytest.mark.parametrize(("to", "read"), [("dot", read_dot), ("mermaid", read_mermaid)])
def test_layers_and_devices_are_boxes_and_names_only_text(step: Step, to: str, read: Any) -> None:
    graph, plan = step
    within, labels, edges = read(export(graph, plan, to).decode())
    device = {op.name: plan.placement[op.name] for op in graph.ops}
    modules = {(device[op.name], op.module) for op in graph.ops if op.module}
    assert len(modules) <= len(within) <= len(modules) + 2 * plan.num_devices
    assert {node for edge in edges for node in edge} <= within.keys()
    assert len(set(edges)) == len(edges) >= len(HOSTILE)
    assert all(one != other for one, other in edges)
    assert len(set(within.values())) == plan.num_devices
    text = "".join(labels.values())
    assert "net" in text
    if to == "mermaid":
        assert "<script" not in text


def test_model_explorer_gets_every_op_with_its_layer_and_device(step: Step) -> None:
    """The fields and references of its JSON graph format; ids and values are texts there."""
    graph, plan = step
    data = json.loads(export(graph, plan, "model-explorer"))
    (found,) = data["graphs"]
    nodes = {node["id"]: node for node in found["nodes"]}
    assert list(nodes) == [str(i) for i in range(len(graph.ops))]
    makers = {t.name: op for op in graph.ops for t in op.outputs}
    for op, node in zip(graph.ops, nodes.values(), strict=True):
        assert node.keys() == {"id", "label", "namespace", "attrs", "incomingEdges",
                               "outputsMetadata"}  # fmt: skip
        told = {each["key"]: each["value"] for each in node["attrs"]}
        assert len(told) == len(node["attrs"])
        assert all(isinstance(text, str) and text.isprintable() for text in told.values())
        assert told["device"] == plan.cluster.devices[plan.placement[op.name]].name
        edges = node["incomingEdges"]
        assert [int(each["targetNodeInputId"]) for each in edges] == [*range(len(op.inputs))]
        for name, each in zip(op.inputs, edges, strict=True):
            source = graph.ops[int(each["sourceNodeId"])]
            assert source == makers[name]
            assert source.outputs[int(each["sourceNodeOutputId"])].name == name
            known = [out["id"] for out in nodes[each["sourceNodeId"]]["outputsMetadata"]]
            assert each["sourceNodeOutputId"] in known
    assert {node["namespace"].split("/")[0] for node in nodes.values()} <= {"net", ""}
    assert all("" not in node["namespace"].split("/")[1:] for node in nodes.values())


def test_no_pickle_is_written_for_memory_viz(step: Step) -> None:
    with pytest.raises(UsageError, match="E243 .*pickles"):
        export(*step, "memory-viz")


def test_quotes_and_escapes_of_names_are_text() -> None:
    name = 'a"b\\n\\"]; n9 [x="#quot;`<br/>'
    drawing = Drawing(name, (name,), (Box(0, name, 1, 1.0), Box(0, "m", 2, 1.0)), ())
    within, labels, _ = read_dot(dot_text(drawing))
    assert len(within) == 2
    unquoted = labels["n0"][1:-1].replace('\\"', '"').replace("\\\\", "\\")
    assert unquoted == name + "\\n1 op, 1 s"
    within, labels, _ = read_mermaid(mermaid_text(drawing))
    assert len(within) == 2
    first = labels["n0"].partition("<br/>")[0]
    assert re.sub(r"#(\d+);", lambda found: chr(int(found[1])), first) == name


def test_a_drawing_of_many_layers_joins_the_deeper_ones(monkeypatch, step: Step) -> None:
    monkeypatch.setattr("pardnn.report.export.drawing.MOST_BOXES", 3)
    graph, plan = step
    within, labels, _ = read_dot(export(graph, plan, "dot").decode())
    assert len(within) <= 4
    assert any('"net\\n' in label for label in labels.values())


@pytest.mark.parametrize("to", sorted({*FORMATS} - {"pp-csv"}))
def test_the_same_plan_gives_the_same_bytes(step: Step, to: str) -> None:
    assert export(*step, to) == export(*step, to)

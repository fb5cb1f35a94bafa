"""Layers of ops, and what a name means."""

import dataclasses
import io

import pytest
from rich.console import Console

import pardnn
from pardnn.errors import UsageError
from pardnn.explain.ask import ask
from pardnn.explain.case import opened
from pardnn.explain.differences import differences
from pardnn.explain.subjects import layer_names, subject_of
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.graph.layers import block_of, is_within, layers_of, origin
from pardnn.report.differences import diff_text
from pardnn.report.explained_text import explained_text, printable
from testbed import hand_graphs


def value(name, kind, *inputs, module=None, alias=None, after=()):
    memory = "reference" if alias else "residual" if kind in ("parameter", "state") else "normal"
    group = {"net.0.weight": "w", "optimizer.state.net.0.weight.m": "m"}.get(alias or name)
    return Op(
        name=name, kind=kind, inputs=inputs, module=module, memory=memory, after=after,
        group=group, outputs=(Tensor(name=name, bytes=8, alias_of=alias),),
        seconds={"accelerator": 0.0 if memory == "residual" else 1.0},
    )  # fmt: skip


def step():
    """Two layers, of which one has a weight that an optimizer with one state updates."""
    state = "optimizer.state.net.0.weight.m"
    return build_graph("step", [
        value("x", "input"),
        value("net.0.weight", "parameter"),
        value(state, "state"),
        value("h", "aten.mm.default", "x", "net.0.weight", module="net.0"),
        value("y", "aten.exp.default", "h", module="net.1.act"),
        value("g", "aten.mul.Tensor", "y", module="net.0"),
        value("m", "aten.add_.Tensor", state, "g", alias=state),
        value("root", "aten.sqrt.default", "m"),
        value("rate", "scalar.mul"),
        value("other", "aten.mul.Tensor", "rate", "h", module="net.1"),
        value("u", "aten.addcdiv_.default", "net.0.weight", "root", "rate",
              alias="net.0.weight", after=("h",)),
    ])  # fmt: skip


def test_parameters_states_and_updates_belong_to_their_layer():
    graph = step()
    found = dict(zip((op.name for op in graph.ops), layers_of(graph), strict=True))
    assert {found[name] for name in ("net.0.weight", "optimizer.state.net.0.weight.m")} == {"net.0"}
    assert {found[name] for name in ("m", "root", "u", "g", "h", "x")} == {"net.0"}
    assert found["rate"] == ""  # two layers read it
    assert found["y"] == "net.1.act"


def test_graphs_without_modules_have_no_layers():
    assert set(layers_of(hand_graphs.mlp(4, 4, 4, 4))) == {""}


def test_names_of_pieces_and_blocks():
    assert [origin(name) for name in ("h@1", "h~2", "h~2@11", "h@x", "@1", "a@1.b")] == [
        "h", "h", "h", "h@x", "@1", "a@1.b"
    ]  # fmt: skip
    assert block_of("model.h.3.attn.0") == "model.h.3"
    assert block_of("model.lm_head") == "model.lm_head"
    assert is_within("net.1.act", "net.1")
    assert not is_within("net.10", "net.1")


def case():
    graph = step()
    cluster = pardnn.Cluster.uniform(2)
    return opened(graph, pardnn.plan(graph, cluster, algorithm="single"))


def test_what_a_name_means():
    found = case()
    kinds = [subject_of(found, name).kind for name in ("h", "net.1", "gpu:1", "1", "device 0")]
    assert kinds == ["op", "layer", "device", "device", "device"]
    assert subject_of(found, "net").ops == tuple(i for i, layer in enumerate(found.layers) if layer)
    assert "net.1.act" in layer_names(found)


def test_an_op_named_like_a_device_is_the_op():
    graph = step()
    ops = [dataclasses.replace(op, name="1") if op.name == "y" else op for op in graph.ops]
    graph = build_graph("step", ops)
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(2), algorithm="single")
    assert subject_of(opened(graph, plan), "1").kind == "op"


@pytest.mark.parametrize("name", ["op:h", "tensor:h", "layer:net.1", "device:1"])
def test_a_name_may_say_what_it_is_the_name_of(name):
    """As in constraints: op and tensor have one name here."""
    kind, _, rest = name.partition(":")
    rest = "gpu:1" if kind == "device" else rest
    assert subject_of(case(), name)[:2] == (kind, rest)


@pytest.mark.parametrize(
    ("name", "near"),
    [("act", "net.1.act"), ("net.0.wieght", "net.0.weight"), ("gpu:7", "gpu:1"), ("ROOT", "root")],
)
def test_misspelt_names_get_suggestions(name, near):
    with pytest.raises(UsageError) as error:
        subject_of(case(), name)
    assert error.value.code == "E241"
    assert near in error.value.details["suggestions"]
    assert near in str(error.value)


@pytest.mark.parametrize("name", ["", "zzzzzzzz", "\x1b[31m</script>"])
def test_what_is_like_nothing_is_refused(name):
    with pytest.raises(UsageError, match="E241"):
        subject_of(case(), name)


def test_of_many_devices_some_are_named_and_the_others_counted():
    graph = step()
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(9), algorithm="single")
    with pytest.raises(UsageError, match="gpu:3, gpu:4 and 4 more"):
        subject_of(opened(graph, plan), "zzzzzzzz")


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\u2028b", "</script>", "line\nbreak"])
def test_names_send_nothing_to_a_terminal(name):
    ops = [
        value("x", "input"),
        dataclasses.replace(value(name, "aten.exp.default", "x", module=name), source=name),
    ]
    graph = build_graph("named", ops)
    plans = [
        pardnn.plan(graph, pardnn.Cluster.uniform(2), algorithm=each)
        for each in ("single", "round-robin")
    ]
    shown = [explained_text(ask(graph, plans[0], name)), explained_text(ask(graph, plans[0], "0"))]
    shown += [explained_text(ask(graph, plans[0], topic=t)) for t in ("memory", "time", "layers")]
    shown.append(diff_text(differences(graph, plans[0], graph, plans[1])))
    for each in shown:
        out = Console(file=io.StringIO(), markup=False, width=200, record=True)
        out.print(each)
        text = out.export_text()
        assert all(line.isprintable() for line in text.split("\n"))
    plain = name if name.isprintable() else name.encode("unicode_escape").decode()
    assert any(plain in printable(op.name) for op in graph.ops)
    assert printable(f"\u00e9{name}").startswith("\u00e9")  # what may be shown is


def test_a_step_of_no_time_is_explained():
    graph = build_graph("none", [value("w", "parameter"), value("s", "state")])
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(2), algorithm="round-robin")
    for name, topic in (("w", None), ("1", None), (None, "time"), (None, "layers")):
        assert explained_text(ask(graph, plan, name, topic=topic))
    assert diff_text(differences(graph, plan, graph, plan))

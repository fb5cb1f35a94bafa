from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph, Op, Tensor, writes
from pardnn.graph.text import graph_text, op_text
from tests.strategies import graphs


def test_an_op_reads_as_a_call() -> None:
    op = Op(
        name="mm",
        kind="aten.mm.default",
        inputs=("x", "w"),
        after=("a", "b"),
        outputs=(Tensor(name="h", bytes=1024, shape=(8, 32), dtype="float32"),),
        group="g",
        workspace=5,
        source="model.py:12",
    )
    expected = "h: f32[8, 32] = aten.mm.default(x, w)"
    assert op_text(op) == f"{expected}  # after a, b; group g; workspace 5 B; model.py:12"


def test_tiny(tiny: Path) -> None:
    assert graph_text(read_graph(tiny / "graph.json")).splitlines() == [
        "graph tiny: 8 ops, 8 tensors",
        "  x: 400 B = input()",
        "  w: 1000 B = parameter()  # residual; group w",
        "  h: 600 B = aten.mm.default(x, w)",
        "  v: 600 B = aten.view.default(h)  # reference",
        "  a: 600 B = aten.relu.default(v)",
        "  b: 600 B = aten.exp.default(v)  # workspace 50 B",
        "  c: 600 B = aten.add.Tensor(a, b)",
        "  w1: 1000 B = aten.add_.Tensor(w, c)  # reference; after h; group w",
    ]


@given(graphs())
def test_one_op_is_one_line(graph: Graph) -> None:
    assert len(graph_text(graph).splitlines()) == 1 + len(graph.ops)


@given(st.text(max_size=200))
def test_hostile_names_cannot_leave_their_line(name: str) -> None:
    tensor = Tensor(name=name, bytes=1, shape=(1,), dtype=name)
    ops = [
        Op(name=name, kind=name, outputs=(tensor,), source=name, group=name),
        Op(name=name + "2", kind="c", inputs=(name,), after=(name,)),
    ]
    text = graph_text(build_graph(name, ops))
    assert len(text.splitlines()) == 3
    assert text.replace("\n", "").isprintable()


def test_what_an_op_writes() -> None:
    def written(kind: str, alias: str | None = "x", **arguments: object) -> tuple[str, ...]:
        output = Tensor(name="y", bytes=1, alias_of=alias)
        return writes(Op(name="o", kind=kind, inputs=("x",), outputs=(output,),
                         arguments=arguments or None))  # fmt: skip

    assert written("aten.add_.Tensor") == ("x",)
    assert written("mylib::scale_") == ("x",)
    assert written("mylib::scale_.default") == ("x",)
    assert written("aten.add.Tensor", None) == ()
    assert written("aten.view.default") == ()
    assert written("aten.__xor__.Tensor") == ()
    assert written("aten.native_batch_norm.default", None, mutates=["x"]) == ("x",)

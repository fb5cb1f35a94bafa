"""The bench of the thesis on graphs of a few ops, counted by hand."""

import pytest

from bench.thesis.batch import made_family, read_rule, write_rule
from bench.thesis.page import page
from bench.thesis.unroll import unrolled
from pardnn.api.batch_scaling import graph_at
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.planner.without_plan.paging import page_bytes
from testbed import families


def training_step(batch_size: int) -> Graph:
    """A product with a weight of 100 bytes, which is then changed in place."""
    seconds = {"accelerator": 1.0}
    x = Tensor(name="x", bytes=8 * batch_size, shape=(batch_size, 2))
    y = Tensor(name="y", bytes=40 * batch_size + 4, shape=(batch_size, 10))
    weight = Tensor(name="w", bytes=100, shape=(2, 10))
    changed = Tensor(name="w.1", bytes=100, shape=(2, 10), alias_of="w")
    return build_graph(
        "step",
        [
            Op(name="x", kind="input", outputs=(x,), memory="residual"),
            Op(name="w", kind="parameter", outputs=(weight,), memory="residual"),
            Op(
                name="y", kind="aten.mm.default", inputs=("x", "w"), outputs=(y,), seconds=seconds,
                workspace=3 * batch_size,
            ),
            Op(
                name="update", kind="aten.add_.Tensor", inputs=("w", "y"), outputs=(changed,),
                memory="reference", seconds=seconds,
            ),
        ],
    )  # fmt: skip


def test_a_rule_of_two_sizes_gives_the_others(tmp_path):
    write_rule(made_family(training_step(4), 4, training_step(8), 8), tmp_path / "rule.json.gz")
    family = read_rule(training_step(4), tmp_path / "rule.json.gz")
    for size in (1, 4, 6, 1000):
        made, wanted = graph_at(family, size), training_step(size)
        assert made.ops == wanted.ops
        assert made.arrays.tensor_bytes.tolist() == wanted.arrays.tensor_bytes.tolist()
        assert made.arrays.workspace.tolist() == wanted.arrays.workspace.tolist()


def test_a_rule_needs_the_same_calls():
    other = build_graph("other", [*training_step(8).ops[:2], training_step(8).ops[2]])
    with pytest.raises(ValueError, match="different calls"):
        made_family(training_step(4), 4, other, 8)


def test_steps_in_a_row_read_what_the_step_before_wrote():
    graph = training_step(4)
    long = unrolled(graph, graph_costs(graph), 3)
    ops = {op.name: op for op in long.ops}
    assert len(long.ops) == 1 + 3 * 3
    assert ops["y~1"].inputs == ("x~1", "w.1")
    assert ops["update~1"].outputs[0].alias_of == "w.1"
    assert set(ops["update~2"].after) == {"y~1", "update~1"}
    order = [long.ops[i].name for i in long.arrays.topological]
    assert order.index("update") < order.index("y~1") < order.index("update~1")


def test_pages_move_only_where_memory_is_short():
    graph = training_step(4)  # x 32, y 164, w 100 bytes
    assert page_bytes(graph, 296) == 0
    # y drives out x and w, then w comes back; x comes back in the next step.
    assert page_bytes(graph, 264) == 32 * 2
    assert page_bytes(graph, 132) > page_bytes(graph, 264)


def test_swapping_drops_what_the_host_has():
    graph = training_step(4)  # x 32, y 164, w 100 bytes; w is written, x is not
    assert page_bytes(graph, 296, "belady") == 0
    # Of x and w, w is used sooner while y is made: x goes, is there already, and comes back.
    assert page_bytes(graph, 264, "belady") == 32
    long = families.training_step(200)
    whole = int(long.arrays.tensor_bytes[long.arrays.tensor_alias < 0].sum())
    for share in (3, 5):
        assert 0 < page_bytes(long, whole // share, "belady") < page_bytes(long, whole // share)


def step(pardnn: float, refined: float, thesis: float) -> dict[str, float]:
    """A row of Fig. 6.7; linear clustering takes 1 s."""
    return {
        "ops": 9, "bound_s": 1.0, "serial_s": 2.0, "round_robin_s": 2.0, "mapped_s": refined,
        "refined_s": refined, "thesis_s": thesis, "pardnn_s": pardnn, "clustering_s": 1.0,
        "pardnn_cpu_s": 1.0, "clustering_cpu_s": 1.0, "cpu_s": 1.0,
    }  # fmt: skip


def test_the_page_says_whose_steps_lose_where_and_nothing_of_parts_it_lacks():
    steps = {"WRN, 4": step(0.8, 0.9, 1.2), "TRN, 4": step(0.8, 0.9, 1.0001)}
    report = {"date": "d", "command": "c", "machine": "m", "steps": steps}
    text = page(report)
    assert "(`pardnn-thesis`) takes 1.095 times" in text
    assert "slower in 1 of 2 rows: WRN, 4 (1.200)" in text
    assert "slower in 0 of 2 rows." in text
    assert "Round robin is less bad" in text
    assert "Unified memory" not in text


def test_state_that_fits_no_replica_is_out_of_memory_whatever_is_computed_twice():
    row = {"batch": 4, "pardnn": {"samples_per_s": 2.0}, "cpu_s": 1.0}
    baselines = {"TRN-2, 4": row, "WRN, 4": row | {"checkpointing": {"samples_per_s": 4.0}},
                 "E3D, 4": row}  # fmt: skip
    state = {"TRN-2": 80, "WRN": 20, "E3D": 10}
    replicas = {n: {"bytes": s << 30, "usable_bytes": 28 << 30, "cpu_s": 1.0}
                for n, s in state.items()}  # fmt: skip
    report = {"date": "d", "command": "c", "machine": "m"}
    text = page(report | {"baselines": baselines, "replicas": replicas})
    assert "TRN-2 (80.0 GiB)" in text
    assert "captured of WRN; of E3D" in text
    assert text.count("OOM (state) |") == 1


def cells(*found: tuple[int, int, float]) -> dict[str, dict[str, float]]:
    """Batch and samples/s by number of devices; a rate of 0 where no plan was found."""
    return {
        str(k): {"batch": batch} | ({"samples_per_s": rate, "cpu_s": 1.0} if rate else {})
        for k, batch, rate in found
    }


def test_speed_ups_are_over_the_fewest_devices_on_which_a_model_fits():
    """None on one device; ours 4, 6, 10 samples/s from two on, the thesis's steps alone 3, 3, 5."""
    ours = cells((1, 0, 0), (2, 8, 4.0), (4, 16, 6.0), (8, 32, 10.0), (16, 64, 10.0))
    alone = cells((1, 0, 0), (2, 8, 3.0), (4, 8, 3.0), (8, 32, 5.0), (16, 32, 5.0))
    row = {"ops": 9, "cpu_s": 1.0, "plans": 9, "refused": 1}
    search = {"TRN-2": row | {"cells": ours, "thesis_cells": alone}}
    given = {"TRN-2": row | {"cells": ours, "thesis_cells": alone}}
    text = page({"date": "d", "command": "c", "machine": "m", "search": search, "given": given})
    assert "| - | 4.0 (1.00) | 6.0 (1.50) | 10.0 (2.50) | 10.0 (2.50) | - 3.0 3.0 5.0 5.0 |" in text
    # 64 on 16 devices, where 8 on two would be 64 in parallel; the thesis's own: 4.
    assert "| 1 (4) | none 8 8 32 32 |" in text
    assert "fit the same batch in 3 of 5 cells; a smaller one in 2: TRN-2 on 4 (8 of 16), " in text
    assert "TRN-2 on 16 (32 of 64); a larger one in 0." in text

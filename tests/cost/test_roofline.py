"""The roofline: known counts, growth with every size, and the effect of the batch size."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pardnn.cost.call import call_of, tensors_by_name
from pardnn.cost.flops import work_of
from pardnn.cost.presets import DEVICE_MODELS, device_model
from pardnn.cost.roofline import HOST_SECONDS, DeviceModel
from pardnn.errors import UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from tests.cost.helpers import call, mlp_graph, mm_graph, roofline_seconds, source, tensor

MODELS = sorted(DEVICE_MODELS)
SIZES = st.integers(1, 2048)


def work(graph, name):
    op = next(op for op in graph.ops if op.name == name)
    return work_of(call_of(op, tensors_by_name(graph)))


def seconds(graph, model="v100"):
    return roofline_seconds(graph, DEVICE_MODELS[model])


def conv_graph(batch=4, groups=1, transposed=False, mask=(True, True, True)):
    weight = (8, 16 // groups, 3, 3) if not transposed else (16, 8 // groups, 3, 3)
    shared = [[1, 1], [1, 1], [1, 1], transposed, [0, 0], groups]
    outputs = [tensor("gx", batch, 16, 10, 10), tensor("gw", *weight), tensor("gb", 8)]
    return build_graph(
        "conv",
        [
            source("x", batch, 16, 10, 10),
            source("w", *weight),
            call(
                "y",
                "aten.convolution.default",
                ["x", "w", None, *shared],
                [tensor("y", batch, 8, 10, 10)],
            ),
            call(
                "g",
                "aten.convolution_backward.default",
                ["y", "x", "w", [8], *shared, list(mask)],
                outputs,
            ),
        ],
    )


def attention_graph(length=64, causal=False):
    shape = (2, 4, length, 32)
    kind = "aten._scaled_dot_product_flash_attention_for_cpu"
    return build_graph(
        "attention",
        [
            *(source(name, *shape) for name in "qkv"),
            call(
                "o",
                f"{kind}.default",
                ["q", "k", "v", 0.0, causal],
                [tensor("o", *shape), tensor("lse", 2, 4, length)],
            ),
            call(
                "g",
                f"{kind}_backward.default",
                ["o", "q", "k", "v", "o", "lse", 0.0, causal],
                [tensor(f"g{name}", *shape) for name in "qkv"],
            ),
        ],
    )


def test_matrix_product_counts_two_flop_per_multiply_add():
    found = work(mm_graph(3, 5, 7), "c")
    assert (found.unit, found.flop, found.depth) == ("matmul", 2 * 3 * 5 * 7, 2 * 5)
    assert found.bytes == 4 * (3 * 5 + 5 * 7 + 3 * 7)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_counts(groups):
    found = work(conv_graph(groups=groups), "y")
    assert found.unit == "conv"
    assert found.flop == 2 * (4 * 8 * 10 * 10) * (16 // groups) * 9


def test_transposed_convolution_sweeps_its_input():
    found = work(conv_graph(transposed=True), "y")
    assert found.flop == 2 * (4 * 16 * 10 * 10) * 8 * 9


@pytest.mark.parametrize(("mask", "times"), [((1, 1, 1), 2), ((0, 1, 1), 1), ((0, 0, 1), 0)])
def test_convolution_backward_obeys_its_output_mask(mask, times):
    graph = conv_graph(mask=tuple(map(bool, mask)))
    assert work(graph, "g").flop == times * work(graph, "y").flop


def test_attention_counts():
    graph = attention_graph()
    forward = 2 * 2 * (2 * 4) * 64 * 64 * 32
    assert work(graph, "o").flop == forward
    assert work(graph, "g").flop == 2.5 * forward
    assert work(attention_graph(causal=True), "o").flop == forward / 2


def test_views_sources_and_host_arithmetic():
    step = Tensor(name="t", bytes=8, shape=(), dtype="host.float")
    graph = build_graph("host", [source("x", 4), call("p", "scalar.pow", [0.9, 2.0], [step])])
    assert seconds(graph).tolist() == [0.0, HOST_SECONDS]
    mlp = mlp_graph(8)
    by_name = dict(zip([op.name for op in mlp.ops], seconds(mlp), strict=True))
    assert by_name["x"] == by_name["w"] == by_name["v"] == 0.0
    # An in-place update is "reference" too, and does cost.
    assert by_name["u"] > DEVICE_MODELS["v100"].launch


def test_expanded_inputs_are_read_once():
    wide = build_graph(
        "expand",
        [
            source("x", 64, 1000, strides=(0, 1)),
            call("y", "aten.exp.default", ["x"], [tensor("y", 64, 1000)]),
        ],
    )
    assert work(wide, "y").bytes == 4 * 1000 + 4 * 64 * 1000


def test_embedding_reads_only_the_rows_it_looks_up():
    graph = build_graph(
        "embedding",
        [
            source("w", 50_000, 64),
            source("i", 128, dtype="int64"),
            call("e", "aten.embedding.default", ["w", "i"], [tensor("e", 128, 64)]),
        ],
    )
    assert work(graph, "e").bytes == 2 * 128 * 64 * 4 + 128 * 8


def test_custom_ops_cost_their_bytes():
    graph = build_graph(
        "custom",
        [source("x", 1 << 20), call("y", "mylib::op.default", ["x"], [tensor("y", 1 << 20)])],
    )
    found = work(graph, "y")
    assert found.bytes == 2 * 4 * (1 << 20)
    assert seconds(graph)[1] > found.bytes / DEVICE_MODELS["v100"].bandwidth


def test_ops_of_unknown_form_have_a_cost():
    ops = [
        Op(name="x", kind="input", outputs=(Tensor(name="x", bytes=400),)),
        Op(
            name="y",
            kind="aten.mm.default",
            inputs=("x",),
            outputs=(Tensor(name="y", bytes=400),),
        ),
        Op(name="z", kind="aten.max_pool2d_with_indices.default", inputs=("y",)),
        Op(name="e", kind="aten.embedding_dense_backward.default"),
    ]
    assert (seconds(build_graph("bare", ops))[1:] > 0).all()


@given(st.sampled_from(MODELS), SIZES, SIZES, SIZES, st.integers(0, 2), st.integers(1, 512))
def test_products_take_longer_when_a_size_grows(model, m, k, n, which, more):
    sizes = [m, k, n]
    before = seconds(mm_graph(*sizes), model)[2]
    sizes[which] += more
    assert seconds(mm_graph(*sizes), model)[2] >= before


@given(st.sampled_from(MODELS), st.integers(1, 64), st.integers(1, 64))
def test_convolution_and_attention_take_longer_when_the_batch_grows(model, batch, more):
    small, large = seconds(conv_graph(batch), model), seconds(conv_graph(batch + more), model)
    assert (large >= small).all()
    small, large = (
        seconds(attention_graph(batch), model),
        seconds(attention_graph(batch + more), model),
    )
    assert (large >= small).all()


@given(st.sampled_from(MODELS), st.integers(1, 4096), st.integers(2, 16))
def test_time_per_sample_falls_with_the_batch(model, batch, times):
    small = seconds(mlp_graph(batch), model).sum() / batch
    large = seconds(mlp_graph(batch * times), model).sum() / (batch * times)
    assert large < small


@given(SIZES, SIZES, SIZES)
def test_no_op_beats_the_data_sheet(m, k, n):
    for model in DEVICE_MODELS.values():
        took = roofline_seconds(mm_graph(m, k, n), model)[2]
        assert took >= 2 * m * k * n / model.flops["matmul"]["float32"]
        assert took >= model.launch


def test_large_products_approach_the_rate_and_small_ones_do_not():
    model = DEVICE_MODELS["v100"]
    for size, low, high in ((8192, 0.95, 1.0), (256, 0.0, 0.6)):
        took = roofline_seconds(mm_graph(size, size, size), model)[2]
        share = 2 * size**3 / took / model.rate("matmul", "float32")
        assert low < share < high


def test_half_precision_is_faster_where_there_is_a_unit_for_it():
    for name, dtype, faster in (
        ("v100", "float16", True), ("v100", "bfloat16", False), ("k80", "float16", False),
        ("a100", "bfloat16", True), ("h200", "bfloat16", True),
    ):  # fmt: skip
        model = DEVICE_MODELS[name]
        assert (model.rate("matmul", dtype) > 4 * model.rate("matmul", "float32")) == faster


def test_float32_products_use_no_tf32_but_convolutions_do():
    a100 = DEVICE_MODELS["a100"]
    assert a100.rate("conv", "float32") > 4 * a100.rate("matmul", "float32")


@pytest.mark.parametrize("name", MODELS)
def test_every_figure_has_a_source(name):
    figures = {field.name for field in dataclasses.fields(DeviceModel)} - {"name", "sources"}
    assert set(DEVICE_MODELS[name].sources) == figures


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(UsageError, match=r"'b200'.*v100, k80, a100, h100, h200, cpu"):
        device_model("b200")

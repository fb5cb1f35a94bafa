"""Whole layers go to one device, with their backward ops and weights."""

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.baselines.layer_round_robin import layer_of, place_layer_round_robin, whole_layers
from tests.place.machines import machine_for


def _graph():
    def op(name, inputs, module, kind="aten.relu.default"):
        outputs = (Tensor(name=name, bytes=8),)
        seconds = {"accelerator": 1.0}
        return Op(
            name=name, kind=kind, inputs=inputs, outputs=outputs, module=module, seconds=seconds
        )

    return build_graph(
        "layers",
        [
            op("model.layers.0.w", (), None, "parameter"),
            op("model.layers.1.w", (), None, "parameter"),
            op("a", ("model.layers.0.w",), "model.layers.0.mlp"),
            op("b", ("a", "model.layers.1.w"), "model.layers.1.mlp"),
            op("c", ("b",), "model.layers.2"),
            op("a.grad", ("c", "a"), "model.layers.0.mlp"),
            op("a.update", ("a.grad", "model.layers.0.w"), None),
        ],
    )


def test_layers_are_read_from_module_paths():
    assert layer_of("model.layers.3.mlp.0") == "model.layers.3"
    assert layer_of("model.head") == "model.head"
    layers = whole_layers(_graph())
    assert layers[0] == layers[2] == layers[5] == layers[6] == "model.layers.0"


def test_layer_i_is_on_device_i_mod_k():
    graph = _graph()
    found = place_layer_round_robin(graph, machine_for(graph, Cluster.uniform(2)), [None, None])
    assert found.plan.place.tolist() == [0, 1, 0, 1, 0, 0, 0]

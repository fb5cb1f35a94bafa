"""The captured graphs that are kept, read without a framework."""

import pytest

from pardnn.cost.costs import preset_costs
from testbed import kept_graphs


def test_all_are_kept_and_small() -> None:
    sizes = {name: kept_graphs.path_of(name).stat().st_size for name in kept_graphs.GRAPHS}
    assert {path.name for path in kept_graphs.FOLDER.glob("*.gz")} == {
        f"{n}.json.gz" for n in sizes
    }
    assert sum(sizes.values()) < 8e6


@pytest.mark.parametrize(
    ("name", "layers", "gib"), [("wresnet_50_4", 54, 1.43), ("wresnet_152_10", 156, 21.68)]
)
def test_they_can_be_planned_for(name: str, layers: int, gib: float) -> None:
    """A product or convolution per weight, twice that going back; costs by shape from a preset."""
    graph = kept_graphs.load(name)
    weights = [op for op in graph.ops if op.kind == "parameter"]
    assert len(weights) == layers
    assert sum(t.bytes for op in weights for t in op.outputs) / 2**30 == pytest.approx(
        gib, abs=5e-3
    )
    forward = [op for op in graph.ops if op.kind == "aten.convolution.default"]
    backward = [op for op in graph.ops if op.kind == "aten.convolution_backward.default"]
    assert len(forward) == len(backward) == layers - 1  # the last weight is the classifier's
    seconds = preset_costs(graph, "k80", ["accelerator"]).on("accelerator")
    assert 0 < float(seconds.sum()) < float("inf")

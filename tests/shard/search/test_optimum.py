"""Search beside the least bytes that there are, by an oracle that shares no code with it."""

import numpy as np
import pytest

from pardnn.plan.mesh import make_mesh
from pardnn.shard.search.tofu import find_sharding
from testbed.hand_graphs import chain, matmul, mlp
from testbed.least_by_counting import least_bytes_counted

#: Under the hook that checks shapes each of these takes seconds.
pytestmark = pytest.mark.jit


@pytest.mark.parametrize(
    ("graph", "axes", "elements"),
    [
        (matmul(64, 128, 256), 1, 8_192),
        (matmul(64, 128, 256), 2, 24_576),
        (matmul(64, 128, 256), 3, 40_960),
        (matmul(128, 128, 128), 3, 57_344),
        (mlp(32, 256, 512, 128), 1, 28_672),
        (mlp(32, 256, 512, 128), 2, 86_016),
        (chain(4, 4, 12, 20), 2, 176),
        (chain(8, 12, 4, 4), 2, 128),
    ],
)
def test_the_oracle_finds_what_was_worked_out_by_hand(graph, axes, elements) -> None:
    """Products: S_X, 3 S_X, 3 S_X + S_Y; 3.5 S; MLP: 2 S_x + 3 S_y on two, thrice that on four."""
    assert least_bytes_counted(graph, axes) == 4 * elements


def test_search_finds_the_optimum_of_training_steps_and_chains() -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        sizes = rng.choice([4, 8, 16, 32], size=4).tolist()
        for graph in (mlp(*sizes), chain(*sizes)):
            assert find_sharding(graph, make_mesh((2, 2))).cost == least_bytes_counted(graph)

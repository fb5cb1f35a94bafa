"""Boxes of the devices of a mesh, when several loops of one call are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.plan.mesh import cut_points, make_mesh, owned_boxes, placements
from pardnn.shard.boxes import overlap, volume
from pardnn.shard.partition.call import Call
from pardnn.shard.partition.per_device import local_ops
from pardnn.shard.partition.strategy import strategies

MATMUL = Call(
    "aten.mm.default",
    ({"tensor": "x"}, {"tensor": "w"}),
    {},
    {"x": (8, 12), "w": (12, 6)},
    ((8, 6),),
)
LOOPS = [strategy.loop for strategy in strategies(MATMUL)]


@pytest.mark.parametrize("axes", list(itertools.product([*LOOPS, None], repeat=2)))
def test_the_work_is_shared_once_per_cut(axes):
    mesh = make_mesh((2, 2))
    found = local_ops(MATMUL, axes, mesh)
    assert found is not None
    assert len(found) == mesh.size
    work = sum(volume(local.regions["self"].box) * local.call.outputs[0][1] for local in found)
    copies = 2 ** axes.count(None)
    assert work == 8 * 12 * 6 * copies
    for local in found:
        result = local.results[0]
        assert volume(result.box) == local.call.outputs[0][0] * local.call.outputs[0][1]
        assert len(result.reducers) == 2


def test_a_loop_that_is_too_short_cannot_be_cut_again():
    call = Call("aten.mm.default", MATMUL.args, {}, {"x": (3, 12), "w": (12, 6)}, ((3, 6),))
    assert local_ops(call, (LOOPS[0], LOOPS[0]), make_mesh((2, 2))) is None


def test_blocks_of_a_layout_tile_the_tensor():
    mesh = make_mesh((2, 3))
    boxes = owned_boxes((7, 9), (1, 0), mesh)
    assert boxes is not None
    assert sum(map(volume, boxes)) == 63
    assert all(volume(overlap(a, b)) == 0 for a, b in itertools.combinations(boxes, 2))
    assert owned_boxes((1, 9), (0, 1), mesh) is None
    assert placements((1, None)) == ("Shard(1)", "Replicate()")
    assert [mesh.coordinates(device) for device in range(3)] == [(0, 0), (0, 1), (0, 2)]


@given(st.integers(2, 40), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_shares_tile_a_range_and_none_is_empty(extent, shares, multiple):
    found = cut_points(extent, tuple(shares), multiple)
    units = -(-extent // multiple)
    assert (found is None) == (units < len(shares))
    if found is None:
        return
    assert found[0] == 0
    assert found[-1] == extent
    for (begin, end), share in zip(itertools.pairwise(found), shares, strict=True):
        assert begin < end
        assert begin % multiple == 0
        if units >= sum(shares):
            assert abs((end - begin) / multiple - units * share / sum(shares)) <= 1
    alike = cut_points(extent, (shares[0],) * len(shares), multiple)
    assert alike == cut_points(extent, len(shares), multiple)


def test_unlike_devices_share_blocks_and_work_by_their_shares():
    mesh = make_mesh((2, 2), [(3, 1), (1, 1)])
    assert mesh.fractions() == (3 / 8, 3 / 8, 1 / 8, 1 / 8)
    assert make_mesh((2, 2)).fractions() == (0.25,) * 4
    boxes = owned_boxes((8, 12), (0, 1), mesh)
    assert boxes is not None
    assert boxes == (((0, 6), (0, 6)), ((0, 6), (6, 12)), ((6, 8), (0, 6)), ((6, 8), (6, 12)))
    found = local_ops(MATMUL, (LOOPS[0], LOOPS[1]), mesh)
    assert found is not None
    work = [volume(local.regions["self"].box) * local.call.outputs[0][1] for local in found]
    assert sorted(work) == [8 * 12 * 6 // 8] * 2 + [8 * 12 * 6 * 3 // 8] * 2

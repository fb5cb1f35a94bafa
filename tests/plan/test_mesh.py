"""Meshes and what devices own, by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.plan.mesh import Box, Layout, Parts, cut_points, make_mesh, owned_boxes


def test_devices_are_numbered_along_the_last_axis_first() -> None:
    mesh = make_mesh((2, 3, 2))
    expected = list(itertools.product(range(2), range(3), range(2)))
    assert [tuple(mesh.coordinates(d)) for d in range(12)] == expected


@pytest.mark.parametrize(
    ("shape", "layout", "boxes"),
    [
        ((8,), (0, 0), [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]),
        ((7,), (0, 0), [((0, 1),), ((1, 3),), ((3, 5),), ((5, 7),)]),
        ((4, 6), (1, 0), [((0, 2), (0, 3)), ((2, 4), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (3, 6))]),
        ((4,), (0, None), [((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)]),
        ((3,), (0, 0), None),
    ],
)
def test_what_each_device_owns(
    shape: tuple[int, ...], layout: Layout, boxes: list[Box] | None
) -> None:
    found = owned_boxes(shape, layout, make_mesh((2, 2)))
    assert found == (None if boxes is None else tuple(boxes))


@pytest.mark.parametrize(
    ("extent", "parts", "multiple", "ends"),
    [
        (10, 3, 1, (0, 3, 6, 10)),
        (10, 2, 4, (0, 4, 10)),  # 3 units of 4, the last of 2
        (12, (3, 1), 1, (0, 9, 12)),
        (3, (1, 100, 1), 1, (0, 1, 2, 3)),  # a share of 0.03 is one all the same
        (10, (1, 1, 100), 1, (0, 1, 2, 10)),
        (10, (100, 1, 1), 1, (0, 8, 9, 10)),  # as many are left as parts follow
        (2, 3, 1, None),
        (4, 2, 4, None),
    ],
)
def test_where_parts_begin(
    extent: int, parts: Parts, multiple: int, ends: tuple[int, ...] | None
) -> None:
    assert cut_points(extent, parts, multiple) == ends


@given(
    shares=st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple),
    extent=st.integers(1, 200),
    multiple=st.integers(1, 4),
)
def test_parts_are_near_their_shares(shares: tuple[int, ...], extent: int, multiple: int) -> None:
    """None is empty, ends are multiples, and where all have a unit each is near its share."""
    ends, units = cut_points(extent, shares, multiple), -(-extent // multiple)
    assert (ends is None) == (units < len(shares))
    if ends is None:
        return
    assert ends[0] == 0
    assert ends[-1] == extent
    assert all(begin < end for begin, end in itertools.pairwise(ends))
    assert all(end % multiple == 0 for end in ends[:-1])
    wanted = [units * end / sum(shares) for end in itertools.accumulate(shares)]
    if units * min(shares) >= 2 * sum(shares):
        pairs = zip(ends[1:-1], wanted, strict=False)
        assert all(abs(end / multiple - want) < 1 for end, want in pairs)

"""Meshes and what devices own, by hand."""

import itertools

import pytest

from pardnn.plan.mesh import Box, Layout, make_mesh, owned_boxes


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

"""Benchmarks import what there is: nothing else runs them in the tests."""

import importlib
import pkgutil

import pytest

import bench

MODULES = sorted(
    each.name
    for each in pkgutil.walk_packages(bench.__path__, "bench.")
    if not each.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_loaded(name: str) -> None:
    importlib.import_module(name)


def test_none_is_left_out() -> None:
    assert len(MODULES) > 30

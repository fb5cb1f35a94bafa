"""Examples and benchmarks import what there is: nothing else runs them in the tests."""

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import bench

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["demo", "gpt2"])  # train.py trains as it is loaded
def test_an_example_can_be_loaded(name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    specification.loader.exec_module(importlib.util.module_from_spec(specification))


@pytest.mark.parametrize("name", sorted(each.name for each in pkgutil.iter_modules(bench.__path__)))
def test_a_benchmark_can_be_loaded(name: str) -> None:
    if name != "__main__":
        importlib.import_module(f"bench.{name}")

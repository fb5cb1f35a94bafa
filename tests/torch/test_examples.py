"""Examples import what there is: nothing else runs them in the tests."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["demo", "gpt2"])  # train.py trains as it is loaded
def test_an_example_can_be_loaded(name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    specification.loader.exec_module(importlib.util.module_from_spec(specification))

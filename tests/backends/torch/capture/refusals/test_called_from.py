"""A refusal for a line of an installed package names the user's line that called it."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.errors import UnsupportedError

SOURCE = """
def scaled(x, n):
    return x * len(range(int(x.sum())))


def made(x, make):
    return make(x)
"""


@pytest.fixture(name="package")
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_installed.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("some_installed")


def refused(compute: Any) -> UnsupportedError:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute(model(x)).mean()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(UnsupportedError) as caught:
        pardnn.capture(step, model, optimizer, torch.ones(2, 2))
    return caught.value


def calling(package: Any) -> Any:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return package.scaled(x, 3)

    return compute


def test_a_line_of_a_package_comes_with_the_users_line(package: Any) -> None:
    compute = calling(package)
    line = inspect.getsourcelines(compute)[1] + 1
    error = refused(compute)
    own = f"{Path(__file__).relative_to(Path.cwd())}:{line}"
    assert error.details == {"source": "some_installed.py:3", "called_from": own}
    assert f"(some_installed.py:3, called from {own})" in str(error)
    assert "That line is a package's." in str(error)


def test_a_users_line_below_a_package_is_named_alone(package: Any) -> None:
    error = refused(lambda x: package.made(x, lambda y: y * len(range(int(y.sum())))))
    assert "called_from" not in error.details
    assert "package" not in str(error)

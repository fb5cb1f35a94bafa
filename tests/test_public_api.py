"""What others import: every name exists, has a docstring and is fully annotated."""

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import pardnn
from pardnn import errors


def modules() -> list[str]:
    """Modules that need no framework, and no solver: two solvers in one process clash."""
    found = pkgutil.walk_packages(pardnn.__path__, "pardnn.", onerror=lambda _: None)
    apart = (".backends.", ".solvers.")
    return [module.name for module in found if not any(part in module.name for part in apart)]


@pytest.mark.parametrize("name", getattr(pardnn, "__all__", []))
def test_exported_names_exist(name: str) -> None:
    assert getattr(pardnn, name) is not None
    assert name in dir(pardnn)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        pardnn.no_such_name  # noqa: B018


def _public(module: ModuleType) -> list[tuple[str, object]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@pytest.mark.parametrize("name", modules())
def test_public_names_are_documented_and_annotated(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for attribute, value in _public(module):
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        assert inspect.getdoc(value), f"{name}.{attribute} has no docstring"
        if inspect.isfunction(value) and not name.endswith(".cli"):
            parameters = inspect.signature(value).parameters.values()
            missing = [p.name for p in parameters if p.annotation is p.empty]
            assert not missing, f"{name}.{attribute}: {missing} are not annotated"
            annotations = inspect.get_annotations(value)
            assert "return" in annotations, f"{name}.{attribute}: result is not annotated"


def test_error_codes_lead_to_exit_statuses() -> None:
    kinds = [kind for _, kind in _public(errors) if inspect.isclass(kind)]
    kinds.remove(errors.Terminated)  # an interrupt, which nothing but a door may catch
    assert len(kinds) >= 9
    for kind in kinds:
        assert issubclass(kind, errors.PardnnError)
        error = kind("what\nwhere")
        assert str(error) == f"{kind.default_code} what\n     where"
        assert error.exit_status == int(kind.default_code[1]) in range(1, 9)
    assert errors.PardnnError("m", code="E403", details={"a": 1}).details == {"a": 1}


def test_package_is_typed() -> None:
    assert (Path(pardnn.__file__).parent / "py.typed").exists()

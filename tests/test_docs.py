"""What the documents say is run, and the files that they name are there."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.jit
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_pages(page: Path) -> None:
    if "import torch" in page.read_text(encoding="utf-8"):
        pytest.skip("needs a framework")
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_modules_that_pages_name_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    assert not missing_names(text)


def test_a_name_that_is_gone_is_noticed() -> None:
    assert not missing_names("`place/pardnn/slicing.py`, pardnn.plan.check.check_plan")
    gone = ["place/squeeze.py", "pardnn.plan.check.check_nothing", "pardnn.place.squeeze"]
    text = f"`{gone[0]}`, {gone[1]}, {gone[2]}"
    assert missing_names(text) == gone


def test_every_error_code_has_a_section() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (E\d{3}): ", page, flags=re.M)
    assert sections == sorted(set(re.findall(r'"(E\d{3})"', source)))


def missing_names(text: str) -> list[str]:
    """Return the paths in code marks and the dotted names that lead nowhere."""
    bases = ROOT, ROOT / "src" / "pardnn"
    tops = {path.name for base in bases for path in base.iterdir() if path.name[0] != "."}
    paths = [
        name
        for name in re.findall(r"`([\w.-]+/[\w./-]*)`", text)
        if name.split("/")[0] in tops and not any((base / name).exists() for base in bases)
    ]
    return paths + [name for name in re.findall(r"\bpardnn(?:\.\w+){2,}", text) if not _is(name)]


def _is(name: str) -> bool:
    place, parts = ROOT / "src" / "pardnn", name.split(".")[1:]
    while parts and (place / parts[0]).is_dir():
        place, parts = place / parts[0], parts[1:]
    module = place / "__init__.py"
    if parts and (place / f"{parts[0]}.py").is_file():
        module, parts = place / f"{parts[0]}.py", parts[1:]
    text = module.read_text(encoding="utf-8")
    return not parts or re.search(rf"\b{parts[0]}\b", text) is not None

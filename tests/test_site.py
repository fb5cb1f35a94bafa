"""The site builds strictly from docs/, holds every public name, and asks nothing of the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pardnn

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; broken links and anchors fail it."""
    made = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(made)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return made


@pytest.mark.long
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//"
    for page in site.rglob("*.html"):
        assert not re.findall(loads, page.read_text(encoding="utf-8")), page


def test_public_names_errors_and_results_are_pages(site: Path) -> None:
    reference = (site / "reference.html").read_text(encoding="utf-8")
    for name in pardnn.__all__:
        assert re.search(rf'id="pardnn\.[\w.]*\b{name}"', reference), name
    assert 'id="e301-not-enough-memory"' in (site / "errors.html").read_text()
    results = (site / "results.html").read_text(encoding="utf-8")
    for page in (ROOT / "bench" / "results").glob("*.md"):
        assert page.stem in results
        assert (site / "results" / f"{page.stem}.html").exists()
    assert "E301" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](gone.md)")
    own = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    rules = re.findall(r"^(?:strict: true|validation:\n(?:  .*\n)+)", own, flags=re.M)
    hook = f"hooks: [{ROOT / 'docs' / 'site' / 'outside.py'}]"
    (tmp_path / "mkdocs.yml").write_text("\n".join(["site_name: x", hook, *rules]))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path / "site")],
        cwd=tmp_path,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "gone.md" in done.stderr

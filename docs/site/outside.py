"""A hook of mkdocs: pages from outside of docs/, and links that lead out of it or of the site.

The repository is read as it is, with links between files; the site holds some of these files as
pages of its own. Links to the others, sources and tests, become text: their names say where
they are.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")
_RESULTS = "bench/results"
#: What makes the search work from disk: the theme would fetch it from a server.
_SHIM, _OWN_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
#: Pages of the site, and the files of the repository that they are.
_OUTSIDE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of other directories, and the list of results."""
    pages = {**_OUTSIDE, _OWN_SHIM: "docs/site/iframe-worker.js"}
    for path in sorted((ROOT / _RESULTS).rglob("*")):
        if path.suffix in {".md", ".svg", ".png"}:
            pages[f"results/{path.relative_to(ROOT / _RESULTS).as_posix()}"] = str(
                path.relative_to(ROOT)
            )
    for uri, source in pages.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "results.md", content=_list_of_results()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links to where their targets are in the site; those to no page become text."""
    here = _source(page.file.src_uri)
    code = re.split(r"(```.*?```)", markdown, flags=re.S)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda m: _led(m, here, page), part)
        for part in code
    )


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Take the one script that the theme would fetch from the site itself."""
    return output.replace(_SHIM, "../" * page.url.count("/") + _OWN_SHIM)


def on_post_template(output: str, **_: object) -> str:
    """Do likewise for the page of lost links, which lies at the top."""
    return output.replace(_SHIM, _OWN_SHIM)


def _led(link: re.Match[str], here: str, page: Page) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if not target:
        return link[0]
    source = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    uri = _uri(source)
    if uri is None:
        return (
            text
            if text.startswith("`") or posixpath.basename(source) in text
            else (f"{text} (`{source}`)")
        )
    relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
    return f"[{text}]({relative}{anchor})"


def _source(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri.startswith("results/"):
        return f"{_RESULTS}/{uri.removeprefix('results/')}"
    return _OUTSIDE.get(uri, f"docs/{uri}")


def _uri(source: str) -> str | None:
    """Return the page or picture of the site that a path of the repository is, or None."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source.startswith(f"{_RESULTS}/") and Path(source).suffix in {".md", ".svg", ".png"}:
        return f"results/{source.removeprefix(f'{_RESULTS}/')}"
    names = {source: uri for uri, source in _OUTSIDE.items()}
    return (names | {"README.md": "index.md", _RESULTS: "results.md"}).get(source)


def _list_of_results() -> str:
    """Return a page that lists the pages of measured and simulated results, newest first."""
    lines = ["# Results", "", "Every page says its command, its machine and what is simulated.", ""]
    for path in sorted((ROOT / _RESULTS).glob("*.md"), reverse=True):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}](results/{path.name}), {path.name[:10]}")
    return "\n".join([*lines, ""])

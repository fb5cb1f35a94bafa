"""The ParDNN thesis's tables and figures, regenerated: one dated page of results.

`python -m bench thesis` plans and simulates the captured steps of `testbed/graphs/` on V100s of
32 GB and writes `bench/results/<date>_thesis.md`, `.json` and two pictures. It needs no framework
and no GPU, and every figure is simulated but those of planning. `--parts` runs some parts only,
`--models` some models; what the day's JSON already holds of the others stays. As many rows are
measured side by side as there are cores, or `--jobs`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import RESULTS, write_chart
from bench.common.side_by_side import cores, measured
from bench.thesis.baselines import baselines_row, state_row
from bench.thesis.batch import RULES
from bench.thesis.cut import cut_row
from bench.thesis.page import page, pictures
from bench.thesis.published import DEVICES, MODELS
from bench.thesis.search import given_row, search_row
from bench.thesis.steps import shape_row, steps_row
from bench.thesis.unroll import unrolled_row
from pardnn.planner.warm_up import warm_up

#: One row of a part: its key and how to measure it.
Row = tuple[str, Callable[[], dict[str, Any]]]

#: Devices on which the steps of the algorithm are compared.
STEPS_DEVICES = (4, 16)
#: Devices over which every op is cut.
CUT_DEVICES = 4
#: What is planned at the thesis's number of ops: the ends of its range, and the largest graph.
UNROLLED = (("Word-RNN", 2), ("TRN-2", 16), ("WRN", 16))


def _models(names: Sequence[str]) -> Iterator[str]:
    for name in names or MODELS:
        if (RULES / f"{MODELS[name].graph}.json.gz").is_file():
            yield name


def _search(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        yield name, lambda graph=MODELS[name].graph: search_row(graph, DEVICES)


def _given(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        yield name, lambda found=MODELS[name]: given_row(found.graph, found.batch)


def _shapes(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        found = MODELS[name]
        batches = (256, 2048) if name == "Word-RNN" else ()
        for batch in dict.fromkeys((found.batch[4], *batches)):
            yield f"{name}, {batch}", lambda m=found, b=batch: shape_row(m.graph, b)


def _steps(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        found = MODELS[name]
        for k in STEPS_DEVICES:
            yield f"{name}, {k}", lambda m=found, k=k: steps_row(m.graph, m.batch[k], k)


def _unrolled(names: Sequence[str]) -> Iterator[Row]:
    there = set(_models(names))
    for name, k in UNROLLED:
        if name in there:
            found = MODELS[name]
            yield f"{name}, {k}", lambda m=found, k=k: unrolled_row(m.graph, m.batch[k], k, m.ops)


def _baselines(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        for k in (4, 8):
            found = MODELS[name]
            yield f"{name}, {k}", lambda m=found, k=k: baselines_row(m.graph, m.batch[k], k)


def _replicas(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        yield name, lambda graph=MODELS[name].graph: state_row(graph)


def _cut(names: Sequence[str]) -> Iterator[Row]:
    for name in _models(names):
        found, k = MODELS[name], CUT_DEVICES
        yield f"{name}, {k}", lambda m=found, k=k: cut_row(m.graph, m.batch[k], k)


PARTS: dict[str, Callable[[Sequence[str]], Iterator[Row]]] = {
    "shapes": _shapes,
    "steps": _steps,
    "baselines": _baselines,
    "replicas": _replicas,
    "search": _search,
    "given": _given,
    "unrolled": _unrolled,
    "cut": _cut,
}


def _machine(jobs: int) -> str:
    numba, python = importlib.metadata.version("numba"), platform.python_version()
    return (
        f"{platform.machine()}, {cores()} cores, Python {python}, numba {numba}, "
        f"{jobs} rows side by side"
    )


def _row(part: str, key: str) -> dict[str, Any]:
    return dict(PARTS[part]([key.split(",")[0]]))[key]()


def write_page(path: Path) -> None:
    """Write the page and the pictures of a JSON of results."""
    report = json.loads(path.read_text(encoding="utf-8"))
    path.with_suffix(".md").write_text(page(report), encoding="utf-8")
    for name, text in pictures(report).items():
        write_chart(text, path.parent, f"{path.stem}_{name}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench thesis", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--models", default="", help="of " + ", ".join(MODELS))
    parser.add_argument("--jobs", type=int, default=cores(), help="rows side by side")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    path = options.output / f"{today}_thesis.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in options.models.split(",") if name]
    warm_up(("pardnn", "linear-clustering"))
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    report |= {"date": today, "command": "python -m bench thesis"}
    report |= {"machine": _machine(options.jobs), "preset": "v100"}
    parts = [part for part in options.parts.split(",") if part]
    tasks = [(part, key) for part in parts for key, _ in PARTS[part](names)]
    for (part, key), row in zip(tasks, measured(_row, tasks, options.jobs), strict=True):
        report.setdefault(part, {})[key] = row
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {key}: {row['cpu_s']:.1f} CPU s", flush=True)
    write_page(path)
    print(path.with_suffix(".md"))


if __name__ == "__main__":
    main()

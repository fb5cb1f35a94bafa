"""Captured steps of the zoo's models, kept in `graphs/` so that planning needs no framework.

`python -m bench capture-zoo`, run where this repository lies, writes them again; with names, only
those. They carry shapes, not seconds: give planners the costs of a preset, as in
`preset_costs(load("rnn_10_8k"), "k80")`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pardnn.graph.file import read_graph, write_graph
from pardnn.graph.ir import Graph

FOLDER = Path(__file__).parent / "graphs"
ZOO = Path(__file__).parent / "zoo"


class Kept(NamedTuple):
    """A captured graph: the file and the function in `testbed/zoo/`, the batch size, and why."""

    model: str
    function: str
    batch_size: int
    why: str


_TOFU = "Tofu, figure 10"
_THESIS = "thesis, largest batch on 4 GPUs"
_CONVOLUTIONAL = tuple(
    f"wresnet_{depth}_{width}" for depth in (50, 101, 152) for width in (4, 6, 8, 10)
)
_RECURRENT = tuple(f"rnn_{layers}_{size}k" for layers in (6, 8, 10) for size in (4, 6, 8))
#: The sizes of Tofu's figures 8 and 9.
TOFU_SIZES = (*_CONVOLUTIONAL, *_RECURRENT)
GRAPHS = {
    kept.function: kept
    for kept in (
        *(Kept("wresnet", name, 8, "Tofu, figure 8") for name in _CONVOLUTIONAL),
        Kept("wresnet", "wresnet_152_10_norm", 8, f"{_TOFU}, with batch norm"),
        Kept("rnn", "rnn_4_8k", 512, _TOFU),
        *(Kept("rnn", name, 512, "Tofu, figure 9") for name in _RECURRENT),
        Kept("gpt2", "gpt2", 8, "what everybody knows"),
        Kept("word_rnn", "word_rnn", 1024, _THESIS),
        Kept("word_rnn", "word_rnn_2", 32, _THESIS),
        Kept("char_crn", "char_crn", 512, _THESIS),
        Kept("char_crn", "char_crn_2", 128, _THESIS),
        Kept("wrn", "wrn_610_14", 16, _THESIS),
        Kept("wrn", "wrn_304_28", 4, _THESIS),
        Kept("trn", "trn", 64, _THESIS),
        Kept("trn", "trn_2", 2, _THESIS),
        Kept("e3d", "e3d", 16, _THESIS),
        Kept("e3d", "e3d_2", 8, _THESIS),
    )
}


def path_of(name: str) -> Path:
    """Return where a graph of `GRAPHS` is kept."""
    return FOLDER / f"{name}.json.gz"


def load(name: str) -> Graph:
    """Return a kept graph.

    Raises:
        FileError: E403, if it is not kept here.
    """
    return read_graph(path_of(name))


def capture(name: str) -> Graph:
    """Capture a graph of `GRAPHS` as it is now. Allocates no tensor data; needs torch."""
    from pardnn.api.capture import captured
    from pardnn.backends.entry_point import load_entry_point

    kept = GRAPHS[name]
    file = ZOO / f"{kept.model}.py"
    return captured(load_entry_point(f"{file}:{kept.function}"), kept.batch_size)[0]


def main(arguments: Sequence[str]) -> None:
    """Capture the named graphs, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench capture-zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GRAPHS))
    parser.add_argument("--output", type=Path, default=FOLDER, help="Folder for the graphs.")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in GRAPHS]
    if unknown:
        parser.error(f"no graph {unknown[0]!r}; there are {', '.join(GRAPHS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.names or GRAPHS:
        started = time.process_time()
        graph = capture(name)
        seconds = time.process_time() - started
        path = options.output / path_of(name).name
        write_graph(graph, path)
        size = path.stat().st_size
        print(f"{name}: {len(graph.ops)} ops, {seconds:.1f} CPU s, {size} bytes", flush=True)

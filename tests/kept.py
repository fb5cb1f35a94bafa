"""Results of small cases as text, kept in `tests/data/kept`: what changes one of them shows there.

A line says what is decided, so that a change reads as one: a plan that gets better as well as one
that gets worse. `KEEP=1 python -m pytest TEST` writes the file anew.
"""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

KEPT = Path(__file__).parent / "data" / "kept"


def assert_kept(name: str, lines: Sequence[str]) -> None:
    """Compare the lines of a case with those in a file, or write them.

    Args:
        name: Of the file.
        lines: The first one names the case; a blank line ends it in the file.
    """
    path, text = KEPT / name, "\n".join(lines)
    blocks = path.read_text(encoding="utf-8").strip().split("\n\n") if path.exists() else []
    cases = {block.partition("\n")[0]: block for block in blocks}
    if os.environ.get("KEEP") == "1":
        cases[lines[0]] = text
        path.write_text("\n\n".join(cases.values()) + "\n", encoding="utf-8")
    assert text.splitlines() == cases[lines[0]].splitlines()


def check_sum(*values: object) -> str:
    """A few letters for arrays of integers, or for what prints alike if it is equal."""
    found = 0
    for value in values:
        is_array = isinstance(value, np.ndarray)
        data = value.astype("<i8").tobytes() if is_array else repr(value).encode()
        found = zlib.crc32(data, found)
    return f"{found:08x}"

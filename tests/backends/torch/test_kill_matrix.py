"""Every rank x phase x signal: the others end in time and name it, and the last step loads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.torch.kill_matrix import (
    TIMEOUT_S,
    Cell,
    Seen,
    cells,
    first_checkpoint,
    run_cell,
)

#: Of the normal job; `KILL_MATRIX=1` runs all (`make kill-matrix`).
FEW = (
    Cell(2, "mid-step", "SIGKILL"),
    Cell(1, "saving", "SIGSTOP"),
    Cell(0, "committing", "SIGTERM"),
)


def row(seen: Seen) -> str:
    cell, verdict = seen.cell, "; ".join(seen.problems) or "ok"
    return (
        f"{cell.phase:15} rank {cell.rank} {cell.signal} {seen.seconds:5.1f} s  {seen.codes:11} "
        f"{verdict:4} {seen.message[:110]}"
    )


@pytest.mark.long
def test_the_others_end_in_time_and_name_the_rank_and_the_last_step_loads(tmp_path: Path) -> None:
    first_checkpoint(tmp_path / "run")
    found = []
    for number, cell in enumerate(cells() if os.environ.get("KILL_MATRIX") else FEW):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(run_cell(cell, tmp_path / "run", folder))
        print(row(found[-1]), flush=True)
    bad = [seen for seen in found if seen.problems]
    worst = max(seen.seconds for seen in found)
    print(f"{len(found) - len(bad)} of {len(found)} as promised; the longest took {worst:.1f} s, "
          f"with a timeout of {TIMEOUT_S:g} s")  # fmt: skip
    assert not bad, "\n".join(row(seen) for seen in bad)

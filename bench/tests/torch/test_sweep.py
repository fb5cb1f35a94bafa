"""The runner of the sweep, on tiny cases."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.sweep import main, measure
from bench.sweep.between import measure_change
from bench.sweep.changes import PATTERNS
from bench.sweep.page import page
from bench.sweep.steps import loss_step, sgd, small
from bench.sweep.transformers_models import MODELS
from tests.long_cases import long_but


def plain() -> Any:
    model, x, y = small()
    return loss_step, (model, sgd(model), x, y)


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.sum() > 0 else 3)


def refused() -> Any:
    _, x, y = small()
    model = Branching(16, 8)
    return loss_step, (model, sgd(model), x, y)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Load here what each case needs: a busy machine takes minutes to import it for each."""
    main.warm_up()


def measured(*jobs: main.Job, limit_s: float = 600.0) -> list[Any]:
    return sorted(main.run(list(jobs), 1, limit_s), key=lambda row: row["name"])


def job(name: str, factory: Any) -> main.Job:
    return "few", name, lambda save: measure.measure(factory, save)


def test_a_plain_step_and_one_that_is_refused() -> None:
    bad, good = measured(job("good", plain), job("bad", refused))
    assert "case" not in good | bad, (good, bad)
    assert good["captured"]["status"] == "ok"
    assert good["placed"]["loss_difference"] == good["placed"]["state_difference"] == 0
    assert good["placed"]["states"] == 4
    assert good["cut"]["loss_difference"] <= measure.TOLERANCE
    assert len(good["cut"]["measured_bytes"]) == measure.RANKS
    assert bad["captured"]["status"] == "refused"
    assert bad["captured"]["code"] == "E802"
    assert "placed" not in bad
    report = main.begin("2026-01-01", [], 2) | {"rows": [bad, good]}
    text = page(report)
    assert "| few | 2 | 1 | 1 | 1 | 1 | 1 | 1 | 0 | 0 | 0 | 0 |" in text
    assert bad["captured"]["text"].splitlines()[0] in text


def test_a_crash_and_a_hang_are_rows() -> None:
    def crash(save: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(save: Any) -> None:
        save({"captured": {"status": "timeout"}})
        signal.pause()

    one, two = measured(("few", "crash", crash), ("few", "hang", hang), limit_s=1.0)
    assert one["case"]["status"] == "failed"
    assert one["case"]["code"] == "exit -9"
    assert two["captured"]["status"] == "timeout"


def test_other_numbers_are_seen() -> None:
    expected = {"losses": [1.0, 2.0], "state": {"w": [1.0, 4.0], "v": [float("nan")]}}
    row = measure.compared([1.0, 2.0], {"w": [1.0, 4.0], "v": [float("nan")]}, expected)
    assert row["loss_difference"] == row["state_difference"] == 0
    row = measure.compared([1.0, 2.5], {"w": [1.0, 3.0], "v": [float("nan")]}, expected)
    assert (row["loss_difference"], row["state_difference"]) == (0.25, 0.25)
    assert row["state_where"] == "w"


@pytest.mark.parametrize(
    ("name", "status"), long_but([("lr", "equal")], [("lr", "equal"), ("float argument", "equal")])
)
def test_a_change_that_is_followed(name: str, status: str) -> None:
    rows: list[Any] = []
    measure_change(PATTERNS[name], rows.append)
    assert rows[-1]["change"]["status"] == status
    assert rows[-1]["change"]["felt"]


def test_names_choose() -> None:
    assert [name for _, name, _ in main.jobs_of({"gpt2", "lr"})] == ["gpt2", "lr"]
    assert sum(group == "transformers" for group, *_ in main.jobs_of({"transformers"})) == len(
        MODELS
    )
    assert sum(group != "changes" for group, *_ in main.jobs_of(set())) >= 150


def test_a_sweep_that_was_cut_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    cuts = [KeyboardInterrupt()]

    def run(jobs: list[main.Job], at_once: int) -> Iterator[main.Row]:
        for group, name, _ in jobs:
            if len(ran) == 2 and cuts:
                raise cuts.pop()
            ran.append(name)
            refused = {"status": "refused", "code": "E802", "text": f"no {name}\nRewrite."}
            yield {"group": group, "name": name, "seconds": 0.0, "change": refused}

    monkeypatch.setattr(main, "run", run)
    monkeypatch.setattr(main, "warm_up", lambda: None)
    names = ["lr", "hook added", "parameter hook added", "class attribute"]
    out, journal = tmp_path / "page.md", tmp_path / "rows"
    command = ["--only", ",".join(names), "--out", str(out), "--journal", str(journal)]
    monkeypatch.setattr(main, "commit", lambda: "one")
    with pytest.raises(KeyboardInterrupt):
        main.main(command)
    (kept,) = journal.iterdir()
    with kept.open("a") as file:
        file.write('{"group": "changes", "na')  # cut short while it was written
    main.main(command)
    assert sorted(ran) == sorted(names)
    text = out.read_text()
    assert "commit one" in text
    for name in names:  # the beginning in the table, the whole below
        assert f"| 1 | {name} | no {name} |" in text
        assert f"no {name}\nRewrite." in text
    monkeypatch.setattr(main, "commit", lambda: "another")
    main.main(command)
    assert len(ran) == 2 * len(names)
    main.main([*command, "--fresh"])
    assert len(ran) == 3 * len(names)

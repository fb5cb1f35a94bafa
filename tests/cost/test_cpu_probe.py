"""The probe of this CPU: plausible, cached, and refused with advice where it cannot run."""

import pytest

from pardnn.cost import cpu_probe as module
from pardnn.cost.cpu_probe import this_cpu
from pardnn.cost.host import cpu_name
from pardnn.errors import PardnnError


def test_probed_once_then_read(tmp_path, monkeypatch):
    model = this_cpu(1, folder=tmp_path)
    # Which of the two is faster is not asserted: beside other work either may be.
    assert all(1e8 < model.flops["matmul"][dtype] < 1e13 for dtype in ("float32", "float64"))
    assert 1e8 < model.bandwidth < 1e13
    monkeypatch.setattr(module, "_probe", lambda _threads: pytest.fail("probed again"))
    assert this_cpu(1, folder=tmp_path) == model


def test_a_probe_that_fails_names_other_costs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-such-python"))
    with pytest.raises(PardnnError, match="--costs measured"):
        this_cpu(3, folder=tmp_path)


def test_the_name_tells_machines_apart():
    assert "cores" in cpu_name()
    assert "GiB" in cpu_name()

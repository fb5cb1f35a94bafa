"""Numbers of the user's objects that one checkpoint has set and the next does not have."""

from __future__ import annotations

from typing import Any

import pytest

from pardnn.backends.torch.checkpoint.held import HeldNumbers
from pardnn.backends.torch.user_step.slots import Slot
from pardnn.backends.torch.user_step.sources import Source


@pytest.mark.parametrize(("changed", "then"), [(False, 1), (True, 7)])
def test_what_a_load_before_has_set_goes_back_unless_it_was_changed_since(
    monkeypatch: pytest.MonkeyPatch, changed: bool, then: int
) -> None:
    own: dict[str, Any] = {"updates": 1}
    place = {"updates": Source("updates", "input", (Slot(own, "updates"),))}
    held = HeldNumbers(lambda: ())
    monkeypatch.setattr(held, "_places", lambda names, _: {n: place[n] for n in names})
    binding: Any = None
    held.set({"updates": 5}, binding)
    assert own["updates"] == 5
    if changed:
        own["updates"] = 7
    held.set({}, binding)
    assert own["updates"] == then

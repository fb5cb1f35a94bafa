"""What can be asked of a step whose last call has failed."""

import pytest

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import PardnnError
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.stepping import telling


def test_state_is_not_gathered_after_a_failed_step() -> None:
    def body(rank: int, path: str) -> list[str]:
        connect(rank, 2, path, 20).close()
        step, args = telling(lambda loss, model: None)
        plan = random_plan(capture(step, *args), 2)
        fast = parallelize(step, *args, plan=plan, device="cpu", timeout=10)
        told = []
        for call in (
            lambda: fast(args[2][:2], args[3]),
            lambda: fast.whole("model.0.weight"),
        ):
            with pytest.raises(PardnnError) as caught:
                call()
            told.append(caught.value.message)
        return told

    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        first, then = outcome.value
        assert then.startswith(f"the ranks had already stopped: {first[:40]}")

"""The bisection of states on the host, beside all numbers of them one after the other."""

from typing import Any

import pytest

from pardnn.errors import InfeasibleError
from pardnn.planner.offload.fewest import fewest


@pytest.mark.parametrize("most", range(1, 10))
def test_no_fewer_states_on_the_host_would_do(most: int) -> None:
    for least in range(most + 2):
        asked: list[int] = []

        def tried(count: int, least: int = least, asked: list[int] = asked) -> Any:
            asked.append(count)
            if count < least and count == most:
                raise InfeasibleError("not with all of them either")
            return count if count >= least else None

        if least > most:
            with pytest.raises(InfeasibleError, match="not with all"):
                fewest(tried, most)
            continue
        assert fewest(tried, most) == least
        assert len(asked) == len(set(asked)) <= 2 + most.bit_length()

"""State that a mixed plan cut inside submeshes stays there under a plan for another batch."""

import pytest

import pardnn
from pardnn.errors import PardnnError
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace, state_in_place, state_problems
from pardnn.planner.kept_state import state_of_columns, submesh_size
from tests.planner.torch.test_mixed import graph, islands, planned

OTHER = {"batch": 6}


def kept(state: StateInPlace, algorithm: str = "auto", **options: object) -> Plan:
    """A plan for a larger batch, beside this state."""
    options = {"reserve": 0.0, "costs": "v100", **options}
    return pardnn.plan(graph(**OTHER), islands(2, 2), algorithm, state=state, **options)


@pytest.mark.parametrize(
    ("first", "pieces", "then"),
    [
        ("megatron*1f1b", 2, "auto"),
        ("megatron*1f1b", 2, "megatron*1f1b"),
        ("zero-3*heft", None, "tofu*heft"),
    ],
)
def test_state_stays_on_its_submesh_cut_as_it_is(first: str, pieces: int | None, then: str) -> None:
    own = planned(first, pieces)
    state = state_in_place(graph(), own)
    assert submesh_size(graph(), state) == 2
    plan = kept(state, then, microbatches=pieces)
    assert plan.algorithm == ("tofu*pardnn" if then == "auto" else then)
    assert state_problems(graph(**OTHER), plan, state) == []
    assert "state tensors that stay where they are: 32" in plan.notes


def test_what_would_move_it_is_refused() -> None:
    state = state_in_place(graph(), planned("zero-3*heft", None))
    first = next(iter(state.held))
    for algorithm, options, why in (
        ("tofu", {}, "not laid out as by a cut over all devices(?s:.*)Use auto"),
        ("auto", {"constraints": [pardnn.fix_layout(first, "whole")]}, "sets a layout"),
    ):
        with pytest.raises(PardnnError, match=why) as error:
            kept(state, algorithm, **options)
        assert error.value.code == "E225"
    with pytest.raises(PardnnError, match="needs it as") as error:
        kept(state, "megatron*heft")
    assert error.value.code == "E301"


def test_a_submesh_is_a_device_of_columns_beside_the_most_that_others_keep_there() -> None:
    own = planned("megatron*1f1b", 2)
    state = state_in_place(graph(), own)
    more = StateInPlace(held=state.held, num_devices=4, other_bytes=(1, 0, 2, 3))
    column = state_of_columns(graph(), more, 2)
    assert (column.num_devices, column.other_bytes) == (2, (1, 3))
    for name, held in column.held.items():
        there = state.held[name].shards[0].device // 2
        assert [shard.device for shard in held.shards] == [there]
        assert held.bytes[there] > 0 == held.bytes[1 - there]


def test_devices_of_two_submeshes_are_no_submesh() -> None:
    state = state_in_place(graph(), planned("megatron*1f1b", 2))
    shifted = {
        name: held._replace(shards=tuple(s._replace(device=s.device % 2 + 1) for s in held.shards))
        for name, held in state.held.items()
    }
    assert submesh_size(graph(), StateInPlace(held=shifted, num_devices=4)) is None

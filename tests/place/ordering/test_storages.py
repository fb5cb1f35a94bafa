"""What a reference order takes, beside the peaks of the plan that keeps to it."""

import numpy as np

from pardnn.graph.csr import frozen
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.ordering.storages import reserve_of, storages_of
from pardnn.sim.peak import peaks
from tests.place.machines import random_place
from tests.strategies import FAMILIES, random_graph


def test_a_reference_order_takes_what_its_plan_takes() -> None:
    """Sends are held until the op before their first reader in the reference order.

    Of any bytes, of single bytes, and of none at all.
    """
    exact = idle = 0
    for seed in range(60):
        graph = random_graph(seed, 12, FAMILIES[seed % len(FAMILIES)])
        a, place = graph.arrays, random_place(graph, 3, seed)
        size = (a.tensor_bytes, a.tensor_bytes % 2, np.zeros_like(a.tensor_bytes))[seed // 6 % 3]
        a = a._replace(tensor_bytes=frozen(size))  # else kernels are compiled once more
        reference = file_positions(a)
        none = np.zeros(3, dtype=np.int64)
        found = reserve_of(a, storages_of(a, place, 3), place, reference, none).limit
        plan = latest_slot_plan(a, 3, place, reference, first_overwrites(graph))
        busy = np.bincount(place, minlength=3) > 0
        assert (found >= peaks(a, plan))[busy].all()
        assert (found[~busy] == 0).all()
        idle += int((~busy).sum())
        first = plan.order_op[plan.order_ptr[plan.message_target]]
        if not (plan.message_post == first).any():
            # A device that has not begun receives at any time, so the sender need not wait.
            assert np.array_equal(found[busy], peaks(a, plan)[busy]), seed
            exact += 1
    assert exact > 5
    assert idle > 0

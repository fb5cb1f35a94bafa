"""Early slots: tensors sent before they are read, where the sender needs their memory.

With every message in its latest slot (`memory_bounded`) a sender holds a tensor until its receiver
is about to read it, although nothing on its own device needs it any more. Where that makes the
sender overflow and the receiver has room, the message is given the latest slot that frees the
sender in time: the receive is posted earlier, and the receiver holds the copy for longer. The proof
(`plan.memory`) counts both.

Storages are processed by size, the largest first, `PASSES` times. A slot between two ops of the
global order lets the receiver post as late as possible; if two ranks would wait for each other in
it, the caller asks for slots before an op instead (`before_ops`), where ranks cannot wait for each
other. O(messages log ops (log ops + devices)) per pass.
"""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportArgumentType=false

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.kernels.jit import kernel
from pardnn.kernels.segment_tree import RangeMax, add_range, last_fitting, max_range, range_max
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.ordering.schedule import first_reaching
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import home_storages, live_bytes, live_ranges, messages_by_tensor

#: One storage's early slot takes the room that another's would have freed, so a few are enough.
PASSES = 3


def with_early_slots(
    arrays: GraphArrays,
    plan: PlanArrays,
    position: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
    *,
    before_ops: bool,
) -> PlanArrays:
    """Return a plan with messages sent as early as the memory of their senders requires.

    Args:
        arrays: The graph.
        plan: Its messages in their latest slots.
        position: Of each op in the global order that the plan follows.
        capacity: Usable bytes per device.
        before_ops: Post before an op that precedes what the sender runs next: needs more memory,
            but cannot deadlock.
    """
    plan = plan._replace(
        message_post=plan.message_post.copy(), message_hold=plan.message_hold.copy()
    )
    by_tensor, tensor_ptr = messages_by_tensor(arrays, plan)
    storage = home_storages(arrays, plan, by_tensor, tensor_ptr)[plan.message_tensor]
    owner = np.concatenate([np.arange(arrays.num_tensors), plan.message_tensor])
    largest = np.lexsort((storage, -arrays.tensor_bytes[owner[storage]])).astype(np.int64)
    unsent = plan._replace(message_hold=arrays.tensor_op[plan.message_tensor])
    used = live_ranges(arrays, unsent, (by_tensor, tensor_ptr))[1]
    list_position = inverse_permutation(plan.order_op)
    for _ in range(PASSES):
        ranges = live_ranges(arrays, plan, (by_tensor, tensor_ptr))
        tree = range_max(live_bytes(arrays, plan, ranges))
        moved = _early_slots_kernel(
            plan, list_position, position[plan.order_op], capacity, before_ops, tree, largest,
            storage, arrays.tensor_bytes[owner], arrays.tensor_bytes[plan.message_tensor],
            ranges[1], used,
        )  # fmt: skip
        if moved == 0:
            break
    return plan


@kernel
def _early_slots_kernel(
    plan: PlanArrays,
    list_position: Int64[ndarray, " n"],
    position_at: Int64[ndarray, " n"],
    capacity: Int64[ndarray, " k"],
    before_ops: bool,
    tree: RangeMax,
    largest: Int64[ndarray, " m"],
    storage: Int64[ndarray, " m"],
    size_of: Int64[ndarray, " s"],
    message_bytes: Int64[ndarray, " m"],
    released: Int64[ndarray, " s"],
    used: Int64[ndarray, " s"],
) -> int:
    """Give messages early slots; return how many storages are freed sooner."""
    m, n, moved, first = len(largest), len(position_at), 0, 0
    new_post = np.empty(m, dtype=np.int64)
    while first < m:
        s, end = storage[largest[first]], first + 1
        while end < m and storage[largest[end]] == s:
            end += 1
        begin, first = first, end
        d = plan.message_source[largest[begin]]
        if released[s] >= n or max_range(tree, used[s] + 1, released[s] + 1) <= capacity[d]:
            continue
        hold = last_fitting(tree, used[s] + 1, released[s] + 1, capacity[d]) - 1
        has_room, count = True, begin
        while count < end and has_room:
            i, q = largest[count], plan.message_target[largest[count]]
            now = list_position[plan.message_post[i]]
            new_post[count] = now
            if list_position[plan.message_hold[i]] > hold:
                after = position_at[hold + 1]
                at = first_reaching(position_at, plan.order_ptr[q], now, after)
                if before_ops and at > plan.order_ptr[q]:
                    at -= 1
                new_post[count] = at
                has_room = max_range(tree, at, now) + message_bytes[i] <= capacity[q]
                add_range(tree, at, now, message_bytes[i])
            count += 1
        for c in range(begin, count):
            i = largest[c]
            now = list_position[plan.message_post[i]]
            if not has_room:
                add_range(tree, new_post[c], now, -message_bytes[i])
            elif list_position[plan.message_hold[i]] > hold:
                plan.message_post[i] = plan.order_op[new_post[c]]
                plan.message_hold[i] = plan.order_op[hold]
        if has_room:
            add_range(tree, hold + 1, released[s] + 1, -size_of[s])
            moved += 1
    return moved

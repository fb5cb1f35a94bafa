"""Early slots without a tree: the bytes held are a list, looked at position by position."""

import numpy as np

from pardnn.graph.csr import GraphArrays
from pardnn.place.ordering.early_slots import PASSES
from pardnn.plan.plan import PlanArrays
from pardnn.sim.peak import home_storages, live_bytes, live_ranges, messages_by_tensor


def early_slots(
    a: GraphArrays, plan: PlanArrays, position: np.ndarray, capacity: np.ndarray, before_ops: bool
) -> list[tuple[int, int]]:
    """Return the op before which each message is posted, and the one until which it is held."""
    at = {int(op): p for p, op in enumerate(plan.order_op)}
    turn = [int(position[op]) for op in plan.order_op]
    home = home_storages(a, plan, *messages_by_tensor(a, plan))
    messages: dict[int, list[int]] = {}
    for i, t in enumerate(plan.message_tensor.tolist()):
        messages.setdefault(int(home[t]), []).append(i)
    bytes_of = [*a.tensor_bytes.tolist(), *a.tensor_bytes[plan.message_tensor].tolist()]
    unsent = plan._replace(message_hold=a.tensor_op[plan.message_tensor])
    used = live_ranges(a, unsent)[1].tolist()
    post, hold = plan.message_post.copy(), plan.message_hold.copy()
    for _ in range(PASSES):
        now = plan._replace(message_post=post.copy(), message_hold=hold.copy())
        released, live = live_ranges(a, now)[1].tolist(), live_bytes(a, now).tolist()
        for s in sorted(messages, key=lambda s: (-bytes_of[s], s)):
            source = int(plan.message_source[messages[s][0]])
            window = range(used[s] + 1, min(released[s], len(turn) - 1) + 1)
            full = [p for p in window if live[p] > capacity[source]]
            if released[s] >= len(turn) or not full:
                continue
            leaves, trial, moves = full[0] - 1, list(live), {}
            for i in messages[s]:
                q, posted = int(plan.message_target[i]), at[int(post[i])]
                if at[int(hold[i])] <= leaves:
                    continue
                begin = int(plan.order_ptr[q])
                new = next((p for p in range(begin, posted) if turn[p] >= turn[full[0]]), posted)
                new -= before_ops and new > begin
                for p in range(new, posted):
                    trial[p] += int(a.tensor_bytes[plan.message_tensor[i]])
                if any(trial[p] > capacity[q] for p in range(new, posted)):
                    break
                moves[i] = int(plan.order_op[new])
            else:
                live = trial
                for p in range(full[0], released[s] + 1):
                    live[p] -= bytes_of[s]
                for i, op in moves.items():
                    post[i], hold[i] = op, plan.order_op[leaves]
    return list(zip(post.tolist(), hold.tolist(), strict=True))

"""A plan whose ops were moved, as a plan: what judging it says is then what simulating it says."""

import dataclasses

from pardnn.explain.case import Case
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan, PlanArrays, Predicted, plan_from_arrays
from pardnn.sim.peak import peaks


def plan_of(case: Case, arrays: PlanArrays, makespan: float) -> Plan:
    """Return an edited plan of whole ops as one that can be written, checked and run."""
    edited = plan_from_arrays(case.planned, arrays)
    sizes = case.planned.arrays.tensor_bytes[arrays.message_tensor]
    predicted = Predicted(
        makespan_s=makespan,
        peak_bytes=tuple(peaks(case.planned.arrays, arrays).tolist()),
        transfer_bytes=int(sizes.sum()),
    )
    plan = dataclasses.replace(
        case.plan, placement=edited.placement, order=edited.order, messages=edited.messages,
        predicted=predicted, checksum=None,
    )  # fmt: skip
    return stamped(plan, case.graph)

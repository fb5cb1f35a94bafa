"""Which stage, piece and pass each op of a cut graph belongs to.

The cut graph has the ops of the whole one, once or once per piece of the batch ("h@2"), and helpers
that slice, join and add up (`plan.pieces`). A helper belongs to the unit that makes what it reads;
if that exists before the step, to the unit that first reads the helper's result.
Complexity: O(ops + edges).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.recipes.phases import FORWARD, SOURCE, UPDATE, phases_of
from pardnn.place.recipes.stages import Stages
from pardnn.plan.plan import Plan


class Units(NamedTuple):
    """What each op of a cut graph belongs to.

    Attributes:
        stage: From 0 on.
        piece: Of the batch; -1 for ops that run once.
        phase: See `phases`.
    """

    stage: Int64[ndarray, " n"]
    piece: Int64[ndarray, " n"]
    phase: Int64[ndarray, " n"]


def units_of_plan(graph: Graph, plan: Plan, planned: Graph) -> Units:
    """Return what each op that a plan places belongs to: its phase and piece, of one stage.

    Args:
        graph: The step.
        plan: Of it.
        planned: The graph whose ops the plan places.
    """
    batched = None if plan.pieces is None else frozenset(plan.pieces.batch)
    phase = phases_of(graph, batched).phase
    on_mesh = plan.partition is not None
    return units_of(graph, planned, Stages(phase * 0, phase, 1), on_mesh=on_mesh)


def units_of(whole: Graph, cut: Graph, stages: Stages, *, on_mesh: bool = False) -> Units:
    """Return what each op of a cut graph belongs to.

    Args:
        whole: The step with its batch whole.
        cut: The same graph, or its batch in pieces.
        stages: Of the whole one.
        on_mesh: Whether names end with a position of a mesh, "h@0", or "h@2@0" of a piece.
    """
    number = whole.op_numbers
    n, a = len(cut.ops), cut.arrays
    of, piece = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    if cut is whole:
        of[:] = np.arange(n)
    for i, op in enumerate(cut.ops if cut is not whole else ()):
        name = op.name.rpartition("@")[0] if on_mesh else op.name
        base, _, suffix = name.rpartition("@")
        if name in number:
            of[i] = number[name]
            continue
        if suffix.isdecimal():
            piece[i] = int(suffix)
        of[i] = number.get(base, -1)
    stage = np.where(of >= 0, stages.stage[of], -1)
    phase = np.where(of >= 0, stages.phase[of], -1)
    order = a.topological
    for i in order[stage[order] < 0].tolist():
        made = a.tensor_op[a.input_tensor[a.input_ptr[i] : a.input_ptr[i + 1]]]
        found = made[(stage[made] >= 0) & (phase[made] != SOURCE)]
        if len(found):
            stage[i], phase[i] = stage[found[-1]], phase[found[-1]]
    for i in order[stage[order] < 0][::-1].tolist():
        outputs = a.consumer_ptr[a.output_ptr[i : i + 2]]
        read = a.consumer_op[outputs[0] : outputs[1]]
        read = read[stage[read] >= 0]
        first = read[np.lexsort((stage[read], phase[read]))][:1]
        stage[i], phase[i] = (stage[first[0]], phase[first[0]]) if len(first) else (0, UPDATE)
        if phase[i] == SOURCE:
            phase[i] = FORWARD
    return Units(stage, piece, phase)

"""Ops that combine the partial results of pieces: accumulators, quotients, other reductions.

Sums are added in the order of the pieces. Consecutive pieces share an accumulator, the storage of
the first one's partial result. A matrix product adds itself to it (`addmm_`), which saves writing
and reading it once more; other results are added by a separate op. Then the accumulators are added
up in order. So numbers depend on how many there are, never on where they are. The sum may be a
tensor apart from its accumulators (`totals`), so that these can have another layout: terms on each
device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import final

from pardnn.graph.ir import MemoryKind, Op, Tensor
from pardnn.plan.mesh import cut_points
from pardnn.plan.partitioned_graph import REDUCE
from pardnn.plan.pieces import ADD, INTO, piece_of
from pardnn.shard.microbatch.sheet import Sheet, new_tensor
from pardnn.shard.tdl.language import Reducer


def is_added(op: Op, reducer: object) -> bool:
    """Whether partial results are added up in place; results that outlive the step are not."""
    return isinstance(reducer, Reducer) and reducer.name == "sum" and op.memory != "residual"


@final
class Sums:
    """Writes the ops that combine partial results.

    Args:
        sheet: Where to write.
        points: First sample of each piece, and the number of samples.
        accumulators: Of each sum, at most as many as pieces.
        totals: Whether sums of one accumulator are copied out of it.
    """

    def __init__(
        self, sheet: Sheet, points: Sequence[int], accumulators: int, *, totals: bool = False
    ) -> None:
        self.sheet, self.points, self.number = sheet, points, len(points) - 1
        self.totals = totals
        #: Each piece has a storage of its own: the first one's takes all others in turn.
        self.is_apart = accumulators >= self.number
        ends = cut_points(self.number, 1 if self.is_apart else accumulators)
        assert ends is not None
        self.rows = list(itertools.pairwise(ends))

    def total(self, name: str, piece: int) -> str:
        """Return the name of a sum up to a piece, from the first piece of its accumulator on."""
        if any(piece == first for first, _ in self.rows):
            return piece_of(name, piece)
        is_all = self.rows[0] == (0, piece + 1) == (0, self.number)
        return name if is_all and not self.totals else f"{name}:sum@{piece}"

    def into(self, op: Op, reducer: object, piece: int) -> str | None:
        """Return the accumulator that a piece of a product adds its result to; None for none."""
        if self.is_apart or op.kind not in INTO or not is_added(op, reducer):
            return None
        is_first = any(piece == first for first, _ in self.rows)
        return None if is_first else self.total(op.outputs[0].name, piece - 1)

    def adding(self, made: Op, op: Op, reducers: Sequence[object], piece: int) -> Op:
        """Return a piece that adds its result to the accumulator; the piece itself if it cannot.

        Args:
            made: The piece.
            op: The op of the graph.
            reducers: What combines its results.
            piece: Number of the piece.
        """
        into = self.into(op, reducers[0], piece) if len(reducers) == 1 else None
        if into is None:
            return made
        name, arguments = self.total(op.outputs[0].name, piece), made.arguments or {}
        return dataclasses.replace(
            made, kind=INTO[op.kind], memory="reference",
            inputs=tuple(dict.fromkeys((into, *made.inputs))),
            outputs=(dataclasses.replace(made.outputs[0], name=name, alias_of=into),),
            arguments={**arguments, "args": [{"tensor": into}, *arguments["args"]]},
        )  # fmt: skip

    def combine(self, op: Op, tensor: Tensor, reducer: Reducer, results: Sequence[str]) -> None:
        """Write the ops that make a whole tensor of its partial results.

        Args:
            op: Whose result it is.
            tensor: The result.
            reducer: What combines it.
            results: Names of all results of the op, which a quotient counts.
        """
        parts = [piece_of(tensor.name, i) for i in range(self.number)]
        if is_added(op, reducer):
            self._accumulate(op, tensor, reducer, parts)
            return
        if reducer.name != "quotient":
            name = f"{tensor.name}:reduce"
            self._reduce(op, tensor, tensor.name, name, reducer.name, parts, memory=op.memory)
            return
        assert reducer.by is not None
        total = f"{tensor.name}:sum"
        self._reduce(op, tensor, total, f"{total}:reduce", "sum", parts)
        args = [{"tensor": total}, {"tensor": results[reducer.by]}]
        self.sheet.helper(
            f"{tensor.name}:divide", "aten.div.Tensor", args, (total, results[reducer.by]),
            new_tensor(tensor, tensor.name), op, memory=op.memory,
        )  # fmt: skip

    def _reduce(
        self,
        op: Op,
        tensor: Tensor,
        out: str,
        name: str,
        how: str,
        parts: list[str],
        *,
        memory: MemoryKind = "normal",
    ) -> None:
        sizes = [b - a for a, b in itertools.pairwise(self.points)]
        weights = [size / self.points[-1] for size in sizes] if how == "mean" else None
        args = [how, [{"tensor": part} for part in parts], weights]
        made = new_tensor(tensor, out)
        self.sheet.helper(name, REDUCE, args, parts, made, op, memory=memory)

    def _accumulate(self, op: Op, tensor: Tensor, reducer: Reducer, parts: list[str]) -> None:
        """Add each partial result to its accumulator, and accumulators to the first one."""
        for first, end in self.rows:
            for i in range(first + 1, end):
                if self.into(op, reducer, i) is None:
                    before, out = self.total(tensor.name, i - 1), self.total(tensor.name, i)
                    self._add(f"{tensor.name}:add@{i}", op, tensor, (before, parts[i]), out)
        total = self.total(tensor.name, self.rows[0][1] - 1)
        for _, end in self.rows[1:]:
            out = tensor.name if end == self.number else f"{tensor.name}:gathered@{end - 1}"
            added = (total, self.total(tensor.name, end - 1))
            self._add(f"{tensor.name}:gather@{end - 1}", op, tensor, added, out)
            total = out
        if total != tensor.name:
            self._reduce(op, tensor, tensor.name, f"{tensor.name}:total", "sum", [total])

    def _add(self, name: str, op: Op, tensor: Tensor, added: tuple[str, str], out: str) -> None:
        made = dataclasses.replace(new_tensor(tensor, out), alias_of=added[0])
        args = [{"tensor": each} for each in added]
        self.sheet.helper(name, ADD, args, added, made, op, memory="reference")

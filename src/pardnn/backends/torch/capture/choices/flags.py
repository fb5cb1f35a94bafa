"""Flags in buffers: tensors of one element on which a step branches.

Problem: `if self.initialized: return` in a layer that prepares itself at its first step, as the
codebooks of VectorQuantize and ActNorm do. The flag is a buffer so that checkpoints contain it, and
the code that it controls cannot be run and undone, because it draws random numbers.

Idea: if the step cannot be followed otherwise, a flag that it does not write is treated as a
constant: it is not a source of the graph, stays with every rank, and is compared at each call like
other constants (`session.constants`).

Complexity: one more capture of steps that would otherwise be refused; none of other steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import WholeOf, is_on_meta, sources_of
from pardnn.errors import PardnnError, UnsupportedError


class Flags:
    """The flags that a capture treats as constants.

    Args:
        objects: The object graph before the first trace.
        batch: Indices of the arguments that are the batch.
        whole_of: Returns the whole of a tensor that a rank holds in part.
        known: Flags that other paths of the step treat as constants.

    Attributes:
        asked: Names of flags that alone decide a number that a trace needed.
        taken: Names of those treated as constants.
    """

    def __init__(
        self, objects: ObjectGraph, batch: Sequence[int], whole_of: WholeOf, known: Collection[str]
    ) -> None:
        self._flags: dict[str, torch.Tensor] = {}
        for source in sources_of(objects, batch):
            tensor = source.get()
            if source.kind == "buffer" and is_flag(tensor) and whole_of(tensor) is None:
                self._flags[source.name] = tensor
        self._objects = objects
        self._refused: PardnnError | None = None
        self.asked: set[str] = set()
        self.taken = set[str]()
        self._take(self._flags.keys() & known)

    def _take(self, names: Collection[str]) -> None:
        self.taken |= {*names}
        self.without(self._objects)

    def without(self, objects: ObjectGraph) -> ObjectGraph:
        """Return an object graph, without the flags among its tensors."""
        taken = {id(self._flags[name]) for name in self.taken}
        if taken:
            objects.tensors = [each for each in objects.tensors if id(each.value) not in taken]
        return objects

    def learn(self, error: PardnnError) -> None:
        """Treat the flags that a step was refused for as constants.

        Raises:
            PardnnError: There are none, or the step writes one.
        """
        new = (self.asked & self._flags.keys()) - self.taken
        if error.code == "E802" and new:
            self._refused = error
            self._take(new)
            return
        if error.code in ("E801", "E804") and self._refused is not None:
            raise UnsupportedError(
                f"{self._refused.message}\n"
                "A flag in a buffer decides, and the step sets it: run one step of your own\n"
                "before capturing. What it holds then is taken for granted.",
                code="E802",
                details=self._refused.details,
            ) from error.__cause__
        raise error from error.__cause__


def is_flag(tensor: object) -> bool:
    """Whether a value is a tensor that holds one truth value or whole number on the host."""
    if not isinstance(tensor, torch.Tensor) or is_on_meta(tensor) or tensor.numel() != 1:
        return False
    is_whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return is_whole and tensor.device.type == "cpu"
